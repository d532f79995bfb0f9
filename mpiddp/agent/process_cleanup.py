"""Cleans up after a rank of a failed job: what it has started, MPI's shared memory, the other ranks of its Slurm step.

The agent is the subreaper of all that descends from its rank (man 2 PR_SET_CHILD_SUBREAPER): it finds what has lost its
parent among its own children.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..base.stderr import write_line
from ..discovery.runtime import find_ancestor
from ..systems.launchers import HYDRA, get_launcher
from ..systems.mpi_libraries import LIBRARIES
from .timeouts import DESCENDANTS_TIMEOUT_S, SCANCEL_TIMEOUT_S, WAITING_LAUNCHER_TIMEOUT_S

if TYPE_CHECKING:
    import psutil

FOLDER = "/dev/shm/"  # noqa: S108 (shm_open(3) has its files there)
SEMAPHORES = "sem.mp-"  # multiprocessing's
PREFIXES = tuple(FOLDER + name for name in (*(part for row in LIBRARIES for part in row.segments), SEMAPHORES))
POLL_INTERVAL_S = 0.01


class Segment(NamedTuple):
    """A file in FOLDER; `device` is as /proc has it, in hexadecimal numbers."""

    path: str
    device: str
    inode: int


def mapped_segments(pid: int | str) -> set[Segment]:
    """Return the segments of MPI that a process maps; none if it is gone, or another user's (man 5 proc)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
        rows = [line.rstrip("\n").split(None, 5) for line in file if FOLDER in line]
        return {Segment(row[5], row[3], int(row[4])) for row in rows if row[5].startswith(PREFIXES)}
    return set()


def remove_unmapped(segments: Collection[Segment]) -> None:
    """Remove the segments that no process maps; so the agent of the last process that did removes them."""
    unmapped = set(segments)
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if not unmapped:
            return
        unmapped -= mapped_segments(pid)
    for segment in unmapped:
        with contextlib.suppress(OSError):
            status = os.stat(segment.path)
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            if (device, status.st_ino) == segment[1:]:  # and not a later one of the same name
                os.unlink(segment.path)


def end_descendants(rank: int) -> None:
    """End all that the rank, process `rank`, has started, when it has ended or has nothing more to do.

    It gets SIGTERM, and SIGKILL after a while. The agent itself reaps its children. A job that the rank has submitted,
    or what a daemon of the node has started for it, is no descendant, and goes on.
    """
    if not has_children():
        return
    import psutil

    def find() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if process.pid != rank]

    alive = send(find(), signal.SIGTERM)
    deadline = time.monotonic() + DESCENDANTS_TIMEOUT_S
    while (alive := [process for process in alive if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    while send(find(), signal.SIGKILL):  # also what they have started meanwhile
        time.sleep(POLL_INTERVAL_S)


def has_children() -> bool:
    """Return whether this process has children, without the time that psutil's import takes."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def send(processes: Iterable[psutil.Process], number: int) -> list[psutil.Process]:
    """Send a signal to those of the processes that live, and wake those that are stopped; return them."""
    import psutil

    alive = list(filter(is_alive, processes))
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
    return alive


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def kill_group(group: int) -> None:
    """Kill a process group, if it exists."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def find_waiting_launcher(name: str) -> int:
    """Return the process of a launcher that waits for ever for a lost node, 0 for none.

    Print what to do if it is not on this node.
    """
    names = get_launcher(name).waiting_processes
    pid = find_ancestor(os.getpid(), names) if names else 0
    if not pid and name == HYDRA.name:
        pid = find_in_slurm_job(names)
    if names and not pid:
        write_line(f"mpiddp: {name} may wait for the lost node for ever; press Ctrl-C twice or kill it")
    return pid


def find_in_slurm_job(names: Collection[str]) -> int:
    """Return the process on this node with one of the names, in the Slurm job of this one; 0 if there is none.

    In a Slurm job Hydra starts its daemons by srun: then they do not descend from it. If a job runs several launchers
    at a time, it is unknown which one has started this process, and 0 is returned.
    """
    import psutil

    job, parents = os.environ.get("SLURM_JOB_ID"), {}
    for process in psutil.process_iter(["name", "ppid"]) if job else ():
        with contextlib.suppress(psutil.Error):
            if process.info["name"] in names and process.environ().get("SLURM_JOB_ID") == job:
                parents[process.pid] = process.info["ppid"]
    launchers = parents.keys() - parents.values()  # mpirun may be a script that runs mpiexec
    return launchers.pop() if len(launchers) == 1 else 0


def end_launcher(pid: int) -> None:
    """Start a process that kills a launcher unless that ends by itself in time.

    At SIGTERM Open MPI's mpirun waits for its daemons, too, or crashes (4.1).
    """
    with contextlib.suppress(OSError, AttributeError):  # before Linux 5.3 there are no such descriptors
        descriptor = os.pidfd_open(pid)
        if os.fork():
            return
        try:
            os.setsid()
            keep_only(descriptor)  # the launcher waits until nobody can write to its pipes
            (end := select.poll()).register(descriptor, select.POLLIN)
            if not end.poll(1000 * WAITING_LAUNCHER_TIMEOUT_S):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os._exit(0)


def keep_only(descriptor: int) -> None:
    """Close all other descriptors."""
    os.closerange(0, descriptor)
    os.closerange(descriptor + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)


def cancel_slurm_step(step: str | None) -> None:
    """Cancel a Slurm step, if there is one: without PMIx, srun does not end the other ranks when one is gone."""
    import subprocess

    if step is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=SCANCEL_TIMEOUT_S)
