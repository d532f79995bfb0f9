import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

p = argparse.ArgumentParser()
p.add_argument("--lr", type=float)
p.add_argument("--width", type=int)
p.add_argument("--out")
a = p.parse_args()
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
model = DDP(torch.nn.TransformerEncoderLayer(a.width, 8).cuda(), device_ids=[local])
opt = torch.optim.AdamW(model.parameters(), lr=a.lr)
torch.manual_seed(dist.get_rank())
for _ in range(10000):
    x = torch.randn(128, 8, a.width, device="cuda")
    loss = (model(x) - x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
if dist.get_rank() == 0:
    os.makedirs(a.out, exist_ok=True)
    torch.save(model.module.state_dict(), os.path.join(a.out, "model.pt"))
dist.destroy_process_group()
