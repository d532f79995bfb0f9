"""Check that launcher and MPI library fit together; otherwise MPI_Init ends the process or splits the job."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.config import Script
from ..base.errors import LaunchError, LocalLaunchError
from ..discovery.launchers import LaunchFacts
from ..discovery.mpi import Library
from ..systems import launchers
from ..systems.launchers import HYDRA, MPIRUN, PALS, SRUN, Launcher
from ..systems.mpi_libraries import CRAY_PMI, FLUX_PMI, INTEL_MPI, MPICH, OPEN_MPI, PMI, PMIX
from ..systems.schedulers import SLURM, Scheduler
from ..systems.starters import is_starter

OTHER_LAUNCHER = "the launcher of that MPI"


def check_nested(outer: str | None, script: Script | None) -> None:
    """Raise LaunchError `nested-launcher` if a launcher would start another one in each of its ranks."""
    target = script.target.rpartition("/")[2] if script is not None and not script.is_code else ""
    if outer is not None:
        raise LaunchError(
            "nested-launcher",
            actual=f"this process is already a rank of {outer}: mpiddp would start in each of its ranks",
            needed="one launcher",
            do=f"start with {MPIRUN.command} or {SRUN.command} instead of {outer}" if outer != "mpiddp"
            else "run the script itself, or remove mpiddp's variables (TORCHELASTIC_RUN_ID) from its environment",
        )
    if is_starter(target):
        raise LaunchError(
            "nested-launcher",
            actual=f"the script is {target}, which would start its own ranks in each rank of mpiddp",
            needed="one launcher",
            do="put the training script itself after python -m mpiddp",
        )
    if launchers.is_command(target) and script is not None and not script.is_module:
        raise LaunchError(
            "nested-launcher",
            actual=f"the script is {target}, which would start its own ranks in each rank of mpiddp",
            needed="one launcher, in front of python",
            do=f"put the launcher first: {target} -n 2 python -m mpiddp train.py",
        )


def check_outer_tasks(started_by: LaunchFacts | None) -> None:
    """Raise LaunchError `nested-launcher` if each task of a Slurm step or Flux job has started a launcher itself."""
    if started_by is not None and started_by.tasks > 1:
        raise LaunchError(
            "nested-launcher",
            actual=f"{started_by.launcher.name} runs in each of {started_by.tasks} tasks of {started_by.outer}: "
            f"the same training would run {started_by.tasks} times",
            needed="one launcher",
            do=f"omit {started_by.outer}, or use it to start python -m mpiddp directly;\n"
            f"a launcher inside a single task ({started_by.outer} -n1) is fine",
        )


def check_not_nested(ranks: int, started_by: LaunchFacts | None) -> None:
    """Raise LaunchError `nested-launcher` if `mpiddp -n` runs in a task of a launcher."""
    if started_by is not None:
        raise LaunchError(
            "nested-launcher",
            actual=f"mpiddp -n {ranks} would start ranks in each of {describe_tasks(started_by)} of "
            f"{started_by.launcher.name}",
            needed="one launcher",
            do=f"omit -n {ranks}: {started_by.launcher.name} sets the number of ranks",
        )


def check_no_batch_job(ranks: int, scheduler: Scheduler | None, library: Library) -> None:
    """Raise LaunchError `in-batch-job` if `mpiddp -n` runs in a job of a scheduler."""
    if scheduler is not None:
        raise LaunchError(
            "in-batch-job",
            actual=f"mpiddp -n {ranks} starts ranks on one machine, but this is a job of {scheduler.name}",
            needed="the command that starts ranks on all nodes of the job",
            do=f"omit -n {ranks}, and start python -m mpiddp with {describe_start(scheduler, library)}",
        )


def describe_start(scheduler: Scheduler, library: Library) -> str:
    """Return the command that starts ranks of a library on the nodes of a scheduler's job."""
    if own := launchers.find_scheduler_launcher(scheduler):
        return " ".join([own.command, *list_fitting_options(own, library)[:1]])
    return launchers.describe_job_start(scheduler, MPIRUN if library.name == OPEN_MPI.name else HYDRA)


