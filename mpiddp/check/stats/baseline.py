"""A host compared with its own former checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .link_findings import NODE_QUANTILE, Role, by_node
from .outliers import PeerSample, best, median_passes
from .schema import CLOCK, LATENCY, LINK_METRICS, RANK_METRICS, Finding, Measurements, Metric, Nodes, Passes, Subject
from .text import format_ratio

MIN_CHECKS = 3  # that a host needs to be compared: with two, one wrong check is half of them
MAX_CHECKS = 20  # the newest, so that a node that was repaired or upgraded gets a new baseline

Baseline = Mapping[str, Mapping[str, Sequence[float]]]  # former values by host and metric, the newest last


def passes_by_host(measured: Measurements) -> dict[str, dict[str, Passes]]:
    """Return each host's metrics: the medians of its ranks, or of its links to others, in each pass.

    A link's metric has one entry as the host sends and one as it receives, such as "large sends". Hosts whose name
    another node has too are left out.
    """
    nodes = Nodes(measured.ranks)
    by_host: dict[str, dict[str, Passes]] = {host: {} for host in nodes.hosts_to_exclude(nodes.ranks)}
    for name, by_rank in measured.by_rank.items():
        for node, ranks in nodes.ranks.items():
            passes = [by_rank[rank] for rank in ranks if by_rank.get(rank)]
            if passes and nodes.host[node] in by_host and name != CLOCK:
                by_host[nodes.host[node]][name] = median_passes(passes)
    for name, links in measured.links.items():
        for role in (Role.SENDS,) if name == LATENCY else Role:
            key = name if name == LATENCY else f"{name} {role.name.lower()}"
            for node, values in by_node(LINK_METRICS[name], links, role, NODE_QUANTILE).items():
                if nodes.host[node] in by_host:
                    by_host[nodes.host[node]][key] = values
    return {host: metrics for host, metrics in by_host.items() if metrics}


def best_by_host(measured: Measurements) -> dict[str, dict[str, float]]:
    """Return what the history keeps of this check: the best pass, by host and metric."""
    return {host: {name: best(metric_of(name), passes) for name, passes in metrics.items()}
            for host, metrics in passes_by_host(measured).items()}


def regressions(measured: Measurements, baseline: Baseline) -> list[Finding]:
    """Return the hosts that are worse than in their former checks, in each pass."""
    node_of = {host: node for node, host in Nodes(measured.ranks).host.items()}
    by_host = passes_by_host(measured)
    count = max((len(passes) for metrics in by_host.values() for passes in metrics.values()), default=0)
    findings = []
    for host, metrics in by_host.items():
        for name, passes in metrics.items():
            former = [[value] * count for value in baseline.get(host, {}).get(name, ())][-MAX_CHECKS:]
            if len(former) < MIN_CHECKS:
                continue
            metric, score = metric_of(name), PeerSample(metric_of(name), former).score(passes)
            if score.is_outlier:
                label = metric.label if " " not in name else f"{name.split()[1]}, {metric.label},"
                text = f"{label} at {format_ratio(score.ratio)} of its own median" if metric.is_rate else (
                    f"{label} {metric.format(score.value)}, {metric.format(score.peer_median)} is its own median")
                findings.append(Finding(Subject.NODE, f"{host}: {text} of {len(former)} checks", (host,),
                                        (node_of[host],), (), name.split()[0], score.ratio))
    return sorted(findings, key=lambda finding: finding.ratio)


def metric_of(name: str) -> Metric:
    """Return the metric of an entry of passes_by_host()."""
    return RANK_METRICS.get(name) or LINK_METRICS[name.split()[0]]
