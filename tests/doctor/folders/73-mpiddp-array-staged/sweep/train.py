import argparse, os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--data", required=True)
p.add_argument("--lr", type=float, required=True)
p.add_argument("--out", required=True)
a = p.parse_args()

# python -m mpiddp has initialised the group; "cuda" is this rank's GPU
x = torch.frombuffer(bytearray(open(os.path.join(a.data, "x.bin"), "rb").read()), dtype=torch.uint8).float().view(-1, 16)
data = TensorDataset(x, (x.sum(1) > 2000).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=8)
model = DistributedDataParallel(torch.nn.Linear(16, 2).cuda())
opt = torch.optim.SGD(model.parameters(), lr=a.lr)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for bx, by in loader:
        loss = torch.nn.functional.cross_entropy(model(bx.cuda()), by.cuda())
        opt.zero_grad(); loss.backward(); opt.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), a.out)
