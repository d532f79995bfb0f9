"""All findings of a check, and its notes: what the user should know but is no fault.

A finding about a rank or node by itself is about its device, memory, disk, clock or the links inside the node. Those
about links between nodes are in link_findings.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...base.text import fold_hosts, format_ranges, join_names
from .link_findings import expected_bandwidth, find_link_findings
from .outliers import MIN_LOSS, Score, median, score_all, typical
from .schema import (
    BANDWIDTH,
    CLOCK,
    LATENCY,
    LINK_METRICS,
    RANK_METRICS,
    CheckFinding,
    Link,
    Measurements,
    Metric,
    Nodes,
    Passes,
    Subject,
    group_pairs,
)
from .text import count_text, format_ratio, format_size, format_value

MIN_SAME_LINKS = 3  # nodes of a kind, to compare a link inside a node with the same link of the other nodes
SLOW_BACKEND = 0.5  # of MPI's bandwidth: below that, the backend probably uses another network
GOOD_ALLREDUCE = 1 - MIN_LOSS  # of the links' bandwidth
LARGE_ALLREDUCE = 2**20  # bytes, from which on the links and not the latency determine the time
BACKEND_HINTS = {
    "nccl": "does NCCL use the fast network? NCCL_DEBUG=INFO shows it",
    "gloo": "gloo uses TCP only; select its network with --interface",
}


def find_all(measured: Measurements) -> list[CheckFinding]:
    """Return the findings, those with hosts to exclude first, the worst first."""
    nodes = Nodes(measured.ranks)
    findings = [*find_rank_findings(measured, nodes), *find_link_findings(measured, nodes)]
    if measured.incomplete_allreduce is not None:
        size, finished = measured.incomplete_allreduce
        findings.append(CheckFinding(Subject.JOB, f"all-reduce of {format_size(size)} completed on only {finished} of "
                                + count_text(len(measured.ranks), "rank"), (), ()))
    return sorted(findings, key=lambda finding: (not finding.hosts, finding.ratio, finding.nodes))


def find_rank_findings(measured: Measurements, nodes: Nodes) -> list[CheckFinding]:
    """Return the findings about ranks and nodes by themselves."""
    return [*find_reports(measured, nodes), *find_slow_ranks(measured, nodes), *find_wrong_clocks(measured, nodes),
            *find_slow_inside(measured, nodes), *find_unreachable_inside(measured, nodes)]


def node_finding(nodes: Nodes, node: int, text: str, metric: str = "", ratio: float = 0.0,
                 subject: Subject = Subject.NODE, label: str = "") -> CheckFinding:
    """Return the finding about a node, or about a rank or link of it, which `label` names."""
    return CheckFinding(subject, f"{nodes.name(node)}{label}: {text}", nodes.hosts_to_exclude([node]), (node,), (),
                        metric, ratio)


def find_reports(measured: Measurements, nodes: Nodes) -> list[CheckFinding]:
    """Return the faults that ranks report, and the lost ranks; each line of a node once.

    A report of most nodes, such as one about a shared folder, is no reason to exclude one of them.
    """
    lost = [(rank, [line]) for rank, line in measured.lost.items()]
    reports = dict.fromkeys((line, measured.ranks[rank].node) for rank, lines in
                            sorted([*lost, *measured.reports.items()]) for line in lines)
    findings = []
    for line, reporting in group_pairs(reports).items():
        if len(reporting) > max(1, len(nodes.ranks) // 2) and line not in measured.lost.values():
            text = f"{count_text(len(reporting), 'node')}: {line}"
            findings.append(CheckFinding(Subject.NODE, text, (), tuple(reporting)))
        else:
            findings += [node_finding(nodes, node, line) for node in reporting]
    return findings


def find_slow_ranks(measured: Measurements, nodes: Nodes) -> list[CheckFinding]:
    """Return the findings of RANK_METRICS: about a node if all its ranks are outliers, else about ranks."""
    findings = []
    has_small_shm: set[int] = set()  # nodes on which /dev/shm has little free space because of its size
    for name in (name for name in RANK_METRICS if name in measured.by_rank and name != CLOCK):
        metric = RANK_METRICS[name]
        by_kind = group_pairs((measured.ranks[rank].kind, (rank, passes))
                              for rank, passes in measured.by_rank[name].items())
        scores = {rank: score for members in by_kind.values()
                  for rank, score in score_all(metric, dict(members)).items()}
        for node, ranks in nodes.ranks.items():
            scored = [rank for rank in ranks if rank in scores]
            outliers = [rank for rank in scored if scores[rank].is_outlier]
            if not outliers or (name == "shm-free" and node in has_small_shm):
                continue
            if name == "shm-size":
                has_small_shm.add(node)
            are_all = len(outliers) == len(scored)
            for members in [outliers] if are_all else [[rank] for rank in outliers]:
                text, ratio = _describe_ranks(metric, [scores[rank] for rank in members])
                label = "" if are_all else f": {_rank_label(members[0], measured)}"
                findings.append(node_finding(nodes, node, text, name, ratio, Subject.NODE if are_all else Subject.RANK,
                                             label))
    return findings


def _describe_ranks(metric: Metric, scores: Sequence[Score]) -> tuple[str, float]:
    value, peer_median, ratio = typical(scores)
    count = scores[0].peers + 1 - len(scores)
    if metric.is_rate:
        reference = f"the median of {count_text(count, 'rank')}" if count > 1 else "the other's"
        return f"{metric.label} at {format_ratio(ratio)} of {reference}", ratio
    others = "the others" if count > 1 else "the other"
    return f"{metric.label} is {metric.format(value)}, {metric.format(peer_median)} on {others}", ratio


def find_wrong_clocks(measured: Measurements, nodes: Nodes) -> list[CheckFinding]:
    """Return the nodes whose clock differs from the others' median; of two nodes, either may be the wrong one."""
    clocks = {measured.ranks[rank].node: passes[0] for rank, passes in measured.by_rank.get(CLOCK, {}).items()}
    if len(clocks) < 2:
        return []
    is_known = len(clocks) > 2
    reference = median(clocks.values()) if is_known else min(clocks.values())
    findings = []
    for node, value in clocks.items():
        if abs(value - reference) > RANK_METRICS[CLOCK].min_difference:
            side = "ahead of" if value > reference else "behind"
            others = "the others" if is_known else "the other node's"
            text = f"clock is {RANK_METRICS[CLOCK].format(abs(value - reference))} {side} {others}"
            finding = node_finding(nodes, node, text, CLOCK)
            findings.append(finding if is_known else finding._replace(hosts=()))
    return findings


