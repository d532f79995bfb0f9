"""What rules know of a job script, and of each line that starts a training."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..systems import mpi_libraries
from ..systems.mpi_libraries import MpiLibrary
from .batch_script import BatchScript, read_file
from .directives import Request, complete, list_forms, number, read_number, read_request
from .findings import Finding, Severity
from .launches import Launch, Program, find_launchers, find_option
from .shell import Part, SimpleCommand, Word

GPU_OPTIONS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "select", "gpu")
STEP_GPU_OPTIONS = frozenset(("gpus-per-node", "gres", "gpus", "gpus-per-task"))  # a step's take the place of the job's
TASK_OPTIONS = ("ntasks-per-node", "ntasks")
BLANK_BEHIND = re.compile(r"(?<!\\)\\[ \t]+(#.*)?$")
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
NODE_FOLDERS = re.compile(r"(/tmp|/var/tmp|/dev/shm|/local(scratch|_scratch|disk)?|/scratch/local|/mnt/nvme|/lscratch)"
                          r"(/|$)|\$\{?(TMPDIR|SLURM_TMPDIR|LOCAL_SCRATCH|LOCALSCRATCH|JOB_TMPDIR)\b")
MAKERS = ("cp", "rsync", "tar", "unzip", "git", "wget", "curl", "sbcast", "ln", "mkdir", "touch", "mv", "cat", "tee",
          "python", "python3", "conda", "uv", "pip", "apptainer", "singularity", "virtualenv", "hf",
          "huggingface-cli", "envsubst", "sed", "echo", "printf")
# What is in the words or the text of a script of which one process uses several GPUs, or starts others.
SEVERAL_GPUS = re.compile(r"spawn|(?<!distributed)(?<!distributed[-_ ])(?<!sharded)(?<!sharded[-_ ])data.?parallel|"
                          r"device.?map|tensor.?parallel|\bray\b|vllm|accelerate.dispatch|multiprocess|"
                          r"\b(mp|multiprocessing)\.Process\(", re.IGNORECASE)


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
        words = (*self.launch.program_options, *self.launch.script_words)
        device = find_option(words, "device") or self.launch.command.assignments.get("MPIDDP_DEVICE")
        return device != "cpu" and find_option(words, "backend") != "gloo"

    @property
    def processes_per_node(self) -> int | None:
        """The number of training processes on a node: tasks, or what a starter starts."""
        starter, options = self.launch.starter, self.launch.program_options
        if starter is None:
            return self.request.tasks_per_node
        value = find_option(options, starter.per_node) if starter.per_node else None
        if value in ("gpu", "auto"):
            return self.request.gpus_per_node
        if value is not None:
            return read_number(value)
        total = read_number(find_option(options, starter.total) or "") if starter.total else None
        nodes = find_option(options, starter.nodes)
        count = 1 if is_alone(self.launch) else self.request.nodes if nodes is None else read_number(nodes)
        if total is not None:
            return total // count if count else None
        return 1 if starter.needs_address else None


class Context:
    """A script and a host, for the rules."""

    def __init__(self, script: BatchScript, host: Host) -> None:
        self.script, self.host = script, host

    @cached_property
    def broken_lines(self) -> tuple[int, ...]:
        """The lines with a backslash that a blank or a comment follows, so that the command ends there."""
        script, lines = self.script, self.script.lines
        quoted = script.documents | script.inside
        return tuple(number for number, line in enumerate(lines[:-1], 1) if BLANK_BEHIND.search(line)
                     and lines[number].strip() and not {number, number + 1} & quoted
                     and not line.lstrip().startswith("#"))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The lines that start trainings, without those that are broken or start a helper in Python."""
        trainings = [launch for launch in self.script.trainings if not any(
            launch.line <= number <= launch.command.last_line for number in self.broken_lines)]
        has_launcher = any(launch.launcher or launch.program is not Program.PYTHON for launch in trainings)
        steps = [make_step(self.script, self._add_configured(launch)) for launch in trainings
                 if launch.launcher or launch.program is not Program.PYTHON or not has_launcher]
        main = [step for step in steps if step.launch.program is not Program.PYTHON or step.request.tasks != 1]
        return tuple(main or steps)

    def _add_configured(self, launch: Launch) -> Launch:
        """Return a launch of a starter with the total of processes that its configuration file has for it."""
        path, starter = find_option(launch.program_options, "config-file"), launch.starter
        if starter is None or not starter.total or not path or launch.container or (
                find_option(launch.program_options, starter.total) is not None):
            return launch
        place = os.path.join(self.script.options.get("chdir", ""), launch.folder or "", path)
        numbers = dict(re.findall(r"^(num_\w+):\s*(\d+)\s*$", self.host.read(place) or "", re.MULTILINE))
        added = [Word([Part(f"--{name}={numbers[key]}")])
                 for name in (starter.total, starter.nodes) if (key := name.replace("-", "_")) in numbers
                 and find_option(launch.program_options, name) is None]
        machines = find_option(launch.program_options, starter.nodes) or numbers.get("num_machines")
        is_split = machines == "1" and self.script.request.nodes != 1
        return launch if is_split else replace(launch, program_options=(*launch.program_options, *added))

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules that the script loads."""
        return tuple(word for command in self.script.commands
                     if command.words[0] in ("module", "ml") and command.words[1:2] not in (("unload",), ("use",))
                     for word in command.words[1:] if word not in ("load", "add", "swap", "switch", "restore", "purge")
                     and not word.startswith("-"))

    @cached_property
    def mpi(self) -> tuple[MpiLibrary | None, str]:
        """The MPI library whose module the script loads last, and the module."""
        for module in reversed(self.modules):
            for part in module.lower().split("/"):
                for library in mpi_libraries.LIBRARIES:
                    if library.modules and re.match(library.modules, part):
                        return library, module
        return None, ""

    def option_line(self, *names: str) -> int | None:
        """Return the line of the first of these options that a directive gives."""
        return next((self.script.option_lines[name] for name in names if name in self.script.option_lines), None)

    def has_text(self, pattern: str) -> bool:
        """Return whether a line of the script that is no comment matches a pattern."""
        return any(re.search(pattern, line) for line in self.script.lines if not line.lstrip().startswith("#"))

    def directive(self, name: str, value: str = "") -> str:
        """Return the directive with an option."""
        form = self.script.form
        return f"{form.sentinels[0]} {form.spell(name, value)}" if form else ""

    def is_here(self, folder: str | None, path: str) -> bool:
        """Return whether a file exists, is made by the script, or cannot be looked for."""
        base = self.script.options.get("chdir", "")
        if re.search(r"[$*`]", path) or (folder is None and not os.path.isabs(path)) or NODE_FOLDERS.match(path) or (
                "$" in base and not os.path.isabs(path)):
            return True
        if any(map(self.host.exists, self.list_places(folder, path))):
            return True
        name, parent = os.path.basename(path), os.path.basename(os.path.dirname(path))
        return any(
            any(name in word or (parent and parent in word) or path.startswith(f"{word.rstrip('/')}/")
                for word in command.words[1:] if word != path or command.words[0] == "mkdir")
            or any(name in redirect.file for redirect in command.redirects)
            for command in self._makers)

    @cached_property
    def _makers(self) -> tuple[SimpleCommand, ...]:
        """The commands that may make files."""
        trainings = {id(launch.command) for launch in self.script.trainings}
        return tuple(command for command in self.script.commands if id(command) not in trainings and (
            command.words[0] in MAKERS or find_launchers(command.words, 0)))

    def list_places(self, folder: str | None, path: str) -> list[str]:
        """Return where a file may be that a job looks for in a folder."""
        places = [os.path.join(self.script.options.get("chdir", ""), folder or "", path)]
        if folder in ("", "."):
            places.append(os.path.join(os.path.dirname(self.script.path), path))
        return places

    def read_training(self, launch: Launch) -> str:
        """Return the text of a training script, empty if it is not here."""
        places = self.list_places(launch.folder, launch.script) if launch.script else []
        return next(filter(None, map(self.host.read, places)), "")

    def may_use_several_gpus(self, launch: Launch) -> bool:
        """Return whether a plain Python script may use several GPUs itself, or start processes.

        Its words or its text say so; a script that gets another script to run is a starter itself.
        """
        words = (*launch.program_options, *launch.script_words)
        starts_script = any(word.endswith(".py") for word in launch.script_words[1:])
        return starts_script or self.has_text(r"\bray\s+start\b") or any(
            map(SEVERAL_GPUS.search, (" ".join(words), self.read_training(launch))))

    @cached_property
    def divides_gpus(self) -> bool:
        """Return whether trainings divide a node's GPUs: several run at once, or see different ones."""
        values = {match for line in self.script.lines if not line.lstrip().startswith("#") for match in re.findall(
            rf"\b(?:{'|'.join(VISIBLE_DEVICES)})=([^\s;&|]*)", line)}
        at_once = [step for step in self.steps if step.launch.command.is_background]
        return len(values) > 1 or len(at_once) > 1 or any(
            step.launch.command.in_loop or step.request.gpus_per_node not in (None, self.script.request.gpus_per_node)
            for step in at_once)


