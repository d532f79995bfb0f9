"""Compares each host with its own earlier checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .link_findings import NODE_QUANTILE, Role, by_node
from .outliers import PeerSample, best, median_passes
from .schema import CLOCK, LATENCY, LINK_METRICS, RANK_METRICS, Finding, Measurements, Metric, Nodes, Passes, Subject
from .text import count_text, format_ratio

MIN_CHECKS = 3  # with two, one wrong check would be half of them
MAX_CHECKS = 20  # the newest: a repaired or upgraded node gets a new baseline

Baseline = Mapping[str, Mapping[str, Sequence[float]]]  # earlier values by host and metric, the newest last


def passes_by_host(measured: Measurements) -> dict[str, dict[str, Passes]]:
    """Return each host's metrics: the medians of its ranks, or of its links to others, in each pass.

    A link's metric has an entry for each role of the host, such as "large sends". Hostnames of several nodes are
    omitted, and so is the working directory: it need not be the one of earlier checks.
    """
    nodes = Nodes(measured.ranks)
    by_host: dict[str, dict[str, Passes]] = {host: {} for host in nodes.hosts_to_exclude(nodes.ranks)}
    for name, by_rank in measured.by_rank.items():
        for node, ranks in nodes.ranks.items():
            passes = [by_rank[rank] for rank in ranks if by_rank.get(rank)]
            if passes and nodes.host[node] in by_host and name != CLOCK and not name.startswith("folder-"):
                by_host[nodes.host[node]][name] = median_passes(passes)
    for name, links in measured.links.items():
        for role in (Role.SENDS,) if name == LATENCY else Role:
            key = name if name == LATENCY else f"{name} {role.name.lower()}"
            for node, values in by_node(LINK_METRICS[name], links, role, NODE_QUANTILE).items():
                if nodes.host[node] in by_host:
                    by_host[nodes.host[node]][key] = values
    return {host: metrics for host, metrics in by_host.items() if metrics}


def best_by_host(measured: Measurements) -> dict[str, dict[str, float]]:
    """Return the values for the history: the best pass, by host and metric."""
    return {host: {name: best(_metric_of(name), passes) for name, passes in metrics.items()}
            for host, metrics in passes_by_host(measured).items()}


def regressions(measured: Measurements, baseline: Baseline) -> list[Finding]:
    """Return findings about hosts that are worse in each pass than in their earlier checks.

    What most hosts have in common, such as a file system that is busy, is no reason to exclude one of them.
    """
    node_of = {host: node for node, host in Nodes(measured.ranks).host.items()}
    by_host = passes_by_host(measured)
    count = max((len(passes) for metrics in by_host.values() for passes in metrics.values()), default=0)
    findings: dict[str, list[Finding]] = {}  # by metric, as a label
    compared: Counter[str] = Counter()  # hosts
    for host, metrics in by_host.items():
        for name, passes in metrics.items():
            earlier = [[value] * count for value in baseline.get(host, {}).get(name, ())][-MAX_CHECKS:]
            if len(earlier) < MIN_CHECKS:
                continue
            metric = _metric_of(name)
            score = PeerSample(metric, earlier).score(passes)
            key, _, role = name.partition(" ")
            label = f"{metric.label} ({role})" if role else metric.label
            compared[label] += 1
            if score.is_outlier:
                if metric.is_rate:
                    text = f"{label} at {format_ratio(score.ratio)} of its own median"
                else:
                    text = f"{label} {metric.format(score.value)}, {metric.format(score.peer_median)} is its own median"
                findings.setdefault(label, []).append(Finding(
                    Subject.NODE, f"{host}: {text} of {len(earlier)} checks", (host,), (node_of[host],), (), key,
                    score.ratio))
    for label, alike in findings.items():
        if len(alike) > max(1, compared[label] // 2):
            text = f"{count_text(len(alike), 'node')}: {label} worse than the median of their own checks"
            nodes = tuple(finding.nodes[0] for finding in alike)
            findings[label] = [Finding(Subject.NODE, text, (), nodes, (), alike[0].metric, alike[0].ratio)]
    return sorted((finding for alike in findings.values() for finding in alike), key=lambda finding: finding.ratio)


def _metric_of(name: str) -> Metric:
    return RANK_METRICS.get(name) or LINK_METRICS[name.split()[0]]
