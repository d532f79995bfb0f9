"""The scheduler of the job that this process is in: the job's number, intended size and end, its nodes and GPUs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..base.config import RESTART_VARIABLE
from ..systems import schedulers
from ..systems.launchers import Launcher
from ..systems.schedulers import FORMAT_VARIABLES, SLURM, Scheduler, read_count

if TYPE_CHECKING:
    import subprocess

COMMAND_TIMEOUT_S = 2.0  # for a scheduler's command


def find_scheduler(environ: Mapping[str, str]) -> Scheduler | None:
    """Return the scheduler of the job around this process, None outside of one: the first in SCHEDULERS counts."""
    return next((row for row in schedulers.SCHEDULERS if any(environ.get(name) for name in row.jobs)
                 and all(name in environ for name in row.marks)), None)


def find_job(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the scheduler's number of this job and that of its part, each empty for none.

    A job of Flux is named by its path, with ƒ written as f, which Flux accepts too. The elements of an array have
    different numbers. PBS's is without the server's name.
    """
    scheduler = find_scheduler(environ)
    if scheduler is None or not scheduler.has_number:
        return "", ""
    number = find_number(environ, scheduler)
    element = environ.get(scheduler.element, "")
    if element.isdecimal() and element != "0":
        return name_job(f"{number}_{element}"), ""
    number, part = scheduler.split_job(number)
    step = environ.get(scheduler.step, "")
    return name_job(number), name_job(part) or (step if step.isdecimal() else "")


def find_number(environ: Mapping[str, str], scheduler: Scheduler) -> str:
    """Return the number of this job in its scheduler's variables, empty without one."""
    return next((environ[name] for name in scheduler.jobs if environ.get(name)), "")


def name_job(text: str) -> str:
    """Return a scheduler's name of a job, 9[3] or ƒ6PMw2aL7, as a name that a file may have."""
    return re.sub(r"[^\w.-]", "_", text.replace("ƒ", "f").replace("]", "")).lstrip(".")


def name_logs(environ: Mapping[str, str]) -> str:
    """Return the name of a job's log folder, empty outside of one: its number, and a step's from the second on.

    It stays the same when the job is queued again.
    """
    job, step = find_job(environ)
    return f"{job}.{step}" if step and step != "0" else job


def find_intended_size(environ: Mapping[str, str]) -> tuple[Scheduler | None, int]:
    """Return the scheduler of a job and its intended size, as Scheduler.size has it.

    If it starts a process on each node, only the first of them gets this, since one is to print it.
    """
    scheduler = find_scheduler(environ)
    if scheduler is None or environ.get(scheduler.process, "0") != "0":
        return None, 0
    if scheduler.size_command and scheduler.is_instance(environ):
        counts = read_command(*scheduler.size_command).split()
        return scheduler, max((int(count) for count in counts if count.isdecimal()), default=0)
    return scheduler, scheduler.size(environ)


def count_unchosen_nodes(environ: Mapping[str, str]) -> int:
    """Return the number of the job's nodes, 0 if it is unknown, or if `mpiddp.supervise` has chosen among them."""
    scheduler = find_scheduler(environ)
    return scheduler.count_nodes(environ) if scheduler is not None and RESTART_VARIABLE not in environ else 0


def describe_unknown_end(environ: Mapping[str, str]) -> str:
    """Return in words why the end of the job is unknown."""
    scheduler = find_scheduler(environ)
    if scheduler is None:
        return "found no scheduler that knows when the job ends"
    return f"{scheduler.ask_end[0] if scheduler.ask_end else scheduler.name} does not report when the job ends"


def find_end(environ: Mapping[str, str], asks: bool) -> float | None:
    """Return when the scheduler will end this job, as a time of time.time(), None if unknown.

    Newer versions of Slurm set SLURM_JOB_END_TIME. If it is missing, or has passed because the job's limit was raised,
    the rank that `asks` calls a command.
    """
    scheduler = find_scheduler(environ)
    ends = [row.end for row in schedulers.SCHEDULERS if row.end and scheduler in (row, None)]
    end_s = float(max((read_count(name)(environ) for name in ends), default=0))
    if end_s > time.time():
        return end_s
    if scheduler is None or not scheduler.ask_end or not asks:
        return None
    try:
        return scheduler.parse_end(read_command(*fill(scheduler.ask_end, job=name_for_commands(environ, scheduler))),
                                   time.time())
    except ValueError:
        return end_s or None


def name_for_commands(environ: Mapping[str, str], scheduler: Scheduler) -> str:
    """Return this job's name in the scheduler's commands."""
    return scheduler.job_name(environ) or find_number(environ, scheduler)


def fill(command: tuple[str, ...], **values: str) -> list[str]:
    """Return a scheduler's command with {job} and {step} replaced; other braces are the command's own."""
    words = [*command]
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    return words


def read_command(*command: str) -> str:
    """Return what a scheduler's command prints, empty if it fails or times out."""
    done = run_command(*command)
    return done.stdout if done is not None and done.returncode == 0 else ""


def run_command(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str] | None:
    """Run a scheduler's command; return None if it cannot be started or times out."""
    import subprocess

    environ = {name: value for name, value in os.environ.items() if name not in FORMAT_VARIABLES}
    try:
        return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True,
                              encoding="utf-8", errors="replace", timeout=timeout_s)
    except (OSError, subprocess.SubprocessError):
        return None


def count_requeues(environ: Mapping[str, str]) -> int:
    """Return how often the scheduler has restarted the job."""
    return max((read_count(row.restarts)(environ) for row in schedulers.SCHEDULERS
                if row.restarts and all(name in environ for name in row.marks)), default=0)


def list_slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the Slurm allocation that this process is in, none outside of one."""
    nodes = environ.get(SLURM.node_list)
    if nodes is None:
        return []
    from ClusterShell.NodeSet import NodeSet

    return list(NodeSet(nodes))


def count_slurm_gpus_on_node(environ: Mapping[str, str]) -> int:
    """Return how many GPUs Slurm gave the job on this node (srun, SLURM_GPUS_ON_NODE), 0 if it does not say.

    Return 0 too if the user asked for GPUs per task: then Slurm itself gives each task its number.
    """
    return 0 if count_slurm_gpus_of_task(environ) else read_count("SLURM_GPUS_ON_NODE")(environ)


def count_slurm_gpus_of_task(environ: Mapping[str, str]) -> int:
    """Return how many GPUs Slurm gives each task, 0 if it does not say.

    SLURM_GPUS_PER_TASK holds it (8, a100:8, or a100:1,v100:1), or SLURM_TRES_PER_TASK, with CPUs and others
    (cpu=4,gres/gpu:a100=8; srun, "--tres-per-task").
    """
    tres = [part.replace("=", ":").replace("gres/", "gres:") for part in
            environ.get("SLURM_TRES_PER_TASK", "").split(",")]
    gpu_parts = [part.removeprefix("gres:gpu") for part in tres if f"{part}:".startswith("gres:gpu:")]
    parts = [part for part in environ.get("SLURM_GPUS_PER_TASK", "").split(",") if part] or gpu_parts
    numbers = [part.rpartition(":")[2] for part in parts]
    return sum(int(number) if number.isdecimal() else 1 for number in numbers)


def list_mpi_interfaces(launcher: Launcher) -> list[str]:
    """Return the interfaces to MPI that a launcher's command lists, none if it has no such command."""
    done = run_command(*launcher.ask_interfaces) if launcher.ask_interfaces else None
    lines = (done.stdout + done.stderr).splitlines() if done is not None else []
    return [line.strip() for line in lines if line.startswith("\t")]
