"""The surroundings of this process: an outer launcher, the Slurm step and its daemon, restarts, host, namespace."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping, MutableMapping

from ..base.config import RESTART_VARIABLE
from ..base.files import read_stat
from . import schedulers
from .launchers import LaunchFacts

STEP_DAEMON = "slurmstepd"  # each node has one for each Slurm step
RUN_PREFIX = "mpiddp-"  # begins the run ids of mpiddp's jobs


def drop_foreign_run_id(environ: MutableMapping[str, str]) -> None:
    """Remove the run id of a job that this process does not belong to.

    A batch system, or another daemon, starts what a rank has submitted with the rank's variables.
    """
    if (run := environ.get("TORCHELASTIC_RUN_ID")) is not None and not is_in_run(run):
        del environ["TORCHELASTIC_RUN_ID"]


def is_in_run(run: str) -> bool:
    """Return whether this process descends from one that has set TORCHELASTIC_RUN_ID to `run`: a rank, or torchrun.

    That process has loaded torch or MPI; all its descendants were started with the variable, and it was not.
    """
    pid = os.getppid()
    try:
        while f"TORCHELASTIC_RUN_ID={run}".encode() in read_bytes(f"/proc/{pid}/environ").split(b"\0"):
            pid = int(read_stat(pid)[1][1])
        libraries = read_bytes(f"/proc/{pid}/maps")
    except OSError:  # another user's process, such as a batch system's daemon
        return False
    return b"/libmpi" in libraries or b"/libtorch" in libraries


def read_bytes(path: str) -> bytes:
    """Return the content of a file; raise OSError if it cannot be read."""
    with open(path, "rb") as file:
        return file.read()


def find_outer_launcher(environ: Mapping[str, str]) -> str | None:
    """Return the name of the launcher that has set torchrun's variables for this process, None if none has."""
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    if run.startswith(RUN_PREFIX):
        return "mpiddp"
    return "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in environ else "torchrun"


def find_slurm_step(environ: Mapping[str, str], runtime: LaunchFacts | None) -> str | None:
    """Return the Slurm step whose tasks are this job's ranks, as JOB.STEP for scancel, None if there is none.

    Return None for a step of a single task too: it may be the user's shell, and it has no other ranks to end.
    """
    if runtime is None or not runtime.by_srun or runtime.size == 1:
        return None
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job.isdigit() and step.isdigit() else None


def read_pid_namespace() -> str:
    """Return the name of this process's process namespace (man 7 pid_namespaces), empty if it is not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def find_ancestor(pid: int, names: Collection[str]) -> int:
    """Return the pid of the nearest process with one of the names that a process descends from, 0 if none is seen."""
    while pid > 1:
        try:
            name, fields = read_stat(pid)
        except OSError:
            return 0
        if name in names:
            return pid
        pid = int(fields[1])
    return 0


def count_restarts(environ: Mapping[str, str]) -> int:
    """Return how often the job was restarted: by `mpiddp.supervise`, or by the scheduler."""
    count = environ.get(RESTART_VARIABLE, "")
    return int(count) if count.isdigit() else schedulers.count_requeues(environ)


def hostname() -> str:
    """Return this host's name without slashes, "unnamed" if it has none, as in some containers."""
    return socket.gethostname().replace("/", "-") or "unnamed"
