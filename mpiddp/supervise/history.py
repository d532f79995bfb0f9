"""The history of attempts: their numbers, which continue after a requeue, the table, and the JSON file."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..base.files import claim_free_folder, list_names, read_number, write_json
from ..base.text import fold_hosts, format_columns, format_duration, truncate_middle
from ..discovery import runtime, schedulers
from .decision import Attempt, Decision

FRUITLESS_FILE = "fruitless"  # a file's name


class AttemptCounter:
    """Numbers the attempts: from 0, or after a requeue from the next number on.

    In a Slurm job, a hidden folder below `folder` has a file for each number. Each supervisor of the job has its own
    folder. If none can be written, the first number is the number of Slurm's restarts. `fruitless` counts the last
    starts in a row that had to stop before their first step; it is 0 if nothing is stored.
    """

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        self._next, self._folder, self.fruitless = runtime.count_restarts(environ), "", 0
        if job := environ.get("SLURM_JOB_ID"):
            wanted = os.path.join(folder, f".mpiddp-attempts-{job}")
            restarts, own = schedulers.count_slurm_restarts(environ), secrets.token_hex(4)
            self._folder = claim_free_folder(wanted, restarts, own, itertools.count(1)).folder
            self.fruitless = max(0, read_number(os.path.join(self._folder, FRUITLESS_FILE))) if self._folder else 0
            self._next = max([self._next, *(int(name) + 1 for name in list_names(self._folder) if name.isdecimal())])

    def take(self) -> int:
        """Return the number of the next attempt."""
        taken, self._next = self._next, self._next + 1
        if self._folder:
            try:
                os.close(os.open(os.path.join(self._folder, str(taken)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            except OSError:  # the numbers may repeat after a requeue
                self._folder = ""
        return taken

    def end(self, fruitless: bool) -> None:
        """Record how a start of the job ended."""
        self.fruitless = self.fruitless + 1 if fruitless else 0
        if self._folder:
            with contextlib.suppress(OSError):
                Path(self._folder, FRUITLESS_FILE).write_text(str(self.fruitless))

    def forget(self) -> None:
        """Remove the numbers: a job that succeeded is not requeued."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


MAX_REASON_CHARS = 80  # characters of a reason
HEADER = ("attempt", "nodes", "time", "steps", "reason", "action")


class AttemptRecord(NamedTuple):
    """An attempt, its start (seconds since the epoch), the decision after it, and its number in the job."""

    began: float
    attempt: Attempt
    decision: Decision
    number: int


def format_table(records: Sequence[AttemptRecord]) -> list[str]:
    """Return the lines of the table of attempts."""
    return ["mpiddp.supervise: attempts", *format_columns([HEADER, *map(format_row, records)])]


def format_row(record: AttemptRecord) -> tuple[str, ...]:
    """Return the cells of an attempt."""
    _, attempt, decision, number = record
    out = f" without {fold_hosts(decision.without)}" if decision.without else ""
    steps = f"{attempt.steps:,}" if attempt.steps else ""
    return (str(number), fold_hosts(attempt.nodes) if attempt.nodes else "this node", format_duration(attempt.seconds),
            steps, truncate_middle(attempt.reason, MAX_REASON_CHARS), f"{decision.action.value}{out}")


def write_history(path: str, records: Sequence[AttemptRecord]) -> None:
    """Write all attempts as JSON: the fields of Attempt, `number`, `began`, `action`, `why` and `without`."""
    write_json(path, {"attempts": [
        {"number": record.number, "began": round(record.began, 3), **record.attempt._asdict(),
         "action": record.decision.action.value, "why": record.decision.why, "without": record.decision.without}
        for record in records]})
