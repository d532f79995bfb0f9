"""What nodes have measured before: a file of JSON lines, one for each check and host, to which each check appends."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base import files
from ..base.stderr import write_all
from .bench.storage import ANSWER_S
from .bench.timeouts import within
from .stats.baseline import best_of_hosts, regressions
from .stats.schema import Finding, Measurements


class Entry(NamedTuple):
    """A check of a host, at `time` in seconds since the epoch.

    `kind` is what its ranks were, such as "2 x 8 cores of AMD EPYC 7763": figures of other kinds are no measure.
    `values` are as `best_of_hosts()` has them.
    """

    time: float
    host: str
    kind: str
    values: dict[str, float]


class History:
    """The former checks in a file, beside which those of now are put. Used by rank 0."""

    def __init__(self, path: str) -> None:
        """Read the file."""
        self._path, self._error = path, ""
        self._known: list[Entry] = []
        self._damaged = 0
        try:
            self._known, self._damaged = within(ANSWER_S, lambda: read(path))
        except OSError as error:
            self._error = reason(error, path)

    def compare(self, measured: Measurements) -> list[Finding]:
        """Return which hosts are worse than in their former checks with ranks of the same kinds."""
        kinds = kinds_of(measured)
        past: dict[str, dict[str, list[float]]] = {}
        for entry in self._known:
            if kinds.get(entry.host) == entry.kind:
                for name, value in entry.values.items():
                    past.setdefault(entry.host, {}).setdefault(name, []).append(value)
        return regressions(measured, past)

    def keep(self, measured: Measurements) -> list[str]:
        """Append this check to the file; return warnings where the file is not as it should be."""
        try:
            if not self._error:
                new = entries(measured, time.time())
                within(ANSWER_S, lambda: append(self._path, new))
        except OSError as error:
            self._error = reason(error, self._path)
        if self._error:
            return [f"check-history: cannot keep figures in {self._path}: {self._error}"]
        damaged = f"{self._damaged} damaged line{'s' * (self._damaged != 1)}"
        return [f"check-history: {damaged} of {self._path} left out"] if self._damaged else []


def reason(error: OSError, path: str) -> str:
    """Return why a file cannot be read or written, in words."""
    if not error.strerror:  # of within()
        return f"it has not answered within {ANSWER_S:g} s"
    return files.format_os_error(error, path)


def kinds_of(measured: Measurements) -> dict[str, str]:
    """Return by host what its ranks are."""
    kinds: dict[str, Counter[str]] = {}
    for info in measured.ranks:
        kinds.setdefault(info.host, Counter())[info.kind] += 1
    return {host: ", ".join(f"{number} x {kind}" for kind, number in some.items()) for host, some in kinds.items()}


def entries(measured: Measurements, now: float) -> list[Entry]:
    """Return an entry for each host of a check."""
    kinds = kinds_of(measured)
    return [Entry(round(now, 1), host, kinds[host], values) for host, values in best_of_hosts(measured).items()]


def read(path: str) -> tuple[list[Entry], int]:
    """Return the entries of a file, and how many of its lines are damaged; none where there is no such file.

    Raises OSError where it cannot be read.
    """
    try:
        with open(files.open_for_reading(path), errors="replace") as file:
            found = [parsed(line) for line in file if line.strip()]
    except FileNotFoundError:
        return [], 0
    return [entry for entry in found if entry], found.count(None)


def parsed(line: str) -> Entry | None:
    """Return the entry of a line, None of a damaged one."""
    try:
        entry: dict[str, Any] = json.loads(line)
        values = {str(name): float(value) for name, value in entry["values"].items()}
        if not all(0 <= value < math.inf for value in values.values()):
            return None
        return Entry(float(entry["time"]), str(entry["host"]), str(entry["kind"]), values)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def append(path: str, new: Sequence[Entry]) -> None:
    """Append entries to a file in one write, so that jobs may share it; raise OSError where it cannot be written.

    A last line without its end, of a job that was killed in between, gets it first.
    """
    file = files.open_for_writing(path, append=True)
    try:
        with open(files.open_for_reading(path), "rb") as known:
            torn = known.read()[-1:] not in (b"", b"\n")
        write_all(file, b"\n" * torn + "".join(f"{json.dumps(entry._asdict())}\n" for entry in new).encode())
    finally:
        os.close(file)
