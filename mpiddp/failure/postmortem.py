"""What is reported of a rank that is gone and did not report itself."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence

from .rank import RankIdentity
from .root_cause import CONSEQUENCE, ENDED, OUT_OF_MEMORY, Report

FRAMES_HEADER = "(most recent call first):"  # the end of the line before a thread's frames
CRASHED_THREAD = "Current thread"
LAUNCH_FRAMES = (f'File "{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}', "<frozen runpy>")
LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)  # the last one: Flux
SIGKILL_SENDERS = "by its launcher, by hand or by the kernel"


def report_dead_process(member: RankIdentity, status: int | None, out_of_memory: bool, stack: str) -> Report:
    """Return the report on a rank whose process ended with a wait status (man 2 wait), None for an unknown one.

    `out_of_memory` tells that the kernel ended a process of its cgroup for lack of memory. `stack` is crash_stack()'s.
    """
    where = find_crash_line(stack)
    if status is None:
        return Report(member.rank, member.host, ENDED, "ended; its launcher may know how", 1, where, stack)
    if number := status & 0x7F:
        return Report(member.rank, member.host, ENDED, describe_signal(number, out_of_memory), 128 + number, where,
                      stack,
                      name_signal(number))
    cause = f"the process left with status {status >> 8}, past Python and past its script's end"
    return Report(member.rank, member.host, ENDED, cause, status >> 8 or 1, where, stack)


def describe_early_death(status: int | None, out_of_memory: bool) -> str:
    """Return how a process died that had not yet met the other ranks; empty if its launcher may have ended it."""
    if status is None:
        return ""
    if number := status & 0x7F:
        return "" if number in LAUNCHER_SIGNALS and not out_of_memory else describe_signal(number, out_of_memory)
    return f"left with status {status >> 8}"


def is_maybe_secondary(report: Report) -> bool:
    """Tell whether a rank may have ended because another one did: it has lost that, or its launcher has ended it."""
    by_launcher = report.signal in map(name_signal, LAUNCHER_SIGNALS) and OUT_OF_MEMORY not in report.cause
    return report.kind == CONSEQUENCE or by_launcher


def describe_signal(number: int, out_of_memory: bool) -> str:
    """Return in words that a signal killed a process, and who may have sent it."""
    cause = f"ended by {name_signal(number)} ({signal.strsignal(number)})"
    if number == signal.SIGKILL:
        cause += f": {OUT_OF_MEMORY if out_of_memory else SIGKILL_SENDERS}"
    return cause


def extract_crash_stack(lines: Sequence[str]) -> str:
    """Return what faulthandler printed in these lines, the thread that crashed before others, innermost frames first.

    Frames that lead to the script are left out, and so are threads without other ones, and the list of extensions.
    """
    begun: list[list[str]] = [[]]
    for line in filter(None, lines):
        if line.startswith("Extension modules:"):
            break
        if line.endswith(FRAMES_HEADER):
            begun.append([])
        begun[-1].append(line)
    threads = [(lines[0].startswith(CRASHED_THREAD), drop_launch_lines(lines), lines) for lines in begun[1:]]
    first = [shown if len(shown) > 1 else lines for crashed, shown, lines in threads if crashed]
    others = [shown for crashed, shown, _ in threads if not crashed and len(shown) > 1]
    return "\n".join(itertools.chain(begun[0], *first, *others))


def drop_launch_lines(thread: Sequence[str]) -> list[str]:
    """Return a thread's lines without the outermost frames, by which Python and mpiddp come to the script."""
    end = len(thread)
    while end and any(words in thread[end - 1] for words in LAUNCH_FRAMES):
        end -= 1
    return list(thread[:end])


def find_crash_line(stack: str) -> str:
    """Return the innermost line of the script, or else of a library, in the thread that crashed; empty for none."""
    from .stack import FRAME, FrameKind, classify_file  # which is loaded by now, where the file system answers

    thread = stack.partition(CRASHED_THREAD)[2].partition(FRAMES_HEADER)[2].partition(FRAMES_HEADER)[0]
    frames = [found for line in thread.split("\n") if (found := FRAME.fullmatch(line))]
    for kind in (FrameKind.SCRIPT, FrameKind.LIBRARY):
        for one in frames:
            if classify_file(one["file"]) is kind:
                return f"{one['file']}, line {one['line']}, in {one['function']}"
    return ""


def name_signal(number: int) -> str:
    """Return a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
