"""What a script has raised: its status, its place and its traceback, without our own frames."""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType, TracebackType

from ..exits import exit_status
from ..plan.verdict import CONSEQUENCE, ENDED, OWN, Report, is_consequence
from ..plan.words import words_of
from ..say import say

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def status_of(error: BaseException) -> int:
    """Return the exit status that Python gives a script that raised this."""
    if isinstance(error, SystemExit):
        return exit_status(error.code)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def describe(error: BaseException, rank: int, host: str) -> Report:
    """Return the report on a script that raised."""
    status, where = status_of(error), line_of(error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        return Report(rank, host, ENDED, "KeyboardInterrupt (SIGINT)", status, where, signal="SIGINT")
    if isinstance(error, SystemExit):
        return Report(rank, host, OWN, f"sys.exit({words_of(error.code, repr)})", status, where)
    first = None
    with contextlib.suppress(Exception):  # a script that has opened too many files cannot load a module
        from .origin import origin  # not while the job starts

        first = origin(error)
    cause = f"{type(error).__name__}: {words_of(error)}".rstrip(": \n")
    kind, cause = CONSEQUENCE if is_consequence(cause) else OWN, cause.split("\n")[0]
    if first is not None:
        where = first.where or where
        told = ", ".join(filter(None, (first.by, in_short(first.where))))
        cause = f"{first.cause} ({told})" if told else first.cause
        kind = CONSEQUENCE if is_consequence(first.cause) else kind
    return Report(rank, host, kind, cause, status, where)


def in_short(where: str) -> str:
    """Return a line of code as in deep.py:6 in load, empty for none."""
    file, _, rest = where.rpartition(", line ")
    return f"{os.path.basename(file)}:{rest.replace(', in ', ' in ', 1)}" if file else ""


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


def show(error: BaseException, full: bool = True) -> None:
    """Print what a script raised, as Python would, but without our own frames; unless `full`, libraries' are folded."""
    strip(error)
    try:
        if isinstance(error, SystemExit):
            print_whole(callstack(error))
            return
        from .excerpt import excerpt, is_plain, printed, wants_colour

        if not is_plain(sys.excepthook):
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            text = printed(error)
            print_whole(text if full else excerpt(text, wants_colour(sys.stderr, os.environ)))
    except BaseException as other:  # by the script's own hook or its own stderr; Python shows both errors then
        say(callstack(other) + callstack(error))


def run_own_hook(error: BaseException) -> None:
    """Call the script's own sys.excepthook, if it has one, on a rank whose error is not shown, as Python would.

    What it prints on sys.stderr is shown unless that is a traceback: there may be one from each rank.
    """
    from .excerpt import is_plain, printed
    from .origin import HEAD

    if not isinstance(error, SystemExit) and not is_plain(sys.excepthook):
        strip(error)
        text = printed(error)
        print_whole(text if HEAD not in text else "")


def print_whole(text: str) -> None:
    """Print on Python's stderr, which may be an object of the script's, by one write; nothing if there is none."""
    if sys.stderr is not None and text:
        sys.stderr.flush()
        sys.stderr.write(text)
        sys.stderr.flush()


def forget(error: BaseException) -> None:
    """Let go of what the frames of an error hold, and of those of its causes and contexts."""
    for one in chain(error):
        traceback, one.__traceback__ = one.__traceback__, None
        while traceback is not None:
            with contextlib.suppress(RuntimeError):  # this frame still runs
                traceback.tb_frame.clear()
            traceback = traceback.tb_next


def strip(error: BaseException) -> None:
    """Remove our own frames from the traceback of an error, and from those of its causes and contexts."""
    for one in chain(error):
        one.__traceback__ = without_our_frames(one.__traceback__)


def chain(error: BaseException) -> list[BaseException]:
    """Return an error with its causes and contexts, and those in a group."""
    found: dict[int, BaseException] = {}
    rest: list[BaseException | None] = [error]
    while rest:
        if (one := rest.pop()) is not None and id(one) not in found:
            found[id(one)] = one
            rest += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return list(found.values())


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
