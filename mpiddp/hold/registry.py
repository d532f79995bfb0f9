"""The user's holds: a file for each, beside those by which `mpiddp.where` finds jobs."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from typing import NamedTuple

from ..where.registry import read_private, registry_folder, remove_file, write_private

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
    write_private(hold_path(hold.run_id), hold._asdict())


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
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                if name.endswith(SUFFIX):
                    holds.append(Hold(**read_private(os.path.join(registry_folder(), name))))
    return sorted(holds, key=lambda hold: -hold.started_s)
