"""The tables of mpiddp/systems/README.md, from the book's rows: `python -m tests.systems_tables` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from mpiddp.systems import launchers, schedulers, variables
from mpiddp.systems.launchers import Launcher
from mpiddp.systems.mpi_libraries import ALL_INTERFACES
from tests.support import ROOT

DOCUMENT = ROOT / "mpiddp/systems/README.md"


def code(words: Iterable[str]) -> str:
    """Return words as code, a dash for none."""
    return ", ".join(f"`{word}`" for word in words if word) or "-"


def describe_interfaces(row: Launcher) -> str:
    """Return the interfaces to MPI that a launcher offers, with the option that asks for each."""
    if row.own == ALL_INTERFACES and not row.options:
        return "any"
    offered = sorted(row.options or row.own)
    return "; ".join(f"{kind}: {code([row.options[kind]])}" if kind in row.options else kind for kind in offered)


def list_launchers() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each launcher that a rank can recognise."""
    yield "launcher", "its rank, number of ranks", "and always", "interfaces to MPI, and their options", "tested"
    for row in launchers.LAUNCHERS:
        if row.ranks:
            name = f"{row.name} ({code([row.command])})" if row.command not in ("", row.name) else row.name
            yield (name, code((row.ranks[0], *row.sizes[:1])), code(row.marks), describe_interfaces(row), row.tested)


def list_schedulers() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each scheduler."""
    yield "scheduler", "its job", "size of the job", "when the job ends", "tested"
    for row in schedulers.SCHEDULERS:
        yield row.name, code(row.jobs), row.unit, code([" ".join(row.ask_end)]), row.tested


def list_variables() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each variable that mpiddp sets."""
    yield "variable", "from", "launchers' variables for the same"
    for row in variables.VARIABLES:
        yield code([row.name]), row.source, code(variables.list_same(row))


TABLES = {"launchers": list_launchers, "schedulers": list_schedulers, "variables": list_variables}


def format_table(name: str) -> str:
    """Return a table in Markdown."""
    heads, *rows = TABLES[name]()
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def fill(text: str) -> str:
    """Return a document with the tables between its marks."""
    return re.sub(r"(<!-- (\w+) -->\n).*?(<!-- end -->)",
                  lambda match: f"{match[1]}{format_table(match[2])}\n{match[3]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(fill(DOCUMENT.read_text()))
