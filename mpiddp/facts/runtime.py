"""Which launcher started this process and what it offers, read from its variables before MPI is loaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from ..config import RESTARTS
from .library import ALL_INTERFACES, PMI, PMIX


class Launcher(NamedTuple):
    """A launcher and the variables in which it tells a process its rank and the number of ranks."""

    name: str
    rank: str
    size: str | None


OPEN_MPI = Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
# A batch script has SLURM_PROCID too; only a step, which srun started, has a numeric SLURM_STEP_ID.
SRUN = Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
HYDRA = Launcher("MPICH's or Intel MPI's mpiexec", "PMI_RANK", "PMI_SIZE")
OTHERS = (
    Launcher("PALS", "PALS_RANKID", None),
    Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
)
PMIX_LAUNCHER = Launcher("a PMIx launcher", "PMIX_RANK", None)
TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE")
SLURM_ANSWERS_S = 2.0
OFFERS = {PMI: ("PMI_FD", "PMI_PORT"), PMIX: ("PMIX_NAMESPACE",)}
OF_HYDRA = "MPI_LOCALRANKID"  # set by MPICH's and Intel's mpiexec, not by srun --mpi=pmi2; PMI_RANK is set by all three

LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID",
               "JSM_NAMESPACE_LOCAL_RANK", "SLURM_LOCALID")
RUN_PREFIX = "mpiddp-"  # begins the run ids of mpiddp's jobs


class Runtime(NamedTuple):
    """What started this process: the launcher, this process's rank, the number of ranks if the launcher tells it.

    `offers` are the interfaces that a library may use to meet the launcher. `has_pmi_library` tells
    whether Intel MPI was shown Slurm's PMI library (I_MPI_PMI_LIBRARY). If each task of a Slurm step runs a
    launcher of its own, `tasks` is the number of these tasks and `task` the number of the one around this process.
    """

    launcher: Launcher
    rank: int
    size: int | None
    offers: frozenset[str]
    has_pmi_library: bool
    tasks: int = 1
    task: int = 0


def disown(environ: MutableMapping[str, str]) -> None:
    """Remove the name of a job that this process has no part in.

    A batch system, or another daemon, starts what a rank has submitted with the rank's variables.
    """
    if (run := environ.get("TORCHELASTIC_RUN_ID")) is not None and not is_in_rank(run):
        del environ["TORCHELASTIC_RUN_ID"]


def is_in_rank(run: str) -> bool:
    """Tell whether this process descends from one that has set TORCHELASTIC_RUN_ID to `run`: a rank, or torchrun.

    Its descendants were started with that, it was not itself, and it has torch or MPI.
    """
    pid = os.getppid()
    try:
        while f"TORCHELASTIC_RUN_ID={run}".encode() in content(f"/proc/{pid}/environ").split(b"\0"):
            pid = parent_of(pid)
        libraries = content(f"/proc/{pid}/maps")
    except OSError:  # another user's process, such as a batch system's daemon
        return False
    return b"/libmpi" in libraries or b"/libtorch" in libraries


def content(path: str) -> bytes:
    """Return what a file holds; raise OSError where it cannot be read."""
    with open(path, "rb") as file:
        return file.read()


def parent_of(pid: int) -> int:
    """Return the parent of a process; raise OSError where that cannot be seen."""
    return int(content(f"/proc/{pid}/stat").rpartition(b") ")[2].split()[1])


def outer_launcher(environ: Mapping[str, str]) -> str | None:
    """Return the name of the launcher that has set torchrun's variables for this process, None if none has."""
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    if run.startswith(RUN_PREFIX):
        return "mpiddp"
    return "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in environ else "torchrun"


def is_first_on_node(environ: Mapping[str, str]) -> bool:
    """Tell whether this process is the first of the job on its node; assume it if no launcher tells."""
    found = [environ[name] for name in LOCAL_RANKS if name in environ]
    return not found or found[0] == "0"


