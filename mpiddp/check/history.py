"""Earlier checks of the nodes (--check-history): a file of JSON lines, one for each check and host."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ..base import files
from ..base.stderr import write_all
from .bench.storage import FOLDER_TIMEOUT_S
from .bench.timeouts import run_with_timeout
from .stats.baseline import best_by_host, regressions
from .stats.schema import Finding, Measurements
from .stats.text import count_text

HOST = re.compile(rb'"host": "([^"\\]*)"')  # as make_entries() and json write it


class Entry(NamedTuple):
    """A check of a host, at `time` in seconds since the epoch, with the values of best_by_host().

    `kind` are the kinds of its ranks, such as "2 x 8 cores of AMD EPYC 7763": only checks of one kind are compared.
    """

    time: float
    host: str
    kind: str
    values: dict[str, float]


class History:
    """The earlier checks of a job's hosts in a file, on rank 0."""

    def __init__(self, path: str, hosts: Collection[str]) -> None:
        """Read the file."""
        self._path, self._error = path, ""
        self._entries: list[Entry] = []
        self._damaged = 0
        try:
            self._entries, self._damaged = read_entries(path, hosts)
        except OSError as error:
            self._error = _error_text(error, path)

    def compare(self, measured: Measurements) -> list[Finding]:
        """Return findings about hosts that are worse than in their earlier checks with ranks of the same kinds."""
        kinds = _kinds_by_host(measured)
        baseline: dict[str, dict[str, list[float]]] = {}
        for entry in self._entries:
            if kinds.get(entry.host) == entry.kind:
                for name, value in entry.values.items():
                    baseline.setdefault(entry.host, {}).setdefault(name, []).append(value)
        return regressions(measured, baseline)

    def append(self, measured: Measurements) -> list[str]:
        """Append this check to the file; return warnings about an unusable or damaged file."""
        try:
            if not self._error:
                entries = make_entries(measured, time.time())
                run_with_timeout(FOLDER_TIMEOUT_S, lambda: append_entries(self._path, entries))
        except OSError as error:
            self._error = _error_text(error, self._path)
        if self._error:
            return [f"check-history: cannot record results in {self._path}: {self._error}"]
        damaged = count_text(self._damaged, "damaged line")
        return [f"check-history: ignored {damaged} in {self._path}"] if self._damaged else []


def _error_text(error: OSError, path: str) -> str:
    if not error.strerror:  # the TimeoutError of run_with_timeout()
        return f"no response within {FOLDER_TIMEOUT_S:g} s"
    return files.format_os_error(error, path)


def _kinds_by_host(measured: Measurements) -> dict[str, str]:
    kinds: dict[str, Counter[str]] = {}
    for info in measured.ranks:
        kinds.setdefault(info.host, Counter())[info.kind] += 1
    return {host: ", ".join(f"{number} x {kind}" for kind, number in counts.items()) for host, counts in kinds.items()}


def make_entries(measured: Measurements, now: float) -> list[Entry]:
    """Return an entry for each host of a check."""
    kinds = _kinds_by_host(measured)
    return [Entry(round(now, 1), host, kinds[host], values) for host, values in best_by_host(measured).items()]


def read_entries(path: str, hosts: Collection[str]) -> tuple[list[Entry], int]:
    """Return the entries of hosts in a file and the number of damaged lines, ([], 0) without a file. Raises OSError.

    The file may have the checks of a whole site.
    """
    def read() -> bytes:
        with open(files.open_for_reading(path), "rb") as file:
            return file.read()

    try:
        lines = run_with_timeout(FOLDER_TIMEOUT_S, read).splitlines()
    except FileNotFoundError:
        return [], 0
    wanted = {host.encode() for host in hosts}
    entries = [_parse_entry(line) for line in lines
               if line.strip() and not ((match := HOST.search(line)) and match[1] not in wanted)]
    return [entry for entry in entries if entry], entries.count(None)


def _parse_entry(line: bytes) -> Entry | None:
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

    If the last line has no newline, because a job was killed while writing, add one first.
    """
    descriptor = files.open_for_writing(path, append=True)
    try:
        with open(files.open_for_reading(path), "rb") as file:
            is_torn = bool(size := os.fstat(file.fileno()).st_size) and os.pread(file.fileno(), 1, size - 1) != b"\n"
        lines = "".join(f"{json.dumps(entry._asdict())}\n" for entry in entries)
        write_all(descriptor, b"\n" * is_torn + lines.encode())
    finally:
        os.close(descriptor)
