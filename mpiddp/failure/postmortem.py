"""The report on a rank whose process died without one."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence

from ..base.ranks import RankIdentity
from ..systems.statuses import signal_status
from .root_cause import ABORT_SIGNAL, OUT_OF_MEMORY, Report, ReportKind

FRAMES_HEADER = "(most recent call first):"  # the end of the line before a thread's frames
CRASHED_THREAD = "Current thread"
LAUNCH_FRAMES = (f'File "{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}', "<frozen runpy>")
LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)  # the last one: Flux
SIGKILL_SENDERS = "sent by the launcher, a user or the kernel"


def make_death_report(rank: RankIdentity, status: int | None, out_of_memory: bool, stack: str) -> Report:
    """Return the report on a rank whose process ended with a wait status (man 2 wait), None for an unknown one.

    `out_of_memory`: the kernel killed a process of its cgroup for lack of memory. `stack` is extract_crash_stack()'s.
    """
    cause, exit_status, signal_name = "ended for an unknown reason; see the launcher's output", 1, ""
    if status is not None and (number := status & 0x7F):
        cause, signal_name = describe_signal(number, out_of_memory), name_signal(number)
        exit_status = signal_status(number)
    elif status is not None:
        cause = f"the process exited with status {status >> 8} from native code before the script finished"
        exit_status = status >> 8 or 1
    return Report(rank.rank, rank.host, ReportKind.PROCESS_EXIT, cause, exit_status, find_crash_line(stack), stack,
                  signal_name)


def describe_early_death(status: int, out_of_memory: bool, is_signalled: bool) -> str:
    """Return how a process died that had not yet reached the other ranks.

    Empty if its launcher may have ended it: if it `is_signalled`, its agent has got a signal from outside.
    """
    if number := status & 0x7F:
        by_launcher = is_signalled and number in LAUNCHER_SIGNALS and not out_of_memory
        return "" if by_launcher else describe_signal(number, out_of_memory)
    return f"exited with status {status >> 8}"


def is_maybe_secondary(report: Report) -> bool:
    """Return whether a rank may have ended because of another one: it lost that, or its launcher ended it."""
    by_launcher = report.signal in map(name_signal, LAUNCHER_SIGNALS) and OUT_OF_MEMORY not in report.cause
    return is_secondary(report) or by_launcher


def is_secondary(report: Report) -> bool:
    """Return whether a rank has ended because it lost another one, or waited for it in vain."""
    return report.kind == ReportKind.SECONDARY or report.signal == ABORT_SIGNAL


def describe_signal(number: int, out_of_memory: bool) -> str:
    """Return the cause of death by a signal, with its possible senders."""
    if number == signal.SIGKILL:
        return f"killed by SIGKILL: {OUT_OF_MEMORY if out_of_memory else SIGKILL_SENDERS}"
    return f"killed by {name_signal(number)} ({signal.strsignal(number)})"


def extract_crash_stack(lines: Sequence[str]) -> str:
    """Return faulthandler's output, the thread that crashed first, each with its innermost frames first.

    Omitted are the frames that lead to the script, threads that have only such frames, and the list of extensions.
    """
    sections: list[list[str]] = [[]]
    for line in filter(None, lines):
        if line.startswith("Extension modules:"):
            break
        if line.endswith(FRAMES_HEADER):
            sections.append([])
        sections[-1].append(line)
    threads = [(section[0].startswith(CRASHED_THREAD), drop_launch_lines(section), section)
               for section in sections[1:]]
    crashed = [shown if len(shown) > 1 else section for has_crashed, shown, section in threads if has_crashed]
    others = [shown for has_crashed, shown, _ in threads if not has_crashed and len(shown) > 1]
    return "\n".join(itertools.chain(sections[0], *crashed, *others))


def drop_launch_lines(thread: Sequence[str]) -> list[str]:
    """Return a thread's lines without the outermost frames, by which Python and mpiddp call the script."""
    end = len(thread)
    while end and any(words in thread[end - 1] for words in LAUNCH_FRAMES):
        end -= 1
    return list(thread[:end])


def find_crash_line(stack: str) -> str:
    """Return the innermost line of the script, or else of a library, in the thread that crashed; empty for none."""
    from .stack import FRAME, FrameKind, classify_file  # loaded by now, unless the file system hangs

    thread = stack.partition(CRASHED_THREAD)[2].partition(FRAMES_HEADER)[2].partition(FRAMES_HEADER)[0]
    frames = [match for line in thread.split("\n") if (match := FRAME.fullmatch(line))]
    for kind in (FrameKind.SCRIPT, FrameKind.LIBRARY):
        for match in frames:
            if classify_file(match["file"]) is kind:
                return f"{match['file']}:{match['line']} {match['function']}"
    return ""


def name_signal(number: int) -> str:
    """Return a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
