"""The file of `--json`: all that a check has measured, with units in the names."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..compare.figures import OWN, WAYS, Figures, Finding, Quantity, Who
from ..version import __version__

SUFFIXES = {"B/s": "bytes_per_s", "FLOP/s": "flop_per_s", "B": "bytes", "s": "s", "1/s": "per_s", "": "share"}
UNREDUCED = ("size_bytes", "ranks_through")
Ways = dict[str, dict[tuple[int, int], list[float]]]


def as_json(figures: Figures, findings: Sequence[Finding], notes: Sequence[str]) -> dict[str, Any]:
    """Return what goes into the file.

    Ranks stand in the order of their numbers. `ways` and `by_mpi` go from node to node, `inside` from rank to rank; of
    values the first is the first look's. A quantity that nobody has measured has no key.
    """
    return {
        "versions": versions(),
        "ranks": [who._asdict() for who in figures.ranks],
        "own": {named(name, OWN[name]): [{"rank": rank, "values": values} for rank, values in sorted(some.items())]
                for name, some in figures.own.items()},
        "ways": ways_as_json(figures.ways),
        "inside": ways_as_json(figures.inside),
        "by_mpi": ways_as_json(figures.by_mpi),
        "told": [{"rank": rank, "words": words} for rank, words in sorted(figures.told.items())],
        "lost": [{"rank": rank, "words": words} for rank, words in sorted(figures.lost.items())],
        "all_reduce": [{"size_bytes": size, "time_s": seconds} for size, seconds in figures.reduced],
        "all_reduce_without_end": figures.unreduced and dict(zip(UNREDUCED, figures.unreduced, strict=True)),
        "unmet": [list(pair) for pair in sorted(figures.unmet)],
        "unmet_inside": [list(pair) for pair in sorted(figures.unmet_inside)],
        "findings": [one._asdict() for one in findings],
        "notes": list(notes),
    }


def read(path: str) -> Figures:
    """Return the figures of a file that as_json() made; raise OSError, or ValueError for anything else in it."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        return from_json(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of mpiddp.check --json: {type(error).__name__}: {error}") from error


def from_json(found: Mapping[str, Any]) -> Figures:
    """Return the figures of what as_json() returned; raise KeyError or TypeError for anything else."""
    own = {name: {one["rank"]: one["values"] for one in found["own"][named(name, quantity)]}
           for name, quantity in OWN.items() if named(name, quantity) in found["own"]}
    return Figures(
        tuple(Who(**who) for who in found["ranks"]), own, ways_from(found["ways"]), ways_from(found["inside"]),
        ways_from(found["by_mpi"]), {one["rank"]: one["words"] for one in found["told"]},
        {one["rank"]: one["words"] for one in found["lost"]},
        [(one["size_bytes"], one["time_s"]) for one in found["all_reduce"]],
        frozenset((one, other) for one, other in found["unmet"]),
        frozenset((one, other) for one, other in found.get("unmet_inside", ())),
        (endless["size_bytes"], endless["ranks_through"]) if (endless := found.get("all_reduce_without_end")) else None)


def ways_as_json(ways: Ways) -> dict[str, list[dict[str, Any]]]:
    """Return the values of each way, by quantity."""
    return {named(name, WAYS[name]): [{"from": one, "to": two, "values": values}
                                      for (one, two), values in sorted(some.items())] for name, some in ways.items()}


def ways_from(found: Mapping[str, Any]) -> Ways:
    """Return what ways_as_json() was made of."""
    return {name: {(one["from"], one["to"]): one["values"] for one in found[named(name, quantity)]}
            for name, quantity in WAYS.items() if named(name, quantity) in found}


def named(name: str, quantity: Quantity) -> str:
    """Return a quantity's name with its unit: shm_write_bytes_per_s."""
    return f"{name.replace('-', '_')}_{SUFFIXES[quantity.unit]}"


def versions() -> dict[str, str]:
    """Return the versions of mpiddp, Python, and the packages that measure, as rank 0 has them."""
    found = {"mpiddp": __version__, "python": platform.python_version()}
    for package in ("torch", "mpi4py"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
