"""How fast a node's folders take files and give them back, and how much room they have.

Files are written and read as programs do it, through the page cache and without fsync(): of a disk or of NFS this is
what a script waits for, and not how long the data needs to get there. What is read has just been written, so that it
may come out of that cache. No file has a name for longer than a moment, and each ends with its process.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from .timeouts import within

SHM = "/dev/shm"  # noqa: S108 (it is what is measured)
ANSWER_S = 5.0  # for a folder, over the time that measuring takes
CHUNK = bytes(2**20)
FILE_BYTES, LEAST_FREE_BYTES, MOST_OF_FREE = 2**24, 2**26, 0.05
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class Folder(NamedTuple):
    """A folder that is measured.

    `name` begins the names of its metrics, `words` are what to call it. `ours` tells that programs have to be able to
    write there, so that it is bad where they cannot.
    """

    name: str
    path: str
    words: str
    ours: bool = True


def folders(environ: Mapping[str, str]) -> tuple[Folder, ...]:
    """Return the folders of a node: /dev/shm, the one for temporary files, the working directory.

    tempfile.gettempdir() takes another one where the first is full, and so is not asked.
    """
    temporary = next((path for name in ("TMPDIR", "TEMP", "TMP") if (path := environ.get(name, ""))), "/tmp")  # noqa: S108
    return (Folder("shm", SHM, SHM), Folder("tmp", temporary, temporary),
            Folder("folder", ".", "the working directory", ours=False))


def measure(folder: Folder, budget_s: float, limit_s: float = ANSWER_S) -> tuple[dict[str, float], list[str]]:
    """Return a folder's figures, by the metrics' names, and what is bad about it.

    A file system that hangs, as NFS does without its server, holds a thread of ours, which ends with the process.
    """
    try:
        return within(limit_s + budget_s, lambda: look(folder, budget_s))
    except TimeoutError:
        return {}, [f"{folder.words} has not answered within {limit_s:g} s"]
    except OSError as error:
        return {}, refused(folder, error)


def refused(folder: Folder, error: OSError) -> list[str]:
    """Return in words that a folder cannot be written; nothing where that may be as its user wants it."""
    if error.errno in FORBIDDEN and not folder.ours:
        return []
    return [f"{folder.words} cannot be written: {error.strerror}"]


def look(folder: Folder, budget_s: float) -> tuple[dict[str, float], list[str]]:
    """Return what measure() does; raises OSError where a folder cannot be looked at or written."""
    seen = os.statvfs(folder.path)
    size, free = float(seen.f_frsize * seen.f_blocks), float(seen.f_frsize * seen.f_bavail)
    known = {"shm": {"shm-size": size, "shm-free": free}, "tmp": {"tmp-free": free}}.get(folder.name, {})
    if free < LEAST_FREE_BYTES:
        if size < LEAST_FREE_BYTES:
            return known, [f"{folder.words} is small: {size / 2**20:.0f} MiB"]
        return known, [f"{folder.words} is full: {free / 2**20:.0f} MiB free"]
    try:
        speeds = transfers(folder.path, int(min(FILE_BYTES, free * MOST_OF_FREE)), budget_s * 0.6)
        if folder.path != SHM:
            speeds["files"] = files_made(folder.path, budget_s * 0.4)
    except OSError as error:
        return known, refused(folder, error)
    return {**known, **{f"{folder.name}-{what}": value for what, value in speeds.items()}}, []


def transfers(path: str, size: int, budget_s: float) -> dict[str, float]:
    """Return how fast a folder takes files of `size` bytes, and gives them back, in B/s: the best of several files."""
    end = time.perf_counter() + budget_s
    best = {"write": 0.0, "read": 0.0}
    part, room = memoryview(CHUNK)[:size], bytearray(len(CHUNK))
    while not best["read"] or time.perf_counter() < end:
        with nameless(path) as file:
            began, written = time.perf_counter(), 0
            while written < size:
                written += os.write(file, part)
            between = time.perf_counter()
            os.lseek(file, 0, os.SEEK_SET)
            while os.readv(file, [room]):
                pass
            best["write"] = max(best["write"], written / (between - began))
            best["read"] = max(best["read"], written / (time.perf_counter() - between))
    return best


@contextmanager
def nameless(path: str) -> Iterator[int]:
    """Open a new file without a name; on a file system that knows none, one whose name is removed at once."""
    try:
        file = os.open(path, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        file = named(path)
    try:
        yield file
    finally:
        os.close(file)


def named(path: str) -> int:
    """Return the descriptor of a new file whose name is gone again; `path` is its folder."""
    ours = f"{socket.gethostname()}-{os.getpid()}"  # which other containers may have, too
    name = os.path.join(path, f".mpiddp-{ours}-{os.urandom(4).hex()}")
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.stat(name)
    finally:
        os.unlink(name)
    return file


def files_made(path: str, budget_s: float) -> float:
    """Return how many files a second a folder can have made, looked at and removed, one after the other."""
    began, number = time.perf_counter(), 0
    while not number or time.perf_counter() < began + budget_s:
        os.close(named(path))
        number += 1
    return number / (time.perf_counter() - began)
