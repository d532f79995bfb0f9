"""A host beside its own former checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .link_findings import RECEIVES, SENDS, by_node
from .outliers import Peers, best, median
from .schema import (
    CLOCK,
    LINK_METRICS,
    RANK_METRICS,
    SYMMETRIC,
    Finding,
    Measurements,
    Metric,
    Nodes,
    Passes,
    in_words,
    is_rate,
    share,
)

FORMER = 3  # checks that a host needs to have had
KEPT = 20  # that count, the newest
ROLES = {SENDS: "sends", RECEIVES: "receives"}

Past = Mapping[str, Mapping[str, Sequence[float]]]  # by host and metric, the newest last


def of_hosts(measured: Measurements) -> dict[str, dict[str, Passes]]:
    """Return each host's metrics: the median of its ranks, or of its links to others, in each pass.

    A link's metric is kept as the host sends and as it receives, such as `large sends`. Hosts whose name others have
    too are left out.
    """
    nodes = Nodes(measured.ranks)
    found: dict[str, dict[str, Passes]] = {}
    for name, of_ranks in measured.own.items():
        for node, ranks in nodes.ranks.items() if name != CLOCK else ():
            some = [of_ranks[rank] for rank in ranks if of_ranks.get(rank)]
            if some and nodes.alone[node]:
                found.setdefault(nodes.host[node], {})[name] = [
                    median([one[at] for one in some if at < len(one)]) for at in range(max(map(len, some)))]
    for name, links in measured.links.items():
        for role, verb in ROLES.items():
            if name not in SYMMETRIC or role == SENDS:
                key = name if name in SYMMETRIC else f"{name} {verb}"
                for node, passes in by_node(LINK_METRICS[name], links, role, 0.5).items():
                    if nodes.alone[node]:
                        found.setdefault(nodes.host[node], {})[key] = passes
    return found


def best_of_hosts(measured: Measurements) -> dict[str, dict[str, float]]:
    """Return what is kept of this check, by host and metric."""
    return {host: {name: best(metric_of(name), passes) for name, passes in some.items()}
            for host, some in of_hosts(measured).items()}


def regressions(measured: Measurements, past: Past) -> list[Finding]:
    """Return the hosts that are worse than in their former checks, in each pass."""
    number = {host: node for node, host in Nodes(measured.ranks).host.items()}
    found, of = [], of_hosts(measured)
    made = max((len(passes) for some in of.values() for passes in some.values()), default=0)
    for host, some in of.items():
        for name, passes in some.items():
            former = [[value] * made for value in past.get(host, {}).get(name, ())][-KEPT:]
            score = Peers(metric_of(name), former).score(passes) if len(former) >= FORMER else None
            if score and score.odd:
                words = beside_past(name, metric_of(name), score.value, score.level, score.ratio)
                found.append(Finding("node", f"{host}: {words} of {len(former)} checks", (host,), (number[host],), (),
                                     name.split()[0], score.ratio))
    return sorted(found, key=lambda one: one.ratio)


def metric_of(name: str) -> Metric:
    """Return the metric of a name that of_hosts() gives."""
    return RANK_METRICS.get(name) or LINK_METRICS[name.split()[0]]


def beside_past(name: str, metric: Metric, value: float, level: float, ratio: float) -> str:
    """Return in words how a value is beside the median of former ones."""
    called = metric.words if " " not in name else f"{name.split()[1]}, {metric.words},"
    if is_rate(metric):
        return f"{called} at {share(ratio)} of its own median"
    return f"{called} {in_words(value, metric.unit)}, {in_words(level, metric.unit)} is its own median"
