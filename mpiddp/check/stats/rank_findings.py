"""What is odd about ranks and nodes by themselves: devices, memory, disks, clocks, links inside a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .outliers import Score, compare, median
from .schema import (
    CLOCK,
    LINK_METRICS,
    RANK_METRICS,
    SYMMETRIC,
    Finding,
    Link,
    Measurements,
    Metric,
    Nodes,
    Passes,
    counted,
    in_words,
    is_rate,
    share,
)

SILENT = "did not answer: "


def find(measured: Measurements, nodes: Nodes) -> list[Finding]:
    """Return what is odd about ranks and nodes by themselves."""
    return [*reported(measured, nodes), *of_ranks(measured, nodes), *of_clocks(measured, nodes),
            *of_links_inside(measured, nodes), *unreachable_inside(measured, nodes)]


def reported(measured: Measurements, nodes: Nodes) -> list[Finding]:
    """Return what ranks report of themselves, and who has not answered; each line of a node once.

    What most nodes report, as of a folder that they share, is no reason to exclude one of them.
    """
    lines: dict[str, dict[int, None]] = {}
    lost = [(rank, [f"{SILENT}{doing}"]) for rank, doing in measured.lost.items()]
    for rank, words in sorted([*lost, *measured.reports.items()]):
        for line in words:
            lines.setdefault(line, {})[measured.ranks[rank].node] = None
    found = []
    for line, some in lines.items():
        if len(some) > max(1, len(nodes.ranks) // 2) and not line.startswith(SILENT):
            found.append(Finding("node", f"{counted(len(some), 'node')}: {line}", (), tuple(some)))
        else:
            found += [Finding("node", f"{nodes.name(node)}: {line}", nodes.hosts([node]), (node,)) for node in some]
    return found


def of_ranks(measured: Measurements, nodes: Nodes) -> list[Finding]:
    """Return the findings of RANK_METRICS: of a node if all its ranks are odd, else of ranks."""
    found = []
    small: set[int] = set()  # nodes whose /dev/shm is: that little of it is free follows
    for name in (name for name in RANK_METRICS if name in measured.own and name != CLOCK):
        scores = by_kind(RANK_METRICS[name], measured.own[name], measured)
        for node, ranks in nodes.ranks.items():
            odd = [rank for rank in ranks if rank in scores and scores[rank].odd]
            whole = len(odd) == len([rank for rank in ranks if rank in scores])
            if not odd or (name == "shm-free" and node in small):
                continue
            small |= {node} if name == "shm-size" else set()
            for some in [odd] if whole else [[rank] for rank in odd]:
                rank = "" if whole else f": rank {some[0]} ({measured.ranks[some[0]].device})"
                words, ratio = beside_ranks(RANK_METRICS[name], [scores[one] for one in some])
                found.append(Finding("node" if whole else "rank", f"{nodes.name(node)}{rank}: {words}",
                                     nodes.hosts([node]), (node,), (), name, ratio))
    return found


def by_kind(metric: Metric, values: Mapping[int, Passes], measured: Measurements) -> dict[int, Score]:
    """Return how each rank is beside those of its kind."""
    kinds: dict[str, dict[int, Passes]] = {}
    for rank, passes in values.items():
        kinds.setdefault(measured.ranks[rank].kind, {})[rank] = passes
    return {rank: score for some in kinds.values() for rank, score in compare(metric, some).items()}


def beside_ranks(metric: Metric, scores: Sequence[Score]) -> tuple[str, float]:
    """Return in words how some ranks of a node are beside the others, and their ratio."""
    value, level, ratio = (median([getattr(one, field) for one in scores]) for field in ("value", "level", "ratio"))
    count = scores[0].peers + 1 - len(scores)
    if is_rate(metric):
        of = f"the median of {counted(count, 'rank')}" if count > 1 else "the other's"
        return f"{metric.words} at {share(ratio)} of {of}", ratio
    others = "the others" if count > 1 else "the other"
    return f"{metric.words} is {in_words(value, metric.unit)}, {in_words(level, metric.unit)} on {others}", ratio


def of_clocks(measured: Measurements, nodes: Nodes) -> list[Finding]:
    """Return the nodes whose clock is ahead of or behind the others' median; of two, which one cannot be told."""
    clock = {measured.ranks[rank].node: passes[0] for rank, passes in measured.own.get(CLOCK, {}).items()}
    if len(clock) < 2:
        return []
    middle = median(clock.values()) if len(clock) > 2 else min(clock.values())
    found = []
    for node, value in clock.items():
        if abs(value - middle) > RANK_METRICS[CLOCK].floor:
            side = "ahead of" if value > middle else "behind"
            others, hosts = ("the others", nodes.hosts([node])) if len(clock) > 2 else ("the other's", ())
            words = f"{nodes.name(node)}: clock is {in_words(abs(value - middle), 's')} {side} {others}"
            found.append(Finding("node", words, hosts, (node,), (), CLOCK))
    return found


