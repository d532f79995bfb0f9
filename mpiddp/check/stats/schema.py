"""What a check measures: the metrics, the ranks and their nodes, the measurements, a finding, and figures in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
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


class Nodes:
    """The nodes of ranks: their names, their kinds, what they hang on."""

    def __init__(self, ranks: Sequence[RankInfo]) -> None:
        self.ranks = {node: [rank for rank, _ in some] for node, some in
                      groupby(sorted(enumerate(ranks), key=lambda one: one[1].node), key=lambda one: one[1].node)}
        first = {node: ranks[some[0]] for node, some in self.ranks.items()}
        hosts = Counter(who.host for who in first.values())
        self.host = {node: who.host for node, who in first.items()}
        self.alone = {node: hosts[who.host] == 1 for node, who in first.items()}
        self.switch = {node: who.switch for node, who in first.items()}
        self.kind = {node: tuple(sorted(ranks[rank].kind for rank in some)) for node, some in self.ranks.items()}

    def name(self, node: int) -> str:
        """Return a node's hostname, with its number where others have the same."""
        return self.host[node] if self.alone[node] else f"{self.host[node]} (node {node})"

    def hosts(self, nodes: Iterable[int]) -> tuple[str, ...]:
        """Return the hosts to leave out for nodes: none for one whose hostname others have too."""
        return tuple(self.host[node] for node in nodes if self.alone[node])

    def switches(self) -> dict[str, list[int]]:
        """Return the nodes of each switch that has two or more, if all are known and there are two or more."""
        found: dict[str, list[int]] = {}
        for node, switch in self.switch.items():
            found.setdefault(switch, []).append(node)
        known = len(found) > 1 and "" not in found
        return {switch: nodes for switch, nodes in found.items() if len(nodes) > 1} if known else {}


SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
RATES = ("", "k", "M", "G", "T", "P")


def in_words(value: float, unit: str) -> str:
    """Return a value in words: 16 MiB, 3.8 GiB, 12 GB/s, 0.2 ms, 2.1 %."""
    if unit == "B":
        return scaled(value, 1024, SIZES)
    if unit == "s":
        return f"{digits(value)} s" if abs(value) >= 1 else f"{digits(value * 1e3)} ms"
    return f"{digits(value * 100)} %" if not unit else scaled(value, 1000, tuple(prefix + unit for prefix in RATES))


def scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    """Return a value in the largest of these units, each `step` times the one before, of which it has one."""
    at = 0
    while abs(value) >= step and at < len(units) - 1:
        value /= step
        at += 1
    return f"{digits(value)} {units[at]}"


def digits(value: float) -> str:
    """Return a number with two digits, or all that stand before the point."""
    if not value or abs(value) >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def is_rate(metric: Metric) -> bool:
    """Whether a metric is told as a share of the others' median: what is done in a second."""
    return metric.unit.endswith("/s")


def share(ratio: float) -> str:
    """Return a share of the median, with two digits."""
    return f"{ratio:.2f}" if ratio >= 0.095 else f"{ratio:.2g}"


def counted(number: int, one: str) -> str:
    """Return a number of things: 1 pair, 12 pairs."""
    return f"{number:,} {one}" if number == 1 else f"{number:,} {one}s"
