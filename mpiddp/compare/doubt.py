"""What is to be measured again after a first look: what seems odd, and some of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from .alike import Nodes
from .figures import OWN, Doubt, Figures
from .groups import boards, inside, own
from .outliers import worse
from .ways import SENDS, Board, Seen, Way

LOOKS = 3  # later looks at what is doubtful
MOST = 64  # suspects of a kind: nodes, ways, ranks; those that are worst by their first look
PARTNERS = 6  # with whom a suspect node meets again
CONTROLS = 12  # ways, or nodes, that nothing is odd about, of each kind
LIKE = 0.15  # of two nodes, the ways differ by less
FEW_NODES = 6  # of so many nodes, all ways are measured again

One = TypeVar("One")


def doubt(figures: Figures) -> Doubt:
    """Return what is to be measured again, LOOKS times; where nothing seems odd, nothing.

    It is bounded: of a job of any size MOST nodes meet PARTNERS each, and 2 * MOST other ways are tried, which
    schedule() packs into some twelve rounds.
    """
    nodes = Nodes(figures.ranks)
    ways = ways_again(figures, nodes)
    both = frozenset(way for some in ways.values() for one, other in some for way in ((one, other), (other, one)))
    return Doubt(own_again(figures, nodes), both, inside_again(figures, nodes), "latency" in ways)


def worst(found: Iterable[tuple[One, Seen]], most: int = MOST) -> list[One]:
    """Return the suspects among some, the worst first."""
    odd = [(seen.first / seen.suspect_from if seen.suspect_from else seen.first, one)
           for one, seen in found if seen.suspect]
    return [one for _, one in sorted(odd, key=lambda pair: -pair[0])[:most]]


def spaced(some: Sequence[One], most: int) -> list[One]:
    """Return so many of some at most, evenly spaced."""
    return list(some) if len(some) <= most else [some[at * len(some) // most] for at in range(most)]


def own_again(figures: Figures, nodes: Nodes) -> dict[str, frozenset[int]]:
    """Return the ranks that measure again, by quantity: all of a suspect's node, and of some others, at once as before.

    Alone on its node a rank would be faster than among others.
    """
    found: dict[str, frozenset[int]] = {}
    for name, seen in own(figures).items():
        suspects = worst(seen.items()) if OWN[name].repeats else []
        if suspects:
            bad = {figures.ranks[rank].node for rank in suspects}
            kinds = {figures.ranks[rank].kind for rank in suspects}
            controls: list[int] = []
            for kind in sorted(kinds):
                good = sorted({figures.ranks[rank].node for rank, one in seen.items()
                               if figures.ranks[rank].kind == kind and not one.suspect} - bad)
                controls += spaced(good, CONTROLS)
            found[name] = frozenset(rank for node in {*bad, *controls} for rank in nodes.ranks[node]
                                    if figures.own[name].get(rank))
    return found


def ways_again(figures: Figures, nodes: Nodes) -> dict[str, set[Way]]:
    """Return the ways between nodes that are measured again, by the quantity that is in doubt."""
    found: dict[str, set[Way]] = {}
    for name, board in boards(figures, nodes).items():
        doubtful = {(node, role): seen for role in board.roles for node in board.of[role]
                    if (seen := board.node(node, role)) and seen.suspect}
        suspects = worst(doubtful.items())
        explained = {(node, role) for node, role in doubtful if node in board.bad[role]}
        odd = worst((way, seen) for way in board.ways() if (seen := board.way(way))
                    and not explained & {(way[0], SENDS), (way[1], board.roles[-1])})
        if not (suspects or odd or (len(nodes.ranks) == 2 and unlike(board))):
            continue
        if len(nodes.ranks) <= FEW_NODES:
            found[name] = {*board.first}
        else:
            some = controls(board, {node for node, _ in suspects} | {node for way in odd for node in way})
            found[name] = {*some, *odd, *(way for node, role in suspects for way in partners(board, node, role))}
    return found


def unlike(board: Board) -> bool:
    """Whether the ways of two nodes differ, each direction from the other."""
    values = sorted(board.first.values())
    by = worse(values[0], values[-1], board.quantity) if board.quantity.more else worse(
        values[-1], values[0], board.quantity)
    return by > (max(board.quantity.least, LIKE) if board.quantity.unit else board.quantity.floor / 2)


def partners(board: Board, node: int, role: int) -> list[Way]:
    """Return some ways of a node: to those that are not bad themselves, if there are enough."""
    ways = sorted(board.of[role][node])
    good = [way for way in ways if way[1 - role] not in board.bad[1 - role]]
    some = good if len(good) > 1 else ways
    turned = node % len(some)  # so that suspects do not all wait for the same partners
    return spaced([*some[turned:], *some[:turned]], PARTNERS)


def controls(board: Board, doubtful: set[int]) -> list[Way]:
    """Return some ways of each kind between nodes that nothing is odd about, or else all of those that are clean."""
    found: list[Way] = []
    for ways in board.cleans.values():
        good = [way for way in sorted(ways) if not doubtful & {*way}]
        found += spaced(good if len(good) >= CONTROLS // 2 else sorted(ways), CONTROLS)
    return found


def inside_again(figures: Figures, nodes: Nodes) -> frozenset[Way]:
    """Return the ways between ranks of a node that are measured again: the suspects', and the same on some nodes."""
    found: set[Way] = set()
    for seen in inside(figures, nodes).values():
        same: dict[tuple[int, ...], list[Way]] = {}  # ways that are not odd, by the local ranks of their ends
        home: dict[int, list[Way]] = {}  # and by their node
        for way, one in seen.items():
            if not one.suspect:
                same.setdefault(ends(figures, way), []).append(way)
                home.setdefault(figures.ranks[way[0]].node, []).append(way)
        for way in worst(seen.items()):
            found.update([way, *spaced(same.get(ends(figures, way), []), CONTROLS // 3),
                          *spaced(home.get(figures.ranks[way[0]].node, []), CONTROLS // 3)])
    return frozenset(way for one, other in found for way in ((one, other), (other, one)))


def ends(figures: Figures, way: Way) -> tuple[int, ...]:
    """Return the local ranks at the ends of a way."""
    return tuple(figures.ranks[rank].local_rank for rank in way)
