"""Text for messages: lists of names, numbers and hosts, durations, columns, filled format strings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter

MAX_LISTED = 5
CUT_STACK = "  ..."  # the last line of a stack whose outermost calls are left out
MAX_LINE_CHARS = 2000


def join_names(names: Sequence[str]) -> str:
    """Return names joined by commas, those after the first MAX_LISTED only counted."""
    shown = ", ".join(names[:MAX_LISTED])
    return f"{shown} and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else shown


def format_address(address: str, port: int | str) -> str:
    """Return an address with its port as in URLs, an IPv6 address in brackets (RFC 3986)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def format_duration(seconds: float) -> str:
    """Return a duration: 4.2 s, 62 s, 4 min 10 s, 1 h 3 min."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def memory_advice(use: str = "", option: str = "") -> str:
    """Return advice on a lack of memory; the scheduler's command `use` shows it, and its `option` requests more."""
    return (f"check the memory use ({use}{'; ' * bool(use)}dmesg on the node): start fewer DataLoader workers, or ask "
            "for more memory" + f" ({option})" * bool(option))


def fold_hosts(hosts: Iterable[str]) -> str:
    """Return hostnames as Slurm writes them, n[001-064]; names that do not fold are listed."""
    from ClusterShell.NodeSet import NodeSet  # heavy, and needed only for a message

    nodes = NodeSet.fromlist(sorted(set(hosts)))
    groups = [str(group) for group in nodes.contiguous()] if len(str(nodes)) > 100 else [str(nodes)]
    return join_names(groups)


def format_ranges(numbers: Iterable[int], most: int = 0) -> str:
    """Return numbers as the kernel writes them, 0-3,8; ranges after the first `most` (0: no limit) are counted."""
    runs = find_runs(numbers)
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most or None]]
    return ",".join(texts) + (f" and {len(runs) - most:,} more ranges" if len(texts) < len(runs) else "")


def find_runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return the first and the last number of each run of consecutive numbers."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def format_columns(table: Sequence[Sequence[str]], most: Sequence[int] = ()) -> list[str]:
    """Return a table as aligned lines; a cell is cut at its column's `most` characters, if given."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    widths = [*map(min, widths, most)] if most else widths
    return ["  ".join(["", *(cell.ljust(width) if len(cell) <= width else f"{cell[:width - 1]}…"
                             for cell, width in zip(row, widths, strict=True))]).rstrip() for row in table]


def find_minority(values: Sequence[str]) -> tuple[str, dict[str, list[int]]]:
    """Return the commonest of the ranks' values, and for each other value the ranks that have it."""
    if len(set(values)) == 1:
        return values[0], {}
    common = Counter(values).most_common(1)[0][0]
    others: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value != common:
            others.setdefault(value, []).append(rank)
    return common, others


def truncate_middle(text: str, most: int = MAX_LINE_CHARS) -> str:
    """Return a text without its middle if it is longer than `most` characters."""
    if len(text) <= most + len("... [1,000 characters left out] ..."):
        return text
    half = most // 2
    return f"{text[:half]} ... [{len(text) - 2 * half:,} characters left out] ... {text[-half:]}"


def field_names(form: str) -> set[str]:
    """Return the names of the fields in a format string for str.format(), without attributes and indices."""
    return {re.split(r"[.[]", field, maxsplit=1)[0] for _, field, _, _ in Formatter().parse(form) if field is not None}


def fill_fields(form: str, fields: Mapping[str, object]) -> str:
    """Return a format string for str.format() with these fields filled in; its other fields stay.

    Raises ValueError if it is not a format string.
    """
    text = ""
    for literal, field, spec, _ in Formatter().parse(form):
        text += literal.replace("{", "{{").replace("}", "}}")
        if field is not None and field in fields:
            text += format(fields[field], spec or "").replace("{", "{{").replace("}", "}}")
        elif field is not None:
            text += f"{{{field}:{spec}}}" if spec else f"{{{field}}}"
    return text


def format_safely(value: object, form: Callable[[object], str] = str) -> str:
    """Return `form(value)`; if that raises, what Python's tracebacks print then."""
    try:
        return form(value)
    except BaseException:  # whatever a script's own __str__ or __repr__ raises
        return f"<{type(value).__name__} {form.__name__}() failed>"
