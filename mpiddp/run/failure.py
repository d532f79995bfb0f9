"""What a script has raised: its status, its place and its traceback, without our own frames."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType, TracebackType

from ..plan.verdict import CONSEQUENCE, ENDED, OWN, Report, is_consequence

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def status_of(error: BaseException) -> int:
    """Return the exit status that Python gives a script that raised this."""
    if isinstance(error, SystemExit):
        return (error.code or 0) & 0xFF if error.code is None or isinstance(error.code, int) else 1
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def describe(error: BaseException, rank: int, host: str) -> Report:
    """Return the report on a script that raised."""
    status, where = status_of(error), line_of(error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        return Report(rank, host, ENDED, "KeyboardInterrupt (SIGINT)", status, where, signal="SIGINT")
    if isinstance(error, SystemExit):
        return Report(rank, host, OWN, f"sys.exit({words_of(error.code, repr)})", status, where)
    cause = f"{type(error).__name__}: {words_of(error)}".rstrip(": \n")
    return Report(rank, host, CONSEQUENCE if is_consequence(cause) else OWN, cause.split("\n")[0], status, where)


def words_of(value: object, form: Callable[[object], str] = str) -> str:
    """Return what `form` makes of a value; if that raises, what Python's tracebacks say then."""
    try:
        return form(value)
    except BaseException:  # whatever a script's own __str__ or __repr__ raises
        return f"<{type(value).__name__} {form.__name__}() failed>"


def line_of(traceback: TracebackType | None) -> str:
    """Return the innermost line of the script in a traceback; the innermost of all if the script has none."""
    script, found = getattr(sys.modules.get("__main__"), "__file__", None), ""
    while traceback is not None:
        in_script = traceback.tb_frame.f_code.co_filename == script
        if in_script or not found.startswith(f"{script}, "):
            found = line_at(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def line_at(frame: FrameType, line: int | None = None) -> str:
    """Return file, line and function of a frame, in words; `line` is the current one if None."""
    return f"{frame.f_code.co_filename}, line {line or frame.f_lineno}, in {frame.f_code.co_name}"


def show(error: BaseException) -> None:
    """Print what a script raised, as Python would, but without our own frames."""
    strip(error)
    try:
        if isinstance(error, SystemExit):
            print(callstack(error), end="", file=sys.stderr, flush=True)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as other:  # by the script's own hook or its own stderr; Python shows both errors then
        sys.__excepthook__(type(other), other, other.__traceback__)
        sys.__excepthook__(type(error), error, error.__traceback__)


def strip(error: BaseException | None) -> None:
    """Remove our own frames from the traceback of an error, and from those of its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = without_our_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame in the script on."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(ours):
        traceback = traceback.tb_next
    return traceback


def callstack(error: BaseException) -> str:
    """Return what show() prints, as text."""
    import traceback

    if isinstance(error, SystemExit):
        return "" if isinstance(error.code, int) else f"{words_of(error.code)}\n"

    strip(error)
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:  # an error that is odd itself
        return f"{type(error).__name__}: {words_of(error)}\n"
