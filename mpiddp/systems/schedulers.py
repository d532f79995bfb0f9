"""The schedulers that run jobs, a row each: their variables, their commands, and the names of their options.

Sources: sbatch(1), squeue(1), flux-environment(7), pbs_job_attributes(7B), bsub(1), sge_pe(5), and the documents of
HTCondor, the MPI Operator and AWS Batch. A real Slurm runs in the tests; the variables and commands of Flux 0.88 and of
Grid Engine 8.1.9 were tried by hand; the others are known from reading alone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from . import directives as forms
from .directives import Directives

Environ = Mapping[str, str]
PE_HOSTFILE = "PE_HOSTFILE"  # names a file
KUBERNETES_HOSTS = "/etc/mpi/hostfile"  # of Kubernetes' MPI operator, on its launcher's pod
NO_LIMIT_S = 2**32 - 1  # flux job timeleft
TIME_FORMATS = "%Y-%m-%dT%H:%M:%S", "%a %b %d %H:%M:%S %Y"  # squeue's and qstat's
FORMAT_VARIABLES = ("SLURM_TIME_FORMAT",)  # which change what the schedulers' commands print


def read_count(name: str) -> Callable[[Environ], int]:
    """Return a function that reads a number from a variable, 0 if it holds none."""
    return lambda environ: int(environ[name]) if environ.get(name, "").isdecimal() else 0


def split_number(text: str) -> tuple[str, str]:
    """Return a job's number, and no part of it."""
    return text.partition("#")[0], ""


class Scheduler(NamedTuple):
    """A scheduler.

    Detection: `jobs` are the variables that hold the job's number, the first that is set counts; all of `marks` must be
    set, too. `split_job` makes the number and that of a part of the job of it, unless the variables name no job
    (`has_number`). `step` holds the number of a part of the job, `element` that of an element of an array. `job_name`
    returns the job's name in the scheduler's commands, empty for its number.

    Size: `size` returns for how many ranks, or at least nodes (`unit`), a job is meant, 0 if unknown; `size_command`
    prints it if the process `is_instance`: the script or shell of the job, and no task in it. If the scheduler starts a
    process on each node, the variable `process` numbers these. `count_nodes` returns the number of nodes, 0 if unknown.
    `node_list` holds the names of the job's nodes, `node_file` returns the path of a file of them, and `tasks_per_node`
    holds the number of ranks on each. `cpus` are
    the variables with the number of CPUs of a node that the job has; that in `each` counts for each process of the job.
    `restarts` counts how often the scheduler has restarted the job.

    End: `end` holds the time.time() when the job ends. `ask_end` is the command that prints it; `parse_end` makes a
    time.time() of its output and the present time, or raises ValueError. In commands, {job} stands for the job's name.

    Supervision: `submit` submits a job script, the commands in `begin` start an allocation. `ask_nodes` prints lists of
    the nodes that the job still has, `ask_state` its state, which is `running` while it has its allocation; `ask_steps`
    prints the number and the name of each step, which may be named {step}; `cancel` ends the step {step}.
    `no_controller` is what they print if the scheduler does not answer. `ask_daemons` prints the addresses of the
    daemons on {nodes}, as scontrol does; their port is in the output of `ask_config`, where `daemon_port_pattern` finds
    it, or else `daemon_port`.

    Messages: the options for the ranks of a node (`tasks_option`), for the GPUs of a node (`gpus`, with {} for their
    number), more cores of a rank (`cores`), leaving out nodes (`exclude`), more memory (`memory`), and what shows a
    job's use of it (`memory_use`); empty if sites differ. `hostfile` is the shell's word for a file with a line for
    each rank, which MPI's launchers can read, and `make_hostfile` the shell's command that writes it. `tested` says
    what we saw of it.

    Job scripts: `directives` is how it reads them, None if it reads none.
    """

    name: str
    jobs: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    has_number: bool = True
    split_job: Callable[[str], tuple[str, str]] = split_number
    step: str = ""
    element: str = ""
    job_name: Callable[[Environ], str] = lambda _: ""

    size: Callable[[Environ], int] = lambda _: 0
    size_command: tuple[str, ...] = ()
    unit: str = "nodes"
    process: str = ""
    count_nodes: Callable[[Environ], int] = lambda _: 0
    node_list: str = ""
    node_file: Callable[[Environ], str] = lambda _: ""
    tasks_per_node: tuple[str, ...] = ()
    cpus: tuple[str, ...] = ()
    each: str = ""
    restarts: str = ""

    end: str = ""
    ask_end: tuple[str, ...] = ()
    parse_end: Callable[[str, float], float] = lambda text, _: float(text)

    submit: str = ""
    begin: str = ""
    is_instance: Callable[[Environ], bool] = lambda _: False
    ask_nodes: tuple[str, ...] = ()
    ask_state: tuple[str, ...] = ()
    running: str = ""
    ask_steps: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    no_controller: str = ""
    ask_daemons: tuple[str, ...] = ()
    ask_config: tuple[str, ...] = ()
    daemon_port: int = 0
    daemon_port_pattern: str = ""

    tasks_option: str = ""
    gpus: str = ""
    cores: str = ""
    exclude: str = ""
    memory: str = ""
    memory_use: str = ""
    hostfile: str = ""
    make_hostfile: str = ""
    tested: str = "no: from its documents"

    directives: Directives | None = None


