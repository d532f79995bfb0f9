import torch


def batches(cfg, rank, world):
    g = torch.Generator().manual_seed(rank)
    for _ in range(cfg["steps"]):
        x = torch.randint(0, 32000, (cfg["batch_size"], 2048), generator=g)
        yield x, x.clone()
