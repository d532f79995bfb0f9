"""Print as JSON this rank's CPUs, torch's number of threads, OMP_NUM_THREADS, and the CPUs of a child process."""

import json
import os
import subprocess
import sys

import torch

LOOK = "import os; print(sorted(os.sched_getaffinity(0)))"
child = subprocess.run([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, text=True, check=True).stdout
print(json.dumps({"rank": int(os.environ["RANK"]), "cpus": sorted(os.sched_getaffinity(0)),
                  "threads": torch.get_num_threads(), "asked": os.environ["OMP_NUM_THREADS"],
                  "child": json.loads(child)}), flush=True)
