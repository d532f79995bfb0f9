"""A traceback as a person reads it: the script's own lines stand out, and those of libraries are folded."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .origin import HEAD, is_library

FRAME = re.compile(r'(?P<indent>(\[rank\d+\]: )?[ |]*)  File "(?P<file>.*)", line \d+')
BOLD, RED, PLAIN = "\033[1m", "\033[1;31m", "\033[0m"
FEWEST = 2  # frames that take less room as one line


class Frame(NamedTuple):
    """A frame of a traceback: its file, and its lines: where it is, the code, and marks below that."""

    file: str
    lines: list[str]
    indent: str


def is_plain(hook: Any) -> bool:
    """Tell whether a sys.excepthook prints as Python does: torch's puts [rank0] before what another one prints."""
    while str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
        free = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
        hook = free["old_hook"].cell_contents if "old_hook" in free else sys.__excepthook__
    return hook is sys.__excepthook__


def printed(error: BaseException) -> str:
    """Return what sys.excepthook prints on sys.stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        sys.excepthook(type(error), error, error.__traceback__)
    return stream.getvalue()


def excerpt(text: str, colour: bool) -> str:
    """Return a traceback, as Python prints it, with each run of two or more library frames as one line.

    The innermost frame stays, as does a traceback of libraries alone, if there is no other one. In `colour`, the
    script's frames and the error stand out.
    """
    found: list[str] = []
    frames: list[Frame] = []
    is_alone = text.count(HEAD) == 1
    for line in text.splitlines():
        if head := FRAME.match(line):
            frames.append(Frame(head["file"], [line], head["indent"]))
        elif frames and line.startswith(frames[-1].indent + "    "):
            frames[-1].lines.append(line)
        else:
            found += shown(frames, colour, is_alone)
            found.append(f"{RED}{line}{PLAIN}" if colour and frames else line)
            frames = []
    return "\n".join([*found, *shown(frames, colour, is_alone)]) + "\n"


def shown(frames: Sequence[Frame], colour: bool, is_alone: bool) -> Iterator[str]:
    """Yield the lines of a traceback's frames; those of libraries alone as they are, if it `is_alone`."""
    if is_alone and all(is_library(one.file) for one in frames):
        yield from (line for one in frames for line in one.lines)
        return
    run: list[Frame] = []
    for number, one in enumerate(frames):
        if is_library(one.file) and number < len(frames) - 1:
            run.append(one)
            continue
        yield from folded(run)
        run = []
        head, *rest = one.lines
        yield f"{BOLD}{head}{PLAIN}" if colour and not is_library(one.file) else head
        yield from rest


def folded(run: Sequence[Frame]) -> Iterator[str]:
    """Yield the lines of library frames that follow each other: one, if they are several."""
    if len(run) < FEWEST:
        yield from (line for one in run for line in one.lines)
        return
    packages = ", ".join(dict.fromkeys(package(one.file) for one in run))
    yield f"{run[0].indent}  ... {len(run)} frames in {packages} (--traceback full)"


def package(file: str) -> str:
    """Return the name of the package, or the module of Python's own, that a file belongs to."""
    _, installed, after = file.rpartition("-packages/")
    if installed:
        return after.partition("/")[0].removesuffix(".py")
    name = os.path.basename(file).removesuffix(".py")
    return os.path.basename(os.path.dirname(file)) if name.startswith("__") else name.strip("<>")


def wants_colour(stream: object, environ: Mapping[str, str]) -> bool:
    """Tell whether to print in colour: on a terminal, unless NO_COLOR (no-color.org) or TERM say otherwise."""
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except Exception:  # a script may have put any object in the place of sys.stderr
        return False
