"""What nodes have measured before: a file of JSON lines, one for each check and host, the newest last."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ..compare.figures import OWN, Figures, Finding
from ..compare.past import aged, present
from ..facts import files
from ..measure.deadlines import within
from ..measure.storage import ANSWER_S
from ..say import write_all

KEPT = 50  # lines of a host
PATIENCE_S = 2.0  # with another job that has the file

Past = dict[str, dict[str, list[float]]]  # by host and quantity, the newest last


class Entry(NamedTuple):
    """A check of a host, at `time` in seconds since the epoch.

    `kind` is what its ranks were, such as "2 x 8 cores of AMD EPYC 7763": figures of other kinds are no measure.
    `values` are as `compare.past` keeps them: the medians over its ranks, by quantity.
    """

    time: float
    host: str
    kind: str
    values: dict[str, float]


class OwnPast:
    """The former checks in a file, beside which those of now are put. Used by rank 0."""

    def __init__(self, path: str) -> None:
        """Read the file."""
        self._path, self._error = path, ""
        self._known: list[Entry] = []
        self._damaged = 0
        self._suspects: set[tuple[str, tuple[int, ...]]] = set()
        try:
            self._known, self._damaged = within(ANSWER_S, lambda: read(path))
        except OSError as error:
            self._error = reason(error, path)

    def doubt(self, figures: Figures) -> dict[str, frozenset[int]]:
        """Return which ranks measure again, by quantity, before their host is said to be worse than it was."""
        found = self._aged(figures)
        self._suspects = {(one.quantity, one.nodes) for one in found}
        return {name: frozenset(rank for rank, who in enumerate(figures.ranks) if figures.own[name].get(rank)
                                and any(who.node in nodes for other, nodes in self._suspects if other == name))
                for name in {one.quantity for one in found} if name in OWN and OWN[name].repeats}

    def judge(self, figures: Figures) -> list[Finding]:
        """Return which hosts are worse than they were, by their first look and by the best of all."""
        return [one for one in self._aged(figures) if (one.quantity, one.nodes) in self._suspects
                and (one.quantity in OWN or self._has_met_again(figures, one.nodes))]

    def _has_met_again(self, figures: Figures, nodes: Sequence[int]) -> bool:
        """Tell whether a node's ways were measured more than once: of one look alone nobody is accused."""
        return any(len(values) > 1 and {*way} & {*nodes} for ways in figures.ways.values()
                   for way, values in ways.items())

    def keep(self, figures: Figures) -> list[str]:
        """Add this check to the file; return warnings where the file is not as it should be."""
        try:
            if not self._error:
                new = entries(figures, time.time())
                within(ANSWER_S, lambda: append(self._path, new))
        except OSError as error:
            self._error = reason(error, self._path)
        if self._error:
            return [f"check-history: cannot keep figures in {self._path}: {self._error}"]
        damaged = f"{self._damaged} damaged line{'s' * (self._damaged != 1)}"
        return [f"check-history: {damaged} of {self._path} left out"] if self._damaged else []

    def _aged(self, figures: Figures) -> list[Finding]:
        return aged(figures, past(self._known, entries(figures, 0.0)))


def reason(error: OSError, path: str) -> str:
    """Return why a file cannot be read or written, in words."""
    if not error.strerror:  # of within()
        return f"it has not answered within {ANSWER_S:g} s"
    return files.reason(error, path)


def entries(figures: Figures, now: float) -> list[Entry]:
    """Return an entry for each host of a check."""
    kinds: dict[str, Counter[str]] = {}
    for who in figures.ranks:
        kinds.setdefault(who.host, Counter())[who.kind] += 1
    return [Entry(round(now, 1), host, ", ".join(f"{number} x {kind}" for kind, number in kinds[host].items()), values)
            for host, values in present(figures).items()]


