"""What a rule finds in a job script, and what rules know of each line that starts a training."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .batch_script import BatchScript, Launch, Program, Request, Scheduler, read_file
from .directives import complete, number, read_number, read_request
from .findings import Severity
from .launches import MPI_LAUNCHERS

STARTERS = (Program.TORCHRUN, Program.TORCH_LAUNCH, Program.ACCELERATE, Program.DEEPSPEED)  # of the ranks of a node
GPU_OPTIONS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "select", "gpu")
STEP_GPU_OPTIONS = frozenset(("gpus-per-node", "gres", "gpus", "gpus-per-task"))  # srun's take the place of sbatch's
ALL_TASKS = r"\$\{?(SLURM_NTASKS|LSB_DJOB_NUMPROC)\}?"  # the job's number, also where another system is meant
TASK_OPTIONS = ("ntasks-per-node", "ntasks")
# What a module's name begins with, if it is of an MPI that srun must be told of; or of a Cray, where it need not.
MPI_MODULES = {"Open MPI": r"(openmpi|ompi|hpcx)\b", "Intel MPI": r"(impi|intel-?mpi|(intel-)?oneapi-mpi)\b",
               "MPICH": r"(mpich|mvapich2?)\b", "Cray MPICH": r"cray-mpich"}


class Change(NamedTuple):
    """A change of the script before its line `line`, which counts from 1, or in it.

    Without a pattern, `text` is a line to insert; else what the pattern matches first becomes `text`, and a line of
    which nothing is left is removed. Several texts for the same pattern exclude each other, unless each `adds_words`.
    """

    line: int
    text: str
    pattern: str = ""
    adds_words: bool = False


@dataclass(frozen=True)
class Fix:
    """What to do about a problem: changes of the script, which are certain if there is no advice in words, too."""

    changes: tuple[Change, ...] = ()
    advice: str = ""

    def __add__(self, other: Fix) -> Fix:
        advice = dict.fromkeys(filter(None, (self.advice, other.advice)))
        return Fix((*self.changes, *other.changes), "; ".join(advice))

    def otherwise(self, other: Fix | str) -> Fix:
        """Return this, or another fix or advice in words if there is no change."""
        return self if self.changes else Fix(advice=other) if isinstance(other, str) else other


class Problem(NamedTuple):
    """What a rule has found: where, what is so, why that matters, and what to do."""

    severity: Severity
    line: int | None
    message: str
    reason: str
    fix: Fix = Fix()


class Host:
    """What rules ask about this host: files, seen from the folder of the submission."""

    def __init__(self, folder: str = "", environ: Mapping[str, str] = {}) -> None:
        self.folder, self.environ = folder, environ

    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists."""
        return os.path.exists(os.path.join(self.folder, path))

    def is_folder(self, path: str) -> bool:
        """Return whether a folder exists."""
        return os.path.isdir(os.path.join(self.folder, path))

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, none if it cannot be read."""
        try:
            return os.listdir(os.path.join(self.folder, folder))
        except OSError:
            return []

    def read(self, path: str) -> str | None:
        """Return a file's text, None if it cannot be read."""
        return read_file(os.path.join(self.folder, path))


@dataclass(frozen=True)
class Step:
    """A line that starts a training, with the resources that it gets as far as they are known."""

    launch: Launch
    request: Request
    options: Mapping[str, str]

    @property
    def uses_gpus(self) -> bool:
        """Return whether the training is not told to run on CPUs."""
        words = (*self.launch.options, *self.launch.script_words)
        return (find_option(words, "device") or self.launch.assignments.get("MPIDDP_DEVICE")) != "cpu" and (
            find_option(words, "backend") != "gloo")

    @property
    def processes_per_node(self) -> int | None:
        """The number of training processes on a node: tasks, or what torchrun and its like start."""
        launch, request = self.launch, self.request
        if launch.program not in STARTERS:
            return request.tasks_per_node
        value = find_option(launch.options, "nproc-per-node") or find_option(launch.options, "num-gpus")
        total = find_option(launch.options, "num-processes")
        if value in ("gpu", "auto"):
            return request.gpus_per_node
        if value is None and (processes := read_number(total or "")) is not None and request.nodes:
            return processes // (1 if is_lone(launch) else request.nodes)
        if value is None:
            return 1 if launch.program in (Program.TORCHRUN, Program.TORCH_LAUNCH) else None
        return read_number(value)


