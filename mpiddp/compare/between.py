"""What is odd about the ways between nodes: a switch, a node as it sends and receives, a link."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..plan.words import folded
from .alike import Nodes
from .figures import Figures, Finding
from .groups import boards
from .outliers import median, worse
from .rounds import cut_off, main_part, partners
from .units import counted, in_words, share
from .ways import RECEIVES, SENDS, Board, Seen, Way

FAMILIES = (("large", "small"), ("latency",), ("resent",))  # of several that are odd, the first is told
FEW_PAIRS = 2  # of a node: those of three nodes
TWO_S_MOST = 0.55  # between two nodes, the slower direction has so much of the other's bandwidth at most

OddNodes = dict[int, dict[int, Seen]]  # of each node, how it sends and receives where that is odd


class Odd(NamedTuple):
    """What is odd in one quantity: nodes, and ways that no odd node explains."""

    board: Board
    nodes: OddNodes
    ways: dict[Way, Seen]


def findings(figures: Figures, nodes: Nodes) -> list[Finding]:
    """Return what is odd about the ways between nodes; of two nodes alone, see two().

    Ways of a node that is odd in anything are not told of: who leaves it out loses them.
    """
    found = silent(figures, nodes)
    if len(nodes.ranks) == 2:
        return [*found, *two(figures, nodes)]
    all_boards = boards(figures, nodes)
    for family in FAMILIES:
        told_nodes: set[int] = set()
        told_ways: set[Way] = set()
        for name in family:
            if name in all_boards:
                seen = odd(all_boards[name])
                if name == "small" and "large" in all_boards:
                    seen = behind_in_both(seen, all_boards["large"])
                new = of_quantity(name, seen, nodes, told_nodes, told_ways)
                told_nodes.update(node for one in new for node in one.nodes if one.subject != "link")
                told_ways.update(way for one in new for way in one.ways)
                found += new
    bad = {node for one in found if one.subject != "link" for node in one.nodes}
    return [one for one in found if one.subject != "link" or not bad & {*one.nodes}]


def silent(figures: Figures, nodes: Nodes) -> list[Finding]:
    """Return what follows from pairs between which nothing came through: nodes that are cut off, or links."""
    met = {(min(way), max(way)) for ways in figures.ways.values() for way, values in ways.items() if values}
    failed = partners(figures.unmet)
    count = len(failed.keys() | partners(met))
    several = {node for node, others in failed.items() if len(others) > 1}
    if several and not main_part(met, count):
        told = f"{counted(len(several), 'node')}: nothing comes through between them"
        return [Finding("node", told, (), tuple(sorted(several)))]
    bad = cut_off(met, figures.unmet, count)
    found = [Finding("node", f"{nodes.name(node)}: nothing comes through to {counted(len(failed[node]), 'other node')}",
                     nodes.hosts([node]), (node,)) for node in sorted(bad)]
    return found + [Finding("link", f"{nodes.name(pair[0])} and {nodes.name(pair[1])}: nothing comes through", (), pair,
                            (pair, pair[::-1])) for pair in sorted(figures.unmet) if not bad & {*pair}]


def odd(board: Board) -> Odd:
    """Return the nodes that are odd, and the odd ways between others: who leaves a node out loses its ways."""
    bad: OddNodes = {}
    for role in board.roles:
        for node in sorted(board.of[role]):
            seen = board.node(node, role)
            if seen is not None and seen.odd:
                bad.setdefault(node, {})[role] = seen
    links = {}
    for way in board.ways():
        explained = way[0] in bad or way[1] in bad
        seen = None if explained or way not in board.again else board.way(way)
        if seen is not None and seen.odd:
            links[way] = seen
    return Odd(board, bad, links)


def behind_in_both(small: Odd, large: Board) -> Odd:
    """Return the ways, and the nodes of few pairs, that are behind with large messages, too, or have no peers there.

    A short message waits where a kernel or a switch lets it wait for once; of a bad link, large ones are slow as well.
    """
    ways = {way: seen for way, seen in small.ways.items()
            if way not in large.first or is_behind(large.way(way))}
    nodes = {node: {role: one for role, one in seen.items()
                    if len(small.board.of[role][node]) > FEW_PAIRS or is_behind(large.node(node, role))}
             for node, seen in small.nodes.items()}
    return Odd(small.board, {node: seen for node, seen in nodes.items() if seen}, ways)


def is_behind(seen: Seen | None) -> bool:
    """Tell whether something was slow at a look, or could not be compared."""
    return seen is None or max(seen.first, seen.again or 0.0) > seen.suspect_from


def of_quantity(name: str, found: Odd, nodes: Nodes, told_nodes: set[int], told_ways: set[Way]) -> list[Finding]:
    """Return the findings of a quantity, but for nodes and ways that are told of already."""
    left = {node: seen for node, seen in found.nodes.items() if node not in told_nodes}
    result = []
    accused = [(switch, some) for switch, some in nodes.switches().items()
               if 2 * len(left.keys() & {*some}) > len(some) and len(left.keys() & {*some}) > 1]
    everywhere = len(accused) == len(nodes.switches())
    for switch, some in accused:
        members = {node: left.pop(node) for node in some if node in left}
        result.append(of_switch(name, switch, members, found.board, nodes, nowhere=everywhere))
    result += [of_node(name, node, seen, found.board, nodes) for node, seen in left.items()]
    links = {way: seen for way, seen in found.ways.items() if way not in told_ways and not told_nodes & {*way}}
    return [*result, *(of_link(name, way, seen, found.board, nodes) for way, seen in links.items())]


def of_node(name: str, node: int, seen: Mapping[int, Seen], board: Board, nodes: Nodes) -> Finding:
    """Return the finding of a node: its ways in a direction are worse than the others'."""
    words = f"{nodes.name(node)}: {how(name, list(seen.items()), board)}"
    ways = tuple(way for role in seen for way in board.of[role][node])
    return Finding("node", words, nodes.hosts([node]), (node,), ways, name, lowest(seen.values(), board))


