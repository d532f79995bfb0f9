"""The user's holds: a file for each, beside those by which `mpiddp.where` finds jobs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from functools import partial
from typing import NamedTuple

from ..base.files import find_risk, open_checked
from ..where.registry import registry_folder, remove_file

SUFFIX = ".hold"


class Hold(NamedTuple):
    """A hold of so many ranks, and where its server listens."""

    run_id: str
    host: str
    address: str
    port: int
    token: str
    ranks: int
    started_s: float


def write_hold(hold: Hold) -> None:
    """Write a hold's file, which its user alone can read; raise OSError."""
    path = hold_path(hold.run_id)
    remove_file(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = open_checked(path, flags, partial(find_risk, job_folder=True), 0o700, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(hold._asdict(), file)


def remove_hold(run_id: str) -> None:
    """Remove a hold's file, if it exists."""
    remove_file(hold_path(run_id))


def hold_path(run_id: str) -> str:
    """Return the path of a hold's file."""
    return os.path.join(registry_folder(), run_id + SUFFIX)


def describe_python() -> str:
    """Return which Python this is, and of which environment."""
    return f"Python {platform.python_version()} of {sys.prefix}"


def read_holds() -> list[Hold]:
    """Return this user's holds, the newest first."""
    holds = []
    with contextlib.suppress(OSError):
        for name in os.listdir(registry_folder()):
            with contextlib.suppress(OSError, ValueError, TypeError):
                path = os.path.join(registry_folder(), name)
                if name.endswith(SUFFIX) and os.lstat(path).st_uid == os.getuid():
                    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
                        holds.append(Hold(**json.load(file)))
    return sorted(holds, key=lambda hold: -hold.started_s)
