"""Train on one GPU per rank, or on the CPU. `single_gpu.py` is this script for one GPU."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
numbers = torch.rand(4096, 2)
data = TensorDataset(numbers, numbers.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler)
model = nn.Linear(2, 1).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, sums in loader:
        loss = nn.functional.mse_loss(model(inputs.to(device)), sums.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)

if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
