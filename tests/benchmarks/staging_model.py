"""What a shared file system makes of a start at many nodes, with --stage and without: a model, from counts on three.

    python -m tests.benchmarks.staging_model

The counts are those of tests.benchmarks.staging: operations and bytes of a job, what of it each further node adds, and
the seconds that a millisecond of latency costs. What is assumed: the first rank of a node asks the server, the others
find what it got; one server does so many operations and bytes per second, whatever they are, and they queue; latency
passes beside the queue; nodes exchange files at 1 GB/s, a byte after the other through ever more of them; MPI_Init and
torch's own work take what they take on a local disk.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LOCAL_S = 3.8
NODES = (8, 64, 512, 1024, 4096)
EXCHANGE_BYTES_PER_S, HOP_S = 1e9, 1e-3  # a chunk of 1 MiB takes a hop's time from node to node


class Start(NamedTuple):
    """What a way to start costs: operations and bytes of one node, those of each further one, seconds per ms."""

    operations: int
    bytes: float
    more_operations: int
    more_bytes: float
    serial_s_per_ms: float
    exchanged: float = 0.0


class Server(NamedTuple):
    """What a server does: operations and bytes per second, and milliseconds for an operation."""

    operations_per_s: float
    bytes_per_s: float
    latency_ms: float


STARTS = {
    "mpiddp": Start(6594, 100e6, 6594, 100e6, 8.3),
    "mpiddp --stage, copied": Start(8290, 522e6, 792, 5.5e6, 1.0, 522e6),
    "mpiddp --stage, again": Start(1375, 3e6, 404, 2e6, 0.35),
}
SERVERS = {
    "one NFS server": Server(20_000, 5e8, 1.0),
    "a parallel file system": Server(200_000, 5e10, 0.5),
}


def seconds(start: Start, server: Server, nodes: int) -> float:
    """Return how long a job's start takes on so many nodes."""
    operations = start.operations + (nodes - 1) * start.more_operations
    read = start.bytes + (nodes - 1) * start.more_bytes
    waiting = max(start.serial_s_per_ms * server.latency_ms, operations / server.operations_per_s,
                  read / server.bytes_per_s)
    exchange = start.exchanged / EXCHANGE_BYTES_PER_S + (math.log2(nodes) * HOP_S if start.exchanged else 0.0)
    return LOCAL_S + waiting + exchange


def main() -> None:
    """Print the table."""
    print(f"| server | start | {' | '.join(f'{nodes:,} nodes' for nodes in NODES)} |\n{'| --- ' * (2 + len(NODES))}|")
    for title, server in SERVERS.items():
        for name, start in STARTS.items():
            print(f"| {title} | {name} | {' | '.join(f'{seconds(start, server, nodes):,.0f} s' for nodes in NODES)} |")


if __name__ == "__main__":
    main()
