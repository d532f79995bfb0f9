"""The schedulers that run jobs: their variables for a job's number, size, CPUs and end, and names of their options.

Sources: sbatch(1), flux-environment(7), pbs_job_attributes(7B), bsub(1), sge_pe(5), and the documents of HTCondor, the
MPI Operator and AWS Batch. A real Slurm runs in the tests; the variables and commands of Flux were tried with
Flux 0.88, by hand; the others are known from reading alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import subprocess

COMMAND_TIMEOUT_S = 2.0  # for a scheduler's command
PE_HOSTFILE = "PE_HOSTFILE"  # names a file
NO_LIMIT_S = 2**32 - 1  # flux job timeleft
TIME_FORMATS = "%Y-%m-%dT%H:%M:%S", "%a %b %d %H:%M:%S %Y"  # squeue's and qstat's


class Scheduler(NamedTuple):
    """A scheduler.

    `jobs` are the variables that hold the job's number, the first that is set counts; `step` holds the number of a part
    of it. `size` returns for how many ranks, or at least nodes (`unit`), a job is meant, 0 if unknown. If the scheduler
    starts a process on each node, the variable `process` numbers these. `cpus` are the variables with the number of
    CPUs of a node that the job has; that in `each` counts for each process of the job. `ask_end` is the command that
    prints when the job ends, with {job} in it; `parse_end` makes a time.time() of its output and the present time, or
    raises ValueError.
    The rest is for messages: the command that starts ranks in a job (`start`; empty: an mpirun), the options for the
    GPUs of a node (`gpus`, with {} for their number), more cores of a rank (`cores`), leaving out nodes (`exclude`),
    more memory (`memory`), and what shows a job's use of it (`memory_use`); empty if sites differ.
    """

    name: str
    jobs: tuple[str, ...]
    step: str = ""
    size: Callable[[Mapping[str, str]], int] = lambda _: 0
    unit: str = "nodes"
    process: str = ""
    cpus: tuple[str, ...] = ()
    each: str = ""
    ask_end: tuple[str, ...] = ()
    parse_end: Callable[[str, float], float] = lambda text, _: float(text)
    start: str = ""
    gpus: str = ""
    cores: str = ""
    exclude: str = ""
    memory: str = ""
    memory_use: str = ""


def read_count(name: str) -> Callable[[Mapping[str, str]], int]:
    """Return a function that reads a number from a variable, 0 if it holds none."""
    return lambda environ: int(environ[name]) if environ.get(name, "").isdecimal() else 0


def count_pbs_slots(environ: Mapping[str, str]) -> int:
    """Return the number of lines of the file PBS_NODEFILE: one for each MPI process that was asked for (mpiprocs)."""
    try:
        with open(environ.get("PBS_NODEFILE", ""), errors="replace") as file:
            return len(file.read().split())
    except OSError:
        return 0


def count_lsf_hosts(environ: Mapping[str, str]) -> int:
    """Return the number of hosts in LSB_MCPU_HOSTS, "n1 16 n2 8": LSF's slots are cores, not processes."""
    return len(environ.get("LSB_MCPU_HOSTS", "").split()) // 2


def count_flux_resources(environ: Mapping[str, str]) -> int:
    """Return the number of nodes, or of GPUs if it is larger, of the Flux instance around a script or a shell."""
    if "FLUX_ENCLOSING_ID" not in environ or "FLUX_TASK_RANK" in environ:
        return 0
    counts = read_command("flux", "resource", "list", "-s", "up", "-no", "{nnodes} {ngpus}").split()
    return max((int(count) for count in counts if count.isdecimal()), default=0)


def parse_time(text: str) -> float:
    """Return the time that squeue or qstat prints."""
    for time_format in TIME_FORMATS:
        try:
            return time.mktime(time.strptime(text.strip(), time_format))
        except ValueError:
            continue
    raise ValueError(text)


