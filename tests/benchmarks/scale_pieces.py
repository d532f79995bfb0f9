"""What rank 0 spends on each rank of a start: messages, and the connection to its store.

    mpiexec -n 2 python scale_pieces.py COUNT

Rank 1 plays COUNT ranks, one after the other: it sends rank 0 the facts that so many would send, takes the answers,
and makes their connections with what NCCL asks of the store. Rank 0 prints its own CPU seconds for each rank.
"""

import json
import os
import sys
import time

from mpi4py import MPI

import mpiddp.bootstrap.store as rendezvous
from mpiddp.base.config import LaunchConfig
from mpiddp.base.polling import sleep_until
from mpiddp.bootstrap.mpi_communicator import TAG, receive_message
from mpiddp.bootstrap.rank0 import raise_open_file_limit
from mpiddp.planning.job import plan_pre_torch
from tests.benchmarks.planning import host, ready

TIMEOUT_S = 100
world, count = MPI.COMM_WORLD, int(sys.argv[1])
raise_open_file_limit(2 * count)
facts = [host(rank) for rank in range(count)]
plans = plan_pre_torch(facts, LaunchConfig())


def messages(facts, answers):
    """Return rank 0's CPU seconds for as many facts that are there already, and their answers."""
    sent = [world.isend(fact, 0, TAG) for fact in facts] if world.rank else []
    sleep_until(world.Ibarrier().Test)
    start = time.process_time()
    for answer in answers:
        while receive_message(world, TAG, 1 - world.rank) is None:
            pass
        if world.rank == 0:
            sent.append(world.issend(answer, 1, TAG))
    for request in sent:
        sleep_until(request.Test)
    taken = time.process_time() - start
    sleep_until(world.Ibarrier().Test)
    return taken


def connections():
    """Return rank 0's CPU seconds for as many connections to its store."""
    server, endpoint = rendezvous.serve_store("127.0.0.1", TIMEOUT_S) if world.rank == 0 else (None, None)
    endpoint = world.bcast(endpoint)
    if server is not None:
        server.set("identifier", "of NCCL")
    sleep_until(world.Ibarrier().Test)
    start = time.process_time()
    held = []
    for _ in range(count if world.rank else 0):
        store, error = rendezvous.connect_store(endpoint, TIMEOUT_S)
        assert error is None, error
        store.get("identifier")
        held.append(store)
    sleep_until(world.Ibarrier().Test)
    return time.process_time() - start


found = {
    "hosts": messages(facts, plans), "devices": messages(ready(plans), plans),
    "errors": messages([None] * count, [None] * count), "store": connections(),
}
if world.rank == 0:
    print(json.dumps({name: seconds / count for name, seconds in found.items()}), flush=True)
world.Barrier()
MPI.Finalize()
os._exit(0)
