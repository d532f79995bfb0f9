"""The launchers that start a job's ranks, a row for each: what its command looks like, and what it does with signals.

Sources: man srun; man flux-run, flux-job and flux-jobs; mpiexec(1) of MPICH and mpirun(1) of Open MPI. Of PALS: the
`mpiexec` of HPE's craycli, with its options, the signals that it hands on to the ranks, SIGINT and SIGQUIT among them,
and its status, the highest of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..facts import schedulers

SLURM, FLUX = schedulers.SLURM.name, schedulers.FLUX.name
STARTERS = "srun, flux run, mpirun or mpiexec"
MPI_PROGRAM = r"(mpirun|mpiexec|orterun|prterun).*"
MPI_COUNTS = ("-n", "-np", "--n", "--np", "-c")
MPI_CHOOSES = ("-H", "-host", "--host", "-hosts", "--hosts", "-machinefile", "--machinefile", "-hostfile", "--hostfile",
               "-f", "-grr", "-rr")
MPI_VALUES = {
    **dict.fromkeys((
        *MPI_COUNTS, "-x", "--bind-to", "-bind-to", "--map-by", "-map-by", "--rank-by", "-wdir", "--wdir", "-wd",
        "--prefix", "-bootstrap", "-launcher", "-rmk", "-iface", "-genvlist", "-envlist", "-output-filename",
        "--output-filename", "--output", "--tune"), 1),
    **dict.fromkeys(("-mca", "--mca", "--gmca", "-gmca", "--prtemca", "--pmixmca", "-genv", "-env"), 2),
}


class Placement(NamedTuple):
    """Where a job runs: its nodes, none for this machine alone, and how many ranks each gets.

    `step` is the job's name, and `variables` are those that the ranks have to see.
    """

    nodes: Sequence[str]
    tasks_per_node: int
    step: str
    variables: Sequence[str]

    @property
    def tasks(self) -> int:
        """Number of ranks."""
        return max(1, len(self.nodes)) * self.tasks_per_node


class LauncherCommand(NamedTuple):
    """A launcher: `name` is what users read, empty for none, and `words` are those that begin its command.

    It is recognised by regular expressions: `program` is for the program's name, `path` for where it lies when links
    are followed, and `version` for what it prints for --version.

    Its options: `chooses` are those that choose nodes, `counts` those for the number of ranks, `per_node` for that of
    each node, and `values` those that are followed by so many words. `place` yields the options for a Placement.
    `is_mpiexec` tells that its command is that of the MPI standard, with ':' between programs; the others' short
    options take a value without a space.

    It runs in an allocation of `system`, which begins by `begin`; anywhere if that is empty. `interrupts` is how many
    SIGINTs end a job. `ends_by_quit` tells that SIGQUIT ends it: others hand that on to the ranks. `stops_ranks` tells
    that it stops the ranks by SIGTSTP and goes on itself. `hides_losses` tells that its status may be 0 after a loss.
    """

    name: str
    words: tuple[str, ...]
    program: str
    place: Callable[[Placement], Iterator[str]]
    path: str = ""
    version: str = ""
    chooses: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    per_node: tuple[str, ...] = ()
    values: Mapping[str, int] = MappingProxyType({})
    is_mpiexec: bool = False
    system: str = ""
    begin: str = ""
    interrupts: int = 1
    ends_by_quit: bool = False
    stops_ranks: bool = False
    hides_losses: bool = False


def place_with_srun(where: Placement) -> Iterator[str]:
    """Yield srun's options; what a lost node still holds of the step before is not waited for (--overlap)."""
    yield from ("--overlap", f"--nodes={len(where.nodes)}", f"--ntasks={where.tasks}",
                f"--nodelist={','.join(where.nodes)}", f"--job-name={where.step}")


def place_with_flux(where: Placement) -> Iterator[str]:
    """Yield the options of `flux run`; a constraint may name hosts (RFC 35)."""
    yield from (f"--nodes={len(where.nodes)}", f"--ntasks={where.tasks}", f"--requires=hosts:{','.join(where.nodes)}",
                f"--job-name={where.step}")


def place_with_pals(where: Placement) -> Iterator[str]:
    """Yield the options of PALS's mpiexec, which shows the ranks all variables (--envall is the default)."""
    yield from ("-n", str(where.tasks))
    if where.nodes:
        yield from ("--ppn", str(where.tasks_per_node), "--hosts", ",".join(where.nodes))


def place_with_open_mpi(where: Placement) -> Iterator[str]:
    """Yield the options of Open MPI's mpirun, which shows ranks of other nodes the variables that -x names."""
    yield from ("-n", str(where.tasks))
    if where.nodes:
        yield from ("--host", ",".join(f"{node}:{where.tasks_per_node}" for node in where.nodes))
    for name in where.variables:
        yield from ("-x", name)


