"""Print as JSON what Slurm tells a task of its GPUs, and what is made of it."""

import json
import os

from mpiddp.discovery import schedulers

TOLD = ("SLURM_GPUS", "SLURM_TRES_PER_TASK")
told = {name: value for name, value in os.environ.items() if name.startswith(TOLD) or name == "CUDA_VISIBLE_DEVICES"}
print(json.dumps({"task": os.environ["SLURM_PROCID"], "told": told,
                  "node": schedulers.count_slurm_gpus_on_node(os.environ),
                  "each": schedulers.count_slurm_gpus_of_task(os.environ)}), flush=True)
