"""Who is compared with whom: ranks of a kind, and pairs of ranks at the same places of their nodes."""

from __future__ import annotations

from .alike import Nodes
from .figures import OWN, WAYS, Figures
from .own import compare
from .ways import Board, Seen, Way

BOTH = ("latency",)  # quantities with one value for both directions
CLOCK = "clock"


def boards(figures: Figures, nodes: Nodes) -> dict[str, Board]:
    """Return the board of each quantity that was measured between nodes."""
    return {name: Board(WAYS[name], values, nodes.kind, name in BOTH)
            for name, values in figures.ways.items() if values}


def own(figures: Figures) -> dict[str, dict[int, Seen]]:
    """Return how each rank is in each quantity of its own, but for the clock, compared with those of its kind."""
    found: dict[str, dict[int, Seen]] = {}
    for name, values in figures.own.items():
        if name != CLOCK:
            kinds: dict[str, dict[int, list[float]]] = {}
            for rank, some in values.items():
                kinds.setdefault(figures.ranks[rank].kind, {})[rank] = some
            found[name] = {rank: seen for some in kinds.values() for rank, seen in compare(OWN[name], some).items()}
    return found


def inside(figures: Figures, nodes: Nodes) -> dict[str, dict[Way, Seen]]:
    """Return how each way between two ranks of a node is, compared with the same of other nodes of the kind.

    Where fewer than two others have it, it is compared with the others of its own node. Ranks on CPUs have the memory
    between them, which is measured by itself.
    """
    found: dict[str, dict[Way, Seen]] = {}
    for name, values in figures.inside.items():
        places: dict[object, dict[Way, list[float]]] = {}
        for way, values_of in values.items():
            ends = [figures.ranks[rank] for rank in way]
            if (name not in BOTH or way[0] < way[1]) and ends[0].device != "cpu":
                place = (nodes.kind[ends[0].node], ends[0].local_rank, ends[1].local_rank)
                places.setdefault(place, {})[way] = values_of
        at_home: dict[int, dict[Way, list[float]]] = {}
        for some in places.values():
            if len(some) < 3:
                for way, values_of in some.items():
                    at_home.setdefault(figures.ranks[way[0]].node, {})[way] = values_of
        groups = [*(some for some in places.values() if len(some) > 2), *at_home.values()]
        found[name] = {way: seen for group in groups for way, seen in compare(WAYS[name], group).items()}
    return found
