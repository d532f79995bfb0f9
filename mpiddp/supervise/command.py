"""Parses the command that starts a job, and makes the same command for other nodes. Pure functions."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..base.config import STANDARD_INPUT
from ..discovery import launchers, schedulers
from ..options.table import split_command

SLURM, FLUX = schedulers.SLURM.name, schedulers.FLUX.name
STARTERS = "srun, flux run, mpirun or mpiexec"
MPI_PROGRAM = r"(mpirun|mpiexec|orterun|prterun).*"
MPI_COUNT_OPTIONS = ("-n", "-np", "--n", "--np", "-c")
MPI_NODE_OPTIONS = ("-H", "-host", "--host", "-hosts", "--hosts", "-machinefile", "--machinefile", "-hostfile",
                    "--hostfile", "-f", "-grr", "-rr")
MPI_OPTION_VALUES = {
    **dict.fromkeys((
        *MPI_COUNT_OPTIONS, "-x", "--bind-to", "-bind-to", "--map-by", "-map-by", "--rank-by", "-wdir", "--wdir", "-wd",
        "--prefix", "-bootstrap", "-launcher", "-rmk", "-iface", "-genvlist", "-envlist", "-output-filename",
        "--output-filename", "--output", "--tune"), 1),
    **dict.fromkeys(("-mca", "--mca", "--gmca", "-gmca", "--prtemca", "--pmixmca", "-genv", "-env"), 2),
}


class JobStep(NamedTuple):
    """A job to start: its nodes (none: this machine only), the ranks on each, and its name.

    `variables` are the names of the environment variables that the launcher must pass to the ranks.
    """

    nodes: Sequence[str]
    tasks_per_node: int
    name: str
    variables: Sequence[str]

    @property
    def tasks(self) -> int:
        """Number of ranks."""
        return max(1, len(self.nodes)) * self.tasks_per_node


class LauncherCommand(NamedTuple):
    """The command line of a launcher, which is a row of discovery/launchers.py.

    Regular expressions recognise it: `program` matches the program's name, `path` its path with links resolved, and
    `version` the output of --version.

    Options: `chooses` choose nodes, `counts` set the number of ranks, `per_node` the ranks of each node, and `values`
    has the number of words that follow an option. `step_options` yields the options that start a JobStep. `is_mpiexec`:
    ':' separates programs, as in the MPI standard; other launchers' short options may be joined to their value.

    It needs an allocation of `system` (any if empty), which the commands in `begin` start. `interrupts` is the number
    of SIGINTs that end a job. `ends_by_quit`: SIGQUIT ends it; others forward SIGQUIT to the ranks. `stops_ranks`: at
    SIGTSTP it stops the ranks and keeps running. `hides_losses`: its status may be 0 after a loss.
    """

    launcher: launchers.Launcher
    program: str
    step_options: Callable[[JobStep], Iterator[str]]
    path: str = ""
    version: str = ""
    chooses: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    per_node: tuple[str, ...] = ()
    values: Mapping[str, int] = {}
    is_mpiexec: bool = False
    system: str = ""
    begin: str = ""
    interrupts: int = 1
    ends_by_quit: bool = False
    stops_ranks: bool = False
    hides_losses: bool = False

    @property
    def name(self) -> str:
        """The name in messages, empty for no launcher."""
        return self.launcher.name

    @property
    def words(self) -> tuple[str, ...]:
        """The first words of the command."""
        return tuple(self.launcher.command.split())


def srun_options(step: JobStep) -> Iterator[str]:
    """Yield srun's options; with --overlap it does not wait for resources that a lost node still holds."""
    yield from ("--overlap", f"--nodes={len(step.nodes)}", f"--ntasks={step.tasks}",
                f"--nodelist={','.join(step.nodes)}", f"--job-name={step.name}")


def flux_options(step: JobStep) -> Iterator[str]:
    """Yield the options of `flux run`; a constraint may name hosts (RFC 35)."""
    yield from (f"--nodes={len(step.nodes)}", f"--ntasks={step.tasks}", f"--requires=hosts:{','.join(step.nodes)}",
                f"--job-name={step.name}")


def pals_options(step: JobStep) -> Iterator[str]:
    """Yield the options of PALS's mpiexec, which passes all variables to the ranks (--envall is the default)."""
    yield from ("-n", str(step.tasks))
    if step.nodes:
        yield from ("--ppn", str(step.tasks_per_node), "--hosts", ",".join(step.nodes))


def open_mpi_options(step: JobStep) -> Iterator[str]:
    """Yield the options of Open MPI's mpirun, which passes to other nodes the variables that -x names."""
    yield from ("-n", str(step.tasks))
    if step.nodes:
        yield from ("--host", ",".join(f"{node}:{step.tasks_per_node}" for node in step.nodes))
    for name in step.variables:
        yield from ("-x", name)


