"""Which launcher started this process, as its variables tell before MPI is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """A launcher and the variables in which it tells a process its rank and the number of ranks."""

    name: str
    rank: str
    size: str | None


# The first whose variable is set counts: an mpirun inside a Slurm step sets its own beside Slurm's.
LAUNCHERS = (
    Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("PALS", "PALS_RANKID", None),
    Launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    Launcher("a PMI launcher", "PMI_RANK", "PMI_SIZE"),
    Launcher("a PMIx launcher", "PMIX_RANK", None),
)
# A batch script has SLURM_PROCID too; only a step, which srun started, has a numeric SLURM_STEP_ID.
SRUN = Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class Runtime:
    """A launcher that was found: its name, this process's rank, the number of ranks if it says."""

    name: str
    rank: int
    size: int | None


def detect(environ: Mapping[str, str]) -> Runtime | None:
    """Return the launcher that started this process, or None where nothing did."""
    candidates = [*LAUNCHERS, SRUN] if environ.get("SLURM_STEP_ID", "").isdigit() else LAUNCHERS
    for launcher in candidates:
        if (rank := environ.get(launcher.rank, "")).isdigit():
            size = environ.get(launcher.size or "", "")
            return Runtime(launcher.name, int(rank), int(size) if size.isdigit() else None)
    return None
