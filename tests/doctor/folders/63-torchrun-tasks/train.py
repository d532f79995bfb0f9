import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import argparse

p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=10)
p.add_argument("--batch-size", type=int, default=64)
args = p.parse_args()

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 128), torch.randint(0, 10, (4096,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, num_workers=4)
model = DDP(torch.nn.Linear(128, 10).cuda(local), device_ids=[local])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.cuda(local)), y.cuda(local))
        opt.zero_grad(); loss.backward(); opt.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
