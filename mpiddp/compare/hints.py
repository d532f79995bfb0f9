"""What two ways of sending say of each other: the job's backend, and MPI."""

from __future__ import annotations

import statistics

from ..plan.words import folded, listed
from .figures import Figures

MUCH = 0.5  # of MPI's bandwidth


def hints(figures: Figures, backend: str) -> list[str]:
    """Return lines where the backend is much slower than MPI between nodes, and where MPI does not come through."""
    found = []
    both = [way for way in figures.ways.get("large", {}) if way in figures.by_mpi.get("large", {})]
    if both:
        ours, mpis = (statistics.median(kept["large"][way][0] for way in both)
                      for kept in (figures.ways, figures.by_mpi))
        if ours < MUCH * mpis:
            found.append(f"{backend} moves {ours / 1e9:.3g} GB/s from node to node, MPI {mpis / 1e9:.3g} GB/s: "
                         + WHY.get(backend, f"does {backend} use the fast network?"))
    hosts = {who.node: who.host for who in figures.ranks}
    silent = sorted({tuple(sorted(way)) for way in figures.ways.get("latency", {})
                     if way not in figures.by_mpi.get("latency", {})})
    if silent:
        pairs = listed([folded(hosts[node] for node in pair) for pair in silent])
        found.append(f"MPI does not come through between {pairs}, {backend} does")
    return found


WHY = {
    "nccl": "does NCCL use the fast network? NCCL_DEBUG=INFO tells",
    "gloo": "gloo knows TCP alone; --interface names the network that it takes",
}
