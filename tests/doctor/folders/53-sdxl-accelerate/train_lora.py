import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--resolution", type=int)
    p.add_argument("--batch-size", type=int)
    p.add_argument("--output")
    a = p.parse_args()
    acc = Accelerator()
    model = torch.nn.Conv2d(3, 3, 3, padding=1)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(256, 3, 64, 64))
    loader = DataLoader(data, batch_size=a.batch_size, shuffle=True)
    model, opt, loader = acc.prepare(model, opt, loader)
    for _ in range(100):
        for (x,) in loader:
            loss = (model(x) - x).square().mean()
            acc.backward(loss)
            opt.step()
            opt.zero_grad()
    acc.save_model(model, a.output)


if __name__ == "__main__":
    main()