def parse_flux_end(text: str, now_s: float) -> float:
    """Return the end from `flux job timeleft`: whole seconds; raise ValueError if the job has no limit."""
    left_s = int(text)
    if left_s >= NO_LIMIT_S:
        raise ValueError(text)
    return now_s + left_s


def parse_pbs_end(text: str, now_s: float) -> float:
    """Return the end from `qstat -f`: PBS prints start and walltime, Torque the remaining seconds."""
    attributes = dict(re.findall(r"^ *([\w.]+) = (.*)$", text, re.MULTILINE))
    if (remaining := attributes.get("Walltime.Remaining", "")).isdecimal():
        return now_s + int(remaining)
    hours, minutes, seconds = map(int, attributes.get("Resource_List.walltime", "").split(":"))
    return parse_time(attributes.get("stime", "")) + hours * 3600 + minutes * 60 + seconds


def parse_lsf_end(text: str, now_s: float) -> float:
    """Return the end from `bjobs -o time_left`: hours and minutes with a letter, as in "0:42 L"."""
    hours, minutes = map(int, text.partition(" ")[0].split(":"))
    return now_s + hours * 3600 + minutes * 60


FLUX = Scheduler(
    "Flux", ("FLUX_JOB_ID_PATH", "FLUX_ENCLOSING_ID"), size=count_flux_resources, unit="nodes or GPUs",
    ask_end=("flux", "job", "timeleft"),
    parse_end=parse_flux_end, start="flux run", gpus="--gpus-per-node={}", cores="--cores-per-task",
    exclude="--requires='not hosts:{}'")
SLURM = Scheduler(
    "Slurm", ("SLURM_JOB_ID",), "SLURM_STEP_ID", read_count("SLURM_NTASKS"), "tasks",
    cpus=("SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE"),
    ask_end=("squeue", "--noheader", "--jobs={job}", "--format=%e"),
    parse_end=lambda text, _: parse_time(text), start="srun",
    gpus="--gpus-per-node={}", cores="--cpus-per-task", exclude="--exclude={}", memory="--mem",
    memory_use="sacct: MaxRSS")
PBS = Scheduler(
    "PBS", ("PBS_JOBID",), size=count_pbs_slots, unit="MPI processes", cpus=("NCPUS",),
    each="NCPUS",  # PBS gives it the value of OMP_NUM_THREADS
    ask_end=("qstat", "-f", "{job}"), parse_end=parse_pbs_end, gpus="-l select=…:ngpus={}", cores="-l select=…:ncpus=",
    memory="-l select=…:mem=", memory_use="qstat -xf: resources_used.mem")
LSF = Scheduler(
    "LSF", ("LSB_JOBID",), size=count_lsf_hosts, cpus=("LSB_MCPU_HOSTS",),
    ask_end=("bjobs", "-noheader", "-o", "time_left", "{job}"), parse_end=parse_lsf_end, gpus="-gpu num={}",
    cores="-n", memory="-M", memory_use="bjobs -l: MAX MEM")
SGE = Scheduler("SGE", ("JOB_ID",), size=read_count("NHOSTS"), cpus=(PE_HOSTFILE,))
HTCONDOR = Scheduler("HTCondor", ("_CONDOR_PROCNO",), size=read_count("_CONDOR_NPROCS"), process="_CONDOR_PROCNO")
AWS_BATCH = Scheduler("AWS Batch", ("AWS_BATCH_JOB_ID",), size=read_count("AWS_BATCH_JOB_NUM_NODES"),
                      process="AWS_BATCH_JOB_NODE_INDEX")
MPI_OPERATOR = Scheduler(
    "Kubernetes' MPI Operator", ("K_MPI_JOB_ROLE",), size=lambda environ: 2 * (environ["K_MPI_JOB_ROLE"] == "launcher"))
SCHEDULERS = (SLURM, FLUX, PBS, LSF, SGE, HTCONDOR, AWS_BATCH, MPI_OPERATOR)
WITHOUT_JOB_NUMBER = (HTCONDOR, MPI_OPERATOR)  # their variables do not name a job