def read(path: str) -> tuple[list[Entry], int]:
    """Return the entries of a file, and how many of its lines are damaged; none where there is no such file.

    Raises OSError where it cannot be read.
    """
    try:
        with open(files.open_for_reading(path), errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        return [], 0
    found = [parsed(line) for line in text.removesuffix("\n").split("\n") if text]
    return [one for one in found if one], max(found.count(None), int(bool(text) and not text.endswith("\n")))


def parsed(line: str) -> Entry | None:
    """Return the entry of a line, None of a damaged one."""
    try:
        one: dict[str, Any] = json.loads(line)
        values = {str(name): float(value) for name, value in one["values"].items()}
        return Entry(float(one["time"]), str(one["host"]), str(one["kind"]), values)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def past(known: Sequence[Entry], present: Sequence[Entry]) -> Past:
    """Return what each host of the present entries has measured before, with ranks of the same kinds."""
    found: Past = {}
    kinds = {one.host: one.kind for one in present}
    for one in known:
        if kinds.get(one.host) == one.kind:
            for name, value in one.values.items():
                found.setdefault(one.host, {}).setdefault(name, []).append(value)
    return {host: {name: values[-KEPT:] for name, values in own.items()} for host, own in found.items()}


def append(path: str, new: Sequence[Entry]) -> None:
    """Add entries to a file, of which the newest of each host stay; raise OSError where it cannot be written.

    Other jobs write to it, too: it is locked meanwhile (man 2 flock), and TimeoutError, an OSError, is raised where one
    of them keeps it. What is old or damaged stays, if another file cannot be put in the place of this one.
    """
    with locked(path) as file:
        known, damaged = read(path)
        write_all(file, b"\n" * torn(path) + as_lines(new))
        kept = newest([*known, *new])
        if damaged or len(kept) < len(known) + len(new):
            with suppress(OSError):
                replace(file, path, as_lines(kept))


def as_lines(found: Sequence[Entry]) -> bytes:
    """Return what a file says of entries."""
    return "".join(f"{json.dumps(one._asdict())}\n" for one in found).encode()


def torn(path: str) -> bool:
    """Tell whether a file's last line has no end."""
    with open(files.open_for_reading(path), "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def replace(held: int, path: str, content: bytes) -> None:
    """Put a file with this content in the place of a locked one, which a link may lead to, at once and as a whole.

    Raises OSError where its folder, or the room that is left, does not let it.
    """
    place, old = os.path.realpath(path), os.fstat(held)
    if not os.path.samestat(old, os.stat(place)):
        raise FileNotFoundError(place)
    beside = f"{place}.new"
    with suppress(FileNotFoundError):
        os.unlink(beside)  # of a process that was killed in between: the lock is ours
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with suppress(PermissionError):  # of a group that is not ours
            os.fchown(file, -1, old.st_gid)
        os.fchmod(file, stat.S_IMODE(old.st_mode))
        write_all(file, content)
        os.fsync(file)
        os.replace(beside, place)
    except OSError:
        os.unlink(beside)
        raise
    finally:
        os.close(file)


def newest(found: Sequence[Entry]) -> list[Entry]:
    """Return the last entries of each host."""
    counts: Counter[str] = Counter()
    kept = []
    for one in reversed(found):
        counts[one.host] += 1
        if counts[one.host] <= KEPT:
            kept.append(one)
    return kept[::-1]


@contextmanager
def locked(path: str) -> Iterator[int]:
    """Open a file to append to it, alone: that which has the name, as replace() leaves the one before without it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        file = files.open_for_writing(path, append=True)
        try:
            lock(file, deadline)
            if is_at(path, file):
                yield file
                return
        finally:
            os.close(file)


def lock(file: int, deadline: float) -> None:
    """Lock an open file; raise TimeoutError where another process has the lock for too long."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(0, "another job holds it") from None
            time.sleep(0.02)


def is_at(path: str, file: int) -> bool:
    """Tell whether an open file is the one that has a name, which is opened: NFS asks its server only then."""
    try:
        other = files.open_for_reading(path)
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(file), os.fstat(other))
    finally:
        os.close(other)
