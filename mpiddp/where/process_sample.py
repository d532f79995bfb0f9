"""What the kernel tells of a process at a glance: its state, what it has used, who descends from it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from typing import NamedTuple

STATE, MINOR, MAJOR, USER, CHILDREN_SYSTEM, STARTED = 0, 7, 9, 11, 14, 19  # of /proc/PID/stat after the name (man 5)
MANY = 1000  # descendants
ANSWERING_S = 0.1  # for which a main thread runs; an interpreter that is asked answers sooner
COUNTED = ("rchar", "wchar", "read_bytes", "write_bytes")  # the last two also within a call, on some file systems
READ_AHEAD = 128 * 1024  # bytes, by default, that a major page fault reads, and for which a read() waits at a time
RECEIVING = ("unix_stream_", "skb_wait_")  # in functions that wait for a Unix or UDP socket, whose bytes nobody counts
PACKET = 1000  # bytes that wake a process which waits for such a socket, at least
ASKED_TURNS = 4  # of a main thread, between two looks, for the signal by which it is asked for its stack


class Glance(NamedTuple):
    """A process as the kernel sees it.

    `state` is a letter (man 5 proc), `kernel` the function of the kernel that its main thread sleeps in, empty if that
    is not told. `main_s` is for how many seconds its main thread has run, or has waited for a processor; it has `ran_s`
    of these, in so many `turns`. `busy_s` is the processor time of all its threads, and of its children that have
    ended. So are `moved_bytes`, what was read and written, also for major page faults, but without recv() and send(),
    and `faults`, the minor page faults. `unseen` says what of it the kernel does not show, empty for nothing.
    """

    state: str
    kernel: str
    main_s: float
    ran_s: float
    turns: int
    busy_s: float
    moved_bytes: int
    faults: int = 0
    unseen: str = ""

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

    def fed_bytes(self, before: Glance) -> int:
        """Return how much has come since `before` for a main thread that waited at both times, at least.

        A long read() counts when it is over. Meanwhile the process sleeps in the kernel, and wakes for each part.
        """
        turns = self.turns - before.turns
        if self.state == before.state == "D":
            return turns * READ_AHEAD
        receives = all(any(part in one.kernel for part in RECEIVING) for one in (self, before))
        return max(0, turns - ASKED_TURNS) * PACKET if receives else 0


def glance(pid: int) -> Glance | None:
    """Look at a process; None if there is none."""
    try:
        fields = stat_of(pid)
    except OSError:
        return None
    kernel, ran_ns, waited_ns, turns, moved, unseen = "", 0, 0, 0, 0, ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        kernel = file.read()
    try:
        with open(f"/proc/{pid}/io") as file:
            moved = sum(int(value) for name, value in (line.split(":") for line in file) if name in COUNTED)
    except OSError as error:
        if fields[STATE] not in "ZX" and os.path.exists(f"/proc/{pid}"):
            unseen = f"/proc/{pid}/io cannot be read ({error.strerror})"
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/schedstat") as file:  # last, sched-stats.rst
        ran_ns, waited_ns, turns = map(int, file.read().split())
    busy = sum(map(int, fields[USER:CHILDREN_SYSTEM + 1])) / os.sysconf("SC_CLK_TCK")
    main_s = (ran_ns + waited_ns) / 1e9 or busy
    minor, major = (int(fields[at]) + int(fields[at + 1]) for at in (MINOR, MAJOR))  # with those of ended children
    return Glance(fields[STATE], kernel if kernel != "0" else "", main_s, ran_ns / 1e9, turns, busy,
                  moved + major * READ_AHEAD, minor, unseen)


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


def unseen_among(family: Iterable[int]) -> str:
    """Return what cannot be seen of the processes that descend from one, or of whether there are any."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return "its children cannot be seen (the kernel lacks CONFIG_PROC_CHILDREN)"
    for pid in family:
        if not os.path.exists(f"/proc/{pid}"):
            try:
                os.kill(pid, 0)
            except PermissionError:  # it is another user's
                return f"its child {pid} is hidden by the mount of /proc"
            except ProcessLookupError:  # it has ended
                continue
    return ""


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
