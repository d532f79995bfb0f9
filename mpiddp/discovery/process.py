"""Another process as the kernel shows it: whether it is stopped, its signals, its cgroup."""

from __future__ import annotations

import os

from ..base.files import read_text

STATE_FIELD = 0  # of /proc/PID/stat after the name (man 5 proc)


class WatchedProcess:
    """Another process of this user. If /proc hides it, nothing is known of it."""

    def __init__(self, pid: int) -> None:
        """Look at a process."""
        self.pid = pid
        try:
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        except OSError:
            self._stat = -1
        self._cgroup = find_memory_events(pid)
        self._oom_kills = count_oom_kills(self._cgroup)

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

    def _fields(self) -> list[str]:
        return os.pread(self._stat, 4096, 0).decode(errors="replace").rpartition(")")[2].split()


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
        with open(path, encoding="utf-8") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except OSError:
        return 0