def of_links_inside(measured: Measurements, nodes: Nodes) -> list[Finding]:
    """Return what is odd about the links between ranks of a node: of the node if more than half are, else of each."""
    found = []
    for name, links in measured.inside.items():
        scores = beside_same_links(name, links, measured, nodes)
        for node in nodes.ranks:
            here = [link for link in scores if measured.ranks[link[0]].node == node]
            odd = [link for link in here if scores[link].odd]
            many = len(odd) > 1 and 2 * len(odd) > len(here)
            for some in ([odd] if many else [[link] for link in odd]):
                ends = [f"rank {rank} ({measured.ranks[rank].device})" for rank in some[0]]
                called = "between its ranks" if many else f"from {ends[0]} to {ends[1]}"
                words, ratio = beside_links(LINK_METRICS[name], [scores[link] for link in some])
                found.append(Finding("node" if many else "link", f"{nodes.name(node)}: {called}: {words}",
                                     nodes.hosts([node]), (node,), (), name, ratio))
    return found


def beside_same_links(
    name: str, links: Mapping[Link, Passes], measured: Measurements, nodes: Nodes
) -> dict[Link, Score]:
    """Return how each link between two ranks is, beside the same one of other nodes of the kind.

    Where fewer than two others have it, it is compared with the others of its own node. Ranks on CPUs have the memory
    between them, which is measured by itself.
    """
    places: dict[object, dict[Link, Passes]] = {}
    for link, passes in links.items():
        ends = [measured.ranks[rank] for rank in link]
        if (name not in SYMMETRIC or link[0] < link[1]) and ends[0].device != "cpu":
            place = (nodes.kind[ends[0].node], ends[0].local_rank, ends[1].local_rank)
            places.setdefault(place, {})[link] = passes
    at_home: dict[int, dict[Link, Passes]] = {}
    for some in places.values():
        for link, passes in some.items() if len(some) < 3 else ():
            at_home.setdefault(measured.ranks[link[0]].node, {})[link] = passes
    groups = [*(some for some in places.values() if len(some) > 2), *at_home.values()]
    return {link: score for group in groups for link, score in compare(LINK_METRICS[name], group).items()}


def beside_links(metric: Metric, scores: Sequence[Score]) -> tuple[str, float]:
    """Return in words how links inside a node are beside others, and their ratio."""
    value, level, ratio = (median([getattr(one, field) for one in scores]) for field in ("value", "level", "ratio"))
    if is_rate(metric):
        return f"{metric.words} at {share(ratio)} of the median of {counted(scores[0].peers, 'link')}", ratio
    return f"{metric.words} {in_words(value, metric.unit)}, {in_words(level, metric.unit)} elsewhere", ratio


def unreachable_inside(measured: Measurements, nodes: Nodes) -> list[Finding]:
    """Return the nodes between whose ranks nothing came through: of two of them, of one and others, or of several."""
    found = []
    homes: dict[int, list[Link]] = {}
    for pair in sorted(measured.unreachable_inside):
        homes.setdefault(measured.ranks[pair[0]].node, []).append(pair)
    for node, pairs in homes.items():
        (rank, often), = Counter(rank for pair in pairs for rank in pair).most_common(1)
        ends = [f"rank {one} ({measured.ranks[one].device})" for one in (rank, *({*pairs[0]} - {rank}))]
        between = " and ".join(ends) if len(pairs) == 1 else (
            f"{ends[0]} and {often} others" if often == len(pairs) else f"{len(pairs)} pairs of its ranks")
        words = f"{nodes.name(node)}: nothing comes through between {between}"
        found.append(Finding("node", words, nodes.hosts([node]), (node,)))
    return found
