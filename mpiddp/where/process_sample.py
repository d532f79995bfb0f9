"""What the kernel shows of processes: state, resource usage, descendants, signals."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from typing import NamedTuple

from ..base.files import read_stat

STATE, MINOR, MAJOR, USER, CHILDREN_SYSTEM, STARTED = 0, 7, 9, 11, 14, 19  # of /proc/PID/stat after the name (man 5)
MAX_DESCENDANTS = 1000
HANDLER_RUN_S = 0.1  # a main thread that has run for longer has called a pending signal handler
IO_COUNTERS = ("rchar", "wchar", "read_bytes", "write_bytes")  # some file systems update the last two during a call
READ_AHEAD = 128 * 1024  # default number of bytes read for a major page fault, and per wait within a read()
# In wait functions of sockets (Unix, UDP, TCP twice), for whose bytes the kernel has no counter in /proc.
SOCKET_WAITS = ("unix_stream_", "skb_wait_", "wait_woken", "sk_wait_data")
PACKET = 1000  # least bytes assumed for each wake-up of a process that waits for such a socket
SIGNAL_TURNS = 4  # of a main thread between two samples, spent on ASK_SIGNAL


class ProcSample(NamedTuple):
    """A process as /proc shows it; `busy_s`, `moved_bytes`, `faults` include all threads and ended children."""

    state: str  # a letter (man 5 proc)
    wchan: str  # the kernel function in which its main thread sleeps; empty if not shown
    main_s: float  # time that its main thread has run or waited for a core
    ran_s: float  # time that its main thread has run
    turns: int  # how often the scheduler has run its main thread
    busy_s: float  # CPU time
    moved_bytes: int  # read and written, also for major page faults, but without recv() and send()
    faults: int = 0  # minor page faults
    unseen: str = ""  # why the kernel does not show some of this; empty if it shows all

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger."""
        return self.state in "Tt"

    @property
    def is_held(self) -> bool:
        """Whether it is stopped, or in an uninterruptible call of the kernel."""
        return self.state in "TtD"

    def has_slept(self, before: ProcSample) -> bool:
        """Return whether the main thread has slept since `before`; False if the kernel does not count turns."""
        return self.state == before.state == "S" and 0 < self.turns == before.turns

    def could_answer(self, before: ProcSample) -> bool:
        """Return whether the main thread has run long enough since `before` for its interpreter to answer."""
        return self.ran_s - before.ran_s > HANDLER_RUN_S

    def fed_bytes(self, before: ProcSample) -> int:
        """Return the least number of bytes received since `before` by a main thread that waited at both times.

        /proc/PID/io counts a long read() when it returns. Until then the process sleeps, and wakes up for each part.
        """
        turns = self.turns - before.turns
        if self.state == before.state == "D":
            return turns * READ_AHEAD
        is_receiving = all(any(part in sample.wchan for part in SOCKET_WAITS) for sample in (self, before))
        return max(0, turns - SIGNAL_TURNS) * PACKET if is_receiving else 0


def sample_process(pid: int) -> ProcSample | None:
    """Return a sample of a process; None if it does not exist."""
    try:
        _, fields = read_stat(pid)
    except OSError:
        return None
    wchan, ran_ns, waited_ns, turns, moved_bytes, unseen = "", 0, 0, 0, 0, ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        wchan = file.read()
    try:
        with open(f"/proc/{pid}/io") as file:
            moved_bytes = sum(int(value) for name, value in (line.split(":") for line in file) if name in IO_COUNTERS)
    except OSError as error:
        if fields[STATE] not in "ZX" and os.path.exists(f"/proc/{pid}"):
            unseen = f"/proc/{pid}/io cannot be read ({error.strerror})"
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/schedstat") as file:  # last (sched-stats.rst)
        ran_ns, waited_ns, turns = map(int, file.read().split())
    busy_s = sum(map(int, fields[USER:CHILDREN_SYSTEM + 1])) / os.sysconf("SC_CLK_TCK")
    main_s = (ran_ns + waited_ns) / 1e9 or busy_s
    minor, major = (int(fields[field]) + int(fields[field + 1]) for field in (MINOR, MAJOR))  # and of ended children
    return ProcSample(fields[STATE], wchan if wchan != "0" else "", main_s, ran_ns / 1e9, turns, busy_s,
                      moved_bytes + major * READ_AHEAD, minor, unseen)


def other_program_name(pid: int, reference: int) -> str:
    """Return the name of a process's program; empty if process `reference` runs the same, or if it is unknown."""
    try:
        if os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{reference}/exe"):
            return ""
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().removesuffix(b"\n").decode(errors="replace")
    except OSError:
        return ""


def list_descendants(pid: int) -> list[int]:
    """Return the descendants of all threads of a process; none if the kernel does not show them."""
    descendants: list[int] = []
    queue = [pid]
    while queue and len(descendants) < MAX_DESCENDANTS:
        with contextlib.suppress(OSError):
            parent = queue.pop(0)
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{thread}/children") as file:
                    queue += (children := list(map(int, file.read().split())))
                    descendants += children
    return descendants


def explain_unseen(descendants: Iterable[int]) -> str:
    """Return why some descendants of a process are not visible; empty if all are."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return "its child processes are not visible (the kernel lacks CONFIG_PROC_CHILDREN)"
    for pid in descendants:
        if not os.path.exists(f"/proc/{pid}"):
            try:
                os.kill(pid, 0)
            except PermissionError:  # another user's process
                return f"its child process {pid} is not visible (hidden by the mount options of /proc)"
            except ProcessLookupError:  # it has ended
                continue
    return ""


def can_handle_signal(pid: int, number: int, descriptor: int, pipe: int, min_age_s: float) -> bool:
    """Return whether a process handles a signal by writing to `pipe` through its `descriptor`.

    The signal would kill any other process. So False for a process younger than `min_age_s`, which may be about to
    execute another program, and for a stopped one or one in state D, where the signal would stay pending.
    """
    try:
        _, fields = read_stat(pid)
        has_pipe = os.stat(f"/proc/{pid}/fd/{descriptor}").st_ino == os.fstat(pipe).st_ino
        with open(f"/proc/{pid}/status", "rb") as file:  # a process name may be invalid UTF-8
            masks = {name: int(value, 16) for name, _, value in (line.partition(b":") for line in file)
                     if name in (b"SigPnd", b"ShdPnd", b"SigBlk", b"SigCgt")}
    except OSError:
        return False
    bit = 1 << number - 1
    started_s = int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
    is_old = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s > min_age_s
    return (has_pipe and is_old and fields[STATE] not in "TtDZX" and bool(masks[b"SigCgt"] & bit)
            and not (masks[b"SigPnd"] | masks[b"ShdPnd"] | masks[b"SigBlk"]) & bit)
