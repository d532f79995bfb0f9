"""Load data in worker processes of every kind, on rank 0 of a script that uses MPI too."""

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    """Squares of the first numbers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index**2)


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver") if dist.get_rank() == 0 else ():
        loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=method)
        assert torch.cat(list(loader)).tolist() == [n**2 for n in range(8)], method
    ranks = MPI.COMM_WORLD.allreduce(1)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(ranks, int(total), flush=True)
