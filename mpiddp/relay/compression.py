"""Logs are compressed when they are complete, by gzip (RFC 1952) or zstd (RFC 8878)."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from typing import IO, Any

from ..facts.files import open_for_reading, open_for_writing

SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
GZIP_LEVEL = 6  # gzip's own default
PIECE_BYTES = 2**20


def compress(path: str, compression: str, anew: bool = False) -> str:
    """Compress a file after what its compressed file has already, or `anew`; remove it and return the other's path.

    At any moment one of the two files has all of it. Raises OSError where that fails: then the file stays as it is.
    """
    target = path + SUFFIXES[compression]
    with replacing(path, target) as sink:
        if not anew and os.path.exists(target):
            with os.fdopen(open_for_reading(target), "rb") as before:
                shutil.copyfileobj(before, sink, PIECE_BYTES)
        with os.fdopen(open_for_reading(path), "rb") as source, compressor(sink, compression) as compressed:
            shutil.copyfileobj(source, compressed, PIECE_BYTES)
    return target


def restore(path: str, compression: str) -> None:
    """Take a file out of its compressed file, in whose place it is then; do nothing if it is there already."""
    target = path + SUFFIXES[compression]
    if os.path.exists(path) or not os.path.exists(target):
        return
    with (replacing(target, path) as sink, os.fdopen(open_for_reading(target), "rb") as source,
          decompressor(source, compression) as data):
        shutil.copyfileobj(data, sink, PIECE_BYTES)


@contextlib.contextmanager
def replacing(source: str, target: str) -> Iterator[IO[bytes]]:
    """Yield a file that takes the place of `target` when the block has ended; then `source` is removed."""
    part = f"{target}.part"
    try:
        with os.fdopen(open_for_writing(part, job_folder=True), "wb") as sink:
            yield sink
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    os.unlink(source)


def compressor(sink: IO[bytes], compression: str) -> contextlib.AbstractContextManager[Any]:
    """Return a file that compresses what is written to it; zstd's by Python (from 3.14) or by the package zstandard."""
    if compression == "gzip":
        import gzip

        return gzip.GzipFile("", "wb", GZIP_LEVEL, sink)
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdFile(sink, "wb")
    import zstandard

    found: contextlib.AbstractContextManager[Any] = zstandard.ZstdCompressor().stream_writer(sink, closefd=False)
    return found


def decompressor(source: IO[bytes], compression: str) -> contextlib.AbstractContextManager[Any]:
    """Return a file of what a compressed one holds, of all its parts."""
    if compression == "gzip":
        import gzip

        return gzip.GzipFile("", "rb", fileobj=source)
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdFile(source, "rb")
    import zstandard

    found: contextlib.AbstractContextManager[Any] = zstandard.ZstdDecompressor().stream_reader(
        source, read_across_frames=True, closefd=False)
    return found
