"""Files that a user asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from ..facts.files import open_for_writing
from ..say import say


def write_json(path: str, content: object) -> None:
    """Write a file that was asked for, or say why that cannot be done."""
    write(path, json.dumps(content))


def write(path: str, content: str) -> None:
    """Write a file that was asked for, or say why that cannot be done."""
    try:
        with open(open_for_writing(path), "w", encoding="utf-8", errors="replace") as file:
            file.write(content)
    except OSError as error:
        say(f"mpiddp: cannot write {path}: {error.strerror}")


def note_suspects(path: str, found: Iterable[tuple[str, str]]) -> None:
    """Append a line for each node that should be left out: time, host and what speaks against it, with tabs between."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    lines = [f"{now}\t{host}\t{' '.join(evidence.split())}\n" for host, evidence in found]
    try:
        with open(open_for_writing(path, append=True), "a", encoding="utf-8", errors="replace") as file:
            file.write("".join(lines))
    except OSError as error:
        say(f"mpiddp: cannot write {path}: {error.strerror}")