def slurm_step(environ: Mapping[str, str], runtime: Runtime | None) -> str | None:
    """Return the Slurm step whose tasks are this job's ranks, as JOB.STEP for scancel, None if there is none.

    Return None for a step of a single task, too: it may be the user's shell, and it has no other ranks to end.
    """
    if runtime is None or runtime.launcher is not SRUN or runtime.size == 1:
        return None
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job.isdigit() and step.isdigit() else None


def pid_namespace() -> str:
    """Return the name of this process's process namespace (man 7 pid_namespaces), empty where that is not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def step_daemon(pid: int) -> int:
    """Return the slurmstepd that a process descends from, 0 for none, or if that cannot be seen.

    Each node has one for each Slurm step.
    """
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", errors="replace", newline="\n") as file:
                name, _, fields = file.read().partition(" (")[2].rpartition(") ")
        except OSError:
            return 0
        if name == "slurmstepd":
            return pid
        pid = int(fields.split()[1])
    return 0


def slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks of the Slurm allocation around this process (SLURM_NTASKS), 0 if it is not set."""
    found = environ.get("SLURM_NTASKS", "")
    return int(found) if found.isdigit() else 0


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """Return the number of the Slurm job that this process is in, None outside of one."""
    return environ.get("SLURM_JOB_ID")


def slurm_task(environ: Mapping[str, str]) -> str | None:
    """Return what Slurm's commands call this job alone: a number may stand for a whole array (man scontrol)."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else slurm_job(environ)


def slurm_name(environ: Mapping[str, str]) -> str | None:
    """Return a name for what runs in a Slurm job, None outside of one: its number, as JOB.STEP from the second step on.

    It is the same when the job was queued again.
    """
    job, step = slurm_job(environ), environ.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job and step.isdigit() and int(step) > 0 else job


def restart_count(environ: Mapping[str, str]) -> int:
    """Return how often the job was started again: by `mpiddp.supervise`, or by Slurm (sbatch, SLURM_RESTART_COUNT)."""
    found = environ.get(RESTARTS, "")
    return int(found) if found.isdigit() else slurm_restarts(environ)


def slurm_restarts(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has started the job again (sbatch, SLURM_RESTART_COUNT)."""
    found = environ.get("SLURM_RESTART_COUNT", "")
    return int(found) if found.isdigit() else 0


def hostname() -> str:
    """Return this host's name, "unnamed" where it has none, as in some containers; no slash is in it."""
    return socket.gethostname().replace("/", "-") or "unnamed"


def gpus_on_node(environ: Mapping[str, str]) -> int:
    """Return how many GPUs Slurm has given the job on this node (srun, SLURM_GPUS_ON_NODE), 0 if it does not say.

    Return 0, too, if the user asked for GPUs per task: Slurm itself gives each task its number then.
    """
    if gpus_of_task(environ):
        return 0
    found = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(found) if found.isdigit() else 0


def gpus_of_task(environ: Mapping[str, str]) -> int:
    """Return how many GPUs Slurm gives each task, 0 if it does not say.

    That is SLURM_GPUS_PER_TASK (8, a100:8, or a100:1,v100:1), or among others in SLURM_TRES_PER_TASK, which has CPUs
    too (cpu=4,gres/gpu:a100=8; srun, "--tres-per-task").
    """
    tres = [part.replace("=", ":").replace("gres/", "gres:") for part in
            environ.get("SLURM_TRES_PER_TASK", "").split(",")]
    of_gpus = [part.removeprefix("gres:gpu") for part in tres if f"{part}:".startswith("gres:gpu:")]
    parts = [part for part in environ.get("SLURM_GPUS_PER_TASK", "").split(",") if part] or of_gpus
    numbers = [part.rpartition(":")[2] for part in parts]
    return sum(int(number) if number.isdecimal() else 1 for number in numbers)


