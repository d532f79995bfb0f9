"""The facts of a job's ranks in a file, to be looked at where the nodes are not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.files import format_os_error, open_for_reading, open_for_writing
from ..base.stderr import write_line
from ..base.version import __version__
from .cpus import Grant, Topology
from .gpus import Gpu
from .host import HostFacts, Interface


def write(path: str, facts: Sequence[HostFacts]) -> None:
    """Write the facts of all ranks, in rank order, or say why that cannot be done."""
    try:
        with open(open_for_writing(path), "w") as file:
            json.dump({"mpiddp": __version__, "ranks": [record(one) for one in facts]}, file)
    except OSError as error:
        write_line(f"mpiddp: cannot write {path}: {format_os_error(error, path)}")


def read(path: str) -> list[HostFacts]:
    """Return the facts in a file; raise OSError, or ValueError with a line for the user if they are none."""
    with open(open_for_reading(path)) as file:
        try:
            found = [loaded(one) for one in json.load(file)["ranks"]]
            check(found)
            return found
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} has no facts that mpiddp {__version__} knows: "
                             f"{type(error).__name__}: {error}") from None


def check(facts: Sequence[HostFacts]) -> None:
    """Raise ValueError unless these can be the facts of a job's ranks."""
    if not facts:
        raise ValueError("it has no ranks")
    for rank, one in enumerate(facts):
        if not 0 <= one.node <= rank or facts[one.node].node != one.node or facts[one.node].topology is None:
            raise ValueError(f"rank {rank} is on the node of rank {one.node}, which does not tell of it")
        if one.versions.keys() != facts[0].versions.keys():
            raise ValueError(f"rank {rank} has other versions than rank 0")


def record(facts: HostFacts) -> dict[str, Any]:
    """Return the facts of a rank as plain lists and dictionaries; those of the script are left out."""
    def plain(value: Any) -> Any:
        if isinstance(value, frozenset):
            return sorted(value)
        return value._asdict() if hasattr(value, "_asdict") else value

    several = ("interfaces", "gpus", "seen")
    return {name: [one._asdict() for one in value] if name in several else plain(value)
            for name, value in facts._replace(script=None)._asdict().items()}


def loaded(found: Mapping[str, Any]) -> HostFacts:
    """Return the facts of a record."""
    cores, granted = found["topology"], found["grant"]
    return HostFacts(**{
        **found,
        "cpus": frozenset(found["cpus"]),
        "allowed": frozenset(found["allowed"]),
        "topology": Topology(tuple(map(tuple, cores["cores"])), tuple(cores["numa"]), tuple(cores["sockets"]),
                             tuple((node, socket) for node, socket in cores.get("nodes", ())))
        if cores else None,
        "interfaces": tuple(Interface(**one) for one in found["interfaces"]),
        "gpus": tuple(Gpu(**one) for one in found["gpus"]),
        "seen": tuple(Gpu(**one) for one in found["seen"]),
        "options": dict(found.get("options") or {}),
        "unaddressed": tuple(found.get("unaddressed", ())),
        "grant": Grant(**granted) if granted else None,
    })