def find_slow_inside(measured: Measurements, nodes: Nodes) -> list[CheckFinding]:
    """Return the findings about links inside nodes: about the node if more than half of them are outliers."""
    findings = []
    for name, links in measured.inside_links.items():
        scores = _score_inside(name, links, measured, nodes)
        for node in nodes.ranks:
            scored = [link for link in scores if measured.ranks[link[0]].node == node]
            outliers = [link for link in scored if scores[link].is_outlier]
            are_most = len(outliers) > 1 and 2 * len(outliers) > len(scored)
            for members in [outliers] if are_most else [[link] for link in outliers]:
                metric = LINK_METRICS[name]
                value, peer_median, ratio = typical([scores[link] for link in members])
                text = f"{metric.label} {metric.format(value)}, {metric.format(peer_median)} elsewhere"
                if metric.is_rate:
                    peers = count_text(scores[members[0]].peers, "link")
                    text = f"{metric.label} at {format_ratio(ratio)} of the median of {peers}"
                ends = [_rank_label(rank, measured) for rank in members[0]]
                label = ": between its ranks" if are_most else f": from {ends[0]} to {ends[1]}"
                findings.append(node_finding(nodes, node, text, name, ratio, Subject.NODE if are_most else Subject.LINK,
                                             label))
    return findings


