"""Another process as the kernel shows it: whether it is stopped, how it ended, its cgroup."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import time

from ..base.files import read_text

REAPING_TIMEOUT_S = 1.0  # for a launcher to take the status of a process that has ended
EXITING_FLAG = 0x4  # PF_EXITING (linux/sched.h)
STATE_FIELD, FLAGS_FIELD, EXIT_CODE_FIELD = 0, 6, 49  # the fields of /proc/PID/stat after the name (man 5 proc)
# struct pidfd_info and its request (linux/pidfd.h, since Linux 6.15): it keeps the status after the parent took it.
PIDFD_INFO_EXIT, PIDFD_INFO_BYTES, PIDFD_EXIT_CODE_AT = 1 << 3, 64, 60
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11


class WatchedProcess:
    """Another process of this user.

    `ended` is a descriptor that becomes readable when the process has ended (man 2 pidfd_open), -1 if the kernel cannot
    make one (before Linux 5.3). If /proc hides the process, nothing else is known of it.
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
                os.kill(pid, 0)  # it may have ended meanwhile
        self._cgroup = find_memory_events(pid)
        self._oom_kills = count_oom_kills(self._cgroup)

    def wait_status(self) -> int | None:
        """Return the process's wait status (man 2 wait), None while the process lives.

        A process that has begun to exit has a status already. Raises ProcessLookupError if the parent has taken the
        status and the kernel has forgotten it (before Linux 6.15).
        """
        if self._stat < 0:
            return self._status_without_proc()
        try:
            fields = self._fields()
        except ProcessLookupError:
            return read_wait_status(self.ended)
        is_exiting = int(fields[FLAGS_FIELD]) & EXITING_FLAG or fields[STATE_FIELD] in "ZX"
        return int(fields[EXIT_CODE_FIELD]) if is_exiting else None

    def is_stopped(self) -> bool:
        """Return whether a signal or a debugger holds the process."""
        try:
            return self._fields()[STATE_FIELD] in "Tt"
        except OSError:
            return False

    def has_handler(self, number: int) -> bool:
        """Return whether the process has a handler for a signal; False if that is not known."""
        try:
            with open(f"/proc/{self.pid}/status", "rb") as file:  # a name may be no text
                caught = next((line.split()[1] for line in file if line.startswith(b"SigCgt:")), b"0")
        except OSError:
            return False
        return bool(int(caught, 16) >> (number - 1) & 1)

    def was_out_of_memory(self) -> bool:
        """Return whether the kernel killed a process of its cgroup for lack of memory since this object was made."""
        return count_oom_kills(self._cgroup) > self._oom_kills

    def _status_without_proc(self) -> int | None:
        """Return what wait_status() does without /proc, from the pidfd alone."""
        if self.ended < 0:
            os.kill(self.pid, 0)
            return None
        if not select.select([self.ended], [], [], 0)[0]:
            return None
        deadline = time.monotonic() + REAPING_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                return read_wait_status(self.ended)
            time.sleep(0.01)  # the pidfd has the status once the parent has taken it
        raise ProcessLookupError

    def _fields(self) -> list[str]:
        return os.pread(self._stat, 4096, 0).decode(errors="replace").rpartition(")")[2].split()


def read_wait_status(pidfd: int) -> int:
    """Return a wait status that the parent has taken; raise ProcessLookupError if the kernel has lost it."""
    info = bytearray(struct.pack("Q", PIDFD_INFO_EXIT) + bytes(PIDFD_INFO_BYTES - 8))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except (OSError, ValueError):
        raise ProcessLookupError from None
    if not struct.unpack_from("Q", info)[0] & PIDFD_INFO_EXIT:
        raise ProcessLookupError
    return int(struct.unpack_from("i", info, PIDFD_EXIT_CODE_AT)[0])


def read_boot_id() -> str:
    """Return the random id of the running kernel (man 5 proc_sys_kernel), empty if it is hidden."""
    return read_text("/proc/sys/kernel/random/boot_id")


def list_cgroups(controller: str, pid: int | str = "self") -> list[str]:
    """Return the folders of a process's cgroup of a controller and of all above it, the innermost first.

    In a container these are the ones that are mounted there.
    """
    folders: dict[str, None] = {}
    for line in filter(None, read_text(f"/proc/{pid}/cgroup").split("\n")):
        number, kinds, path = line.split(":", 2)
        if number == "0":
            roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        else:
            roots = [f"/sys/fs/cgroup/{controller}", f"/sys/fs/cgroup/{kinds}"] * (controller in kinds.split(","))
        parts = [part for part in path.split("/") if part]
        for folder in ("/".join([root, *parts[:depth]]) for root in roots for depth in range(len(parts), -1, -1)):
            if os.path.isdir(folder):
                folders[os.path.realpath(folder)] = None  # cpu and cpuacct may be one, by two names
    return list(folders)


def find_memory_events(pid: int) -> str:
    """Return the file that counts the memory events of a process's cgroup (cgroup-v2.rst), empty if there is none.

    If a cgroup does not count memory, the one above it may.
    """
    counts = ("memory.events", "memory.oom_control")
    files = (f"{folder}/{name}" for folder in list_cgroups("memory", pid) for name in counts)
    return next(filter(os.path.exists, files), "")


def count_oom_kills(path: str) -> int:
    """Return how many processes of a cgroup were killed for lack of memory, 0 if that is not known."""
    if not path:
        return 0
    try:
        with open(path) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except OSError:
        return 0
