"""Finds the original error behind causes, groups and quoted tracebacks; folds tracebacks for reading."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from ..base.termination import HardExit
from ..base.text import format_safely, truncate_middle
from .root_cause import is_peer_loss
from .stack import FrameKind, classify_file, is_pythons

TRACEBACK_HEADER = "Traceback (most recent call last):"
PRINTED_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')
WORKER_ERROR = re.compile(r"Caught \w+ in (DataLoader worker process \d+|[\w ]+)\.")
PROCESS_ERROR = re.compile(r"-- (Process \d+) terminated")
GROUP_TYPE = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on
MAX_DEPTH = 50  # causes and groups, one within the other
CYTHON_SUFFIXES = (".pyx", ".pxi")  # as tracebacks name the sources of what Cython has compiled, such as mpi4py
MAX_ERROR_CHARS = 200  # characters of an error that followed another one
MPICH_ERROR_STACK = ", error stack:"  # ends the first line of MPICH's and Intel MPI's errors; the last line says most
NCCL_LAST_ERROR = "Last error:"  # in NCCL's errors; the next line says most


class CodeLine(NamedTuple):
    """A line of code."""

    file: str
    line: int | str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class Origin(NamedTuple):
    """An error in one line, its line of code as reports have it, and how it was passed on (`by`), empty if unknown.

    `is_loss`: ranks raise such an error if another rank has ended.
    """

    cause: str
    where: str
    by: str = ""
    is_loss: bool = False


def find_origin(error: BaseException) -> Origin | None:
    """Return the original error behind this one, None if this is the original.

    That is its cause. For an exit, an error from the loss of another rank, or one after a KeyboardInterrupt it may
    also be the error that was being handled.
    """
    is_loss, first, by = is_from_peer_loss(error), error, ""
    follows = is_loss or is_interrupt(error)
    for _ in range(MAX_DEPTH):
        if (quoted := parse_error_text(first)) is not None:  # another process's traceback
            parts = [quoted.by or ("in another process" if first is not error else ""),
                     describe_later_error(error) if isinstance(error, SystemExit) else ""]
            return quoted._replace(by=", ".join(filter(None, parts)))
        inner = first.__cause__
        if isinstance(first, GROUP_TYPE):
            members = first.exceptions
            inner = next((member for member in members if not is_from_peer_loss(member)), members[0])
            by = f"and {len(members) - 1} more in a group" if len(members) > 1 else by
        elif isinstance(first, KeyboardInterrupt) or (is_loss and is_raised_by_peer_loss(first)):
            break
        elif inner is None and (follows or isinstance(first, SystemExit)):
            inner = first.__context__
            by = by or describe_later_error(error)
        if inner is None or inner is first:
            break
        by = by or (describe_later_error(error) if isinstance(error, SystemExit)
                    else f"re-raised as {format_error_line(error)}")
        first = inner
    else:
        return None
    own = [place for place in list_code_lines(first.__traceback__) if not is_library(place.file)]
    return None if first is error else Origin(format_error_line(first), str(own[-1]) if own else "", by, is_loss)


def describe_later_error(error: BaseException) -> str:
    """Return text on an error that followed the original one."""
    return f"then {truncate_middle(format_error_line(error), MAX_ERROR_CHARS)}"


def is_from_peer_loss(error: BaseException, deepest: int = MAX_DEPTH) -> bool:
    """Return whether an error, its cause, or the error that was being handled was raised because a rank has ended.

    A group counts if all its errors do.
    """
    if isinstance(error, GROUP_TYPE):
        return deepest > 0 and all(is_from_peer_loss(member, deepest - 1) for member in error.exceptions)
    if (quoted := parse_error_text(error)) is not None:
        return quoted.is_loss
    inner = error.__cause__ or error.__context__
    return is_raised_by_peer_loss(error) or (
        inner is not None and deepest > 0 and is_from_peer_loss(inner, deepest - 1))


def is_raised_by_peer_loss(error: BaseException) -> bool:
    """Return whether an error itself says that another rank has ended, and comes from a communication library."""
    files = [place.file for place in list_code_lines(error.__traceback__) if not is_pythons(place.file)]
    kind = type(error)
    return is_peer_loss(f"{kind.__module__}.{kind.__qualname__}: {format_safely(error)}", files[-1] if files else "")


def is_interrupt(error: BaseException, deepest: int = MAX_DEPTH) -> bool:
    """Return whether an error is a KeyboardInterrupt, or was raised while one was handled."""
    inner = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt) or (
        inner is not None and deepest > 0 and is_interrupt(inner, deepest - 1))


def parse_error_text(error: BaseException) -> Origin | None:
    """Return the origin in an error's text if that quotes a traceback, None otherwise."""
    try:
        text = str(error)
    except Exception:  # whatever a script's own __str__ raises
        return None
    return parse_traceback(text) if TRACEBACK_HEADER in text else None


def parse_traceback(text: str) -> Origin | None:
    """Return the error of the last traceback in a text, with its innermost line outside of libraries, else of all."""
    before, _, traceback = text.rpartition(TRACEBACK_HEADER)
    places, lines = [], traceback.splitlines()
    for index, line in enumerate(lines):
        if match := PRINTED_FRAME.match(line):
            places.append(CodeLine(match["file"], match["line"], match["function"]))
        elif places and line and not line[0].isspace():
            error = "\n".join(lines[index:])
            break
    else:
        return None
    own = [place for place in places if not is_library(place.file)] or places
    files = [place.file for place in places if not is_pythons(place.file)]
    by = WORKER_ERROR.search(before) or PROCESS_ERROR.search(before)
    return Origin(pick_telling_line(error.partition('\n"""')[0]), str(own[-1]), f"in {by[1]}" if by else "",
                  is_peer_loss(error, files[-1] if files else ""))