def check_compatibility(started_by: LaunchFacts | None, library: Library, mpi_types: Sequence[str] = ()) -> None:
    """Raise LaunchError `launcher-mismatch`, `no-pmix` or `pmi-unsupported` if MPI could not start.

    `mpi_types` are the interfaces that the launcher lists, empty if unknown. An unknown launcher or library passes.
    """
    if started_by is None or is_lone_task(started_by, library):
        return
    launcher = started_by.launcher
    if launcher.library is not None and not started_by.offers & library.interfaces:
        raise LaunchError(
            "launcher-mismatch",
            actual=f"{describe_tasks(started_by)} started by {launcher.name}, but mpi4py loaded {library}",
            needed="launcher and library of the same MPI",
            do=f"start with {describe_fitting_launcher(launcher, library)}, or load the module of the launcher's MPI "
            f"(without modules: pip install {launcher.library.package})",
        )
    if launcher.options:
        check_interfaces(started_by, library, mpi_types)


def check_shared_memory(library: Library, why_not: str, host: str) -> None:
    """Raise LocalLaunchError `no-shm` if MPICH has no shared memory on a host, for the reason `why_not`.

    Open MPI and Intel MPI do without.
    """
    if library.row.needs_shm and why_not:
        raise LocalLaunchError(
            "no-shm",
            actual=f"{why_not} on {host}; without shared memory {library.name} aborts in MPI_Init, even with one rank",
            needed="a /dev/shm that this user can write to",
            do="in a container, mount one (docker: --shm-size=8g; a pod: an emptyDir of medium Memory at /dev/shm),\n"
            "or bind the host's; or use Open MPI, which does not need it",
        )


def is_lone_task(started_by: LaunchFacts | None, library: Library) -> bool:
    """Return whether this process is a launcher's only task, and is to start as if there were no launcher.

    That is so if the library can use no interface of the launcher, and in a Slurm step with PMIx, because MPI_Abort
    would kill the step there (pmixp_lib_abort() in Slurm): that may be the user's shell.
    """
    if started_by is None or not started_by.launcher.hides or started_by.size != 1:
        return False
    is_fatal = started_by.by_srun and PMIX in started_by.offers
    return is_fatal or not started_by.offers & library.interfaces or is_pmi_library_missing(started_by, library)


def is_pmi_library_missing(started_by: LaunchFacts, library: Library) -> bool:
    """Return whether the launcher started Intel MPI without naming the scheduler's PMI library to it."""
    needs_variable = started_by.launcher.pmi_library and library.name == INTEL_MPI.name
    return bool(needs_variable) and not started_by.has_pmi_library


def list_hidden_prefixes(started_by: LaunchFacts | None, library: Library) -> tuple[str, ...]:
    """Return the prefixes of variables that the library must not see, because they are another launcher's."""
    if started_by is not None and is_lone_task(started_by, library):
        return started_by.launcher.hides
    return started_by.launcher.hides_always if started_by is not None else ()


def check_interfaces(started_by: LaunchFacts, library: Library, mpi_types: Sequence[str]) -> None:
    """Raise LaunchError `no-pmix` or `pmi-unsupported` if a launcher offers no interface that the library has."""
    command, variable = started_by.command, started_by.launcher.pmi_library
    needed, do = describe_needed_interface(started_by, library, mpi_types)
    if not started_by.offers:
        raise LaunchError(
            "no-pmix",
            actual=f"{describe_tasks(started_by)} started by {command} without a PMI interface; with {library} each "
            "would be a separate job",
            needed=needed,
            do=do,
        )
    if not started_by.offers & library.interfaces:
        offered = " and ".join(sorted(started_by.offers - {FLUX_PMI} or started_by.offers))
        raise LaunchError(
            "pmi-unsupported",
            actual=f"{command} offers {offered}, which {library} does not support",
            needed=needed,
            do=do,
        )
    if PMI in started_by.offers and is_pmi_library_missing(started_by, library):
        raise LaunchError(
            "pmi-unsupported",
            actual=f"{command} offers pmi, but {variable} is not set, which {library} needs to use it",
            needed=f"{variable}, set to the path of {SLURM.name}'s libpmi2.so",
            do=f"export {variable}=/usr/lib64/libpmi2.so, or the library's path on this system",
        )


