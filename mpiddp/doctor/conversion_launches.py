"""Says which launches of a recipe mpiddp can replace, how many ranks they start, and which are of one training."""

from __future__ import annotations

import re

from .batch_script import BatchScript, Launch, Program
from .directives import read_number
from .shell import Command, Token, Word

STARTED = (Program.TORCHRUN, Program.TORCH_LAUNCH, Program.ACCELERATE)
TASK_VARIABLES = re.compile(r"\bSLURM_(NODEID|PROCID|LOCALID)\b")


def find_convertible(script: BatchScript) -> list[Launch]:
    """Return the launches whose place mpiddp can take; a Python by srun or mpirun only if nothing else trains.

    A step with one process on a node, beside trainings with more, is none.
    """
    launches = [launch for launch in script.launches if launch.script_words and "<<" not in launch.text]
    chosen = [launch for launch in launches if launch.program in STARTED]
    if not chosen and all(launch.program is not Program.MPIDDP for launch in launches):
        chosen = [launch for launch in launches if launch.program is Program.PYTHON and launch.launcher
                 and not launch.inner and launch.launcher_options.get("ntasks") != "1"]
    most = max((count_processes(script, launch) for launch in chosen), default=0)
    return [launch for launch in chosen if most < 2 or count_processes(script, launch) != 1]


def count_processes(script: BatchScript, launch: Launch) -> int:
    """Return the processes of a launch on a node, 0 if their number is unknown."""
    if launch.program is not Program.PYTHON:
        return count_ranks_per_node(script, launch) or 0
    options, nodes = launch.launcher_options, script.request.nodes
    total, per_node = (read_number(options.get(name, "")) for name in ("ntasks", "ntasks-per-node"))
    return per_node or (total // nodes if total and nodes else script.request.tasks_per_node or 0)


def starts_one_node(script: BatchScript, launch: Launch) -> bool:
    """Return whether a launch starts one node's part of a training: it names the node, or is in a loop over them."""
    options, rank = read_torch_options(launch), read_node_rank(launch)
    nodes = options.get("nnodes", options.get("num-machines", "1"))
    is_given = not TASK_VARIABLES.search(rank) and (not launch.followed or rank in launch.early)
    return bool(rank) and is_given and nodes != "1" and script.request.nodes != 1 and (
        "nodelist" in launch.launcher_options or (launch.in_loop and "$" in rank))


def read_node_rank(launch: Launch) -> str:
    """Return the number of a node among those of a training as it is given, empty if it is not."""
    options = read_torch_options(launch)
    return options.get("node-rank", options.get("machine-rank", ""))


def is_same_training(launch: Launch, other: Launch) -> bool:
    """Return whether two launches start the same script in the same way."""
    return (launch.script_words, launch.assignments) == (other.script_words, other.assignments)


def find_command(script: BatchScript, launch: Launch) -> Command:
    """Return the command that a launch is."""
    return next(command for command in script.commands if (command.line, command.text) == (launch.line, launch.text))


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
            options[name] = written_value(word, value, "" if launch.followed else "=")
        elif name:
            options[name] = written_value(word, word, "" if launch.followed else " ")
    return options


def written_value(word: str, value: str, separator: str) -> str:
    """Return the value of an option with what is written behind a separator, if there are variables in that."""
    token = getattr(word, "token", None)
    if token is None or not separator or "$" not in token.text or token.count != 1:
        return str(value)
    written = token.text.partition("=")[2] if separator == "=" else token.text
    return Word(value, getattr(word, "unknown", ()), Token(written, 1))
