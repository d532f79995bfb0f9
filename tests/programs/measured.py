"""Print what a rank measures by itself, as JSON: LEADS BUDGET_S [CGROUP], which it enters once torch is imported."""

import json
import os
import sys
import time
from pathlib import Path

import torch

from mpiddp.check.bench import rank

torch.set_num_threads(1)
for group in sys.argv[3:]:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
began = time.perf_counter()
found = rank.measure_rank(torch.device("cpu"), sys.argv[1] == "leads", float(sys.argv[2]))
print(json.dumps({"values": found.values, "told": found.reports, "took_s": time.perf_counter() - began}))
