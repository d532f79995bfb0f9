"""Where a running job can be asked: a card in the user's state folder, which nobody else can read."""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

JOB_NUMBERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


class Card(NamedTuple):
    """What one has to know to ask a job where its ranks are.

    `run_id` is the job's own name, `number` that of the batch system, empty without one. The coordinator listens on
    `address` and `port` of `host` for those that show `token`.
    """

    run_id: str
    number: str
    host: str
    address: str
    port: int
    token: str
    ranks: int
    version: str


def folder() -> str:
    """Return where the user's cards are (XDG Base Directory Specification)."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "mpiddp")


def job_number() -> str:
    """Return the number that the batch system has given this job, empty for none."""
    return next((os.environ[name] for name in JOB_NUMBERS if os.environ.get(name)), "")


def write(card: Card) -> str:
    """Write a card and return its file, empty where the user's folder cannot be written: the job works without."""
    path = os.path.join(folder(), f"{card.run_id}.json")
    try:
        os.makedirs(folder(), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            json.dump(card._asdict(), file)
    except OSError:
        return ""
    return path


def remove(path: str) -> None:
    """Remove a card that write() has written."""
    if path:
        with contextlib.suppress(OSError):
            os.unlink(path)


def read_all() -> dict[str, Card]:
    """Return the cards of this user by their files, those that were written last first; others are left out."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(folder()), key=lambda one: -one.stat().st_mtime):
            with contextlib.suppress(OSError, ValueError, TypeError), open(entry.path) as file:
                found[entry.path] = Card(**json.load(file))
    return found