class Rule(NamedTuple):
    """A rule: its name, and the function that finds problems."""

    name: str
    find: Callable[[Context], Iterator[Finding]]


RULES: list[Rule] = []


def rule(name: str) -> Callable[[Callable[[Context], Iterator[Finding]]], Callable[[Context], Iterator[Finding]]]:
    """Make a rule of a function."""

    def register(find: Callable[[Context], Iterator[Finding]]) -> Callable[[Context], Iterator[Finding]]:
        RULES.append(Rule(name, find))
        return find

    return register


def error(line: int | None, message: str, reason: str, *write: str, advice: str = "") -> Finding:
    """Return what makes the job fail, or train several times."""
    return Finding("", Severity.ERROR, line, message, reason, advice, tuple(filter(None, write)))


def warning(line: int | None, message: str, reason: str, *write: str, advice: str = "") -> Finding:
    """Return what wastes resources, or may make the job fail."""
    return replace(error(line, message, reason, *write, advice=advice), severity=Severity.WARNING)


def note(line: int | None, message: str, reason: str, *write: str, advice: str = "") -> Finding:
    """Return what breaks nothing."""
    return replace(error(line, message, reason, *write, advice=advice), severity=Severity.NOTE)


def make_step(script: BatchScript, launch: Launch) -> Step:
    """Return a launch with the resources that it gets."""
    options, job, row = dict(launch.options), script.request, launch.row
    if launch.has_unknown_options:
        return Step(launch, Request(), {**script.options, **options})
    if not launch.launcher:
        return Step(launch, replace(job, tasks=1, tasks_per_node=1), script.options)
    if row.system is not None:
        form = row.system.directives
        inherited = dict(script.options) if script.scheduler == row.system else {}
        if form is not None and not form.has_one_task:
            inherited = {name: value for name, value in inherited.items() if name == "nodes"}
        if options.get("ntasks") == "1" and "nodes" not in options:
            inherited["nodes"] = "1"  # the launcher reduces their number
        if "ntasks" in options and "ntasks-per-node" not in options:
            inherited.pop("ntasks-per-node", None)
        elif "ntasks-per-node" in options and "ntasks" not in options:
            inherited.pop("ntasks", None)
        if not STEP_GPU_OPTIONS.isdisjoint(options):
            inherited = {name: value for name, value in inherited.items() if name not in STEP_GPU_OPTIONS}
        merged = inherited | options
        request = read_request(form, merged)
        if script.scheduler != row.system and not {"ntasks", "ntasks-per-node"} & set(options):
            request = replace(request, nodes=None, tasks=None, tasks_per_node=None)  # the allocation's, unknown here
        return Step(launch, request, merged)
    return Step(launch, read_other_request(script, launch), {**script.options, **options})


