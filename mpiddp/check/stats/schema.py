"""What a check measures: the metrics, the ranks, the measurements, and a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Link = tuple[int, int]  # from a node to another, or from a rank to another
Passes = list[float]  # one value for each pass


class Metric(NamedTuple):
    """Something that is measured.

    `unit` is B/s, FLOP/s, B, s, 1/s, or empty for a share; `more` tells whether more is better. What a training does
    not feel is no finding: a difference below `floor`, in the metric's unit, or below `matters`, a share of the median.
    """

    words: str
    unit: str
    more: bool = True
    matters: float = 0.0
    floor: float = 0.0


# What a rank measures by itself. Of a node's ranks, local rank 0 alone measures what belongs to the node.
RANK_METRICS = {
    "matrix": Metric("matrix product", "FLOP/s"),
    "memory": Metric("host memory", "B/s"),
    "device-memory": Metric("device memory", "B/s"),
    "to-device": Metric("copies to the device", "B/s"),
    "from-device": Metric("copies from the device", "B/s"),
    "device-free": Metric("free device memory", "B"),
    "throttled": Metric("CPU time that its cgroup's limit takes away", "", more=False, floor=0.05),
    "shm-size": Metric("size of /dev/shm", "B", matters=0.5),
    "shm-free": Metric("free in /dev/shm", "B", matters=0.5),
    "shm-write": Metric("writing to /dev/shm", "B/s", matters=0.5),
    "shm-read": Metric("reading from /dev/shm", "B/s", matters=0.5),
    "tmp-free": Metric("free in /tmp", "B", matters=0.9),
    "tmp-write": Metric("writing to /tmp", "B/s", matters=0.5),
    "tmp-read": Metric("reading from /tmp", "B/s", matters=0.5),
    "tmp-files": Metric("files made, looked at and removed in /tmp", "1/s", matters=0.5),
    "folder-write": Metric("writing to the working directory", "B/s", matters=0.5),
    "folder-read": Metric("reading from the working directory", "B/s", matters=0.5),
    "folder-files": Metric("files made, looked at and removed in the working directory", "1/s", matters=0.5),
    "clock": Metric("clock, from rank 0's", "s", more=False, floor=0.1),  # ahead or behind
    "import": Metric("import of torch", "s", more=False, matters=0.5, floor=5.0),
}

LINK_METRICS = {
    "latency": Metric("latency", "s", more=False, matters=0.5, floor=1e-5),
    "large": Metric("64 MiB", "B/s"),
    "resent": Metric("TCP segments sent again", "", more=False, floor=0.01),
}
SYMMETRIC = ("latency",)  # one value for both directions
CLOCK = "clock"


class RankInfo(NamedTuple):
    """A rank: its host, the number of its node, its number on that, what it computes on.

    It is compared with others of the same `kind`, such as "NVIDIA H100 80GB" or "12 cores of AMD EPYC 7763". `switch`
    is the network switch of its node, as Slurm's topology names it, empty where that is unknown.
    """

    host: str
    node: int
    local_rank: int
    device: str = "cpu"
    kind: str = ""
    switch: str = ""


class Measurements(NamedTuple):
    """All that a check has measured.

    `ranks` are in rank order. `own` has for each of RANK_METRICS the passes of each rank, and `links` for each of
    LINK_METRICS those of each link from one node to another. A latency, which has no direction, stands under both
    directions: it is the backend's or MPI's, whichever is shorter. `inside` has the same between two ranks of a node,
    `by_mpi` the links as MPI itself has them. `reports` are words of what is bad by itself, such as a device's errors,
    by rank; `lost` says what a rank was doing that has not answered in time. `allreduce` has the sizes in bytes of an
    all-reduce over all ranks and the best of their seconds; of one that did not end, `incomplete_allreduce` has the
    size and how many ranks came through. `unreachable` are pairs of nodes between which nothing came through although
    both answered, `unreachable_inside` such pairs of ranks of a node. `claims` are what each rank's hardware is known
    to do at best, by metric.
    """

    ranks: tuple[RankInfo, ...]
    own: dict[str, dict[int, Passes]]
    links: dict[str, dict[Link, Passes]]
    inside: dict[str, dict[Link, Passes]]
    by_mpi: dict[str, dict[Link, Passes]]
    reports: dict[int, list[str]]
    lost: dict[int, str]
    allreduce: dict[int, float]
    claims: dict[int, dict[str, float]]
    unreachable: frozenset[Link] = frozenset()
    unreachable_inside: frozenset[Link] = frozenset()
    incomplete_allreduce: tuple[int, int] | None = None

    def add(self, rank: int, values: Mapping[str, float], told: Sequence[str]) -> None:
        """Add what a rank has measured in a pass, by metric, and what it says of itself, each line once."""
        for name, value in values.items():
            self.own.setdefault(name, {}).setdefault(rank, []).append(value)
        reports = self.reports.setdefault(rank, [])
        reports += [one for one in told if one not in reports]


def empty(ranks: tuple[RankInfo, ...]) -> Measurements:
    """Return measurements of ranks that have measured nothing yet."""
    return Measurements(ranks, {}, {}, {}, {}, {}, {}, {}, {})


class Finding(NamedTuple):
    """Something odd: a line for the user, and the hosts that should be left out for it, if that is known.

    `nodes` are the numbers of the nodes that it is about, `links` the links between nodes. `subject` is rank, node,
    link, switch, or job, which is all of its ranks. `ratio` is 1 for what is as good as its peers, 0.5 for half the
    bandwidth or twice the latency.
    """

    subject: str
    words: str
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    links: tuple[Link, ...] = ()
    metric: str = ""
    ratio: float = 0.0