def _score_inside(
    name: str, links: Mapping[Link, Passes], measured: Measurements, nodes: Nodes
) -> dict[Link, Score]:
    """Return how each link between two ranks compares with the same link of other nodes of the kind.

    If fewer than MIN_SAME_LINKS nodes have it, it is compared with the other links of its node. Links between ranks on
    CPUs are omitted: they are the host memory, which has its own metric.
    """
    def place(link: Link) -> tuple[tuple[str, ...], int, int]:
        first, second = (measured.ranks[rank] for rank in link)
        return nodes.kinds[first.node], first.local_rank, second.local_rank

    same_links = group_pairs((place(link), link) for link in links if (name != LATENCY or link[0] < link[1])
                             and measured.ranks[link[0]].device != "cpu")
    common = [members for members in same_links.values() if len(members) >= MIN_SAME_LINKS]
    others = group_pairs((measured.ranks[link[0]].node, link) for members in same_links.values()
                         if len(members) < MIN_SAME_LINKS for link in members)
    return {link: score for members in (*common, *others.values()) for link, score in
            score_all(LINK_METRICS[name], {link: links[link] for link in members}).items()}


def find_unreachable_inside(measured: Measurements, nodes: Nodes) -> list[CheckFinding]:
    """Return the nodes with unreachable pairs of ranks: a single pair, those of one rank, or several."""
    findings = []
    by_node = group_pairs((measured.ranks[pair[0]].node, pair) for pair in sorted(measured.unreachable_inside))
    for node, pairs in by_node.items():
        (rank, count), = Counter(rank for pair in pairs for rank in pair).most_common(1)
        text = f"{len(pairs)} pairs of its ranks cannot reach each other"
        if count == len(pairs):
            others = _rank_label(pairs[0][1], measured) if count == 1 else f"{count} others"
            text = f"{_rank_label(rank, measured)} cannot reach {others}"
        findings.append(node_finding(nodes, node, text))
    return findings


def _rank_label(rank: int, measured: Measurements) -> str:
    return f"rank {rank} ({measured.ranks[rank].device})"


def notes(measured: Measurements, backend: str) -> list[str]:
    """Return the notes."""
    return [*note_missing_peers(measured), *note_mpi(measured, backend), *note_gloo_allreduce(measured, backend)]


def note_missing_peers(measured: Measurements) -> list[str]:
    """Return lines about ranks and nodes that have no peers."""
    nodes = Nodes(measured.ranks)
    if len(measured.ranks) == 1:
        return ["only one rank: there is nothing to compare it with"]
    lines = []
    kinds = Counter(info.kind for info in measured.ranks)
    unique_ranks = [f"rank {rank} ({info.kind or info.device})" for rank, info in enumerate(measured.ranks)
                    if kinds[info.kind] == 1]
    if unique_ranks and len(kinds) > 1:
        lines.append(f"no other rank of the same kind to compare with: {join_names(unique_ranks)}")
    if len(nodes.ranks) == 1:
        return [*lines, ("only one node: its ranks are compared with each other, but there is no other node to compare "
                         "it with")]
    if len(nodes.ranks) == 2 and measured.links:
        return [*lines, "only two nodes: a link that is slow in both directions is not detected"]
    node_kinds = Counter(nodes.kinds.values())
    unique_nodes = [node for node, kind in nodes.kinds.items() if node_kinds[kind] == 1]
    if unique_nodes and len(node_kinds) > 1:
        hosts = nodes.hosts_to_exclude(unique_nodes)
        label = fold_hosts(hosts) if len(hosts) == len(unique_nodes) else f"nodes {format_ranges(unique_nodes)}"
        lines.append("no other node with the same devices and number of ranks to compare with: "
                     f"{label}")
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
