"""The versions of what runs on a rank, and the state of its code."""

from __future__ import annotations

import os
import sys

from ..base.version import __version__

GIT_TIMEOUT_S = 5.0


def read_versions(mpi_library: str) -> dict[str, str]:
    """Return the versions, by name, that must be the same on all ranks; torch's is not known yet."""
    import mpi4py

    return {"Python": sys.version.split()[0], "mpi4py": mpi4py.__version__, "mpiddp": __version__,
            "MPI library": mpi_library}


def describe_software(script: str) -> str:
    """Return the versions of all software in words, and the git state of a script file (empty for none)."""
    import mpi4py
    import torch

    from .devices import read_nccl_version
    from .mpi import identify_library

    nccl = read_nccl_version()
    torch_parts = [f"{name} {version}" for name, version in (
        ("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("NCCL", nccl)) if version]
    words = [f"Python {sys.version.split()[0]}",
             f"torch {torch.__version__}" + (f" ({', '.join(torch_parts)})" if torch_parts else ""),
             identify_library().title, f"mpi4py {mpi4py.__version__}", f"mpiddp {__version__}"]
    code = read_commit(script) if script else ""
    return ", ".join(words) + (f"; {script} at git {code}" if code else "")


def read_commit(file: str) -> str:
    """Return `git describe` of the folder around a file, empty without git or a repository."""
    import subprocess

    command = ["git", "-C", os.path.dirname(os.path.abspath(file)), "describe", "--always", "--dirty", "--tags"]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, stdin=subprocess.DEVNULL,
                              env=env)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