def describe_needed_interface(started_by: LaunchFacts, library: Library, mpi_types: Sequence[str]) -> tuple[str, str]:
    """Return the interfaces that a library supports, or else the libraries that fit; and what to do."""
    launcher = started_by.launcher
    options = list_fitting_options(launcher, library, mpi_types)
    if not options:
        known = " or ".join(kind for kind in sorted(launcher.options) if kind != FLUX_PMI)
        start = library.row.launcher or OTHER_LAUNCHER
        do = ("load the site's module for such a library, and install mpi4py for it "
              f"(pip install --no-binary=mpi4py mpi4py),\nor start with {start}")
        return f"an MPI library that supports {known}", do
    kinds = [kind for kind, option in launcher.options.items() if option in options and kind != FLUX_PMI]
    needed = f"an interface that {library.name} supports: {' or '.join(kinds)}"
    if is_variable(options[0]):
        return needed, f"export {options[0]} before {launcher.command}"
    hint = (f", with {launcher.pmi_library} set to {SLURM.name}'s libpmi2.so"
            if is_pmi_library_missing(started_by, library) else "")
    use = f"use {launcher.command} {' or '.join(options)}{hint}"
    if not launcher.ask_interfaces:
        return needed, use
    has = (f"this {SLURM.name} has {launcher.interface.format(', '.join(mpi_types))}" if mpi_types else
           f"`{' '.join(launcher.ask_interfaces)}` shows what {SLURM.name} has")
    return needed, f"{use}; {has}"


def list_fitting_options(launcher: Launcher, library: Library, mpi_types: Sequence[str] = ()) -> list[str]:
    """Return the options by which a launcher offers an interface that a library has, the best first.

    `mpi_types` are the interfaces that the launcher lists: if some of these fit, no others are named. Cray's PMI is
    only for Cray MPICH, and for an MPICH that has loaded it.
    """
    for_cray = library.is_cray or (library.name == MPICH.name and CRAY_PMI in library.interfaces)
    kinds = (CRAY_PMI, PMI, PMIX) if for_cray else (PMIX, PMI, FLUX_PMI)
    options = dict.fromkeys(launcher.options[kind] for kind in kinds
                            if kind in library.interfaces and kind in launcher.options)
    available = [option for option in options if option in map(launcher.interface.format, mpi_types)]
    return (available or [*options])[:1 if for_cray else None]


def warn_unlaunched(library: Library, scheduler: Scheduler | None, size: int) -> list[str]:
    """Return the warning `no-launcher` for a process without a launcher in a job that is meant for several."""
    if scheduler is None or size < 2:
        return []
    start = library.row.launcher or library.row.start
    if launchers.find_scheduler_launcher(scheduler):
        start = f"{describe_start(scheduler, library)}, or {start},"
    line = (f"no-launcher: the {scheduler.name} job has {size} {scheduler.unit}, but this process was started without "
            f"a launcher and trains alone; put {start} before python -m mpiddp")
    return [line]


def check_world_size(started_by: LaunchFacts | None, size: int, library: Library) -> None:
    """Raise LaunchError `split-world` if MPI has another number of ranks than the launcher started.

    If the launcher sets no number, the ranks that do not exist in MPI's world know it: the first of them prints it.
    """
    if started_by is None:
        return
    launcher = started_by.launcher
    processes, speaker = describe_tasks(started_by), 0
    if started_by.size is None and started_by.rank >= size:
        processes, speaker = f"rank {started_by.rank}", size
    elif started_by.size in (None, size):
        return
    raise LaunchError(
        "split-world",
        actual=f"{processes} started by {launcher.name}, but MPI's world size is {size} ({library})",
        needed="one MPI world with all processes: launcher and library of the same MPI",
        do=f"start with {describe_fitting_launcher(launcher, library)}, or load the module of the launcher's MPI",
        speaker=speaker,
    )


def describe_fitting_launcher(launcher: Launcher, library: Library) -> str:
    """Return in words what starts ranks of a library: `launcher` with another option if it has one, or another one."""
    if options := list_fitting_options(launcher, library):
        option, command = options[0], launcher.command
        return f"{option} in the environment of {command}" if is_variable(option) else f"{command} {option}"
    if library.is_cray:
        return f"a launcher for {library.name} ({SRUN.command}, or {PALS.name})"
    return library.row.launcher or OTHER_LAUNCHER


def is_variable(option: str) -> bool:
    """Return whether a launcher reads this option in its environment."""
    return not option.startswith("-")


def describe_tasks(started_by: LaunchFacts) -> str:
    """Return the number of processes in words."""
    if started_by.size is None:
        return "processes"
    return "1 process" if started_by.size == 1 else f"{started_by.size} processes"
