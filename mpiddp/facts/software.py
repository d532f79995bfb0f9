"""The versions of what runs on a rank, and where its Python lives."""

from __future__ import annotations

import sys

from ..version import __version__


def versions(mpi_library: str) -> dict[str, str]:
    """Return the versions that must be the same on all ranks, by name; torch's is not known yet."""
    import mpi4py

    return {"Python": sys.version.split()[0], "mpi4py": mpi4py.__version__, "mpiddp": __version__,
            "MPI library": mpi_library}


def prefix() -> str:
    """Return the folder of this Python's environment."""
    return sys.prefix
