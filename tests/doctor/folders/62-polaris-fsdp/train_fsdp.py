import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int)
p.add_argument("--out")
a = p.parse_args()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(a.steps):
    x = torch.randn(16, 4096, device="cuda")
    loss = (model(x) - x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 1000 == 999:
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{a.out}/{step}")
dist.destroy_process_group()
