import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--data", default=None)
parser.add_argument("--out", default="out")
args = parser.parse_args()

torch.manual_seed(args.seed)
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
sampler = DistributedSampler(data, seed=args.seed)
loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=args.workers)
model = DistributedDataParallel(torch.nn.Linear(64, 10).cuda())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
os.makedirs(args.out, exist_ok=True)
last = os.path.join(args.out, "last.pt")
start = 0
if os.path.exists(last):
    state = torch.load(last, map_location="cuda")
    model.module.load_state_dict(state["model"])
    start = state["epoch"] + 1
for epoch in range(start, args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, last + ".tmp")
        os.replace(last + ".tmp", last)
