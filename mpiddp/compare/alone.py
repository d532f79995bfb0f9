"""What is odd about ranks and nodes by themselves: devices, memory, disks, clocks, ways inside a node."""

from __future__ import annotations

from collections import Counter
from statistics import median_low

from .alike import Nodes
from .figures import OWN, WAYS, Figures, Finding
from .groups import CLOCK, inside, own
from .outliers import both_ways, median, peers
from .units import counted, in_words, is_rate, share
from .ways import Seen, Way

SILENT = "did not answer: "
EXPLAINS = {"shm-size": "shm-free"}  # what is odd for another's sake is not told again


def findings(figures: Figures, nodes: Nodes) -> list[Finding]:
    """Return what is odd about ranks and nodes by themselves."""
    return [*told(figures, nodes), *measured(figures, nodes), *clocks(figures, nodes), *within(figures, nodes),
            *unmet_within(figures, nodes)]


def told(figures: Figures, nodes: Nodes) -> list[Finding]:
    """Return what ranks have told of themselves, and who has not answered; each line of a node once.

    What most nodes tell, as of a folder that they share, is no reason to leave one of them out.
    """
    lines: dict[str, list[int]] = {}
    lost = {rank: [f"{SILENT}{doing}"] for rank, doing in figures.lost.items()}
    for rank, words in sorted([*lost.items(), *figures.told.items()]):
        for line in words:
            of_line = lines.setdefault(line, [])
            if figures.ranks[rank].node not in of_line:
                of_line.append(figures.ranks[rank].node)
    found = []
    for line, some in lines.items():
        if len(some) > max(1, len(nodes.ranks) // 2) and not line.startswith(SILENT):
            found.append(Finding("node", f"{counted(len(some), 'node')}: {line}", (), tuple(some)))
            continue
        found += [Finding("node", f"{nodes.name(node)}: {line}", nodes.hosts([node]), (node,)) for node in some]
    return found


def measured(figures: Figures, nodes: Nodes) -> list[Finding]:
    """Return the findings of quantities of OWN: of a node if all its ranks are odd, else of ranks."""
    found: list[Finding] = []
    odd_nodes: dict[str, set[int]] = {}
    for name, seen in own(figures).items():
        odd: dict[int, list[int]] = {}
        for rank, one in seen.items():
            node = figures.ranks[rank].node
            if one.odd and node not in odd_nodes.get(name, ()):
                odd.setdefault(node, []).append(rank)
        for node, ranks in odd.items():
            if len(ranks) == len([rank for rank in nodes.ranks[node] if rank in seen]):
                odd_nodes.setdefault(EXPLAINS.get(name, name), set()).add(node)
                found.append(of_ranks("node", name, ranks, seen, nodes.name(node), figures, nodes))
                continue
            for rank in ranks:
                called = f"{nodes.name(node)}: rank {rank} ({figures.ranks[rank].device})"
                found.append(of_ranks("rank", name, [rank], seen, called, figures, nodes))
    return found


def of_ranks(subject: str, name: str, ranks: list[int], seen: dict[int, Seen], called: str,
             figures: Figures, nodes: Nodes) -> Finding:
    """Return the finding of ranks of a node in a quantity of OWN."""
    quantity, node = OWN[name], figures.ranks[ranks[0]].node
    value, level = median([seen[rank].value for rank in ranks]), median([seen[rank].level for rank in ranks])
    count = seen[ranks[0]].number + 1 - len(ranks)
    ratio = (value / level if level else 0.0) if quantity.more else (level / value if value else 0.0)
    if is_rate(quantity):
        of = f"the median of {counted(count, 'rank')}" if count > 1 else "the other's"
        words = f"{called}: {quantity.words} at {share(ratio)} of {of}"
    else:
        others = "the others" if count > 1 else "the other"
        unit = quantity.unit
        words = f"{called}: {quantity.words} is {in_words(value, unit)}, {in_words(level, unit)} on {others}"
    return Finding(subject, words, nodes.hosts([node]), (node,), (), name, min(1.0, max(0.0, ratio)))


def clocks(figures: Figures, nodes: Nodes) -> list[Finding]:
    """Return the nodes whose clock is ahead of or behind the others' median; of two, which one cannot be told."""
    found: list[Finding] = []
    clock = {figures.ranks[rank].node: values[0] for rank, values in figures.own.get(CLOCK, {}).items() if values}
    for node, value in clock.items():
        rest = [other for key, other in clock.items() if key != node] if len(clock) <= 64 else list(clock.values())
        off = both_ways(value, peers(rest, (), OWN[CLOCK]), OWN[CLOCK]) if rest else 0.0
        if off and not (len(clock) == 2 and found):
            side = "ahead of" if off > 0 else "behind"
            others, hosts = ("the others", nodes.hosts([node])) if len(clock) > 2 else ("the other's", ())
            words = f"{nodes.name(node)}: clock is {in_words(abs(off), 's')} {side} {others}"
            found.append(Finding("node", words, hosts, (node,), (), CLOCK))
    return found


def within(figures: Figures, nodes: Nodes) -> list[Finding]:
    """Return what is odd about the ways between ranks of a node: of the node if more than half are, else of each."""
    found: list[Finding] = []
    for name, seen in inside(figures, nodes).items():
        odd: dict[int, list[Way]] = {}
        for way, one in seen.items():
            if one.odd:
                odd.setdefault(figures.ranks[way[0]].node, []).append(way)
        for node, ways in odd.items():
            every = [way for way in seen if figures.ranks[way[0]].node == node]
            if len(ways) > 1 and 2 * len(ways) > len(every):
                called = f"{nodes.name(node)}: between its ranks"
                found.append(of_ways("node", name, ways, seen, called, node, nodes))
                continue
            for way in ways:
                ends = [f"rank {rank} ({figures.ranks[rank].device})" for rank in way]
                called = f"{nodes.name(node)}: from {ends[0]} to {ends[1]}"
                found.append(of_ways("link", name, [way], seen, called, node, nodes))
    return found


def unmet_within(figures: Figures, nodes: Nodes) -> list[Finding]:
    """Return the nodes between whose ranks nothing came through: of two of them, of one and others, or of several."""
    found = []
    homes: dict[int, list[Way]] = {}
    for pair in sorted(figures.unmet_inside):
        homes.setdefault(figures.ranks[pair[0]].node, []).append(pair)
    for node, pairs in homes.items():
        (rank, often), = Counter(rank for pair in pairs for rank in pair).most_common(1)
        ends = [f"rank {one} ({figures.ranks[one].device})" for one in (rank, *({*pairs[0]} - {rank}))]
        between = " and ".join(ends) if len(pairs) == 1 else (
            f"{ends[0]} and {often} others" if often == len(pairs) else f"{len(pairs)} pairs of its ranks")
        words = f"{nodes.name(node)}: nothing comes through between {between}"
        found.append(Finding("node", words, nodes.hosts([node]), (node,)))
    return found


def of_ways(subject: str, name: str, ways: list[Way], seen: dict[Way, Seen], called: str, node: int,
            nodes: Nodes) -> Finding:
    """Return the finding of ways inside a node."""
    quantity = WAYS[name]
    middle = next(seen[way] for way in ways if seen[way].again == median_low([seen[one].again or 0.0 for one in ways]))
    ratio = max(0.0, 1 - (middle.again or 0.0)) if quantity.more else 1 / (1 + (middle.again or 0.0))
    if is_rate(quantity):
        words = f"{called}: {quantity.words} at {share(ratio)} of the median of {counted(middle.number, 'way')}"
    else:
        unit = quantity.unit
        words = f"{called}: {quantity.words} {in_words(middle.value, unit)}, {in_words(middle.level, unit)} elsewhere"
    return Finding(subject, words, nodes.hosts([node]), (node,), (), name, ratio)
