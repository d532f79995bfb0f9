"""How many threads each rank shall use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..facts.host import HostFacts


def threads(facts: Sequence[HostFacts]) -> list[int]:
    """Return each rank's number of threads, in rank order.

    Slurm's --cpus-per-task counts; otherwise ranks of a node that may run on the same cores share
    them evenly.
    """
    sharers = Counter((one.node, one.cores) for one in facts)
    return [one.cpus_per_task or max(1, len(one.cores) // sharers[one.node, one.cores]) for one in facts]
