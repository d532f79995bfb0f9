"""The command that starts a job: which launcher it has, and how it runs on other nodes. Pure functions."""

from __future__ import annotations

import enum
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..command.options import split
from ..config import STANDARD_INPUT

SRUN_NODES = ("-N", "--nodes", "-w", "--nodelist", "-x", "--exclude", "-n", "--ntasks", "-F", "--nodefile",
              "--ntasks-per-node")
MPIRUN_NODES = ("-H", "-host", "--host", "-hosts", "-machinefile", "--machinefile", "-hostfile", "--hostfile", "-f",
                "-N", "-ppn", "--ppn", "-perhost", "-npernode", "--npernode", "-grr", "-rr")
COUNT = ("-n", "-np", "--n", "--np", "-c")
VALUES = {  # options of launchers that take so many words, of which one may be called as a program is: -p test
    **dict.fromkeys((
        "-A", "-B", "-C", "-D", "-G", "-J", "-L", "-M", "-S", "-T", "-W", "-a", "-b", "-d", "-e", "-i", "-m", "-o",
        "-p", "-q", "-r", "-t", "--account", "--chdir", "--comment", "--constraint", "--cpus-per-task",
        "--container-image", "--container-mounts", "--container-name", "--container-workdir", "--distribution",
        "--error", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gres", "--input", "--job-name", "--mem", "--mpi",
        "--output", "--partition", "--qos", "--reservation", "--time"), 1),
    **dict.fromkeys((
        *COUNT, "-x", "--bind-to", "-bind-to", "--map-by", "-map-by", "--rank-by", "-wdir", "--wdir", "-wd", "--prefix",
        "-bootstrap", "-launcher", "-rmk", "-iface", "-genvlist", "-envlist", "-output-filename",
        "--output-filename", "--output", "--tune"), 1),
    **dict.fromkeys(("-mca", "--mca", "--gmca", "-gmca", "--prtemca", "--pmixmca", "-genv", "-env"), 2),
}


class Launcher(enum.Enum):
    """What starts the ranks."""

    SRUN = "srun"
    OPEN_MPI = "Open MPI's mpirun"
    HYDRA = "MPICH's or Intel MPI's mpiexec"
    NONE = "no launcher"


class Command(NamedTuple):
    """A command in parts: the launcher's `program` and its `options`, and what it starts, `rest`.

    `tasks` is the number of ranks that the options ask for, None if they don't. `error_file` and `abort_grace` are the
    values of mpiddp's options, empty where they are not given; the first one is not in `rest`.
    """

    launcher: Launcher
    program: str
    options: tuple[str, ...]
    rest: tuple[str, ...]
    tasks: int | None = None
    error_file: str = ""
    abort_grace: str = ""


class CommandError(ValueError):
    """A command that cannot be started on nodes of our choice; the text says why, and what to do."""


def read(command: Sequence[str], version: str, is_program: Callable[[str], object] = shutil.which) -> Command:
    """Return a command in parts; `version` is what its program prints for --version.

    A launcher's options end where the name of a program stands. Raises CommandError.
    """
    launcher = launcher_of(command[0], version)
    if launcher is Launcher.NONE:
        rest, error_file, abort_grace = own_options(command)
        return Command(launcher, "", (), rest, None, error_file, abort_grace)
    begin = begin_of_program(command, is_program)
    program, *options = command[:begin]
    rest, error_file, abort_grace = own_options(command[begin:])
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
        if ":" in rest:
            raise CommandError("':' between programs: mpiddp.supervise gives all nodes as many ranks of one program")
    return Command(launcher, program, tuple(options), rest, tasks, error_file, abort_grace)


def begin_of_program(command: Sequence[str], is_program: Callable[[str], object]) -> int:
    """Return where in a launcher's command the program stands that it starts; the end, if that is not found."""
    at = 1
    while at < len(command):
        if command[at][:1] == "-":
            at += VALUES.get(command[at], 0)
        elif is_program(command[at]):
            break
        at += 1
    return min(at, len(command))


def own_options(words: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """Return the words without mpiddp's --error-file, the value of that, and --abort-grace's; empty if not given.

    The options stand between `-m mpiddp`, or `mpiddp`, and the script: what follows is the script's own. Raises
    CommandError for a script on standard input.
    """
    by_module = [at + 2 for at, pair in enumerate(pairwise(words)) if pair == ("-m", "mpiddp")]
    begins = by_module or [at + 1 for at, word in enumerate(words) if os.path.basename(word) == "mpiddp"]
    if not begins:
        return tuple(words), "", ""
    ours, script = split(words[begins[0]:])
    if script[:1] == [STANDARD_INPUT]:
        raise CommandError("-: standard input cannot be read a second time; save the script in a file, and name that")
    found = {"--error-file": "", "--abort-grace": ""}
    left = []
    while ours:
        name, is_given, value = ours.pop(0).partition("=")
        if name in found:
            found[name] = value if is_given or not ours else ours.pop(0)
        if name != "--error-file":
            left.append(f"{name}={found[name]}" if name in found else name + is_given + value)
    return (*words[:begins[0]], *left, *script), found["--error-file"], found["--abort-grace"]


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
