"""MPI alone: the bandwidth from rank 0 to rank 1 as osu_bw takes it, and the bus bandwidth of a ring, in B/s."""

from __future__ import annotations

import json
import sys
import time

import numpy
from mpi4py import MPI

WINDOW, SIZE, TIMES = 8, 2**22, 5  # messages under way, and bytes of each
RING = int(sys.argv[1])  # bytes that are reduced

comm = MPI.COMM_WORLD
buffers = [bytearray(SIZE) for _ in range(WINDOW)]
word = bytearray(1)


def one_way() -> float:
    """Send a window of messages from rank 0 to rank 1, which answers, and return the bytes per second."""
    began = time.perf_counter()
    if comm.rank == 0:
        MPI.Request.Waitall([comm.Isend(one, 1) for one in buffers])
        comm.Recv(word, 1)
    elif comm.rank == 1:
        MPI.Request.Waitall([comm.Irecv(one, 0) for one in buffers])
        comm.Send(word, 0)
    return WINDOW * SIZE / (time.perf_counter() - began)


def ring() -> float:
    """Add up arrays of all ranks in a ring, part by part, and return the bus bandwidth."""
    data = numpy.ones(RING // 4, numpy.float32)
    parts = numpy.array_split(data, comm.size)
    came = numpy.empty_like(parts[0])
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Barrier()
    began = time.perf_counter()
    for step in range(2 * (comm.size - 1)):
        leaves, comes = parts[(comm.rank - step) % comm.size], parts[(comm.rank - step - 1) % comm.size]
        target = came[:len(comes)]
        comm.Sendrecv(leaves, after, 0, target, before, 0)
        if step < comm.size - 1:
            comes += target
        else:
            comes[:] = target
    comm.Barrier()
    assert (data == comm.size).all()
    return RING / (time.perf_counter() - began) * 2 * (comm.size - 1) / comm.size


def sleep_for_others() -> None:
    """Wait for all ranks without taking their cores, as a blocking call would."""
    come = comm.Ibarrier()
    while not come.Test():
        time.sleep(0.01)


ways = [one_way() for _ in range(TIMES)]
sleep_for_others()
rings = [ring() for _ in range(TIMES)]
if comm.rank == 0:
    print(json.dumps({"way": max(ways), "ring": max(rings)}))