def hydra_options(step: JobStep) -> Iterator[str]:
    """Yield the options of MPICH's and Intel MPI's mpiexec."""
    yield from ("-n", str(step.tasks))
    if step.nodes:
        yield from ("-hosts", ",".join(step.nodes), "-ppn", str(step.tasks_per_node))


SRUN = LauncherCommand(
    launchers.SRUN, "srun", srun_options, system=SLURM, begin="sbatch or salloc", interrupts=2, ends_by_quit=True,
    counts=("-n", "--ntasks"), per_node=("--ntasks-per-node",),
    chooses=("-N", "--nodes", "-w", "--nodelist", "-x", "--exclude", "-F", "--nodefile"),
    values=dict.fromkeys((
        "-A", "-B", "-C", "-D", "-G", "-J", "-L", "-M", "-S", "-T", "-W", "-a", "-b", "-c", "-d", "-e", "-i", "-m",
        "-o", "-p", "-q", "-r", "-t", "--account", "--chdir", "--comment", "--constraint", "--cpus-per-task",
        "--container-image", "--container-mounts", "--container-name", "--container-workdir", "--distribution",
        "--error", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gres", "--input", "--job-name", "--mem", "--mpi",
        "--output", "--partition", "--qos", "--reservation", "--time"), 1))
FLUX_RUN = LauncherCommand(
    launchers.FLUX, "flux", flux_options, system=FLUX, begin="flux batch or flux alloc", interrupts=2,
    ends_by_quit=True, counts=("-n", "--ntasks"), per_node=("--tasks-per-node",),
    chooses=("-N", "--nodes", "--requires"),
    values=dict.fromkeys((
        "-B", "-S", "-c", "-g", "-o", "-q", "-t", "--add-file", "--bank", "--begin-time", "--cores-per-task", "--cwd",
        "--dependency", "--env", "--env-file", "--env-remove", "--error", "--flags", "--gpus-per-task", "--input",
        "--job-name", "--output", "--queue", "--rlimit", "--setattr", "--setopt", "--signal", "--taskmap",
        "--time-limit", "--urgency"), 1))
# It is recognised by HPE's folder, /opt/cray/pals or /opt/cray/pe/pals: its output for --version is unknown.
PALS = LauncherCommand(
    launchers.PALS, MPI_PROGRAM, pals_options, path=r"/cray/(\w+/)?pals/", is_mpiexec=True,
    counts=("-n", "-np", "--np"), per_node=("-ppn", "--ppn"),
    chooses=("-host", "--host", "-hosts", "--hosts", "-hostlist", "--hostlist", "-f", "-hostfile", "--hostfile",
             "-configfile", "--configfile"),
    values=dict.fromkeys((
        "-d", "-depth", "--depth", "--cpu-bind", "--mem-bind", "-env", "--env", "-envlist", "--envlist", "-wdir",
        "--wdir", "-umask", "--umask", "-path", "--path", "-soft", "--soft", "--pmi", "--rlimits", "--include-tasks",
        "--exclude-tasks", "--procinfo-file"), 1))
OPEN_MPI = LauncherCommand(
    launchers.OPEN_MPI, MPI_PROGRAM, open_mpi_options, version=r"Open MPI|OpenRTE|PRRTE|open-mpi",
    is_mpiexec=True, ends_by_quit=True, stops_ranks=True, hides_losses=True, counts=MPI_COUNT_OPTIONS,
    per_node=("-N", "-npernode", "--npernode"), chooses=MPI_NODE_OPTIONS, values=MPI_OPTION_VALUES)
HYDRA = LauncherCommand(
    launchers.HYDRA, MPI_PROGRAM, hydra_options, is_mpiexec=True, counts=MPI_COUNT_OPTIONS,
    per_node=("-ppn", "--ppn", "-perhost"), chooses=MPI_NODE_OPTIONS, values=MPI_OPTION_VALUES)
NONE = LauncherCommand(launchers.Launcher("", ()), "", lambda _: iter(()))
LAUNCHERS = (SRUN, FLUX_RUN, PALS, OPEN_MPI, HYDRA)  # the first match wins; an unknown mpiexec is taken for MPICH's


def find_launcher(program: str, path: str, version: str) -> LauncherCommand:
    """Return the launcher of a program at `path` (links resolved) whose output for --version is `version`."""
    name = program.rpartition("/")[2]
    return next((row for row in LAUNCHERS if re.fullmatch(row.program, name) and re.search(row.path, path)
                 and re.search(row.version, version)), NONE)