def list_pbs_slots(environ: Environ) -> list[str]:
    """Return the lines of the file PBS_NODEFILE: a node for each MPI process that was asked for (mpiprocs)."""
    try:
        with open(environ.get("PBS_NODEFILE", ""), encoding="utf-8", errors="replace") as file:
            return file.read().split()
    except OSError:
        return []


def count_lsf_hosts(environ: Environ) -> int:
    """Return the number of hosts in LSB_MCPU_HOSTS, "n1 16 n2 8": LSF's slots are cores, not processes."""
    return len(environ.get("LSB_MCPU_HOSTS", "").split()) // 2


def is_flux_instance(environ: Environ) -> bool:
    """Return whether this is the script or shell of a Flux instance that has the nodes of a job.

    In a task of `flux run`, the instance may have all nodes of the cluster.
    """
    return "FLUX_URI" in environ and "FLUX_TASK_RANK" not in environ


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


def split_flux_path(text: str) -> tuple[str, str]:
    """Return a job of Flux and its part from the job's path: in a batch job, /ƒ6PMw2aL7/ƒXGLLfH, ids begin anew."""
    number, _, part = text.lstrip("/").partition("/")
    return number, part.replace("/", ".")


def is_operators_launcher(environ: Environ) -> bool:
    """Return whether this is the pod of the MPI Operator that starts the others."""
    return environ.get("K_MPI_JOB_ROLE") == "launcher"


