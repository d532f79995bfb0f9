"""Real cgroups with a limit: of memory, or of a share of the CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.support import need

V2 = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
RELEASE_S = 5.0  # for the kernel to let go of processes that have ended


@contextmanager
def limited(controller: str, name: str, value: str, name_in_v2: str, value_in_v2: str) -> Iterator[Path]:
    """Yield a new cgroup with a limit of a controller: what is written to its cgroup.procs is in it."""
    v1 = V2 / controller
    parent, limit, text = (v1, name, value) if v1.is_dir() else (V2, name_in_v2, value_in_v2)
    folder = parent / f"mpiddp-test-{controller}-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        need([f"a cgroup of one's own ({error})"])
    try:
        if not (folder / limit).exists():
            need([f"a {controller} controller that {parent} hands on"])
        (folder / limit).write_text(text)
        yield folder
    finally:
        deadline = time.monotonic() + RELEASE_S
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        folder.rmdir()


def quota(cpus: float) -> AbstractContextManager[Path]:
    """Return a cgroup that has so many CPUs' time."""
    share = str(round(cpus * PERIOD_US))
    return limited("cpu", "cpu.cfs_quota_us", share, "cpu.max", f"{share} {PERIOD_US}")


def inside(group: Path, *command: object) -> list[str]:
    """Return the command that runs another one in a cgroup."""
    return ["sh", "-c", f"echo $$ > {group}/cgroup.procs; exec \"$@\"", "sh", *map(str, command)]
