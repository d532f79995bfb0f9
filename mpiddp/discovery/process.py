"""What the kernel tells of another process: whether it is stopped, how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import time

from ..base.files import read_text

REAPING_S = 1.0  # for a launcher to take the status of a process that has ended
EXITING = 0x4  # PF_EXITING (linux/sched.h)
STATE, FLAGS, EXIT_CODE = 0, 6, 49  # the fields of /proc/PID/stat after the name (man 5 proc)
# struct pidfd_info and its request (linux/pidfd.h, since Linux 6.15): it has the status after the parent took it, too.
PIDFD_INFO_EXIT, PIDFD_INFO_BYTES, PIDFD_EXIT_CODE_AT = 1 << 3, 64, 60
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11


class Process:
    """Another process of this user.

    `ended` is a descriptor that becomes readable when the process has ended (man 2 pidfd_open), -1 if the
    kernel cannot make one (before Linux 5.3). Where /proc does not show the process, only that is known.
    """

    def __init__(self, pid: int) -> None:
        """Look at a process; raise ProcessLookupError if there is none."""
        with contextlib.suppress(PermissionError):
            os.kill(pid, 0)
        self.pid = pid
        try:
            self.ended = os.pidfd_open(pid)
        except (OSError, AttributeError):  # a Python may have been built without it
            self.ended = -1
        try:
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        except OSError:
            self._stat = -1
            with contextlib.suppress(PermissionError):
                os.kill(pid, 0)  # it may have gone meanwhile
        self._cgroup = memory_events(pid)
        self._oom_kills = oom_kills(self._cgroup)

    def wait_status(self) -> int | None:
        """Return the process's wait status (man 2 wait), None while the process lives.

        A process that has begun to exit has a status already. Raises ProcessLookupError if the parent
        has taken the status and the kernel has forgotten it (before Linux 6.15).
        """
        if self._stat < 0:
            return self._status_without_proc()
        try:
            fields = self._fields()
        except ProcessLookupError:
            return exit_code(self.ended)
        leaves = int(fields[FLAGS]) & EXITING or fields[STATE] in "ZX"
        return int(fields[EXIT_CODE]) if leaves else None

    def is_stopped(self) -> bool:
        """Tell whether a signal or a debugger holds the process."""
        try:
            return self._fields()[STATE] in "Tt"
        except OSError:
            return False

    def handles(self, number: int) -> bool:
        """Tell whether the process has a handler for a signal; no if that is not known."""
        try:
            with open(f"/proc/{self.pid}/status", "rb") as file:  # a name may be no text
                caught = next((line.split()[1] for line in file if line.startswith(b"SigCgt:")), b"0")
        except OSError:
            return False
        return bool(int(caught, 16) >> (number - 1) & 1)

    def was_out_of_memory(self) -> bool:
        """Tell whether the kernel has ended a process of its cgroup for lack of memory since this object was made."""
        return oom_kills(self._cgroup) > self._oom_kills

    def _status_without_proc(self) -> int | None:
        """Return what wait_status() does, from the kernel's word that the process has ended."""
        if self.ended < 0:
            os.kill(self.pid, 0)
            return None
        over, _, _ = select.select([self.ended], [], [], 0)
        if not over:
            return None
        deadline = time.monotonic() + REAPING_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                return exit_code(self.ended)
            time.sleep(0.01)  # until its parent has taken the status, the kernel does not tell it
        raise ProcessLookupError

    def _fields(self) -> list[str]:
        return os.pread(self._stat, 4096, 0).decode(errors="replace").rpartition(")")[2].split()


def exit_code(pidfd: int) -> int:
    """Return the wait status of a process whose parent has taken it; raise ProcessLookupError if it is forgotten."""
    info = bytearray(struct.pack("Q", PIDFD_INFO_EXIT) + bytes(PIDFD_INFO_BYTES - 8))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except (OSError, ValueError):
        raise ProcessLookupError from None
    if not struct.unpack_from("Q", info)[0] & PIDFD_INFO_EXIT:
        raise ProcessLookupError
    return int(struct.unpack_from("i", info, PIDFD_EXIT_CODE_AT)[0])


def boot() -> str:
    """Return what tells one running kernel from another (man 5 proc_sys_kernel), empty where it is hidden."""
    return read_text("/proc/sys/kernel/random/boot_id")


def cgroups(controller: str, pid: int | str = "self") -> list[str]:
    """Return the folders of a process's cgroup of a controller and of all above it, from the inside.

    In a container, those that are mounted there.
    """
    found: dict[str, None] = {}
    for line in filter(None, read_text(f"/proc/{pid}/cgroup").split("\n")):
        number, kinds, path = line.split(":", 2)
        if number == "0":
            roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        else:
            roots = [f"/sys/fs/cgroup/{controller}", f"/sys/fs/cgroup/{kinds}"] * (controller in kinds.split(","))
        parts = [part for part in path.split("/") if part]
        for folder in ("/".join([root, *parts[:depth]]) for root in roots for depth in range(len(parts), -1, -1)):
            if os.path.isdir(folder):
                found[os.path.realpath(folder)] = None  # cpu and cpuacct may be one, by two names
    return list(found)


def memory_events(pid: int) -> str:
    """Return the file that counts the memory events of a process's cgroup (cgroup-v2.rst), empty if there is none.

    A cgroup that does not count memory leaves that to the one above it.
    """
    counts = ("memory.events", "memory.oom_control")
    files = (f"{folder}/{name}" for folder in cgroups("memory", pid) for name in counts)
    return next(filter(os.path.exists, files), "")


def oom_kills(path: str) -> int:
    """Return how many processes of a cgroup were ended for lack of memory, 0 if that is not known."""
    if not path:
        return 0
    try:
        with open(path) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except OSError:
        return 0
