"""The versions of what runs on a rank, and where its Python lives."""

from __future__ import annotations

import os
import sys

from ..base.version import __version__

GIT_S = 5.0  # for an answer


def versions(mpi_library: str) -> dict[str, str]:
    """Return the versions that must be the same on all ranks, by name; torch's is not known yet."""
    import mpi4py

    return {"Python": sys.version.split()[0], "mpi4py": mpi4py.__version__, "mpiddp": __version__,
            "MPI library": mpi_library}


def stack(script: str) -> str:
    """Return in words what a rank runs with, and the state of the code around a script file, empty for none."""
    import mpi4py
    import torch

    from .devices import nccl_version
    from .mpi import library

    nccl = nccl_version()
    of_torch = [f"{name} {version}" for name, version in (
        ("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("NCCL", nccl)) if version]
    words = [f"Python {sys.version.split()[0]}",
             f"torch {torch.__version__}" + (f" ({', '.join(of_torch)})" if of_torch else ""),
             library().title, f"mpi4py {mpi4py.__version__}", f"mpiddp {__version__}"]
    code = commit(script) if script else ""
    return ", ".join(words) + (f"; {script} at git {code}" if code else "")


def commit(file: str) -> str:
    """Return what git calls the state of the folder around a file, empty where there is no git or no repository."""
    import subprocess

    command = ["git", "-C", os.path.dirname(os.path.abspath(file)), "describe", "--always", "--dirty", "--tags"]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, stdin=subprocess.DEVNULL, env=env)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
