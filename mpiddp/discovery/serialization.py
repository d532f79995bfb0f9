"""The facts of a job's ranks in a file, for --dry-run away from the nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.files import format_os_error, open_for_reading, open_for_writing
from ..base.stderr import write_line
from ..base.version import __version__
from .cpus import CpuGrant, Topology
from .gpus import Gpu
from .host import HostFacts, Interface

VISIBLE, VISIBLE_KEY = "visible_gpus", "seen"  # a field of HostFacts, and its name in files


def write_facts(path: str, facts: Sequence[HostFacts]) -> None:
    """Write the facts of all ranks, in rank order, or print why that fails."""
    try:
        with open(open_for_writing(path), "w", encoding="utf-8") as file:
            json.dump({"mpiddp": __version__, "ranks": [serialize_facts(rank_facts) for rank_facts in facts]}, file)
    except OSError as error:
        write_line(f"mpiddp: cannot write {path}: {format_os_error(error, path)}")


def read_facts(path: str) -> list[HostFacts]:
    """Return the facts in a file; raise OSError, or ValueError with a line for the user if it holds none."""
    with open(open_for_reading(path), encoding="utf-8") as file:
        try:
            facts = [deserialize_facts(record) for record in json.load(file)["ranks"]]
            check_facts(facts)
            return facts
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a facts file of mpiddp {__version__}: "
                             f"{type(error).__name__}: {error}") from None


def check_facts(facts: Sequence[HostFacts]) -> None:
    """Raise ValueError unless these can be the facts of a job's ranks."""
    if not facts:
        raise ValueError("it has no ranks")
    for rank, rank_facts in enumerate(facts):
        node = rank_facts.node
        if not 0 <= node <= rank or facts[node].node != node or facts[node].topology is None:
            raise ValueError(f"rank {rank} is on the node of rank {node}, which has no facts of a node")
        if rank_facts.versions.keys() != facts[0].versions.keys():
            raise ValueError(f"rank {rank} lists versions of other software than rank 0")


def serialize_facts(facts: HostFacts) -> dict[str, Any]:
    """Return the facts of a rank as plain lists and dictionaries, without those of the script."""
    def plain(name: str, value: Any) -> Any:
        if name in ("interfaces", "gpus", VISIBLE):
            return [item._asdict() for item in value]
        if isinstance(value, frozenset):
            return sorted(value)
        return value._asdict() if hasattr(value, "_asdict") else value

    record = {name: plain(name, value) for name, value in facts._replace(script=None)._asdict().items()}
    return {VISIBLE_KEY if name == VISIBLE else name: value for name, value in record.items()}


def deserialize_facts(record: Mapping[str, Any]) -> HostFacts:
    """Return the facts of a record."""
    cores, granted = record["topology"], record["grant"]
    return HostFacts(**{
        **{name: value for name, value in record.items() if name != VISIBLE_KEY},
        "cpus": frozenset(record["cpus"]),
        "allowed": frozenset(record["allowed"]),
        "topology": Topology(tuple(map(tuple, cores["cores"])), tuple(cores["numa"]), tuple(cores["sockets"]),
                             tuple((node, socket) for node, socket in cores.get("nodes", ())))
        if cores else None,
        "interfaces": tuple(Interface(**item) for item in record["interfaces"]),
        "gpus": tuple(Gpu(**item) for item in record["gpus"]),
        VISIBLE: tuple(Gpu(**item) for item in record[VISIBLE_KEY]),
        "options": dict(record.get("options") or {}),
        "unaddressed": tuple(record.get("unaddressed", ())),
        "site_warnings": tuple(record.get("site_warnings", ())),
        "grant": CpuGrant(**granted) if granted else None,
    })