def job_end(environ: Mapping[str, str], asks: bool) -> float | None:
    """Return when Slurm will end this job, as a time of time.time(), None if Slurm does not say.

    Newer versions of Slurm set SLURM_JOB_END_TIME. If it is missing, the one rank that `asks` calls squeue.
    """
    if (told := environ.get("SLURM_JOB_END_TIME", "")).isdigit():
        return float(told)
    job = slurm_task(environ)
    if job is None or not asks:
        return None
    import subprocess
    import time

    try:
        done = subprocess.run(["squeue", "--noheader", f"--jobs={job}", "--format=%e"], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=SLURM_ANSWERS_S)
        return time.mktime(time.strptime(done.stdout.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def kills_aborted(runtime: Runtime | None) -> bool:
    """Tell whether MPI_Abort's status is lost: srun --mpi=pmi2 kills all ranks and reports 137."""
    return runtime is not None and runtime.launcher is SRUN and PMI in runtime.offers


def slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the Slurm allocation that this process is in, none outside of one."""
    nodes = environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        return []
    from ClusterShell.NodeSet import NodeSet

    return list(NodeSet(nodes))


def srun_mpi_types() -> list[str]:
    """Return the values of --mpi that this Slurm's srun lists, none if srun cannot be asked."""
    import subprocess

    try:
        done = subprocess.run(["srun", "--mpi=list"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=SLURM_ANSWERS_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.startswith("\t")]


def detect(environ: Mapping[str, str]) -> Runtime | None:
    """Return what started this process, None if no launcher did.

    An mpirun or mpiexec inside a Slurm step sets its own variables beside Slurm's; it wins over srun.
    """
    in_step = environ.get("SLURM_STEP_ID", "").isdigit()
    by_srun = in_step and environ.get("SLURM_MPI_TYPE", "none") != "none" and OF_HYDRA not in environ
    order = [OPEN_MPI, *OTHERS, *([SRUN, HYDRA] if by_srun else [HYDRA, *([SRUN] if in_step else [])]), PMIX_LAUNCHER]
    if "TORCHELASTIC_RUN_ID" in environ:
        order.append(TORCHRUN)
    for launcher in order:
        if (rank := environ.get(launcher.rank, "")).isdigit():
            size = environ.get(launcher.size or "", "")
            around = outer_tasks(environ) if in_step and is_in_task(launcher, environ) else (1, 0)
            return Runtime(launcher, int(rank), int(size) if size.isdigit() else None, offers(launcher, environ),
                           "I_MPI_PMI_LIBRARY" in environ, *around)
    return None


def offers(launcher: Launcher, environ: Mapping[str, str]) -> frozenset[str]:
    """Return the interfaces that a launcher offers its ranks, without those of a Slurm step around the launcher."""
    own = {OPEN_MPI: {PMIX}, HYDRA: {PMI}}.get(launcher, ALL_INTERFACES)
    return frozenset(kind for kind in own if any(name in environ for name in OFFERS[kind]))


def is_in_task(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Tell whether this rank's mpirun or mpiexec runs itself in the Slurm step that this rank is in.

    An mpirun in an allocation runs outside that step: it has srun start a daemon on each node, and so its
    ranks are in a step of several tasks, too. A rank's variables tell the two cases apart. With Open MPI they
    name the rank's daemon, and number 0 is mpirun itself (PMIX_SERVER_URI2 begins with NAMESPACE.NUMBER).
    MPICH's mpiexec sets HYDI_CONTROL_FD if it started the daemon without srun. Intel's says in
    HYDRA_BSTRAP_LAUNCHER how it started the daemon.
    """
    if launcher is OPEN_MPI:
        return environ.get("PMIX_SERVER_URI2", "").partition(";")[0].endswith(".0")
    started_by = environ.get("HYDRA_BSTRAP_LAUNCHER", "slurm")
    return launcher is HYDRA and ("HYDI_CONTROL_FD" in environ or started_by != "slurm")


def outer_tasks(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return how many tasks the Slurm step around this process has, and the number of the task around it."""
    tasks, task = environ.get(SRUN.size or "", ""), environ.get(SRUN.rank, "")
    return (int(tasks), int(task)) if tasks.isdigit() and task.isdigit() else (1, 0)
