"""Files that a user asked for."""

from __future__ import annotations

import json

from ..facts.files import open_for_writing
from ..say import say


def write_json(path: str, content: object) -> None:
    """Write a file that was asked for, or say why that cannot be done."""
    write(path, json.dumps(content))


def write(path: str, content: str) -> None:
    """Write a file that was asked for, or say why that cannot be done."""
    try:
        with open(open_for_writing(path), "w") as file:
            file.write(content)
    except OSError as error:
        say(f"mpiddp: cannot write {path}: {error.strerror}")
