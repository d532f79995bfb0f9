"""Benchmarks of a node's folders: writing and reading files, and free space.

Files are written and read as programs do, through the page cache and without fsync(): this is the time that a script
waits, not the time until the data is on a disk or an NFS server. Files have no name, or only for a moment, and end with
their process.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from ...base.timeouts import run_with_timeout

SHM = "/dev/shm"  # noqa: S108 (it is measured)
FOLDER_TIMEOUT_S = 5.0  # in addition to the budget
BUFFER = bytes(2**20)
FILE_BYTES = 2**24
MAX_SHARE_OF_FREE = 0.05  # leaves space for other programs
MIN_FREE_BYTES = 2**26  # of a folder with less, it is reported
TRANSFERS, FILES = 0.6, 0.4  # shares of the budget
NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)


class BenchmarkFolder(NamedTuple):
    """A folder: the prefix of its metrics, its path, its label, and whether denied write permission is a fault."""

    name: str
    path: str
    label: str
    must_be_writable: bool = True


def folders(environ: Mapping[str, str]) -> tuple[BenchmarkFolder, ...]:
    """Return the folders of a node: /dev/shm, the folder for temporary files, the working directory.

    tempfile.gettempdir() would choose another folder if the first is full.
    """
    temporary = next((path for name in ("TMPDIR", "TEMP", "TMP") if (path := environ.get(name, ""))), "/tmp")  # noqa: S108
    return (BenchmarkFolder("shm", SHM, SHM), BenchmarkFolder("tmp", temporary, temporary),
            BenchmarkFolder("folder", ".", "the working directory", must_be_writable=False))


def measure_folder(
    folder: BenchmarkFolder, budget_s: float, timeout_s: float = FOLDER_TIMEOUT_S
) -> tuple[dict[str, float], list[str]]:
    """Return a folder's values by metric, and lines about its faults.

    A file system that hangs, as NFS without its server, blocks only a thread, which ends with the process.
    """
    try:
        return run_with_timeout(timeout_s + budget_s, lambda: _measure_in_thread(folder, budget_s))
    except TimeoutError:
        return {}, [f"{folder.label} did not respond within {timeout_s:g} s"]
    except OSError as error:
        return {}, _write_faults(folder, error)


def _write_faults(folder: BenchmarkFolder, error: OSError) -> list[str]:
    if error.errno in NOT_PERMITTED and not folder.must_be_writable:
        return []
    return [f"cannot write to {folder.label}: {error.strerror}"]


def _measure_in_thread(folder: BenchmarkFolder, budget_s: float) -> tuple[dict[str, float], list[str]]:
    status = os.statvfs(folder.path)
    size, free = float(status.f_frsize * status.f_blocks), float(status.f_frsize * status.f_bavail)
    values = {"shm": {"shm-size": size, "shm-free": free}, "tmp": {"tmp-free": free}}.get(folder.name, {})
    if size < MIN_FREE_BYTES:
        return values, [f"{folder.label} is small: {size / 2**20:.0f} MiB"]
    if free < MIN_FREE_BYTES:
        return values, [f"{folder.label} is full: {free / 2**20:.0f} MiB free"]
    try:
        file_bytes = int(min(FILE_BYTES, free * MAX_SHARE_OF_FREE))
        speeds = _measure_transfers(folder.path, file_bytes, budget_s * TRANSFERS)
        if folder.path != SHM:
            speeds["files"] = _measure_files(folder.path, budget_s * FILES)
    except OSError as error:
        return values, _write_faults(folder, error)
    return {**values, **{f"{folder.name}-{metric}": speed for metric, speed in speeds.items()}}, []


def _measure_transfers(path: str, size: int, budget_s: float) -> dict[str, float]:
    """Return the B/s at which files of `size` bytes are written and read, the best of several files."""
    end = time.perf_counter() + budget_s
    best = {"write": 0.0, "read": 0.0}
    data, target = memoryview(BUFFER)[:size], bytearray(len(BUFFER))
    while not best["read"] or time.perf_counter() < end:
        with unnamed_file(path) as file:
            start, written = time.perf_counter(), 0
            while written < size:
                written += os.write(file, data)
            middle = time.perf_counter()
            os.lseek(file, 0, os.SEEK_SET)
            while os.readv(file, [target]):
                pass
            best["write"] = max(best["write"], written / (middle - start))
            best["read"] = max(best["read"], written / (time.perf_counter() - middle))
    return best


@contextmanager
def unnamed_file(path: str) -> Iterator[int]:
    """Open a new file without a name in a folder; if the file system does not support that, remove the name at once."""
    try:
        file = os.open(path, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        file = unlinked_file(path)
    try:
        yield file
    finally:
        os.close(file)


def unlinked_file(path: str) -> int:
    """Create a file in a folder, stat it, remove its name, and return its descriptor."""
    process = f"{socket.gethostname()}-{os.getpid()}"  # not unique: containers may share both
    name = os.path.join(path, f".mpiddp-{process}-{os.urandom(4).hex()}")
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.stat(name)
    finally:
        os.unlink(name)
    return file


def _measure_files(path: str, budget_s: float) -> float:
    """Return how many files per second are created, inspected and removed in a folder, one after the other."""
    start, count = time.perf_counter(), 0
    while not count or time.perf_counter() < start + budget_s:
        os.close(unlinked_file(path))
        count += 1
    return count / (time.perf_counter() - start)
