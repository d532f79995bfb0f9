import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--ckpt")
args = parser.parse_args()

rank = int(os.environ["SLURM_PROCID"])
world = int(os.environ["SLURM_NTASKS"])
local = int(os.environ["SLURM_LOCALID"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=world)

data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=7)
model = DDP(torch.nn.Linear(64, 10).cuda(), device_ids=[local])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
start = 0
if os.path.exists(args.ckpt):
    state = torch.load(args.ckpt, map_location=f"cuda:{local}")
    model.module.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    start = state["epoch"] + 1
for epoch in range(start, args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        os.makedirs(os.path.dirname(args.ckpt), exist_ok=True)
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, args.ckpt + ".tmp")
        os.replace(args.ckpt + ".tmp", args.ckpt)
dist.destroy_process_group()