class Context:
    """A script and a host, for the rules."""

    def __init__(self, script: BatchScript, host: Host) -> None:
        self.script, self.host = script, host

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The lines that start trainings, without those that start a helper in Python."""
        trainings = self.script.trainings
        has_launcher = any(launch.launcher or launch.program is not Program.PYTHON for launch in trainings)
        chosen = [launch for launch in trainings
                  if launch.launcher or launch.program is not Program.PYTHON or not has_launcher]
        steps = [make_step(self.script, self._add_configured(launch)) for launch in chosen]
        main = [step for step in steps if step.launch.program is not Program.PYTHON or step.request.tasks != 1]
        return tuple(main or steps)

    def _add_configured(self, launch: Launch) -> Launch:
        """Return a launch of accelerate with the number of processes that its configuration file has for it."""
        path = find_option(launch.options, "config-file")
        if launch.program is not Program.ACCELERATE or not path or launch.container or (
                find_option(launch.options, "num-processes") is not None):
            return launch
        place = os.path.join(self.script.options.get("chdir", ""), launch.folder or "", path)
        numbers = dict(re.findall(r"^(num_\w+):\s*(\d+)\s*$", self.host.read(place) or "", re.MULTILINE))
        machines = find_option(launch.options, "num-machines") or numbers.get("num_machines")
        is_split = machines == "1" and self.script.request.nodes != 1
        if is_split or "num_processes" not in numbers:
            return launch
        return replace(launch, options=(*launch.options, f"--num_processes={numbers['num_processes']}"))

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the script loads."""
        return tuple(word for command in self.script.commands
                     if command.words[0] in ("module", "ml") and command.words[1:2] not in (("unload",), ("use",))
                     for word in command.words[1:] if word not in ("load", "add", "swap", "switch", "restore", "purge")
                     and not word.startswith("-"))

    def option_line(self, *names: str) -> int | None:
        """Return the line of the first of these options that a directive gives."""
        lines = self.script.option_lines
        return next((lines[name] for name in names if name in lines), None)

    def find_assignment(self, name: str) -> tuple[int | None, str]:
        """Return the line in which a variable is set, and its value as it is written; empty if it is not set."""
        start = re.compile(rf"\s*(?:export\s+|declare\s+-x\s+)?(?:\w+=\S+\s+)*{name}=[\"']?([^\"'\s;#]+)")
        for line, text in enumerate(self.script.lines, 1):
            if match := start.match(text):
                return line, match[1]
        return None, ""

    def has_text(self, pattern: str) -> bool:
        """Return whether a line of the script that is no comment matches a pattern."""
        return any(re.search(pattern, line) for line in self.script.lines if not line.lstrip().startswith("#"))


class Rule(NamedTuple):
    """A rule: its name, what it is about in one line, and the function that finds problems."""

    name: str
    summary: str
    find: Callable[[Context], Iterator[Problem]]


def rule(name: str, summary: str) -> Callable[[Callable[[Context], Iterator[Problem]]], Rule]:
    """Make a rule of a function."""
    return lambda find: Rule(name, summary, find)


