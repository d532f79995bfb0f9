"""The wording of what users read, in one golden file for each command: `tests/golden/launch.toml` and its neighbours.

A test names a message and its fields, so that the wording stands, and changes, in one place.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it, too

FOLDER = Path(__file__).with_name("golden")
FIELD = re.compile(r"\{(\w+)\}")


def message(name: str, **fields: object) -> str:
    """Return a message with its fields filled in: `message("where/no_such_job", job=48211)`.

    Raise KeyError if there is no such message, if a field is missing, or if it has no such field.
    """
    template = wording(name)
    if unknown := set(fields) - set(FIELD.findall(template)):
        raise KeyError(f"{name} has no field {', '.join(sorted(unknown))}")
    return FIELD.sub(lambda field: str(fields[field[1]]), template)


def find(name: str, text: str, **known: object) -> list[dict[str, str]]:
    """Return the fields of each occurrence of a message in a text, in their order; `known` ones must be as given.

    A field is within one line, and as short as the words around it allow; one that ends the message ends at the line's
    end.
    """
    template = wording(name)
    pattern = ""
    named: set[str] = set()
    for number, part in enumerate(FIELD.split(template)):
        if number % 2 == 0:
            pattern += re.escape(part)
        elif part in known:
            pattern += re.escape(str(known[part]))
        elif part in named:
            pattern += f"(?P={part})"
        else:
            pattern += f"(?P<{part}>.*?)"
            named.add(part)
    if template.endswith("}"):
        pattern += "$"
    return [match.groupdict() for match in re.finditer(pattern, text, re.MULTILINE)]


def wording(name: str) -> str:
    """Return a message as its command's file has it, with `{field}` in the places of its fields."""
    command, _, key = name.partition("/")
    return load(command)[key]


@cache
def load(command: str) -> dict[str, str]:
    """Return the messages of a command by their names."""
    return tomllib.loads((FOLDER / f"{command}.toml").read_text())
