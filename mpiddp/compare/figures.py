"""The figures of a check: what was measured, of whom, and in which unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

MEETING_SMALL, MEETING_LARGE = 2**20, 2**26  # bytes of a message between two ranks

One = TypeVar("One")


class Quantity(NamedTuple):
    """Something that is measured.

    `unit` is B/s, FLOP/s, B, s, 1/s, or empty for a share; `more` tells whether more is better. A figure is odd only
    if it is worse than the median of its peers by the share `least` of that, and by `floor` in its unit. `repeats`
    tells that it is measured again before anybody is accused: what does not vary by itself needs no second look.
    """

    words: str
    unit: str
    more: bool = True
    least: float = 0.1
    floor: float = 0.0
    repeats: bool = True


# Of a rank: what it measures itself. Of those of a node, local rank 0 alone measures what belongs to the node.
OWN = {
    "matrix": Quantity("matrix product", "FLOP/s"),
    "memory": Quantity("host memory", "B/s", least=0.25),
    "device-memory": Quantity("device memory", "B/s"),
    "to-device": Quantity("copies to the device", "B/s"),
    "from-device": Quantity("copies from the device", "B/s"),
    "device-free": Quantity("free device memory", "B", repeats=False),
    "throttled": Quantity("CPU time that its cgroup's limit takes away", "", more=False, floor=0.05),
    "shm-size": Quantity("size of /dev/shm", "B", least=0.5, repeats=False),
    "shm-free": Quantity("free in /dev/shm", "B", least=0.5, repeats=False),
    "shm-write": Quantity("writing to /dev/shm", "B/s", least=0.5),
    "shm-read": Quantity("reading from /dev/shm", "B/s", least=0.5),
    "tmp-free": Quantity("free in /tmp", "B", least=0.9, repeats=False),
    "tmp-write": Quantity("writing to /tmp", "B/s", least=0.5),
    "tmp-read": Quantity("reading from /tmp", "B/s", least=0.5),
    "tmp-files": Quantity("files made, looked at and removed in /tmp", "1/s", least=0.5),
    "folder-write": Quantity("writing to the working directory", "B/s", least=0.5),
    "folder-read": Quantity("reading from the working directory", "B/s", least=0.5),
    "folder-files": Quantity("files made, looked at and removed in the working directory", "1/s", least=0.5),
    "clock": Quantity("clock, from rank 0's", "s", more=False, floor=0.1, repeats=False),  # both ways
    "import": Quantity("import of torch", "s", more=False, least=1.0, floor=5.0, repeats=False),
}

# Of a way, from one node or rank to another.
WAYS = {
    "latency": Quantity("latency", "s", more=False, least=1.0, floor=1e-5),
    "small": Quantity("1 MiB", "B/s"),
    "large": Quantity("64 MiB", "B/s"),
    "resent": Quantity("TCP segments sent again", "", more=False, floor=0.015),
}


class Who(NamedTuple):
    """A rank: its host, the number of its node, its number on that, what it computes on.

    It is compared with others of the same `kind`, such as "NVIDIA H100 80GB" or "12 cores of AMD EPYC 7763". `switch`
    is what its node hangs on, as Slurm's topology names it, empty where that is not known.
    """

    host: str
    node: int
    local_rank: int
    device: str = "cpu"
    kind: str = ""
    switch: str = ""


class Figures(NamedTuple):
    """All that a check has measured.

    `ranks` are in rank order. `own` holds for each quantity of OWN the values of each rank that has measured it, and
    `ways` for each quantity of WAYS those of each way from one node to another; a latency, which has no direction,
    stands under both: the backend's or MPI's, whichever is shorter. `inside` holds the same between two ranks of a
    node. Each is a list: the first value, then those of later looks, which only suspects and a few others get. `by_mpi`
    holds `ways` as MPI itself has them. `told` are words of what is bad by itself, such as a device's errors, for each
    rank. `lost` tells of ranks that have not answered in time what they were doing. `reduced` are the sizes in bytes of
    an all-reduce over all ranks, and its seconds; of one that did not come to its end, `unreduced` has the size and how
    many ranks came through it. `unmet` are pairs of nodes between which nothing came through, though both have
    answered, and `unmet_inside` such pairs of ranks of a node.
    """

    ranks: tuple[Who, ...]
    own: dict[str, dict[int, list[float]]]
    ways: dict[str, dict[tuple[int, int], list[float]]]
    inside: dict[str, dict[tuple[int, int], list[float]]]
    by_mpi: dict[str, dict[tuple[int, int], list[float]]]
    told: dict[int, list[str]]
    lost: dict[int, str]
    reduced: list[tuple[int, float]]
    unmet: frozenset[tuple[int, int]] = frozenset()
    unmet_inside: frozenset[tuple[int, int]] = frozenset()
    unreduced: tuple[int, int] | None = None

    def looked_again(self) -> Figures:
        """Return what these would be if one more look told the same as the last one; first looks are not repeated."""
        def more(kept: Mapping[str, Mapping[One, list[float]]]) -> dict[str, dict[One, list[float]]]:
            return {name: {one: [*values, *values[1:][-1:]] for one, values in some.items()}
                    for name, some in kept.items()}

        return self._replace(own=more(self.own), ways=more(self.ways), inside=more(self.inside),
                             by_mpi=more(self.by_mpi))


class Doubt(NamedTuple):
    """What is to be measured again: quantities of OWN of ranks, ways from node to node, ways from rank to rank.

    Suspects are among them, and some others, so that a slow moment of all is not taken for theirs. `latency`
    tells whether ways from node to node are in doubt for their latency.
    """

    own: dict[str, frozenset[int]]
    ways: frozenset[tuple[int, int]]
    inside: frozenset[tuple[int, int]]
    latency: bool


class Finding(NamedTuple):
    """Something odd: a line for the user, and the hosts that one should leave out for it, if that is known.

    `nodes` are the numbers of the nodes that it is about, `ways` the ways from node to node. `subject` is rank, node,
    link, switch, or job, which is all of its ranks.
    """

    subject: str
    words: str
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    ways: tuple[tuple[int, int], ...] = ()
    quantity: str = ""
    ratio: float = 0.0
