"""What the kernel tells of a process at a glance: its state, what it has used, who descends from it."""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

STATE, USER, CHILDREN_SYSTEM, STARTED = 0, 11, 14, 19  # fields of /proc/PID/stat after the name (man 5 proc)
MANY = 1000  # descendants
ANSWERING_S = 0.1  # for which a main thread runs; an interpreter that is asked answers sooner


class Glance(NamedTuple):
    """A process as the kernel sees it.

    `state` is a letter (man 5 proc), `kernel` the function of the kernel that its main thread sleeps in, empty if that
    is not told. `main_s` is for how many seconds its main thread has run, or has waited for a processor; it has `ran_s`
    of these, in so many `turns`. `busy_s` is the processor time of all its threads, and of its children that have
    ended; `moved_bytes` is what it has read and written.
    """

    state: str
    kernel: str
    main_s: float
    ran_s: float
    turns: int
    busy_s: float
    moved_bytes: int

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger."""
        return self.state in "Tt"

    @property
    def is_held(self) -> bool:
        """Whether the process is stopped, or the kernel does not let it go."""
        return self.state in "TtD"

    def has_slept(self, before: Glance) -> bool:
        """Tell whether the main thread has slept since `before`; it has not where the kernel does not count turns."""
        return self.state == before.state == "S" and 0 < self.turns == before.turns

    def could_answer(self, before: Glance) -> bool:
        """Tell whether the main thread has run long enough since `before` for its interpreter to answer."""
        return self.ran_s - before.ran_s > ANSWERING_S


def glance(pid: int) -> Glance | None:
    """Look at a process; None if there is none."""
    try:
        fields = stat_of(pid)
    except OSError:
        return None
    kernel, ran_ns, waited_ns, turns, moved = "", 0, 0, 0, 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        kernel = file.read()
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io") as file:
        moved = sum(int(file.readline().split()[1]) for _ in ("rchar", "wchar"))
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/schedstat") as file:  # last, sched-stats.rst
        ran_ns, waited_ns, turns = map(int, file.read().split())
    busy = sum(map(int, fields[USER:CHILDREN_SYSTEM + 1])) / os.sysconf("SC_CLK_TCK")
    main_s = (ran_ns + waited_ns) / 1e9 or busy
    return Glance(fields[STATE], kernel if kernel != "0" else "", main_s, ran_ns / 1e9, turns, busy, moved)


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; raise OSError where there is no such process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def other_program(pid: int, than: int) -> str:
    """Return the name of the program that a process runs, empty if it is the one of process `than`, or not known."""
    try:
        if os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{than}/exe"):
            return ""
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().removesuffix(b"\n").decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Return the processes that descend from one, those of its main thread and of others; none if that is not known."""
    found: list[int] = []
    queue = [pid]
    while queue and len(found) < MANY:
        with contextlib.suppress(OSError):
            one = queue.pop(0)
            for thread in os.listdir(f"/proc/{one}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{one}/task/{thread}/children") as file:
                    queue += (children := list(map(int, file.read().split())))
                    found += children
    return found


def can_be_sent(pid: int, number: int, descriptor: int, pipe: int, age_s: float) -> bool:
    """Tell whether a process would handle a signal by printing with its `descriptor` into `pipe`.

    The signal would end any other process. A process younger than `age_s` may be about to become another program, and
    in one that the kernel holds the signal would wait, and find another program.
    """
    try:
        fields = stat_of(pid)
        same = os.stat(f"/proc/{pid}/fd/{descriptor}").st_ino == os.fstat(pipe).st_ino
        with open(f"/proc/{pid}/status", "rb") as file:  # a name may be no text
            masks = {name: int(value, 16) for name, _, value in (line.partition(b":") for line in file)
                     if name in (b"SigPnd", b"ShdPnd", b"SigBlk", b"SigCgt")}
    except OSError:
        return False
    bit = 1 << number - 1
    started_s = int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
    is_old = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s > age_s
    return (same and is_old and fields[STATE] not in "TtDZX" and bool(masks[b"SigCgt"] & bit)
            and not (masks[b"SigPnd"] | masks[b"ShdPnd"] | masks[b"SigBlk"]) & bit)
