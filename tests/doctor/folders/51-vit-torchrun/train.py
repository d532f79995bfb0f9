import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

p = argparse.ArgumentParser()
p.add_argument("--data")
p.add_argument("--epochs", type=int, default=90)
p.add_argument("--workers", type=int, default=8)
p.add_argument("--checkpoint")
args = p.parse_args()

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)

tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
data = datasets.ImageFolder(os.path.join(args.data, "train"), tf)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=128, sampler=sampler, num_workers=args.workers, pin_memory=True)
model = DDP(models.vit_l_16().cuda(), device_ids=[local_rank])
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.checkpoint)
dist.destroy_process_group()
