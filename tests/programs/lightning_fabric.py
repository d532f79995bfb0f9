"""Train with Lightning Fabric, as for torchrun."""

import os

import torch
from lightning.fabric import Fabric
from torch import nn

fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
                num_nodes=int(os.environ["GROUP_WORLD_SIZE"]))
fabric.launch()
torch.manual_seed(0)
layer = nn.Linear(1, 1)
model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.3))
x = torch.linspace(-1, 1, 120).reshape(-1, 1)[fabric.global_rank::fabric.world_size]
for _ in range(100):
    optimizer.zero_grad()
    fabric.backward(nn.functional.mse_loss(model(x), 3 * x + 1))
    optimizer.step()
alike = fabric.all_gather(layer.weight.detach()).flatten().tolist()
print(f"rank {fabric.global_rank}/{fabric.world_size}: {layer.weight.item():.2f}, {len(set(alike))} version\n",
      end="", flush=True)
