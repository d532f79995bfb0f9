"""Files that a user asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from ..facts.files import open_for_writing, reason
from ..say import say


def write_json(path: str, content: object) -> None:
    """Write a file that was asked for, or say why that cannot be done."""
    write(path, json.dumps(content))


def write(path: str, content: str) -> None:
    """Write a file that was asked for, or say why that cannot be done."""
    if why := written(path, content):
        say(why)


def written(path: str, content: str) -> str:
    """Write a file that was asked for, and return why that cannot be done, empty if it is done."""
    try:
        with open(open_for_writing(path), "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
    except OSError as error:
        return f"mpiddp: cannot write {path}: {reason(error, path)}"
    return ""


def note_suspects(path: str, found: Iterable[tuple[str, str]]) -> None:
    """Append a line for each node that should be left out: time, host and what speaks against it, with tabs between."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    lines = [f"{now}\t{host}\t{' '.join(evidence.split())}\n" for host, evidence in found]
    try:
        with open(open_for_writing(path, append=True), "a", encoding="utf-8", errors="replace") as file:
            file.write("".join(lines))
    except OSError as error:
        say(f"mpiddp: cannot write {path}: {reason(error, path)}")