def read_other_request(script: BatchScript, launch: Launch) -> Request:
    """Return the resources of a launch by an MPI's launcher, or by one that starts sets of tasks."""
    job, options = script.request, launch.options
    if "sets-per-node" in launch.row.names.values():
        sets, tasks, gpus = (number(options, f"{name}-per-{unit}") for name, unit in (
            ("sets", "node"), ("tasks", "set"), ("gpus", "set")))
        return Request(job.nodes, None, sets * tasks if sets and tasks else None, number(options, "cpus-per-set"),
                       sets * gpus if sets and gpus is not None else None)
    is_jobs = options.get("ntasks", "").strip("${}") in [
        variable for _, form in list_forms() for variable, name in form.variables.items() if name == "ntasks"]
    if (is_jobs or "ntasks" not in options) and "ntasks-per-node" not in options:
        if "select" in script.options and job.tasks_per_node is None and "hostfile" not in options:
            return complete(replace(job, tasks_per_node=1))
        return job
    return complete(replace(job, tasks=number(options, "ntasks"), tasks_per_node=number(options, "ntasks-per-node"),
                            gpus_per_task=None))


def is_alone(launch: Launch) -> bool:
    """Return whether a starter trains on one node alone: it is not told of others."""
    starter = launch.starter
    return starter is not None and bool(starter.several_nodes) and all(
        find_option(launch.program_options, name) in (None, "1") for name in (starter.nodes, *starter.elsewhere))


def count(number_of: int, noun: str) -> str:
    """Return a number with its noun."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number_of} {noun}{plural * (number_of != 1)}"
