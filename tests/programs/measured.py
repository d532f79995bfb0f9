"""Print what a rank measures by itself, as JSON: LEADS BUDGET_S."""

import json
import sys
import time

import torch

from mpiddp.check.bench import rank

torch.set_num_threads(1)
began = time.perf_counter()
found = rank.measure_rank(torch.device("cpu"), sys.argv[1] == "leads", float(sys.argv[2]))
print(json.dumps({"values": found.values, "told": found.reports, "took_s": time.perf_counter() - began}))