def find_scheduler(environ: Mapping[str, str]) -> Scheduler | None:
    """Return the scheduler of the job around this process, None outside of one.

    JOB_ID is a common name: it is SGE's only beside SGE_ROOT. Flux passes on no variables of Slurm, but Slurm passes on
    those of a task of Flux that submits a job (flux-framework/flux-core#5237): the first in SCHEDULERS counts.
    """
    return next((scheduler for scheduler in SCHEDULERS if any(environ.get(name) for name in scheduler.jobs)
                 and (scheduler is not SGE or "SGE_ROOT" in environ)), None)


def find_job(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the scheduler's number of this job and that of its part, each empty for none.

    A job of Flux is named by its path, /ƒ6PMw2aL7/ƒXGLLfH in a batch job, since ids begin anew in each; ƒ is written as
    f, which Flux accepts too. The elements of an array have different numbers. PBS's is without the server's name.
    """
    scheduler = find_scheduler(environ)
    if scheduler is None or scheduler in WITHOUT_JOB_NUMBER:
        return "", ""
    number = next(environ[name] for name in scheduler.jobs if environ.get(name))
    if scheduler is FLUX:
        number, _, part = number.lstrip("/").partition("/")
        return name_job(number), name_job(part.replace("/", "."))
    element = environ.get("LSB_JOBINDEX" if scheduler is LSF else "SGE_TASK_ID", "")
    if scheduler in (LSF, SGE) and element.isdecimal() and element != "0":
        return name_job(f"{number}_{element}"), ""
    if scheduler is PBS:
        number = number.partition(".")[0]
    step = environ.get(scheduler.step, "")
    return name_job(number.partition("#")[0]), step if step.isdecimal() else ""


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
    return scheduler, scheduler.size(environ)


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
    end_s = float(read_count("SLURM_JOB_END_TIME")(environ)) if scheduler in (SLURM, None) else 0.0
    if end_s > time.time():
        return end_s
    if scheduler is None or not scheduler.ask_end or not asks:
        return None
    job = name_for_commands(environ, scheduler)
    try:
        return scheduler.parse_end(read_command(*(word.format(job=job) for word in scheduler.ask_end)), time.time())
    except ValueError:
        return end_s or None


def name_for_commands(environ: Mapping[str, str], scheduler: Scheduler) -> str:
    """Return this job's name in the scheduler's commands: a number alone means a whole array to LSF (man bjobs)."""
    number = next((environ[name] for name in scheduler.jobs if environ.get(name)), "")
    if scheduler is SLURM:
        return name_slurm_job(environ) or number
    element = environ.get("LSB_JOBINDEX", "") if scheduler is LSF else ""
    return f"{number}[{element}]" if element.isdecimal() and element != "0" else number


def read_command(*command: str) -> str:
    """Return what a scheduler's command prints, empty if it fails or times out."""
    done = run_command(*command)
    return done.stdout if done is not None and done.returncode == 0 else ""


def run_command(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str] | None:
    """Run a scheduler's command; return None if it cannot be started or times out."""
    import subprocess

    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              timeout=timeout_s)
    except (OSError, subprocess.SubprocessError):
        return None


def name_slurm_job(environ: Mapping[str, str]) -> str | None:
    """Return this job's name in Slurm's commands: a number may mean a whole array (man scontrol)."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")


def count_slurm_restarts(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has restarted the job (sbatch, SLURM_RESTART_COUNT)."""
    return read_count("SLURM_RESTART_COUNT")(environ)


def list_slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the Slurm allocation that this process is in, none outside of one."""
    nodes = environ.get("SLURM_JOB_NODELIST")
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


def list_srun_mpi_types() -> list[str]:
    """Return the values of --mpi that this Slurm's srun lists, none if it lists none."""
    done = run_command("srun", "--mpi=list")
    lines = (done.stdout + done.stderr).splitlines() if done is not None else []
    return [line.strip() for line in lines if line.startswith("\t")]
