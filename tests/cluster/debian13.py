"""A root folder with Debian 13: Python 3.13, glibc 2.41, torch 2.6, Open MPI 5.0.7, MPICH 4.2 and Slurm 24.11.

It is made once for a machine, below FOLDER, and kept there for later runs under a digest of what it is made of. Its
mounts are those of the private mount namespace in which a command enters it, and go with the command.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import run
from tests.support import OVERSUBSCRIBE, ROOT, VENVS, Mpi, check

from .cluster import RUN

FOLDER = Path("/var/tmp/mpiddp-debian13")  # not under /tmp, which every node hides behind its own
MAKE_TIMEOUT_S = 1800
# torch and what the examples import are Debian's: PyPI has no torch for Python 3.13 without CUDA.
PACKAGES = ("python3-venv", "python3-torch", "python3-sklearn", "openmpi-bin", "mpich", "slurmctld", "slurmd",
            "slurm-client", "slurm-wlm-basic-plugins")
WHEELS = ("ClusterShell", "mpi4py", "nvidia-ml-py", "psutil", "setproctitle", "tqdm")
MORE_WHEELS = ("mpich", "setuptools>=77", "sympy==1.13.1")  # which README's first command installs besides
DEBOOTSTRAP = ("mmdebstrap", "--mode=root", "--variant=apt", "--aptopt=Apt::Install-Recommends false",
               "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
               f"--include={','.join(PACKAGES)}", "trixie")
UNSHARED = ("unshare", "--mount", "--propagation", "private")
VENV = "/opt/venv"
INSTALL = f"""
python3 -m venv --system-site-packages {VENV}
{VENV}/bin/pip install --quiet --no-index --find-links=/opt/wheels --no-deps --ignore-installed {' '.join(WHEELS)}
"""
# Slurm from 23.11 on looks for cgroups that a node of this cluster has no part of.
SLURM_FILES = {"cgroup.conf": "CgroupPlugin=disabled\n"}


@dataclass(frozen=True)
class RootMpi(Mpi):
    """One of the root folder's two MPIs, which share an environment: mpi4py takes the one that a variable names."""

    @property
    def python(self) -> Path:
        """The interpreter in the root folder."""
        return Path(VENV, "bin/python")

    def missing(self) -> list[str]:
        """Return nothing: what the root folder lacks is a fault of its making."""
        return []

    def environ(self) -> dict[str, str]:
        """Return the environment for its jobs."""
        return {**super().environ(), "MPI4PY_MPIABI": self.name}


OPEN_MPI = RootMpi("openmpi", "Debian 13's Open MPI 5.0.7", Path("/usr/bin/mpirun.openmpi"), OVERSUBSCRIBE)
MPICH = RootMpi("mpich", "Debian 13's MPICH 4.2", Path("/usr/bin/mpiexec.mpich"), pmi="pmi2")


def missing_components() -> list[str]:
    """Return what this machine lacks to make the root folder, in words."""
    missing = [] if shutil.which("mmdebstrap") else ["the command mmdebstrap"]
    return missing if os.geteuid() == 0 else [*missing, "root"]


def root_folder() -> Path:
    """Return the root folder, and make it first where it is not there: that needs the network, and some minutes.

    Others that were made of something else are removed. Raises AssertionError with the output of what failed.
    """
    made_of = "\n".join([*DEBOOTSTRAP, *WHEELS, *MORE_WHEELS, INSTALL, (ROOT / "tests/constraints.txt").read_text()])
    root = FOLDER / hashlib.sha256(made_of.encode()).hexdigest()[:12]
    FOLDER.mkdir(exist_ok=True)
    lock = os.open(FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            for other in FOLDER.iterdir():
                shutil.rmtree(other)
            unfinished = root.with_suffix(".unfinished")
            make(unfinished)
            unfinished.rename(root)
    finally:
        os.close(lock)
    return root


def make(root: Path) -> None:
    """Install Debian 13 in a folder, and an environment with mpiddp's requirements; mpiddp itself is the checkout's."""
    check(run(*UNSHARED, *DEBOOTSTRAP, str(root), timeout=MAKE_TIMEOUT_S))
    check(run(str(VENVS / "base/bin/pip"), "download", "--quiet", "--no-deps", "--only-binary=:all:",
              "--python-version=3.13", f"--constraint={ROOT}/tests/constraints.txt", f"--dest={root}/opt/wheels",
              *WHEELS, *MORE_WHEELS, timeout=MAKE_TIMEOUT_S))
    check(run(*inside(root, Path("/")), "sh", "-ec", INSTALL, timeout=MAKE_TIMEOUT_S))


def enter(root: Path, folders: Sequence[Path]) -> list[str]:
    """Return the prefix that runs a command in the root folder, from a private mount namespace.

    It sees this machine's devices, processes, /tmp and hosts file, and `folders` under the same names.
    """
    inner = shlex.quote(str(root))
    lines = [f"mount --bind {inner} {inner}"]  # as its "/" is a mount, too
    for make, path in [*(("mkdir -p", path) for path in ("/dev", "/proc", "/sys", "/tmp", *map(str, folders))),
                       ("touch", "/etc/hosts")]:
        target = shlex.quote(f"{root}{path}")
        lines.append(f"{make} {target}; mount --rbind {shlex.quote(path)} {target}")
    return ["sh", "-ec", "\n".join([*lines, f'exec chroot {inner} "$@"']), "enter"]


def inside(root: Path, cwd: Path = ROOT) -> list[str]:
    """Return the prefix that runs a command in the root folder on this machine, in a folder below the checkout."""
    return [*UNSHARED, *enter(root, [ROOT]), "env", f"--chdir={cwd}"]


def cluster_options() -> dict[str, object]:
    """Return what makes a Cluster run in the root folder, which is made if need be."""
    return {"enter": enter(root_folder(), [ROOT, RUN]), "files": SLURM_FILES}
