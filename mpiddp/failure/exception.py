"""An exception that a script raised: its exit status, its report and its traceback, without our own frames."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..base.stderr import write_line
from ..base.termination import HardExit, exit_status
from ..base.text import format_safely
from ..discovery.script import OURS
from ..systems.statuses import EXIT_INTERRUPTED
from .root_cause import Report, ReportKind

if TYPE_CHECKING:
    from .traceback import Origin

Result = TypeVar("Result")


class Explanation(NamedTuple):
    """An error's line, the kind of the report, the signal that it stands for, where it was raised if elsewhere."""

    cause: str
    kind: ReportKind = ReportKind.ERROR
    signal: str = ""
    origin: Origin | None = None


def find_script_status(error: BaseException) -> int:
    """Return the exit status that Python gives a script that raised this."""
    if isinstance(error, SystemExit):
        return exit_status(error.code)
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def make_report(error: BaseException, rank: int, host: str) -> Report:
    """Return the report on a script that raised `error`; it never says 0, which is no failure's status."""
    plain = f"{type(error).__name__}: {format_safely(error)}".split("\n")[0]
    cause, kind, signal, origin = call_safely(lambda: explain(error), Explanation(plain))
    where = find_traceback_line(error.__traceback__)
    if origin is not None:
        where = origin.where or where
        details = ", ".join(filter(None, (origin.by, os.path.basename(origin.where))))
        cause = f"{origin.cause} ({details})" if details else origin.cause
    worker, has_lost_it = ("", False) if signal else call_safely(lambda: find_worker(error), ("", False))
    if worker:
        cause, kind = f"{worker} (then {cause})", ReportKind.ERROR if has_lost_it else kind
    return Report(rank, host, kind, cause, find_script_status(error) or 1, where, signal=signal)


def explain(error: BaseException) -> Explanation:
    """Return what an error says."""
    from .traceback import find_origin, format_error_line, is_from_peer_loss, is_interrupt  # not while the job starts

    kind = ReportKind.SECONDARY if is_from_peer_loss(error) else ReportKind.ERROR
    return Explanation(format_error_line(error), kind, "SIGINT" if is_interrupt(error) else "", find_origin(error))


def find_worker(error: BaseException) -> tuple[str, bool]:
    """Return which worker has ended abnormally, and whether the error says that the connection to it is lost."""
    from .workers import find_dead_worker, is_lost_connection

    errors = list_related(error)
    return find_dead_worker(errors), any(map(is_lost_connection, errors))


def call_safely(function: Callable[[], Result], default: Result) -> Result:
    """Return what a function returns, or the default if it raises.

    The error's own code may raise, and the import of a module that no descriptor is left to load.
    """
    with contextlib.suppress(BaseException):
        return function()
    return default


def make_exit_report(status: int, frame: FrameType, rank: int, host: str) -> Report:
    """Return the report on a script that called os._exit() in a frame."""
    error = HardExit(status)
    error.__context__ = sys.exc_info()[1]
    report = make_report(error, rank, host)
    return report._replace(where=report.where or find_line_above(frame))


def find_traceback_line(traceback: TracebackType | None) -> str:
    """Return the innermost line of the script in a traceback; the innermost of all if there is none."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return find_script_line(frames)


def find_line_above(frame: FrameType | None) -> str:
    """Return the innermost line of the script among the callers of a frame; the innermost of all if there is none."""
    frames: list[tuple[FrameType, int]] = []
    while frame is not None:
        frames.insert(0, (frame, frame.f_lineno))
        frame = frame.f_back
    return find_script_line(frames)


def find_script_line(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Return file, line and function of the innermost frame of the script, as reports have them.

    The script is the file of `__main__`. If that is a library that runs another file, such as coverage, all that is
    outside of libraries is the script.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    own = frames
    with contextlib.suppress(Exception):  # as above
        from .traceback import is_library

        own = [frame for frame in frames if not is_library(frame[0].f_code.co_filename)] or frames
    script = [frame for frame in own if frame[0].f_code.co_filename == main]
    for frame, line in (script or own)[-1:]:
        return f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
    return ""


def print_exception(error: BaseException, full: bool = True) -> None:
    """Print a script's exception as Python would, but without our own frames; unless `full`, libraries' are folded."""
    strip_our_frames(error)
    try:
        if isinstance(error, SystemExit):
            print_whole(format_exception(error))
            return
        set_last_error(error)
        from .traceback import capture_hook_output, fold_traceback, is_colour_wanted, is_default_hook

        if not is_default_hook(sys.excepthook):
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            text = capture_hook_output(error)
            print_whole(text if full else fold_traceback(text, is_colour_wanted(sys.stderr, os.environ)))
    except SystemExit:  # from the script's own hook: Python prints no more then
        return
    except BaseException as other:  # from the script's own hook or stderr; Python prints both errors then
        write_line(f"Error in sys.excepthook:\n{format_exception(other)}\n"
                   f"Original exception was:\n{format_exception(error)}")


def run_user_hook(error: BaseException) -> None:
    """Call the script's own sys.excepthook, if it has one, on a rank whose error is not printed, as Python would.

    Its output on sys.stderr is printed unless that is a traceback: there may be one from each rank.
    """
    from .traceback import TRACEBACK_HEADER, capture_hook_output, is_default_hook

    if isinstance(error, SystemExit):
        return
    strip_our_frames(error)
    set_last_error(error)
    if not is_default_hook(sys.excepthook):
        text = capture_hook_output(error)
        print_whole(text if TRACEBACK_HEADER not in text else "")


def set_last_error(error: BaseException) -> None:
    """Set what Python sets for debuggers before it calls sys.excepthook (Python manual, sys.last_value)."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def print_whole(text: str) -> None:
    """Print on sys.stderr, which may be an object of the script's, by one write; nothing if it is None."""
    if sys.stderr is not None and text:
        sys.stderr.flush()
        sys.stderr.write(text)
        sys.stderr.flush()


def release_frames(error: BaseException) -> None:
    """Release the local variables in the frames of an error, of its causes and of its contexts."""
    for related in list_related(error):
        traceback, related.__traceback__ = related.__traceback__, None
        while traceback is not None:
            with contextlib.suppress(RuntimeError):  # this frame still runs
                traceback.tb_frame.clear()
            traceback = traceback.tb_next


def strip_our_frames(error: BaseException) -> None:
    """Remove our own frames from the traceback of an error, and from those of its causes and contexts."""
    for related in list_related(error):
        related.__traceback__ = skip_our_frames(related.__traceback__)


def list_related(error: BaseException) -> list[BaseException]:
    """Return an error with its causes and contexts, and those in a group."""
    related: dict[int, BaseException] = {}
    rest: list[object] = [error]
    while rest:
        if isinstance(item := rest.pop(), BaseException) and id(item) not in related:
            related[id(item)] = item
            with contextlib.suppress(Exception):  # of an error's own properties
                within = getattr(item, "exceptions", ())  # anything if the error is no group
                rest += [item.__cause__, item.__context__, *(within if isinstance(within, tuple) else ())]
    return list(related.values())


def skip_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame in the script on."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(OURS):
        traceback = traceback.tb_next
    return traceback


def format_exception(error: BaseException) -> str:
    """Return the text that print_exception() prints."""
    import traceback

    if isinstance(error, SystemExit):
        return "" if isinstance(error.code, int) else f"{format_safely(error.code)}\n"

    strip_our_frames(error)
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:  # from the error's own methods
        return f"{type(error).__name__}: {format_safely(error)}\n"