class Command(NamedTuple):
    """A parsed command: the launcher's first words (`program`) and `options`, and what it starts (`rest`).

    The launcher's options set `tasks` ranks in all and `tasks_per_node` on each node, None if they do not.
    `error_file` and `abort_grace` are the values of mpiddp's options, empty if not given; `rest` lacks --error-file.
    """

    launcher: LauncherCommand
    program: tuple[str, ...]
    options: tuple[str, ...]
    rest: tuple[str, ...]
    tasks: int | None = None
    tasks_per_node: int | None = None
    error_file: str = ""
    abort_grace: str = ""


class CommandError(ValueError):
    """The command cannot be started on chosen nodes; the text is the message for the user."""


def parse_command(command: Sequence[str], version: str, is_program: Callable[[str], object] = shutil.which,
                  path: str = "") -> Command:
    """Return a parsed command; its program at `path` (links resolved) prints `version` for --version.

    A launcher's options end at the first word that is a program. Raises CommandError.
    """
    launcher = find_launcher(command[0], path, version)
    if launcher is NONE:
        rest, error_file, abort_grace = take_our_options(command)
        return Command(launcher, (), (), rest, None, None, error_file, abort_grace)
    length = len(launcher.words)
    if tuple(command[1:length]) != launcher.words[1:]:
        raise CommandError(f"{' '.join(command[:2])} is not supported; use {launcher.name}")
    begin = find_program(command, length, launcher.values, is_program)
    options = command[length:begin]
    rest, error_file, abort_grace = take_our_options(command[begin:])
    for option in options:
        if name_option(option, launcher) in launcher.chooses:
            raise CommandError(f"remove {option}: mpiddp.supervise chooses the nodes for {launcher.name}; to set their "
                               "number, give --nodes N before the command")
    if not rest:
        raise CommandError(f"no program found after the launcher's options: {' '.join(command)}")
    if launcher.is_mpiexec and ":" in rest:
        raise CommandError("':' between programs is not supported: all nodes must run the same program with the same "
                           "number of ranks")
    options, tasks = take_number(options, launcher, launcher.counts)
    options, tasks_per_node = take_number(options, launcher, launcher.per_node)
    return Command(launcher, tuple(command[:length]), tuple(options), rest, tasks, tasks_per_node, error_file,
                   abort_grace)


def find_program(
    command: Sequence[str], position: int, values: Mapping[str, int], is_program: Callable[[str], object]
) -> int:
    """Return the index, from `position` on, of the program that a launcher's command starts; the end if there is none.

    `values` has the number of words that follow an option; such a word may be the name of a program, as in -p test.
    """
    while position < len(command):
        if command[position][:1] == "-":
            position += values.get(command[position], 0)
        elif is_program(command[position]):
            break
        position += 1
    return min(position, len(command))


def take_our_options(words: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """Return the words without mpiddp's --error-file, and the values of it and of --abort-grace, empty if not given.

    mpiddp's options are between `-m mpiddp` or `mpiddp` and the script. Raises CommandError for a script on standard
    input.
    """
    by_module = [position + 2 for position, pair in enumerate(pairwise(words)) if pair == ("-m", "mpiddp")]
    begins = by_module or [position + 1 for position, word in enumerate(words) if os.path.basename(word) == "mpiddp"]
    if not begins:
        return tuple(words), "", ""
    ours, script = split_command(words[begins[0]:])
    if script[:1] == [STANDARD_INPUT]:
        raise CommandError("a restart cannot read standard input (-) a second time; save the script to a file")
    values = {"--error-file": "", "--abort-grace": ""}
    left = []
    while ours:
        name, is_given, value = ours.pop(0).partition("=")
        if name in values:
            values[name] = value if is_given or not ours else ours.pop(0)
        if name != "--error-file":
            left.append(f"{name}={values[name]}" if name in values else name + is_given + value)
    return (*words[:begins[0]], *left, *script), values["--error-file"], values["--abort-grace"]


def name_option(word: str, launcher: LauncherCommand) -> str:
    """Return the option's name in a word: -N in -N2, --nodes in --nodes=2."""
    return word[:2] if not launcher.is_mpiexec and not word.startswith("--") else word.partition("=")[0]


def take_number(
    options: Sequence[str], launcher: LauncherCommand, names: Sequence[str]
) -> tuple[Sequence[str], int | None]:
    """Return a launcher's options without those in `names`, and the value of the last of these, None for none.

    Raises CommandError if a value is not a number greater than 0.
    """
    left, number = [], None
    words = iter(options)
    for word in words:
        name = name_option(word, launcher)
        if name not in names:
            left.append(word)
            continue
        value = word[len(name):].removeprefix("=") or next(words, "")
        if not value.isdecimal() or int(value) == 0:
            raise CommandError(f"{name} {value}: must be a number greater than 0")
        number = int(value)
    return left, number


def make_command(command: Command, step: JobStep) -> list[str]:
    """Return the words that start a command as this step."""
    return [*command.program, *command.launcher.step_options(step), *command.options, *command.rest]
