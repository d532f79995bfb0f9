"""What any MPI job that uses torch costs: MPI and torch imported, one barrier, MPI finalised, no tear-down."""

import os

import torch
from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
print(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} with torch {torch.__version__}\n", end="", flush=True)
MPI.Finalize()
os._exit(0)
