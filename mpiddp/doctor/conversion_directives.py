"""Gives a recipe's directives one task for each rank, and each task its share of the cores."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .batch_script import BatchScript, Scheduler
from .directives import find_directives_end, read_number
from .edits import option_pattern

CHECK = "# check: "


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
