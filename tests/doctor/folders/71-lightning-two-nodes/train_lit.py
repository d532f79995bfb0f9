import argparse
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Conv2d(1, 1, 3, padding=1)
    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--devices", type=int, default=1)
    p.add_argument("--num-nodes", type=int, default=1)
    p.add_argument("--precision", default="32-true")
    a = p.parse_args()
    data = TensorDataset(torch.randn(512, 1, 64, 64), torch.randn(512, 1, 64, 64))
    trainer = L.Trainer(accelerator="gpu", devices=a.devices, num_nodes=a.num_nodes, strategy="ddp",
                        precision=a.precision, max_epochs=100)
    trainer.fit(Lit(), DataLoader(data, batch_size=8, shuffle=True, num_workers=8))
