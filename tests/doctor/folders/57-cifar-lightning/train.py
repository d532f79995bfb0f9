import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = models.resnet18(num_classes=10)

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("command", choices=["fit"])
    p.add_argument("--data_dir")
    p.add_argument("--devices", type=int)
    p.add_argument("--num_nodes", type=int)
    p.add_argument("--batch_size", type=int)
    p.add_argument("--max_epochs", type=int)
    a = p.parse_args()
    data = datasets.CIFAR10(a.data_dir, transform=transforms.ToTensor())
    loader = DataLoader(data, batch_size=a.batch_size, shuffle=True, num_workers=7)
    trainer = L.Trainer(accelerator="gpu", strategy="ddp", devices=a.devices, num_nodes=a.num_nodes,
                        max_epochs=a.max_epochs)
    trainer.fit(Net(), loader)


if __name__ == "__main__":
    main()
