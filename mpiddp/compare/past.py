"""A host beside its own past: what is worse than in its former checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .alike import Nodes
from .figures import OWN, WAYS, Figures, Finding, Quantity
from .groups import BOTH, CLOCK
from .outliers import allowed, best, median, peers, worse
from .units import in_words, is_rate, share

FORMER = 3  # checks that a host needs to have had
KEPT = 20  # that count, the newest

Past = Mapping[str, Mapping[str, Sequence[float]]]


def last(values: Sequence[float], _: Quantity) -> float:
    """Return the last look's value, which is what is kept."""
    return values[-1]


def present(
    figures: Figures, of_looks: Callable[[Sequence[float], Quantity], float] = last
) -> dict[str, dict[str, float]]:
    """Return what is kept of this check, by host and quantity: the median of its ranks, or of its ways to others.

    A way's quantity is kept as it sends and as it receives, such as `large sends`. Of the looks at one counts what
    `of_looks` returns. Hosts whose name others have too are left out.
    """
    nodes = Nodes(figures.ranks)
    found: dict[str, dict[str, list[float]]] = {}

    def keep(node: int, name: str, values: Sequence[float], quantity: Quantity) -> None:
        if values and nodes.alone[node]:
            found.setdefault(nodes.host[node], {}).setdefault(name, []).append(of_looks(values, quantity))

    for name, of_ranks in figures.own.items():
        for rank, values in of_ranks.items() if name != CLOCK else ():
            keep(figures.ranks[rank].node, name, values, OWN[name])
    for name, of_ways in figures.ways.items():
        for (one, other), values in of_ways.items():
            keep(one, name if name in BOTH else f"{name} sends", values, WAYS[name])
            if name not in BOTH:
                keep(other, f"{name} receives", values, WAYS[name])
    return {host: {name: median(values) for name, values in by_name.items()} for host, by_name in found.items()}


def aged(figures: Figures, past: Past) -> list[Finding]:
    """Return the hosts that are worse than in their former checks, of which `past` has the values, newest last.

    They are so by the best of all looks.
    """
    nodes = Nodes(figures.ranks)
    number = {host: node for node, host in nodes.host.items()}
    found = []
    for host, values in present(figures, best).items():
        for name, value in values.items():
            former = list(past.get(host, {}).get(name, ()))[-KEPT:]
            quantity = quantity_of(name)
            if len(former) >= FORMER and quantity is not None:
                before = peers(former, (), quantity)
                loss = worse(value, before.level, quantity)
                if loss > allowed(before, quantity):
                    ratio = max(0.0, 1 - loss) if quantity.more else 1 / (1 + loss)
                    words = f"{host}: {told(name, quantity, value, before.level, ratio)} of {len(former)} checks"
                    found.append(Finding("node", words, (host,), (number[host],), (), name.split()[0], ratio))
    return sorted(found, key=lambda one: one.ratio)


def quantity_of(name: str) -> Quantity | None:
    """Return the quantity of a name that present() gives, None for a name that another version has written."""
    return OWN.get(name) or WAYS.get(name.split()[0])


def told(name: str, quantity: Quantity, value: float, level: float, ratio: float) -> str:
    """Return in words how a value is beside the median of former ones."""
    called = quantity.words if " " not in name else f"{name.split()[1]}, {quantity.words},"
    if is_rate(quantity):
        return f"{called} at {share(ratio)} of its own median"
    return f"{called} {in_words(value, quantity.unit)}, {in_words(level, quantity.unit)} is its own median"
