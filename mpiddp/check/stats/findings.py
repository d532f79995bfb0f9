"""All findings of a check, and its notes: what the user should know but is no fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ...base.text import fold_hosts, format_ranges, join_names
from .link_findings import expected_bandwidth, find_link_findings
from .outliers import MIN_LOSS, best, median
from .rank_findings import find_rank_findings
from .schema import (
    BANDWIDTH,
    LATENCY,
    LINK_METRICS,
    RANK_METRICS,
    Finding,
    Measurements,
    Metric,
    Nodes,
    Subject,
    group_pairs,
)
from .text import count_text, format_ratio, format_size, format_value

USE_HISTORY = "use --check-history to compare with earlier checks"
SLOW_BACKEND = 0.5  # of MPI's bandwidth: below that, the backend probably uses another network
GOOD_ALLREDUCE = 1 - MIN_LOSS  # of the links' bandwidth
LARGE_ALLREDUCE = 2**20  # bytes, from which on the links and not the latency determine the time
BACKEND_HINTS = {
    "nccl": "does NCCL use the fast network? NCCL_DEBUG=INFO shows it",
    "gloo": "gloo uses TCP only; select its network with --interface",
}


def find_all(measured: Measurements) -> list[Finding]:
    """Return the findings, those with hosts to exclude first, the worst first."""
    nodes = Nodes(measured.ranks)
    findings = [*find_rank_findings(measured, nodes), *find_link_findings(measured, nodes)]
    if measured.incomplete_allreduce is not None:
        size, finished = measured.incomplete_allreduce
        findings.append(Finding(Subject.JOB, f"all-reduce of {format_size(size)} completed on only {finished} of "
                                + count_text(len(measured.ranks), "rank"), (), ()))
    return sorted(findings, key=lambda finding: (not finding.hosts, finding.ratio, finding.nodes))


def notes(measured: Measurements, backend: str) -> list[str]:
    """Return the notes."""
    return [note_claims(measured), *note_missing_peers(measured), *note_mpi(measured, backend),
            *note_gloo_allreduce(measured, backend)]


def note_claims(measured: Measurements) -> str:
    """Return a line with the results beside the hardware's peak rates: without outliers, all nodes may be slow.

    If ranks or links have different peak rates, the line shows those with the lowest share.
    """
    parts = []
    for name, metric in ((BANDWIDTH, LINK_METRICS[BANDWIDTH]), *RANK_METRICS.items()):
        if by_claim := group_pairs(_claimed_values(name, metric, measured)):
            share, claim, value = min((median(values) / claim, claim, median(values))
                                      for claim, values in by_claim.items())
            label = "links" if name == BANDWIDTH else metric.label + " of a node" * (name == "memory")
            parts.append(f"{label} {metric.format(value)} of {metric.format(claim)} ({format_ratio(share)})")
    return f"share of hardware peak rates: {', '.join(parts)}" if parts else (
        "the peak rates of this hardware are unknown: results are compared only with each other")


def _claimed_values(name: str, metric: Metric, measured: Measurements) -> Iterator[tuple[float, float]]:
    """Yield the peak rate and the best pass of each link, rank or node.

    A link has the peak rate of its slower end. The peak rate of the host memory is the node's: the values of its ranks,
    which measure at the same time, are added.
    """
    of_ranks = {rank: claims[name] for rank, claims in measured.claims.items() if name in claims}
    of_nodes = {measured.ranks[rank].node: claim for rank, claim in of_ranks.items()}
    if name in LINK_METRICS:
        for link, passes in measured.links.get(name, {}).items():
            if passes and of_nodes.keys() >= {*link}:
                yield min(of_nodes[node] for node in link), best(metric, passes)
        return
    values = {rank: best(metric, passes) for rank, passes in measured.by_rank.get(name, {}).items() if passes}
    if name == "memory":
        for node, ranks in Nodes(measured.ranks).ranks.items():
            if node in of_nodes and values.keys() >= {*ranks}:
                yield of_nodes[node], sum(values[rank] for rank in ranks)
        return
    for rank in values.keys() & of_ranks.keys():
        yield of_ranks[rank], values[rank]


def note_missing_peers(measured: Measurements) -> list[str]:
    """Return lines about ranks and nodes that have no peers, and how to compare them anyway."""
    nodes = Nodes(measured.ranks)
    if len(measured.ranks) == 1:
        return [f"only one rank: there is nothing to compare it with; {USE_HISTORY}"]
    lines = []
    kinds = Counter(info.kind for info in measured.ranks)
    unique_ranks = [f"rank {rank} ({info.kind or info.device})" for rank, info in enumerate(measured.ranks)
                    if kinds[info.kind] == 1]
    if unique_ranks and len(kinds) > 1:
        lines.append(f"no other rank of the same kind to compare with: {join_names(unique_ranks)}; {USE_HISTORY}")
    if len(nodes.ranks) == 1:
        return [*lines, ("only one node: its ranks are compared with each other, but there is no other node to compare "
                         f"it with; {USE_HISTORY}")]
    if len(nodes.ranks) == 2 and measured.links:
        return [*lines, f"only two nodes: a link that is slow in both directions is not detected; {USE_HISTORY}"]
    node_kinds = Counter(nodes.kinds.values())
    unique_nodes = [node for node, kind in nodes.kinds.items() if node_kinds[kind] == 1]
    if unique_nodes and len(node_kinds) > 1:
        hosts = nodes.hosts_to_exclude(unique_nodes)
        label = fold_hosts(hosts) if len(hosts) == len(unique_nodes) else f"nodes {format_ranges(unique_nodes)}"
        lines.append("no other node with the same devices and number of ranks to compare with: "
                     f"{label}; {USE_HISTORY}")
    return lines


def note_mpi(measured: Measurements, backend: str) -> list[str]:
    """Return lines if the backend is much slower than MPI between nodes, and if MPI messages do not arrive."""
    lines = []
    ours, mpis = measured.links.get(BANDWIDTH, {}), measured.mpi_links.get(BANDWIDTH, {})
    if both := ours.keys() & mpis.keys():
        of_backend, of_mpi = (median([max(links[link]) for link in both]) for links in (ours, mpis))
        if of_backend < SLOW_BACKEND * of_mpi:
            hint = BACKEND_HINTS.get(backend, f"does {backend} use the fast network?")
            lines.append(f"{backend} transfers {format_value(of_backend, 'B/s')} between nodes, "
                         f"MPI {format_value(of_mpi, 'B/s')}: {hint}")
    if silent := measured.links.get(LATENCY, {}).keys() - measured.mpi_links.get(LATENCY, {}).keys():
        hosts = {info.node: info.host for info in measured.ranks}
        links = sorted({(min(link), max(link)) for link in silent})
        pairs = [fold_hosts(hosts[node] for node in link) for link in links]
        lines.append(f"MPI messages do not arrive between {join_names(pairs)}, but those of {backend} do")
    return lines


def note_gloo_allreduce(measured: Measurements, backend: str) -> list[str]:
    """Return a line if gloo's all-reduce is slower than the links, as it always is: no fault."""
    fastest = max((result.bus_bandwidth for result in allreduce_results(measured) if result.size >= LARGE_ALLREDUCE),
                  default=0.0)
    expected = expected_bandwidth(measured)
    if backend != "gloo" or not fastest or expected is None or fastest > GOOD_ALLREDUCE * expected:
        return []
    rates = f"{format_value(fastest, 'B/s')}, the links {format_value(expected, 'B/s')}"
    return [f"gloo's all-reduce reaches {rates}; this is normal, because gloo sums on the CPU"]


class AllReduceResult(NamedTuple):
    """An all-reduce: its size in bytes, its time in seconds, and its bus bandwidth in B/s."""

    size: int
    time_s: float
    bus_bandwidth: float


def allreduce_results(measured: Measurements) -> list[AllReduceResult]:
    """Return the all-reduces by size, with their bus bandwidth as nccl-tests defines it (its doc/PERFORMANCE.md).

    It is size / time * 2 (n - 1) / n for n ranks: the traffic on each rank's link, whatever n is.
    """
    count = len(measured.ranks)
    return [AllReduceResult(size, time_s, size / time_s * 2 * (count - 1) / count if time_s > 0 else 0.0)
            for size, time_s in sorted(measured.allreduce.items())]
