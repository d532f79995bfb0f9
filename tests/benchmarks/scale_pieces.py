"""What each rank of a large job costs rank 0 in its start, measured with two ranks (JSON, microseconds)."""

import json
import os
import time

from mpi4py import MPI

from mpiddp.act import rendezvous
from mpiddp.act.rollcall import RollCall
from mpiddp.config import LaunchConfig
from mpiddp.launch import look_at_host
from mpiddp.plan.job import plan_hosts

MESSAGES, CONNECTIONS = 2000, 500
world = MPI.COMM_WORLD
roll = RollCall(world, 60)
facts = look_at_host(world, LaunchConfig(device="cpu"))
found = {}


def each(number, start):
    return round((time.perf_counter() - start) / number * 1e6, 1)


if world.rank == 0:
    roll.comm.recv(source=1)  # after all the others, which wait in line then
    start = time.perf_counter()
    for _ in range(MESSAGES):
        while roll._receive() is None:
            pass
    found["receive"] = each(MESSAGES, start)
    plan = plan_hosts([facts], LaunchConfig())[0]
    start = time.perf_counter()
    for _ in range(MESSAGES):
        roll._send(plan, 1)
    found["send"] = each(MESSAGES, start)
    server, endpoint = rendezvous.serve("127.0.0.1", 60)
    world.bcast(endpoint)
    found["connect"] = world.recv(source=1)
    print(json.dumps(found), flush=True)
else:
    for _ in range(MESSAGES):
        roll._send(facts, 0)
    roll.comm.send(None, dest=0)
    for _ in range(MESSAGES):
        while roll._receive(0) is None:
            pass
    endpoint = world.bcast(None)
    start = time.perf_counter()
    stores = [rendezvous.connect(endpoint, 60) for _ in range(CONNECTIONS)]
    world.send(each(CONNECTIONS, start), dest=0)
world.Barrier()
MPI.Finalize()
os._exit(0)
