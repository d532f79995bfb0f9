"""Train on one GPU, or on the CPU if there is none. `distributed.py` is this script for many GPUs."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
numbers = torch.rand(4096, 2)
data = TensorDataset(numbers, numbers.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=64, shuffle=True)
model = nn.Linear(2, 1).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(10):
    for inputs, sums in loader:
        loss = nn.functional.mse_loss(model(inputs.to(device)), sums.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)

torch.save(model.state_dict(), "model.pt")