def of_switch(name: str, switch: str, members: OddNodes, board: Board, nodes: Nodes, nowhere: bool) -> Finding:
    """Return the finding of a switch: most of its nodes are odd. If those of all are, no host is to be left out."""
    seen = [(role, one) for some in members.values() for role, one in some.items()]
    hosts = nodes.hosts(members)
    named = folded(hosts) if len(hosts) == len(members) else counted(len(members), "node")
    words = f"switch {switch}, {named}: {how(name, seen, board)}"
    ways = tuple(way for node, some in members.items() for role in some for way in board.of[role][node])
    return Finding("switch", words, () if nowhere else hosts, tuple(members), ways, name,
                   lowest([one for _, one in seen], board))


def how(name: str, seen: list[tuple[int, Seen]], board: Board) -> str:
    """Return in words how somebody sends and receives, by what is odd about that."""
    number = sum(one.number for role, one in seen if role == seen[0][0])
    pairs = counted(number, "pair")
    value, level = (median([getattr(one, field) for _, one in seen]) for field in ("value", "level"))
    if name == "latency":
        return f"latency {in_words(value, 's')}, {in_words(level, 's')} between the others ({pairs})"
    roles = {role for role, _ in seen}
    if name == "resent":
        verbs = " and ".join(verb for role, verb in ((SENDS, "sends"), (RECEIVES, "is sent")) if role in roles)
        return f"{in_words(value, '')} of the TCP segments that it {verbs} are lost"
    verbs = " and ".join(verb for role, verb in ((SENDS, "sends"), (RECEIVES, "receives")) if role in roles)
    other = {SENDS: "receives normally", RECEIVES: "sends normally"}[roles.pop()] if len(roles) == 1 else ""
    size = "" if name == "large" else f" of {board.quantity.words}"
    ratio = share(1 - median([one.again or 0.0 for _, one in seen]))
    return f"{verbs} at {ratio} of the median ({pairs}{size})" + (f", {other}" if other else "")


def of_link(name: str, way: Way, seen: Seen, board: Board, nodes: Nodes) -> Finding:
    """Return the finding of a single way: its ends are as others are on their other ways."""
    ends = [nodes.name(node) for node in way]
    if name == "latency":
        words = f"{ends[0]} and {ends[1]}: latency {in_words(seen.value, 's')}, {in_words(seen.level, 's')} elsewhere"
        return Finding("link", words, (), way, (way, way[::-1]), name, ratio_of(seen, board))
    if name == "resent":
        words = f"{ends[0]} to {ends[1]}: {in_words(seen.value, '')} of the TCP segments are lost"
        return Finding("link", words, (), way, (way,), name, ratio_of(seen, board))
    size = "" if name == "large" else f", {board.quantity.words}"
    words = f"{ends[0]} to {ends[1]}: at {share(1 - (seen.again or 0))} of the median of {seen.number:,} ways{size}"
    return Finding("link", words, (), way, (way,), name, ratio_of(seen, board))


def lowest(seen: Iterable[Seen], board: Board) -> float:
    """Return the lowest of the ratios."""
    return min(ratio_of(one, board) for one in seen)


def ratio_of(seen: Seen, board: Board) -> float:
    """Return how good something is beside its peers: 0.5 for half the bandwidth, or twice the latency."""
    loss = seen.again or 0.0
    return max(0.0, 1 - loss) if board.quantity.more or not board.quantity.unit else 1 / (1 + loss)


def two(figures: Figures, nodes: Nodes) -> list[Finding]:
    """Return a finding if of two nodes' two directions one is worse: which of the nodes is at fault, none can tell."""
    one, other = sorted(nodes.ranks)
    for name, board in boards(figures, nodes).items():
        if len(board.roles) == 1 or len(board.again) < 2:
            continue
        slow = max(board.again, key=lambda way: worse(board.again[way], 0, board.quantity))
        fast = slow[::-1]
        by = worse(board.again[slow], board.again[fast], board.quantity)
        least = max(1 - TWO_S_MOST, board.quantity.least) if board.quantity.unit else board.quantity.floor
        if by > least and worse(board.first[slow], board.first[fast], board.quantity) > least / 2:
            unit = board.quantity.unit
            words = (f"{nodes.name(slow[0])} to {nodes.name(slow[1])}: {board.quantity.words}: "
                     f"{in_words(board.again[slow], unit)}, {in_words(board.again[fast], unit)} the other way; "
                     "of two nodes it cannot be told which is at fault")
            return [Finding("link", words, (), (one, other), (slow,), name, max(0.0, 1 - by))]
    return []
