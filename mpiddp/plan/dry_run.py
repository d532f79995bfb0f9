"""What a job of a given shape would be like, without MPI and without torch."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import Shape
from . import environment, topology

UNKNOWN_PORT = 0  # the kernel gives it when the job starts


def describe(shape: Shape, hosts: Sequence[str]) -> str:
    """Return in words the ranks, hosts, address and variables of a job; `hosts` are the known names of its nodes."""
    names = [hosts[i] if i < len(hosts) else f"node {i}" for i in range(shape.nodes)]
    places = topology.places([node for node in range(shape.nodes) for _ in range(shape.ranks_per_node)])
    address = "127.0.0.1" if shape.nodes == 1 else f"<address of {names[0]}>"
    endpoint = environment.Endpoint(address, UNKNOWN_PORT, token="", run_id="mpiddp-<random>")
    lines = [f"{len(places)} ranks on {shape.nodes} nodes, if they are placed node by node:"]
    for node, name in enumerate(names):
        first = node * shape.ranks_per_node
        lines.append(f"  {name}: ranks {first} to {first + shape.ranks_per_node - 1}, device cuda:LOCAL_RANK or cpu")
    for place in dict.fromkeys((places[0], places[-1])):
        exports = {**environment.exports(place, endpoint), "MASTER_PORT": "<free port of rank 0>",
                   "OMP_NUM_THREADS": "<share of the cores, or --cpus-per-task>",
                   "GLOO_SOCKET_IFNAME": "lo" if shape.nodes == 1 else "<interface towards MASTER_ADDR>"}
        lines.append(f"rank {place.rank}:")
        lines += [f"  {name}={value}" for name, value in exports.items()]
    return "\n".join(lines)
