"""Former checks of the nodes (--check-history): a file of JSON lines, one for each check and host."""

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
from .bench.storage import FOLDER_TIMEOUT_S
from .bench.timeouts import run_with_timeout
from .stats.baseline import best_by_host, regressions
from .stats.schema import Finding, Measurements


class Entry(NamedTuple):
    """A check of a host, at `time` in seconds since the epoch.

    `kind` is what its ranks were, such as "2 x 8 cores of AMD EPYC 7763": checks of other kinds are not compared.
    `values` are those of best_by_host().
    """

    time: float
    host: str
    kind: str
    values: dict[str, float]


class History:
    """The former checks in a file, on rank 0."""

    def __init__(self, path: str) -> None:
        """Read the file."""
        self._path, self._error = path, ""
        self._entries: list[Entry] = []
        self._damaged = 0
        try:
            self._entries, self._damaged = run_with_timeout(FOLDER_TIMEOUT_S, lambda: read_entries(path))
        except OSError as error:
            self._error = error_text(error, path)

    def compare(self, measured: Measurements) -> list[Finding]:
        """Return which hosts are worse than in their former checks with ranks of the same kinds."""
        kinds = kinds_by_host(measured)
        baseline: dict[str, dict[str, list[float]]] = {}
        for entry in self._entries:
            if kinds.get(entry.host) == entry.kind:
                for name, value in entry.values.items():
                    baseline.setdefault(entry.host, {}).setdefault(name, []).append(value)
        return regressions(measured, baseline)

    def append(self, measured: Measurements) -> list[str]:
        """Append this check to the file; return warnings about a file that cannot be used or is damaged."""
        try:
            if not self._error:
                entries = make_entries(measured, time.time())
                run_with_timeout(FOLDER_TIMEOUT_S, lambda: append_entries(self._path, entries))
        except OSError as error:
            self._error = error_text(error, self._path)
        if self._error:
            return [f"check-history: cannot keep figures in {self._path}: {self._error}"]
        lines = f"{self._damaged} damaged line{'s' * (self._damaged != 1)}"
        return [f"check-history: {lines} of {self._path} left out"] if self._damaged else []


def error_text(error: OSError, path: str) -> str:
    """Return why a file cannot be read or written."""
    if not error.strerror:  # the TimeoutError of run_with_timeout()
        return f"it has not answered within {FOLDER_TIMEOUT_S:g} s"
    return files.format_os_error(error, path)


def kinds_by_host(measured: Measurements) -> dict[str, str]:
    """Return the kinds of each host's ranks."""
    kinds: dict[str, Counter[str]] = {}
    for info in measured.ranks:
        kinds.setdefault(info.host, Counter())[info.kind] += 1
    return {host: ", ".join(f"{number} x {kind}" for kind, number in counts.items()) for host, counts in kinds.items()}


def make_entries(measured: Measurements, now: float) -> list[Entry]:
    """Return an entry for each host of a check."""
    kinds = kinds_by_host(measured)
    return [Entry(round(now, 1), host, kinds[host], values) for host, values in best_by_host(measured).items()]


def read_entries(path: str) -> tuple[list[Entry], int]:
    """Return the entries of a file and the number of damaged lines; no entries if there is no file. Raises OSError."""
    try:
        with open(files.open_for_reading(path), errors="replace") as file:
            entries = [parse_entry(line) for line in file if line.strip()]
    except FileNotFoundError:
        return [], 0
    return [entry for entry in entries if entry], entries.count(None)


def parse_entry(line: str) -> Entry | None:
    """Return the entry of a line, None if it is damaged."""
    try:
        entry: dict[str, Any] = json.loads(line)
        values = {str(name): float(value) for name, value in entry["values"].items()}
        if not all(0 <= value < math.inf for value in values.values()):
            return None
        return Entry(float(entry["time"]), str(entry["host"]), str(entry["kind"]), values)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def append_entries(path: str, entries: Sequence[Entry]) -> None:
    """Append entries to a file in one write, so that jobs may share it; raise OSError.

    If the last line has no end, because a job was killed while it wrote, it gets one first.
    """
    descriptor = files.open_for_writing(path, append=True)
    try:
        with open(files.open_for_reading(path), "rb") as file:
            is_torn = file.read()[-1:] not in (b"", b"\n")
        lines = "".join(f"{json.dumps(entry._asdict())}\n" for entry in entries)
        write_all(descriptor, b"\n" * is_torn + lines.encode())
    finally:
        os.close(descriptor)
