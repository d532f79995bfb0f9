"""Gives a recipe's directives one task for each rank, and each task its share of the cores."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .batch_script import BatchScript, Launch, Program, Scheduler
from .directives import find_directives_end, read_number
from .edits import option_pattern
from .shell import Token, Word

CHECK = "# check: "


def count_ranks_per_node(script: BatchScript, launch: Launch) -> int | None:
    """Return how many ranks the recipe starts on a node, None if that is unknown or the launcher's to decide."""
    if launch.program is Program.PYTHON:
        return None
    options, gpus = read_torch_options(launch), script.request.gpus_per_node
    if launch.program is Program.ACCELERATE:
        total, nodes = read_number(options.get("num-processes", "")), read_number(options.get("num-machines", ""))
        nodes = nodes or (script.request.nodes if "config-file" in options else 1)  # which may have the number
        return total // nodes if total and nodes and total % nodes == 0 else gpus or None
    processes = read_number(options.get("nproc-per-node", "1"))
    if processes == 1 and launch.launcher == "srun":  # one torchrun for each rank
        return read_number(launch.launcher_options.get("ntasks-per-node", "")) or script.request.tasks_per_node or 1
    return processes or gpus or None


def read_torch_options(launch: Launch) -> dict[str, str]:
    """Return the options of torchrun or `accelerate launch`, by their long names with dashes."""
    options: dict[str, str] = {}
    name = ""
    for word in launch.options:
        if word.startswith("-") and len(word) > 1:
            name, _, value = word.lstrip("-").partition("=")
            name = {"t": "tee", "r": "redirects"}.get(name, name.replace("_", "-"))
            options[name] = as_value(word, value, "" if launch.followed else "=")
        elif name:
            options[name] = as_value(word, word, "" if launch.followed else " ")
    return options


def as_value(word: str, value: str, separator: str) -> str:
    """Return the value of an option with what is written behind a separator, if there are variables in that."""
    token = getattr(word, "token", None)
    if token is None or not separator or "$" not in token.text or token.count != 1:
        return str(value)
    written = token.text.partition("=")[2] if separator == "=" else token.text
    return Word(value, getattr(word, "unknown", ()), Token(written, 1))


def count_cores(script: BatchScript) -> int | None:
    """Return the cores of a task of the recipe: sbatch's number, or the launcher's; None if there is none."""
    launcher = (read_number(launch.launcher_options.get("cpus-per-task", "")) for launch in script.launches)
    return script.request.cpus_per_task or next(filter(None, launcher), None)


def convert_directives(script: BatchScript, lines: Sequence[str], ranks: int | None, is_plain: bool) -> list[str]:
    """Return the lines with one task for each rank, and its share of the cores.

    `is_plain` tells that the launcher already starts the ranks, without torchrun or accelerate.
    """
    request = script.request
    if ranks is None:
        fits = is_plain and request.gpus_per_node in (None, request.tasks_per_node)
        return [*lines] if fits else insert_check(lines, "one task for each GPU of a node, and its share of the cores")
    if script.scheduler is not Scheduler.SLURM:
        return insert_check(lines, f"{ranks} tasks per node, and for each its share of the cores")
    if request.gpus_per_node not in (None, ranks):
        lines = insert_check(lines, f"tasks per node: the recipe has {ranks}, and {request.gpus_per_node} GPUs")
    tasks, cores = request.tasks_per_node or 1, count_cores(script)
    if tasks == ranks and request.gpus_per_task is None:
        return [*lines]
    changes: dict[str, str | None] = {"ntasks": None, "ntasks-per-gpu": None, "ntasks-per-node": str(ranks)}
    if cores is not None:
        changes["cpus-per-task"] = str(max(1, cores * tasks // ranks))
    if request.gpus_per_task is not None:
        changes |= {"gpus-per-task": None, "gpus-per-node": str(request.gpus_per_task * tasks)}
    edited = edit_directives(lines, changes)
    if cores is None:
        return insert_check(edited, "--cpus-per-task: a node's cores divided by its tasks, here and behind srun")
    if cores * tasks < 2 * ranks:
        return insert_check(edited, f"--cpus-per-task: the recipe has {cores * tasks} cores for {ranks} ranks")
    return edited


def edit_directives(lines: Sequence[str], changes: Mapping[str, str | None]) -> list[str]:
    """Return the lines with other values of sbatch's options, without those that are None; new ones come last."""
    missing = {name: value for name, value in changes.items() if value is not None}
    end = find_directives_end(lines)
    edited: list[str] = []
    for line in lines[:end]:
        new, changed = edit_directive(line, changes) if line.startswith("#SBATCH") else (line, frozenset[str]())
        missing = {name: value for name, value in missing.items() if name not in changed}
        edited += [new] if new.strip() != "#SBATCH" else []
    return [*edited, *(f"#SBATCH --{name}={value}" for name, value in missing.items()), *lines[end:]]


def edit_directive(line: str, changes: Mapping[str, str | None]) -> tuple[str, frozenset[str]]:
    """Return a directive with other values, and which of them it has; the comment behind a new value is left out."""
    changed = set()
    for name, value in changes.items():
        pattern = rf"\s+{option_pattern(Scheduler.SLURM, name)}(\s+#.*)?"
        if re.search(pattern, line):
            changed.add(name)
            line = re.sub(pattern, "" if value is None else f" --{name}={value}", line)
    return line, frozenset(changed)


def insert_check(lines: Sequence[str], text: str) -> list[str]:
    """Return the lines with something to check behind the directives."""
    end = find_directives_end(lines)
    return [*lines[:end], CHECK + text, *lines[end:]]
