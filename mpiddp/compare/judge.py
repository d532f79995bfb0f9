"""The verdict: what of a job's nodes, devices and ways is odd, and what there is nothing to compare with."""

from __future__ import annotations

from collections import Counter

from ..plan.words import folded, listed, ranges
from . import alone, between
from .alike import Nodes
from .figures import Figures, Finding
from .units import counted, in_words

ITSELF = "--check-history compares it with its own former checks"


def judge(figures: Figures) -> list[Finding]:
    """Return what is odd: first what nodes should be left out for, the worst first.

    Of what is measured again before anybody is accused (Quantity.repeats), both the first value and the later ones
    have to be odd. A finding's ratio is 1 where something is as good as its peers: 0.5 for half the bandwidth, or
    twice the latency.
    """
    nodes = Nodes(figures.ranks)
    found = [*alone.findings(figures, nodes), *between.findings(figures, nodes), *without_end(figures)]
    return sorted(found, key=lambda one: (not one.hosts, one.ratio, one.nodes))


def without_end(figures: Figures) -> list[Finding]:
    """Return the finding of an all-reduce that did not come to its end."""
    if figures.unreduced is None:
        return []
    size, through = in_words(figures.unreduced[0], "B").replace(".0 ", " "), figures.unreduced[1]
    ranks = counted(len(figures.ranks), "rank")
    return [Finding("job", f"an all-reduce of {size} came to its end on {through} of {ranks}", (), ())]


def incomparable(figures: Figures) -> list[str]:
    """Return sentences of what cannot be compared with others, and with what it can."""
    nodes = Nodes(figures.ranks)
    if len(figures.ranks) == 1:
        return [f"one rank: there is no other to compare it with; {ITSELF}"]
    found = []
    kinds = Counter(who.kind for who in figures.ranks)
    single = [rank for rank, who in enumerate(figures.ranks) if kinds[who.kind] == 1]
    if single and len(kinds) > 1:
        named = listed([f"rank {rank} ({figures.ranks[rank].kind or figures.ranks[rank].device})" for rank in single])
        found.append(f"no other rank is of the kind of {named}: {ITSELF}")
    if len(nodes.ranks) == 1:
        return [*found, f"one node: its ranks are compared with each other, the node with nothing; {ITSELF}"]
    if len(nodes.ranks) == 2:
        found.append("two nodes: of the ways between them, each direction is compared with the other; what is slow "
                     f"both ways does not show; {ITSELF}")
        return found
    same = Counter(nodes.kind.values())
    rare = [node for node, kind in nodes.kind.items() if same[kind] < 2]
    if rare and len(same) > 1:
        hosts = nodes.hosts(rare)
        named = folded(hosts) if len(hosts) == len(rare) else f"nodes {ranges(rare)}"
        found.append(f"no other node has such devices, or as many ranks: {named}. What is measured there, and how it "
                     f"sends and receives, is compared with nothing; {ITSELF}")
    return found
