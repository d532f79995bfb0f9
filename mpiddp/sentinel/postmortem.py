"""What is reported of a rank that is gone and did not report itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from ..plan.member import Member
from ..plan.verdict import CONSEQUENCE, ENDED, OUT_OF_MEMORY, Report

LAUNCHING = (f'File "{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}', "<frozen runpy>")
BY_LAUNCHERS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)  # the last one: Flux
BY_WHOM = "by its launcher, by hand or by the kernel"


def report_on(member: Member, status: int | None, out_of_memory: bool, stacks: Sequence[str]) -> Report:
    """Return the report on a rank whose process ended with a wait status (man 2 wait), None for an unknown one.

    `out_of_memory` tells that the kernel ended a process of its cgroup for lack of memory. `stacks` are the lines
    that faulthandler printed.
    """
    text = without_launch(stacks)
    if status is None:
        return Report(member.rank, member.host, ENDED, "ended; its launcher may know how", 1, text=text)
    if number := status & 0x7F:
        return Report(member.rank, member.host, ENDED, killed(number, out_of_memory), 128 + number, text=text,
                      signal=signal_name(number))
    cause = f"the process left with status {status >> 8}, past Python and past its script's end"
    return Report(member.rank, member.host, ENDED, cause, status >> 8 or 1, text=text)


def early_death(status: int | None, out_of_memory: bool) -> str:
    """Return how a process died that had not yet met the other ranks; empty if its launcher may have ended it."""
    if status is None:
        return ""
    if number := status & 0x7F:
        return "" if number in BY_LAUNCHERS and not out_of_memory else killed(number, out_of_memory)
    return f"left with status {status >> 8}"


def may_follow_from_another(report: Report) -> bool:
    """Tell whether a rank may have ended because another one did: it has lost that, or its launcher has ended it."""
    by_launcher = report.signal in map(signal_name, BY_LAUNCHERS) and OUT_OF_MEMORY not in report.cause
    return report.kind == CONSEQUENCE or by_launcher


def killed(number: int, out_of_memory: bool) -> str:
    """Return in words that a signal killed a process, and who may have sent it."""
    cause = f"ended by {signal_name(number)} ({signal.strsignal(number)})"
    if number == signal.SIGKILL:
        cause += f": {OUT_OF_MEMORY if out_of_memory else BY_WHOM}"
    return cause


def without_launch(stacks: Sequence[str]) -> str:
    """Return what faulthandler printed, without the frames that lead to the script and the list of extensions."""
    lines = [line for line in stacks if line and not line.startswith("Extension modules:")]
    script = [line for line in lines if '  File "' in line and not any(words in line for words in LAUNCHING)]
    while script and lines[-1] != script[-1]:
        lines.pop()
    return "\n".join(lines)


def signal_name(number: int) -> str:
    """Return a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