def name_slurm_job(environ: Environ) -> str:
    """Return the job's name in Slurm's commands, empty for none: a number may mean a whole array (man scontrol)."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def parse_sge_end(text: str, _: float) -> float:
    """Return the end from `qstat -xml -j`: a start, and h_rt in seconds; raise ValueError if one is missing.

    The elements of an array that run have a start each, and the output does not tell which one is this job's.
    """
    limits = re.findall(r"<CE_name>h_rt</CE_name>.*?<CE_doubleval>([\d.]+)<", text, re.DOTALL)
    starts = re.findall(r"<JAT_start_time>(\d+)<", text)
    if len(starts) != 1 or not limits:
        raise ValueError(text)
    return int(starts[0]) + min(map(float, limits))


def name_lsf_job(environ: Environ) -> str:
    """Return the job's name in LSF's commands: a number alone means a whole array (man bjobs)."""
    element = environ.get("LSB_JOBINDEX", "")
    return f"{environ.get('LSB_JOBID', '')}[{element}]" if element.isdecimal() and element != "0" else ""


NO_SCHEDULER = Scheduler("")
SLURM = Scheduler(
    "Slurm", ("SLURM_JOB_ID",), step="SLURM_STEP_ID", job_name=name_slurm_job, size=read_count("SLURM_NTASKS"),
    unit="tasks", count_nodes=read_count("SLURM_JOB_NUM_NODES"), node_list="SLURM_JOB_NODELIST",
    tasks_per_node=("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    cpus=("SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE"), restarts="SLURM_RESTART_COUNT",
    end="SLURM_JOB_END_TIME", ask_end=("squeue", "--noheader", "--jobs={job}", "--format=%e"),
    parse_end=lambda text, _: parse_time(text),
    submit="sbatch", begin="sbatch or salloc",
    ask_nodes=("squeue", "--noheader", "--states=RUNNING", "--jobs={job}", "--format=%N"),
    ask_state=("squeue", "--noheader", "--jobs={job}", "--format=%T"), running="RUNNING",
    ask_steps=("squeue", "--noheader", "--steps", "--jobs={job}", "--format=%i %j"),
    cancel=("scancel", "--signal=KILL", "{step}"), no_controller="Unable to contact slurm controller",
    ask_daemons=("scontrol", "--oneliner", "show", "node", "{nodes}"), ask_config=("scontrol", "show", "config"),
    daemon_port=6818, daemon_port_pattern=r"^SlurmdPort *= (\d+)",  # slurm.conf, SlurmdPort
    tasks_option="--ntasks-per-node", gpus="--gpus-per-node={}", cores="--cpus-per-task", exclude="--exclude={}",
    memory="--mem", memory_use="sacct: MaxRSS", tested="versions 22.05 and 24.11", directives=forms.SLURM)
FLUX = Scheduler(
    "Flux", ("FLUX_JOB_ID_PATH", "FLUX_ENCLOSING_ID"), split_job=split_flux_path,
    size_command=("flux", "resource", "list", "-s", "up", "-no", "{nnodes} {ngpus}"), is_instance=is_flux_instance,
    unit="nodes or GPUs", ask_end=("flux", "job", "timeleft"), parse_end=parse_flux_end,
    submit="flux batch", begin="flux batch or flux alloc",
    ask_nodes=("flux", "resource", "list", "-s", "up", "-no", "{nodelist}"),
    ask_steps=("flux", "jobs", "--name={step}", "-no", "{id} {name}"), cancel=("flux", "cancel", "{step}"),
    gpus="--gpus-per-node={}", cores="--cores-per-task", exclude="--requires='not hosts:{}'",
    tested="version 0.88, by hand", directives=forms.FLUX)
PBS = Scheduler(
    "PBS", ("PBS_JOBID",), split_job=lambda text: (text.partition(".")[0], ""),
    size=lambda environ: len(list_pbs_slots(environ)), unit="MPI processes",
    count_nodes=lambda environ: len(set(list_pbs_slots(environ))), hostfile="$PBS_NODEFILE",
    submit="qsub", node_file=lambda environ: environ.get("PBS_NODEFILE", ""), cpus=("NCPUS",),
    each="NCPUS",  # PBS gives it the value of OMP_NUM_THREADS
    ask_end=("qstat", "-f", "{job}"), parse_end=parse_pbs_end, gpus="-l select=…:ngpus={}", cores="-l select=…:ncpus=",
    memory="-l select=…:mem=", memory_use="qstat -xf: resources_used.mem", directives=forms.PBS)
LSF = Scheduler(
    "LSF", ("LSB_JOBID",), submit="bsub", element="LSB_JOBINDEX", job_name=name_lsf_job, size=count_lsf_hosts,
    count_nodes=count_lsf_hosts, hostfile="$LSB_DJOB_HOSTFILE",
    cpus=("LSB_MCPU_HOSTS",), ask_end=("bjobs", "-noheader", "-o", "time_left", "{job}"), parse_end=parse_lsf_end,
    gpus="-gpu num={}", cores="-n", memory="-M", memory_use="bjobs -l: MAX MEM",
    directives=forms.LSF)
SGE = Scheduler(  # JOB_ID is a common name
    "SGE", ("JOB_ID",), marks=("SGE_ROOT",), element="SGE_TASK_ID", size=read_count("NHOSTS"),
    count_nodes=read_count("NHOSTS"), node_file=lambda environ: environ.get(PE_HOSTFILE, ""), cpus=(PE_HOSTFILE,),
    restarts="RESTARTED", submit="qsub", ask_end=("qstat", "-xml", "-j", "{job}"), parse_end=parse_sge_end,
    hostfile="$TMPDIR/hosts", make_hostfile=f"awk '{{while ($2--) print $1}}' ${PE_HOSTFILE} > $TMPDIR/hosts",
    tested="version 8.1.9, by hand")
HTCONDOR = Scheduler("HTCondor", ("_CONDOR_PROCNO",), has_number=False, size=read_count("_CONDOR_NPROCS"),
                     process="_CONDOR_PROCNO")
AWS_BATCH = Scheduler("AWS Batch", ("AWS_BATCH_JOB_ID",), size=read_count("AWS_BATCH_JOB_NUM_NODES"),
                      process="AWS_BATCH_JOB_NODE_INDEX")
MPI_OPERATOR = Scheduler(
    "Kubernetes' MPI Operator", ("K_MPI_JOB_ROLE",), has_number=False,
    size=lambda environ: 2 * is_operators_launcher(environ),
    node_file=lambda environ: KUBERNETES_HOSTS if is_operators_launcher(environ) and os.path.exists(
        KUBERNETES_HOSTS) else "")
# The first counts: Slurm passes on the variables of a task of Flux that submits a job (flux-framework/flux-core#5237).
SCHEDULERS: tuple[Scheduler, ...] = (SLURM, FLUX, PBS, LSF, SGE, HTCONDOR, AWS_BATCH, MPI_OPERATOR)


def get_scheduler(name: str) -> Scheduler:
    """Return the scheduler with a name, NO_SCHEDULER if there is none."""
    return next((row for row in SCHEDULERS if row.name == name), NO_SCHEDULER)


def describe_readable() -> str:
    """Return in words the schedulers whose job scripts can be read."""
    *first, last = (row.name for row in SCHEDULERS if row.directives)
    return f"{', '.join(first)} or {last}"
