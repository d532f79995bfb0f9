"""The command that starts a job: which launcher it has, and how it runs on other nodes. Pure functions."""

from __future__ import annotations

import enum
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

SRUN_NODES = ("-N", "--nodes", "-w", "--nodelist", "-x", "--exclude", "-n", "--ntasks", "-F", "--nodefile")
MPIRUN_NODES = ("-H", "-host", "--host", "-hosts", "-machinefile", "--machinefile", "-hostfile", "--hostfile", "-f")
COUNT = ("-n", "-np", "--np", "-c")


class Launcher(enum.Enum):
    """What starts the ranks."""

    SRUN = "srun"
    OPEN_MPI = "Open MPI's mpirun"
    HYDRA = "MPICH's or Intel MPI's mpiexec"
    NONE = "no launcher"


class Command(NamedTuple):
    """A command in parts: the launcher's `program` and its `options`, and what it starts, `rest`.

    `tasks` is the number of ranks that the options ask for, None if they don't; `error_file` is the job's own.
    """

    launcher: Launcher
    program: str
    options: tuple[str, ...]
    rest: tuple[str, ...]
    tasks: int | None = None
    error_file: str = ""


class CommandError(ValueError):
    """A command that cannot be started on nodes of our choice; the text says why, and what to do."""


def read(command: Sequence[str], version: str, is_program: Callable[[str], object] = shutil.which) -> Command:
    """Return a command in parts; `version` is what its program prints for --version.

    A launcher's options end where the name of a program stands. Raises CommandError.
    """
    launcher = launcher_of(command[0], version)
    if launcher is Launcher.NONE:
        return Command(launcher, "", (), tuple(command), error_file=value_of("--error-file", command))
    begin = next((at for at, word in enumerate(command) if at and word[:1] != "-" and is_program(word)), len(command))
    program, *options = command[:begin]
    rest = tuple(command[begin:])
    given = SRUN_NODES if launcher is Launcher.SRUN else MPIRUN_NODES
    for option in options:
        name = option.split("=")[0]
        if name in given or (launcher is Launcher.SRUN and option[:2] in given and not option.startswith("--")):
            raise CommandError(f"{option}: mpiddp.supervise chooses the nodes of {launcher.value}; leave it out, and "
                               "say --nodes N before the command")
    if not rest:
        raise CommandError(f"{' '.join(command)}: starts no program that is found")
    tasks = None
    if launcher is not Launcher.SRUN:
        options, tasks = without_count(options)
    return Command(launcher, program, tuple(options), rest, tasks, value_of("--error-file", rest))


def launcher_of(program: str, version: str) -> Launcher:
    """Return which launcher a program is."""
    name = os.path.basename(program)
    if name == "srun":
        return Launcher.SRUN
    if not name.startswith(("mpirun", "mpiexec", "orterun", "prterun")):
        return Launcher.NONE
    is_open = any(word in version for word in ("Open MPI", "OpenRTE", "PRRTE", "open-mpi"))
    return Launcher.OPEN_MPI if is_open else Launcher.HYDRA


def without_count(options: Sequence[str]) -> tuple[list[str], int | None]:
    """Return a launcher's options without the number of ranks, and that; raise CommandError if it is none."""
    for at, option in enumerate(options[:-1]):
        if option in COUNT:
            if not options[at + 1].isdecimal():
                raise CommandError(f"{option} {options[at + 1]}: must be a number of ranks")
            return [*options[:at], *options[at + 2:]], int(options[at + 1])
    return list(options), None


def value_of(name: str, words: Sequence[str]) -> str:
    """Return the value of an option, empty if it is not among the words."""
    for at, word in enumerate(words):
        if word == name and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""


def on_nodes(
    command: Command, nodes: Sequence[str], tasks_per_node: int, step: str, variables: Sequence[str]
) -> list[str]:
    """Return the words that start a command on `nodes`, none for this machine alone; `step` names it.

    `variables` are those that the ranks have to see.
    """
    count = str(max(1, len(nodes)) * tasks_per_node)
    return [command.program, *placed(command.launcher, nodes, count, tasks_per_node, step, variables), *command.options,
            *command.rest] if command.program else list(command.rest)


def placed(
    launcher: Launcher, nodes: Sequence[str], count: str, tasks_per_node: int, step: str, variables: Sequence[str]
) -> Iterator[str]:
    """Yield a launcher's options for nodes and ranks."""
    if launcher is Launcher.SRUN:  # what a lost node still holds of the step before must not be waited for
        yield from ("--overlap", f"--nodes={len(nodes)}", f"--ntasks={count}", f"--nodelist={','.join(nodes)}",
                    f"--job-name={step}")
        return
    yield from ("-n", count)
    if launcher is Launcher.OPEN_MPI:
        if nodes:
            yield from ("--host", ",".join(f"{node}:{tasks_per_node}" for node in nodes))
        for name in variables:
            yield from ("-x", name)
    elif nodes:
        yield from ("-hosts", ",".join(nodes), "-ppn", str(tasks_per_node))
