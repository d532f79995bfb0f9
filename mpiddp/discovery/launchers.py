"""The launcher that started this process, by the variables that it has set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..systems import launchers
from ..systems.launchers import Launcher
from ..systems.mpi_libraries import INTERFACE_VARIABLES


class LaunchFacts(NamedTuple):
    """What started this process: the launcher, the process's rank, and the number of ranks, None if it is not set.

    `offers` are the interfaces by which a library may connect to the launcher. `has_pmi_library` is true if
    the variable Launcher.pmi_library is set. If each task of an `outer` launcher runs a launcher of its own, `tasks` is
    the number of these tasks and `task` the number of the one around this process. `mpi_type` is the interface that was
    asked for, empty if it is unknown.
    """

    launcher: Launcher
    rank: int
    size: int | None
    offers: frozenset[str]
    has_pmi_library: bool
    tasks: int = 1
    task: int = 0
    outer: str = ""
    mpi_type: str = ""

    @property
    def command(self) -> str:
        """The launcher's name, with the option for its interface if that is known."""
        option = self.launcher.interface.format(self.mpi_type)
        return f"{self.launcher.name} {option}" if self.mpi_type else self.launcher.name

    @property
    def by_srun(self) -> bool:
        """Return whether the rank is a task of a Slurm step, which srun has started."""
        return self.launcher.is_step


def read_launch_facts(environ: Mapping[str, str]) -> LaunchFacts | None:
    """Return what started this process, None if no launcher did.

    Inside a task of another launcher, a launcher sets its variables beside the other's: the inner one counts.
    """
    launcher = find_launcher(environ)
    if launcher is None:
        return None
    rank = read_number(environ, launcher.ranks)
    assert rank is not None
    offers = frozenset(kind for kind in launcher.own if any(name in environ for name in INTERFACE_VARIABLES[kind]))
    return LaunchFacts(launcher, rank, read_number(environ, launcher.sizes), offers, launcher.pmi_library in environ,
                       *find_outer_tasks(launcher, environ), environ.get(launcher.asked, ""))


def find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher of this process: the first that fits, or else the first for which a rank alone is enough."""
    with_rank = [row for row in launchers.LAUNCHERS if read_number(environ, row.ranks) is not None]
    certain = (row for row in with_rank if all(name in environ for name in row.marks) and row.fits(environ))
    return next(certain, None) or next((row for row in with_rank if row.alone(environ)), None)


def read_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the number in the first of these variables that holds one, None if none does."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)


def find_outer_tasks(launcher: Launcher, environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Return the tasks that each run such a launcher: their number, this process's own, and the name of their launcher.

    It is (1, 0, "") if this process's launcher runs in no such task, and in a task with a terminal: that is the first
    task's, and the shells of the others end at once, because they have no standard input. The second task counts as the
    first then: a step that a shell has started inherits the variable of the terminal.
    """
    for outer in launchers.LAUNCHERS:
        tasks, task = read_number(environ, outer.sizes), read_number(environ, outer.ranks)
        if tasks is None or task is None or not is_in_task(launcher, outer, environ):
            continue
        has_terminal = outer.terminal in environ
        if task or not has_terminal:
            return tasks, task - has_terminal, outer.name
    return 1, 0, ""


def is_in_task(launcher: Launcher, outer: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether this rank's launcher itself runs in the task of another launcher that this rank is in.

    A launcher in an allocation may run outside of that task, and have its daemons started as tasks.
    """
    if launcher.in_task is None or outer.is_task is None or not outer.is_task(environ):
        return False
    return launcher.in_task(environ) if outer.carries else True


def is_first_on_node(environ: Mapping[str, str]) -> bool:
    """Return whether this process is the first of the job on its node; True if its launcher sets no local rank."""
    launcher = find_launcher(environ)
    return launcher is None or not read_number(environ, launcher.local_ranks)
