"""Train with Lightning's Trainer, as for torchrun."""

import os

import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):
    """A line through points that lie on one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


torch.manual_seed(0)
x = torch.linspace(-1, 1, 120).reshape(-1, 1)
model = Line()
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_epochs=10, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, DataLoader(TensorDataset(x, 3 * x + 1), batch_size=4, shuffle=True))
weight = model.layer.weight.detach()
alike = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
dist.all_gather(alike, weight)
print(f"rank {trainer.global_rank}/{trainer.world_size}: {weight.item():.2f}, {len(set(map(float, alike)))} version\n",
      end="", flush=True)
