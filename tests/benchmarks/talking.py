"""Print lines as training scripts do: so many on each rank, alike or with numbers of its own; buffered by `blocks`."""

import os
import sys
import time

import torch.distributed as dist

kind, lines = sys.argv[1], int(sys.argv[2])
if "blocks" in sys.argv[3:]:
    sys.stdout.reconfigure(line_buffering=False)
rank = int(os.environ["RANK"])
if not dist.is_initialized():
    dist.init_process_group("gloo")
dist.barrier()
loss = 0.25 + (rank / 1000 if kind == "numbers" else 0)
begun = time.time()
for step in range(lines):
    print(f"epoch 3 step {step} loss {loss:.6f} learning rate 0.000300 and so on")
sys.stdout.flush()
print(f"rank {rank} took {time.time() - begun:.3f} s", file=sys.stderr, flush=True)
