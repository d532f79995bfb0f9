"""Which ranks and nodes are of one kind, and how they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from .schema import RankInfo


class Nodes:
    """The nodes of ranks: their names, their kinds, what they hang on."""

    def __init__(self, ranks: Sequence[RankInfo]) -> None:
        self.ranks = {node: [rank for rank, _ in some] for node, some in
                      groupby(sorted(enumerate(ranks), key=lambda one: one[1].node), key=lambda one: one[1].node)}
        first = {node: ranks[some[0]] for node, some in self.ranks.items()}
        hosts = Counter(who.host for who in first.values())
        self.host = {node: who.host for node, who in first.items()}
        self.alone = {node: hosts[who.host] == 1 for node, who in first.items()}
        self.switch = {node: who.switch for node, who in first.items()}
        self.kind = {node: tuple(sorted(ranks[rank].kind for rank in some)) for node, some in self.ranks.items()}

    def name(self, node: int) -> str:
        """Return a node's hostname, with its number where others have the same."""
        return self.host[node] if self.alone[node] else f"{self.host[node]} (node {node})"

    def hosts(self, nodes: Iterable[int]) -> tuple[str, ...]:
        """Return the hosts to leave out for nodes: none for one whose hostname others have too."""
        return tuple(self.host[node] for node in nodes if self.alone[node])

    def switches(self) -> dict[str, list[int]]:
        """Return the nodes of each switch that has two or more, if all are known and there are two or more."""
        found: dict[str, list[int]] = {}
        for node, switch in self.switch.items():
            found.setdefault(switch, []).append(node)
        known = len(found) > 1 and "" not in found
        return {switch: nodes for switch, nodes in found.items() if len(nodes) > 1} if known else {}
