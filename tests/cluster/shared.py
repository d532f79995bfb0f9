"""An environment on a shared file system: each node of the cluster has a mount of its own, one server serves them all.

It is a FUSE file system in C (shared.c) above the folder that it hides, so that every path stays as it is.
"""

from __future__ import annotations

import compileall
import contextlib
import mmap
import secrets
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT, VENVS, Mpi

from .cluster import NODES, RUN, Cluster, start_daemon
from .impair import compiled, end_daemon

KINDS = ("getattr", "open", "read", "bytes", "readdir", "readlink", "other")
OPERATIONS = ("getattr", "open", "read", "readdir", "readlink", "other")
STATE = struct.Struct(f"{5 + len(KINDS)}q")
MOUNTING_S = 20.0
KEPT_S = 30.0  # names and attributes, as NFS keeps those of folders; FUSE's own default is 1


class Speed(NamedTuple):
    """What the server does: seconds for each operation, and operations and bytes per second for all nodes; 0: any."""

    latency_s: float = 0.0
    operations_per_s: int = 0
    bytes_per_s: int = 0


class State:
    """What a server and its mounts share: how fast it is, and what it has done."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / f"shared-{secrets.token_hex(4)}"
        self.file.write_bytes(bytes(STATE.size))
        with self.file.open("r+b") as file:
            self._state = mmap.mmap(file.fileno(), STATE.size)

    def set(self, speed: Speed) -> None:
        """Be as fast as that from now on, and count anew."""
        values = int(speed.latency_s * 1e9), speed.operations_per_s, speed.bytes_per_s
        self._state[:] = STATE.pack(*values, *[0] * (2 + len(KINDS)))

    def counts(self) -> dict[str, int]:
        """Return how often each kind of operation came, and how many bytes were read, since set() was called."""
        return dict(zip(KINDS, STATE.unpack(self._state[:])[5:], strict=True))


def program(folder: Path) -> Path:
    """Return the program that serves, compiled into a folder."""
    return compiled("shared.c", "-I/usr/include/fuse3", libraries=("-lfuse3", "-lpthread"), folder=folder)


def here(state: State, folder: Path, prepare: str = "true") -> list[str]:
    """Return the prefix that runs a command on this machine, for which alone a folder is on a shared file system.

    It is mounted with nothing in any cache; `prepare` is a command of the shell that runs before.
    """
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", HERE.replace("PREPARE", prepare), "sh",
            str(program(state.file.parent)), str(folder), str(state.file)]


HERE = """
"$1" "$2" "$2" "$3" 30 & server=$!
until grep -q fuse.shared /proc/self/mountinfo; do sleep 0.02; kill -0 $server || exit 9; done
folder=$2
shift 3
cd /
PREPARE && "$@"
status=$?
umount --lazy "$folder"
wait $server
exit $status
"""


class Server:
    """Serves a folder to nodes, each of which keeps what it has seen until it is mounted anew."""

    def __init__(self, cluster: Cluster, folder: Path, nodes: Sequence[str] = NODES, kept_s: float = KEPT_S) -> None:
        self._cluster, self._folder, self._nodes, self._kept_s = cluster, folder, nodes, kept_s
        self._program = program(RUN)
        self.state = State(RUN)

    def serve(self, speed: Speed) -> None:
        """Serve as fast as that from now on, and count anew."""
        self.state.set(speed)

    def mount(self) -> None:
        """Mount the folder on every node, with nothing in any cache."""
        self.unmount()
        for node in self._nodes:
            start_daemon(f"shared-{node}", *self._cluster.at(node, Path("/")), str(self._program), str(self._folder),
                         str(self._folder), str(self.state.file), str(self._kept_s))
        deadline = time.monotonic() + MOUNTING_S
        for node in self._nodes:
            while not self._is_mounted(node):
                if time.monotonic() > deadline:
                    raise TimeoutError((RUN / f"shared-{node}.log").read_text())
                time.sleep(0.02)

    def unmount(self) -> None:
        """Show every node its own disk."""
        for node in self._nodes:
            while self._is_mounted(node):
                subprocess.run([*self._cluster.at(node, Path("/")), "umount", "--lazy", str(self._folder)], check=True,
                               timeout=MOUNTING_S)
            if (RUN / "pids" / f"shared-{node}").exists():
                end_daemon(f"shared-{node}")

    def _is_mounted(self, node: str) -> bool:
        done = subprocess.run([*self._cluster.at(node, Path("/")), "cat", "/proc/self/mountinfo"], check=True,
                              capture_output=True, text=True, timeout=MOUNTING_S)
        return any(f" {self._folder} " in line and "fuse.shared" in line for line in done.stdout.splitlines())


@contextlib.contextmanager
def shared(cluster: Cluster, folder: Path, speed: Speed, nodes: Sequence[str] = NODES,
           kept_s: float = KEPT_S) -> Iterator[Server]:
    """Serve a folder to nodes in this block."""
    server = Server(cluster, folder, nodes, kept_s)
    server.serve(speed)
    try:
        server.mount()
        yield server
    finally:
        server.unmount()


@contextlib.contextmanager
def environment(mpi: Mpi) -> Iterator[Path]:
    """Return the Python of an environment in which mpiddp is installed as by pip, and all else is the tests' own.

    It lies beside the others, so that a mount of that folder has all of it.
    """
    folder = VENVS.resolve() / f"shared-{secrets.token_hex(4)}"
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
        site = next(folder.glob("lib/python*/site-packages"))
        own = next((VENVS / mpi.name).glob("lib/python*/site-packages"))
        for path in own.iterdir():
            if path.suffix != ".pth":
                shutil.copytree(path, site / path.name, symlinks=True)
        base = f"os.path.join(os.path.dirname(sys.prefix), 'base', {str(site.relative_to(folder))!r})"
        (site / "base.pth").write_text(f"import os, site, sys; site.addsitedir({base})\n")
        shutil.copytree(ROOT / "mpiddp", site / "mpiddp", ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(site / "mpiddp", quiet=1)
        yield folder / "bin/python"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
