"""Data of a check: metrics, ranks and nodes, measurements, findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ...base.config import TextEnum
from .text import format_value

Link = tuple[int, int]  # from a node to another, or from a rank to another
Passes = list[float]  # one value for each pass
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def group_pairs(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


class Metric(NamedTuple):
    """A quantity; its `unit` is B/s, FLOP/s, B, s, 1/s, or empty for a share.

    A smaller difference than `min_loss`, a share of the peers' median, or `min_difference`, in the metric's unit, is no
    finding: it hardly affects a training.
    """

    label: str
    unit: str
    higher_is_better: bool = True
    min_loss: float = 0.0
    min_difference: float = 0.0

    @property
    def is_rate(self) -> bool:
        """Whether findings show it as a share of the peers' median."""
        return self.unit.endswith("/s")

    def format(self, value: float) -> str:
        """Return a value with its unit."""
        return format_value(value, self.unit)


# Benchmarks of each rank; those of the node are run by its local rank 0 alone.
RANK_METRICS = {
    "matrix": Metric("matrix product", "FLOP/s"),
    "memory": Metric("host memory", "B/s"),
    "device-memory": Metric("device memory", "B/s"),
    "to-device": Metric("copies to the device", "B/s"),
    "from-device": Metric("copies from the device", "B/s"),
    "device-free": Metric("free device memory", "B"),
    "throttled": Metric("CPU time throttled by its cgroup", "", False, min_difference=0.05),
    "shm-size": Metric("size of /dev/shm", "B", min_loss=0.5),
    "shm-free": Metric("free space in /dev/shm", "B", min_loss=0.5),
    "shm-write": Metric("writing to /dev/shm", "B/s", min_loss=0.5),
    "shm-read": Metric("reading from /dev/shm", "B/s", min_loss=0.5),
    "tmp-free": Metric("free space in /tmp", "B", min_loss=0.9),
    "tmp-write": Metric("writing to /tmp", "B/s", min_loss=0.5),
    "tmp-read": Metric("reading from /tmp", "B/s", min_loss=0.5),
    "tmp-files": Metric("creating and removing files in /tmp", "1/s", min_loss=0.5),
    "folder-write": Metric("writing to the working directory", "B/s", min_loss=0.5),
    "folder-read": Metric("reading from the working directory", "B/s", min_loss=0.5),
    "folder-files": Metric("creating and removing files in the working directory", "1/s", min_loss=0.5),
    "clock": Metric("clock offset", "s", False, min_difference=0.1),  # from rank 0's, ahead or behind
    "import": Metric("import of torch", "s", False, min_loss=0.5, min_difference=5.0),
}
BANDWIDTH, LATENCY, RETRANSMITS, CLOCK = "bandwidth", "latency", "retransmits", "clock"  # also in the JSON file
LINK_METRICS = {
    LATENCY: Metric("latency", "s", False, min_loss=0.5, min_difference=1e-5),  # one value for both directions
    BANDWIDTH: Metric("bandwidth", "B/s"),
    RETRANSMITS: Metric("retransmitted TCP segments", "", False, min_difference=0.01),
}


class RankInfo(NamedTuple):
    """A rank. Ranks of one `kind` are compared, such as "NVIDIA H100 80GB" or "12 cores of AMD EPYC 7763".

    `switch` is the node's network switch in Slurm's topology, empty if unknown.
    """

    host: str
    node: int
    local_rank: int
    device: str = "cpu"
    kind: str = ""
    switch: str = ""


class Measurements(NamedTuple):
    """The results of a check.

    - `ranks`: in rank order
    - `by_rank`: by metric of RANK_METRICS and rank
    - `links`: by metric of LINK_METRICS and link between nodes, over the job's backend; both directions have the same
      latency, and it is MPI's if that is shorter
    - `inside_links`: the same between two ranks of a node
    - `mpi_links`: the same as `links`, over MPI alone
    - `reports`: by rank, lines about faults, such as a device's errors
    - `lost`: by rank that did not reply in time, a line that says so
    - `allreduce`: by size in bytes of an all-reduce over all ranks, its best time in seconds
    - `unreachable`, `unreachable_inside`: pairs of nodes, or of ranks of a node, that reply to rank 0 but cannot reach
      each other
    - `incomplete_allreduce`: size in bytes of an all-reduce that timed out, and how many ranks completed it
    """

    ranks: tuple[RankInfo, ...]
    by_rank: dict[str, dict[int, Passes]]
    links: dict[str, dict[Link, Passes]]
    inside_links: dict[str, dict[Link, Passes]]
    mpi_links: dict[str, dict[Link, Passes]]
    reports: dict[int, list[str]]
    lost: dict[int, str]
    allreduce: dict[int, float]
    unreachable: frozenset[Link] = frozenset()
    unreachable_inside: frozenset[Link] = frozenset()
    incomplete_allreduce: tuple[int, int] | None = None

    def add(self, rank: int, values: Mapping[str, float], reports: Sequence[str]) -> None:
        """Add a rank's pass: values by metric, and its reports, each line once."""
        for name, value in values.items():
            self.by_rank.setdefault(name, {}).setdefault(rank, []).append(value)
        known = self.reports.setdefault(rank, [])
        known += [line for line in reports if line not in known]


def no_measurements(ranks: tuple[RankInfo, ...]) -> Measurements:
    """Return empty measurements of these ranks."""
    return Measurements(ranks, {}, {}, {}, {}, {}, {}, {})


class Subject(TextEnum):
    """What a finding is about; JOB is all ranks."""

    RANK = "rank"
    NODE = "node"
    LINK = "link"
    SWITCH = "switch"
    JOB = "job"


class CheckFinding(NamedTuple):
    """An outlier or a fault: a line for the user, the hosts to exclude for it, and the nodes and links affected.

    `ratio` is 1 for a value as good as its peers', 0.5 for half the bandwidth or twice the latency.
    """

    subject: Subject
    text: str
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    links: tuple[Link, ...] = ()
    metric: str = ""
    ratio: float = 0.0


class Nodes:
    """The job's nodes by number: their ranks, hosts, and the kinds of their ranks."""

    def __init__(self, ranks: Sequence[RankInfo]) -> None:
        self.ranks = group_pairs(sorted((info.node, rank) for rank, info in enumerate(ranks)))
        first = {node: ranks[members[0]] for node, members in self.ranks.items()}
        hosts = Counter(info.host for info in first.values())
        self.host = {node: info.host for node, info in first.items()}
        self.has_unique_host = {node: hosts[info.host] == 1 for node, info in first.items()}
        self.switch = {node: info.switch for node, info in first.items()}
        self.kinds = {node: tuple(sorted(ranks[rank].kind for rank in members)) for node, members in self.ranks.items()}

    def name(self, node: int) -> str:
        """Return a node's hostname, with its number if another node has the same."""
        return self.host[node] if self.has_unique_host[node] else f"{self.host[node]} (node {node})"

    def hosts_to_exclude(self, nodes: Iterable[int]) -> tuple[str, ...]:
        """Return the hosts of nodes, without those whose name another node has too."""
        return tuple(self.host[node] for node in nodes if self.has_unique_host[node])

    def by_switch(self) -> dict[str, list[int]]:
        """Return the nodes of each switch with two or more; nothing unless there are two switches and all are known."""
        members = group_pairs((switch, node) for node, switch in self.switch.items())
        is_known = len(members) > 1 and "" not in members
        return {switch: nodes for switch, nodes in members.items() if len(nodes) > 1} if is_known else {}