def make_step(script: BatchScript, launch: Launch) -> Step:
    """Return a launch with the resources that it gets."""
    options = dict(launch.launcher_options)
    if launch.has_unknown_options:
        return Step(launch, Request(), {**script.options, **options})
    if launch.launcher == "srun":
        merged = {**script.options} if script.scheduler is Scheduler.SLURM else {}
        if options.get("ntasks") == "1" and "nodes" not in options:
            merged["nodes"] = "1"  # srun reduces their number
        if "ntasks" in options and "ntasks-per-node" not in options:
            merged.pop("ntasks-per-node", None)
        elif "ntasks-per-node" in options and "ntasks" not in options:
            merged.pop("ntasks", None)
        if not STEP_GPU_OPTIONS.isdisjoint(options):
            merged = {name: value for name, value in merged.items() if name not in STEP_GPU_OPTIONS}
        merged |= options
        request = read_request(Scheduler.SLURM, merged)
        if script.scheduler is not Scheduler.SLURM and not {"ntasks", "ntasks-per-node"} & set(options):
            request = replace(request, nodes=None, tasks=None, tasks_per_node=None)  # the allocation's, unknown here
        return Step(launch, request, merged)
    if launch.launcher == "flux":
        job = script.options if script.scheduler is Scheduler.FLUX else {}
        merged = {**({"nodes": job["nodes"]} if "nodes" in job else {}), **options}
        return Step(launch, read_request(Scheduler.FLUX, merged), merged)
    return Step(launch, read_other_request(script, launch), {**script.options, **options})


def read_other_request(script: BatchScript, launch: Launch) -> Request:
    """Return the resources of a launch by mpirun, jsrun, or no launcher in a job."""
    job, options = script.request, launch.launcher_options
    if launch.launcher == "jsrun":
        sets, tasks = number(options, "rs_per_host"), number(options, "tasks_per_rs")
        gpus = number(options, "gpu_per_rs")
        return Request(job.nodes, None, sets * tasks if sets and tasks else None, number(options, "cpu_per_rs"),
                       sets * gpus if sets and gpus is not None else None)
    if not launch.launcher:
        return replace(job, tasks=1, tasks_per_node=1)
    is_jobs = re.fullmatch(ALL_TASKS, options.get("ntasks", "")) is not None
    if (is_jobs or "ntasks" not in options) and "ntasks-per-node" not in options:
        if script.scheduler is Scheduler.PBS and job.tasks_per_node is None and "hostfile" not in options:
            return complete(replace(job, tasks_per_node=1))
        return job
    return complete(replace(job, tasks=number(options, "ntasks"), tasks_per_node=number(options, "ntasks-per-node"),
                            gpus_per_task=None))


def find_option(words: Sequence[str], name: str) -> str | None:
    """Return the value of a long option, with dashes or underscores, None if it is not given."""
    for position, word in enumerate(words):
        own, has_value, value = word.partition("=")
        if own.startswith("-") and own.lstrip("-").replace("_", "-") == name:
            return value if has_value else next(iter(words[position + 1:position + 2]), "")
    return None


def is_lone(launch: Launch) -> bool:
    """Return whether `accelerate launch` or deepspeed trains on one node alone: it is not told of others."""
    names = {Program.ACCELERATE: ("config-file", "num-machines"),
             Program.DEEPSPEED: ("hostfile", "num-nodes", "no-ssh")}.get(launch.program, ())
    return bool(names) and all(find_option(launch.options, name) in (None, "1") for name in names)


def is_mpirun(launch: Launch) -> bool:
    """Return whether mpirun or a relative of it starts the ranks."""
    return launch.launcher in MPI_LAUNCHERS


def count(number_of: int, noun: str) -> str:
    """Return a number with its noun."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number_of} {noun}{plural * (number_of != 1)}"


def find_mpi(context: Context) -> tuple[str, str]:
    """Return the MPI whose module the script loads, and the module; empty if there is none."""
    for module in reversed(context.modules):
        for part in module.lower().split("/"):
            for name, pattern in MPI_MODULES.items():
                if re.match(pattern, part):
                    return name, module
    return "", ""


def parse_memory_mb(text: str) -> float | None:
    """Return a size as Slurm reads it, in MB; None if it cannot be read."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]+)?)([KMGT]?)[Bb]?", text, re.IGNORECASE)
    units = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
    return float(match[1]) * units[match[2].upper()] if match else None
