"""Train on the digits as any launcher's script: `training.py [arguments of train_digits.py]`."""

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

if "RANK" not in os.environ:  # accelerate launch of one process
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo")
script = Path(__file__).parents[2] / "examples/train_digits.py"
sys.argv[0] = str(script)
runpy.run_path(str(script), run_name="__main__")