def place_with_hydra(where: Placement) -> Iterator[str]:
    """Yield the options of MPICH's and Intel MPI's mpiexec."""
    yield from ("-n", str(where.tasks))
    if where.nodes:
        yield from ("-hosts", ",".join(where.nodes), "-ppn", str(where.tasks_per_node))


SRUN = LauncherCommand(
    "srun", ("srun",), "srun", place_with_srun, system=SLURM, begin="with sbatch, or in a shell of salloc",
    interrupts=2, ends_by_quit=True, counts=("-n", "--ntasks"), per_node=("--ntasks-per-node",),
    chooses=("-N", "--nodes", "-w", "--nodelist", "-x", "--exclude", "-F", "--nodefile"),
    values=dict.fromkeys((
        "-A", "-B", "-C", "-D", "-G", "-J", "-L", "-M", "-S", "-T", "-W", "-a", "-b", "-c", "-d", "-e", "-i", "-m",
        "-o", "-p", "-q", "-r", "-t", "--account", "--chdir", "--comment", "--constraint", "--cpus-per-task",
        "--container-image", "--container-mounts", "--container-name", "--container-workdir", "--distribution",
        "--error", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gres", "--input", "--job-name", "--mem", "--mpi",
        "--output", "--partition", "--qos", "--reservation", "--time"), 1))
FLUX_RUN = LauncherCommand(
    "flux run", ("flux", "run"), "flux", place_with_flux, system=FLUX, begin="with flux batch, or in a shell of flux "
    "alloc", interrupts=2, ends_by_quit=True, counts=("-n", "--ntasks"), per_node=("--tasks-per-node",),
    chooses=("-N", "--nodes", "--requires"),
    values=dict.fromkeys((
        "-B", "-S", "-c", "-g", "-o", "-q", "-t", "--add-file", "--bank", "--begin-time", "--cores-per-task", "--cwd",
        "--dependency", "--env", "--env-file", "--env-remove", "--error", "--flags", "--gpus-per-task", "--input",
        "--job-name", "--output", "--queue", "--rlimit", "--setattr", "--setopt", "--signal", "--taskmap",
        "--time-limit", "--urgency"), 1))
# HPE's folder, /opt/cray/pals or /opt/cray/pe/pals, tells this one: what it prints for --version is not known.
PALS = LauncherCommand(
    "PALS's mpiexec", ("mpiexec",), MPI_PROGRAM, place_with_pals, path=r"/cray/(\w+/)?pals/", is_mpiexec=True,
    counts=("-n", "-np", "--np"), per_node=("-ppn", "--ppn"),
    chooses=("-host", "--host", "-hosts", "--hosts", "-hostlist", "--hostlist", "-f", "-hostfile", "--hostfile",
             "-configfile", "--configfile"),
    values=dict.fromkeys((
        "-d", "-depth", "--depth", "--cpu-bind", "--mem-bind", "-env", "--env", "-envlist", "--envlist", "-wdir",
        "--wdir", "-umask", "--umask", "-path", "--path", "-soft", "--soft", "--pmi", "--rlimits", "--include-tasks",
        "--exclude-tasks", "--procinfo-file"), 1))
OPEN_MPI = LauncherCommand(
    "Open MPI's mpirun", ("mpirun",), MPI_PROGRAM, place_with_open_mpi, version=r"Open MPI|OpenRTE|PRRTE|open-mpi",
    is_mpiexec=True, ends_by_quit=True, stops_ranks=True, hides_losses=True, counts=MPI_COUNTS,
    per_node=("-N", "-npernode", "--npernode"), chooses=MPI_CHOOSES, values=MPI_VALUES)
HYDRA = LauncherCommand(
    "MPICH's or Intel MPI's mpiexec", ("mpiexec",), MPI_PROGRAM, place_with_hydra, is_mpiexec=True, counts=MPI_COUNTS,
    per_node=("-ppn", "--ppn", "-perhost"), chooses=MPI_CHOOSES, values=MPI_VALUES)
NONE = LauncherCommand("", (), "", lambda _: iter(()))
LAUNCHERS = (SRUN, FLUX_RUN, PALS, OPEN_MPI, HYDRA)  # the first that fits; any other mpiexec is taken for MPICH's


def launcher_of(program: str, path: str, version: str) -> LauncherCommand:
    """Return the row for a program that lies at `path`, links followed, and prints `version` for --version."""
    name = program.rpartition("/")[2]
    return next((row for row in LAUNCHERS if re.fullmatch(row.program, name) and re.search(row.path, path)
                 and re.search(row.version, version)), NONE)
