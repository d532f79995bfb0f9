"""Root folders with other releases of Debian, which have newer versions of Python, torch, the MPIs and Slurm.

Each is made once for a machine, below FOLDER, and kept there for later runs under a digest of what it is made of. Its
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

FOLDER = Path("/var/tmp/mpiddp-debian")  # not under /tmp, which every node hides behind its own
MAKE_TIMEOUT_S = 1800
# torch and what the examples import are Debian's: PyPI has no torch for newer Pythons without CUDA.
PACKAGES = ("python3-venv", "python3-torch", "python3-sklearn", "openmpi-bin", "mpich", "slurmctld", "slurmd",
            "slurm-client", "slurm-wlm-basic-plugins")
WHEELS = ("ClusterShell", "mpi4py", "nvidia-ml-py", "psutil", "setproctitle", "tqdm")
UNSHARED = ("unshare", "--mount", "--propagation", "private")
VENV = "/opt/venv"
INSTALL = f"""
python3 -m venv --system-site-packages {VENV}
{VENV}/bin/pip install --quiet --no-index --find-links=/opt/wheels --no-deps --ignore-installed {' '.join(WHEELS)}
"""
# Slurm from 23.11 on looks for cgroups that a node of this cluster has no part of.
SLURM_FILES = {"cgroup.conf": "CgroupPlugin=disabled\n"}


@dataclass(frozen=True)
class Release:
    """A release of Debian: its suite, and what differs in it."""

    suite: str
    python: str
    start_method: str  # multiprocessing's default
    more_wheels: tuple[str, ...]  # which README's first command installs besides

    def debootstrap(self) -> tuple[str, ...]:
        """Return the command that installs it; a mirror may be older than its Release file is valid for."""
        return ("mmdebstrap", "--mode=root", "--variant=apt", "--aptopt=Apt::Install-Recommends false",
                "--aptopt=Acquire::Check-Valid-Until false", "--dpkgopt=path-exclude=/usr/share/man/*",
                "--dpkgopt=path-exclude=/usr/share/locale/*", f"--include={','.join(PACKAGES)}", self.suite)

    def wheels(self) -> tuple[str, ...]:
        """Return the packages that pip installs."""
        return (*WHEELS, *self.more_wheels)


RELEASES = {release.suite: release for release in (
    Release("trixie", "3.13", "fork", ("mpich", "setuptools>=77", "sympy==1.13.1")),
    Release("sid", "3.14", "forkserver", ("mpich", "setuptools>=77", "mpmath<1.4")),
)}


@dataclass(frozen=True)
class RootMpi(Mpi):
    """One of a root folder's two MPIs, which share an environment: mpi4py takes the one that a variable names."""

    @property
    def python(self) -> Path:
        """The interpreter in a root folder."""
        return Path(VENV, "bin/python")

    def missing(self) -> list[str]:
        """Return nothing: what a root folder lacks is a fault of its making."""
        return []

    def environ(self) -> dict[str, str]:
        """Return the environment for its jobs; mpiddp is the checkout's, also for workers, which start Python."""
        return {**super().environ(), "MPI4PY_MPIABI": self.name, "PYTHONPATH": str(ROOT)}


OPEN_MPI = RootMpi("openmpi", "Debian's Open MPI", Path("/usr/bin/mpirun.openmpi"), OVERSUBSCRIBE)
MPICH = RootMpi("mpich", "Debian's MPICH", Path("/usr/bin/mpiexec.mpich"), pmi="pmi2")


def missing_components() -> list[str]:
    """Return what this machine lacks to make a root folder, in words."""
    missing = [] if shutil.which("mmdebstrap") else ["the command mmdebstrap"]
    return missing if os.geteuid() == 0 else [*missing, "root"]


def root_folder(release: Release) -> Path:
    """Return a release's root folder, and make it first where it is not there: that needs the network and some minutes.

    Others of the release that were made of something else are removed. Raises AssertionError with the output of what
    failed.
    """
    made_of = "\n".join([*release.debootstrap(), *release.wheels(), INSTALL,
                         (ROOT / "tests/constraints.txt").read_text()])
    folder = FOLDER / release.suite
    root = folder / hashlib.sha256(made_of.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            for other in folder.iterdir():
                shutil.rmtree(other)
            unfinished = root.with_suffix(".unfinished")
            make(release, unfinished)
            unfinished.rename(root)
    finally:
        os.close(lock)
    return root


def make(release: Release, root: Path) -> None:
    """Install a release in a folder, and an environment with mpiddp's requirements; mpiddp itself is the checkout's."""
    check(run(*UNSHARED, *release.debootstrap(), str(root), timeout=MAKE_TIMEOUT_S))
    check(run(str(VENVS / "base/bin/pip"), "download", "--quiet", "--no-deps", "--only-binary=:all:",
              f"--python-version={release.python}", f"--constraint={ROOT}/tests/constraints.txt",
              f"--dest={root}/opt/wheels", *release.wheels(), timeout=MAKE_TIMEOUT_S))
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


def cluster_options(release: Release) -> dict[str, object]:
    """Return what makes a Cluster run in a release's root folder, which is made if need be."""
    return {"enter": enter(root_folder(release), [ROOT, RUN]), "files": SLURM_FILES}