def is_library(file: str) -> bool:
    """Return whether a file is Python's, an installed package's or our own."""
    return classify_file(file) is not FrameKind.SCRIPT or file.endswith(CYTHON_SUFFIXES)


def format_error_line(error: BaseException) -> str:
    """Return an error as the last line of its traceback."""
    if isinstance(error, SystemExit):
        return f"{'os._exit' if isinstance(error, HardExit) else 'sys.exit'}({format_safely(error.code, repr)})"
    return pick_telling_line(f"{type(error).__name__}: {format_safely(error)}").rstrip(": ")


def pick_telling_line(text: str) -> str:
    """Return the first line of an error's text, and the most specific line if the first only introduces it."""
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if rest and first.endswith(MPICH_ERROR_STACK):
        return f"{first.removesuffix(MPICH_ERROR_STACK)}: {rest[-1]}"
    if NCCL_LAST_ERROR in rest[:-1]:
        return f"{first}: {rest[rest.index(NCCL_LAST_ERROR) + 1]}"
    return f"{first} {rest[0]}" if rest and first.endswith(":") else first


def list_code_lines(traceback: TracebackType | None) -> list[CodeLine]:
    """Return the lines of a traceback, outermost first."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append(CodeLine(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return places


FRAME_LINE = re.compile(r'(?P<indent>(\[rank\d+\]: )?[ |]*)  File "(?P<file>.*)", line \d+')
BOLD, RED, PLAIN = "\033[1m", "\033[1;31m", "\033[0m"
MIN_FOLDED = 2  # frames that take less room as one line


class PrintedFrame(NamedTuple):
    """A frame of a traceback: its file, and its lines: the place, the code, and marks below that."""

    file: str
    lines: list[str]
    indent: str


def is_default_hook(hook: Any) -> bool:
    """Return whether a sys.excepthook prints as Python's: torch's puts [rank0] before the output of another one."""
    while str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
        free = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
        hook = free["old_hook"].cell_contents if "old_hook" in free else sys.__excepthook__
    return hook is sys.__excepthook__


def capture_hook_output(error: BaseException) -> str:
    """Return the output of sys.excepthook on sys.stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        sys.excepthook(type(error), error, error.__traceback__)
    return stream.getvalue()


def fold_traceback(text: str, colour: bool) -> str:
    """Return a traceback, as Python prints it, with each run of MIN_FOLDED or more library frames as one line.

    The innermost frame stays, and so does a single traceback that has only library frames. `colour` highlights the
    script's frames and the error.
    """
    folded_lines: list[str] = []
    frames: list[PrintedFrame] = []
    is_alone = text.count(TRACEBACK_HEADER) == 1
    for line in text.splitlines():
        if head := FRAME_LINE.match(line):
            frames.append(PrintedFrame(head["file"], [line], head["indent"]))
        elif frames and line.startswith(frames[-1].indent + "    "):
            frames[-1].lines.append(line)
        else:
            folded_lines += fold_frames(frames, colour, is_alone)
            folded_lines.append(f"{RED}{line}{PLAIN}" if colour and frames else line)
            frames = []
    return "\n".join([*folded_lines, *fold_frames(frames, colour, is_alone)]) + "\n"


def fold_frames(frames: Sequence[PrintedFrame], colour: bool, is_alone: bool) -> Iterator[str]:
    """Yield the lines of a traceback's frames, unfolded if it `is_alone` and has only library frames."""
    if is_alone and all(is_library(frame.file) for frame in frames):
        yield from (line for frame in frames for line in frame.lines)
        return
    run: list[PrintedFrame] = []
    for index, frame in enumerate(frames):
        if is_library(frame.file) and index < len(frames) - 1:
            run.append(frame)
            continue
        yield from fold_run(run)
        run = []
        head, *rest = frame.lines
        yield f"{BOLD}{head}{PLAIN}" if colour and not is_library(frame.file) else head
        yield from rest


def fold_run(run: Sequence[PrintedFrame]) -> Iterator[str]:
    """Yield the lines of successive library frames, or one line for all of them."""
    if len(run) < MIN_FOLDED:
        yield from (line for frame in run for line in frame.lines)
        return
    packages = ", ".join(dict.fromkeys(name_package(frame.file) for frame in run))
    yield f"{run[0].indent}  ... {len(run)} frames in {packages} (--traceback full)"


def name_package(file: str) -> str:
    """Return the name of a file's package, or of its module of Python's own."""
    _, installed, after = file.rpartition("-packages/")
    if installed:
        return after.partition("/")[0].removesuffix(".py")
    name = os.path.basename(file).removesuffix(".py")
    return os.path.basename(os.path.dirname(file)) if name.startswith("__") else name.strip("<>")


def is_colour_wanted(stream: object, environ: Mapping[str, str]) -> bool:
    """Return whether to print in colour: on a terminal, unless NO_COLOR (no-color.org) or TERM forbids it."""
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except Exception:  # a script may have replaced sys.stderr by any object
        return False
