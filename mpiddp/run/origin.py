"""Where an error comes from: others pass on what was raised elsewhere, as text or as a cause, in words of their own."""

from __future__ import annotations

import builtins
import re
from typing import NamedTuple

from ..plan.words import words_of
from ..where.stack import LIBRARIES, PYTHON

HEAD = "Traceback (most recent call last):"
FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')
WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+|[\w ]+)\.")
PROCESS = re.compile(r"-- (Process \d+) terminated")
GROUP = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on
DEEPEST = 50  # causes and groups, one within the other


class Origin(NamedTuple):
    """An error in one line, the line of code as reports have it, and in words how it came here, empty if not known."""

    cause: str
    where: str
    by: str = ""


def origin(error: BaseException) -> Origin | None:
    """Return what an error was first, None if it is that itself."""
    found, by = error, ""
    for _ in range(DEEPEST):
        if (told := told_of(found)) is not None:
            return told
        inner = found.__cause__
        if isinstance(found, GROUP):
            inner, more = found.exceptions[0], len(found.exceptions) - 1
            by = f"and {more} more in a group" if more else by
        if inner is None or inner is found:
            break
        if (told := told_of(inner)) is not None:  # another process's traceback
            return told._replace(by=told.by or "in another process")
        by = by or f"re-raised as {in_a_line(error)}"
        found = inner
    return None if found is error else Origin(in_a_line(found), place_of(found), by)


def told_of(error: BaseException) -> Origin | None:
    """Return what the text of an error tells of another one, None if that is none."""
    try:
        text = str(error)
    except Exception:  # whatever a script's own __str__ raises
        return None
    return read(text) if HEAD in text else None


def read(text: str) -> Origin | None:
    """Return the error of the last traceback in a text, and its innermost line outside of libraries, else of all."""
    before, _, traceback = text.rpartition(HEAD)
    places, cause = [], ""
    for line in traceback.splitlines():
        if found := FRAME.match(line):
            places.append((found["file"], found["line"], found["function"]))
        elif places and line and not line[0].isspace():
            cause = line
            break
    if not cause:
        return None
    own = [place for place in places if not is_library(place[0])] or places
    file, number, function = own[-1]
    by = WORKER.search(before) or PROCESS.search(before)
    return Origin(cause.strip(), f"{file}, line {number}, in {function}", f"in {by[1]}" if by else "")


def is_library(file: str) -> bool:
    """Tell whether a file is Python's or an installed package's."""
    return any(part in file for part in LIBRARIES) or file.startswith((PYTHON, "<frozen "))


def in_a_line(error: BaseException) -> str:
    """Return an error as the last line of its traceback, without the lines that follow."""
    return f"{type(error).__name__}: {words_of(error)}".rstrip(": \n").split("\n")[0]


def place_of(error: BaseException) -> str:
    """Return the innermost line of an error's traceback outside of libraries, empty for none."""
    places, traceback = [], error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    own = [place for place in places if not is_library(place[0])]
    return "{}, line {}, in {}".format(*own[-1]) if own else ""
