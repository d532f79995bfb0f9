"""Ranks and hosts in words: a handful by name, the rest counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter

LISTED = 5
CUT_STACK = "  ..."  # the last line of a stack whose outermost calls are left out
LONG = 2000  # the most characters of a text that is printed on one line


def listed(names: Sequence[str]) -> str:
    """Return names joined by commas, those after a handful only counted."""
    shown = ", ".join(names[:LISTED])
    return f"{shown} and {len(names) - LISTED:,} more" if len(names) > LISTED else shown


def at_port(address: str, port: int | str) -> str:
    """Return an address with its port, as URLs have it: that of IPv6 stands in brackets (RFC 3986)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def duration(seconds: float) -> str:
    """Return a time in words: 4.2 s, 62 s, 4 min 10 s, 1 h 3 min."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def memory_advice(use: str = "", option: str = "") -> str:
    """Return what to do where memory lacks: `use` tells a job's use of it, `option` asks for more, empty if unknown."""
    return (f"look at the memory ({use}{'; ' * bool(use)}dmesg on the node): fewer DataLoader workers, or ask for more"
            + f" ({option})" * bool(option))


def folded(hosts: Iterable[str]) -> str:
    """Return hostnames as Slurm writes them, n[001-064]; what does not fold is listed."""
    from ClusterShell.NodeSet import NodeSet  # heavy, and needed only for a message

    nodes = NodeSet.fromlist(sorted(set(hosts)))
    groups = [str(group) for group in nodes.contiguous()] if len(str(nodes)) > 100 else [str(nodes)]
    return listed(groups)


def ranges(numbers: Iterable[int], most: int = 0) -> str:
    """Return numbers as the kernel writes them, 0-3,8; of more than `most` ranges, unless 0, the rest are counted."""
    parts = rows(numbers)
    words = [str(first) if first == last else f"{first}-{last}" for first, last in parts[:most or None]]
    return ",".join(words) + (f" and {len(parts) - most:,} more ranges" if len(words) < len(parts) else "")


def rows(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first and the last of numbers in a row."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def columns(table: Sequence[Sequence[str]], most: Sequence[int] = ()) -> list[str]:
    """Return a table as lines, its cells in columns; each cell is cut at its column's `most` characters, if given."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    widths = [*map(min, widths, most)] if most else widths
    return ["  ".join(["", *(cell.ljust(width) if len(cell) <= width else f"{cell[:width - 1]}…"
                             for cell, width in zip(row, widths, strict=True))]).rstrip() for row in table]


def minority(values: Sequence[str]) -> tuple[str, dict[str, list[int]]]:
    """Return the commonest of the ranks' values, and for each other value the ranks that have it."""
    if len(set(values)) == 1:
        return values[0], {}
    common = Counter(values).most_common(1)[0][0]
    others: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value != common:
            others.setdefault(value, []).append(rank)
    return common, others


def shortened(text: str, most: int = LONG) -> str:
    """Return a text without its middle if it is longer than `most` characters."""
    if len(text) <= most + len("... [1,000 characters left out] ..."):
        return text
    half = most // 2
    return f"{text[:half]} ... [{len(text) - 2 * half:,} characters left out] ... {text[-half:]}"


def fields(form: str) -> set[str]:
    """Return the names of a format string's fields, as str.format() takes it, without attributes and indices."""
    return {re.split(r"[.[]", field, maxsplit=1)[0] for _, field, _, _ in Formatter().parse(form) if field is not None}


def filled(form: str, fields: Mapping[str, object]) -> str:
    """Return a format string, as str.format() takes it, with these fields filled in, and others left as they are.

    Raises ValueError for a string that is none.
    """
    found = ""
    for literal, field, spec, _ in Formatter().parse(form):
        found += literal.replace("{", "{{").replace("}", "}}")
        if field is not None and field in fields:
            found += format(fields[field], spec or "").replace("{", "{{").replace("}", "}}")
        elif field is not None:
            found += f"{{{field}:{spec}}}" if spec else f"{{{field}}}"
    return found


def words_of(value: object, form: Callable[[object], str] = str) -> str:
    """Return what `form` makes of a value; if that raises, what Python's tracebacks say then."""
    try:
        return form(value)
    except BaseException:  # whatever a script's own __str__ or __repr__ raises
        return f"<{type(value).__name__} {form.__name__}() failed>"
