"""Removes what MPI leaves of killed jobs in folders that all jobs share: `python -m tests.leftovers SINCE`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

SHARED = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "sem.mp-*")
HWLOC = "hydra_hwloc_xmlfile_*"  # which a rank of MPICH reads in MPI_Init


def remove_leftovers(since_s: float, memory: Path = Path("/dev/shm")) -> None:
    """Remove this user's files that are younger than a time and that no process has open or maps.

    Another job of the user may start at the same time: without its segment its ranks wait for each other for ever.
    """
    own = [path for name in SHARED for path in memory.glob(name) if is_own(path, since_s)]
    used = set(used_inodes(memory))  # looked up after the list, which lacks the segments of jobs that start meanwhile
    for path in own:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino not in used:
                path.unlink()
    topologies = [path for path in Path("/tmp").glob(HWLOC) if is_own(path, since_s)]
    if not any(process.info["name"] == "hydra_pmi_proxy" for process in psutil.process_iter(["name"])):
        for path in topologies:
            path.unlink(missing_ok=True)


def is_own(path: Path, since_s: float) -> bool:
    """Return whether a file is this user's and younger than a time."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_uid == os.getuid() and status.st_mtime > since_s
    return False


def used_inodes(memory: Path) -> Iterator[int]:
    """Yield the inodes of the files that processes have open, and of those in a folder that they map (man 5 proc)."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {memory}/" in line:
                    yield int(line.split(None, 5)[4])
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    yield link.stat().st_ino


if __name__ == "__main__":
    remove_leftovers(Path(sys.argv[1]).stat().st_mtime)
