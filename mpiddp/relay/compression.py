"""Compressed files that are whole at any moment, whatever becomes of the process that writes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..facts.files import open_for_writing

GZIP = 16 + zlib.MAX_WBITS  # zlib's word for a gzip header


class Codec(Protocol):
    """Compresses data in blocks. A reader finds all blocks so far if `ending` follows them, also if that is none."""

    ending: bytes

    def block(self, data: bytes) -> bytes:
        """Return a block, the first with what begins a file."""


class Gzip:
    """Makes a member of a gzip file (RFC 1952)."""

    def __init__(self) -> None:
        self._compress = zlib.compressobj(wbits=GZIP)
        self._crc = self._size = 0
        self.ending = b"\x1f\x8b\x08" + bytes(6) + b"\xff\x03\x00" + bytes(8)  # a member without data

    def block(self, data: bytes) -> bytes:
        """Return a block that ends at a byte's end; an empty last one (RFC 1951, 3.2.6) and the sums may follow."""
        self._crc, self._size = zlib.crc32(data, self._crc), self._size + len(data)
        self.ending = b"\x03\x00" + struct.pack("<II", self._crc, self._size & 0xFFFFFFFF)
        return self._compress.compress(data) + self._compress.flush(zlib.Z_SYNC_FLUSH)


class Zstd:
    """Makes a frame of a zstd file (RFC 8878), by Python's own module (from 3.14) or by the package zstandard."""

    def __init__(self) -> None:
        self.ending = b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00"  # a frame without data
        self._block: Callable[[bytes], bytes]
        if sys.version_info >= (3, 14):
            from compression import zstd

            own = zstd.ZstdCompressor()
            self._block = lambda data: own.compress(data, own.FLUSH_BLOCK)
        else:
            import zstandard

            others: Any = zstandard.ZstdCompressor().compressobj()
            self._block = lambda data: others.compress(data) + others.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)

    def block(self, data: bytes) -> bytes:
        """Return a block, which an empty last one may follow (3.1.1.2): our frames have no checksum."""
        self.ending = b"\x01\x00\x00"
        return self._block(data)


CODECS: dict[str, type[Codec]] = {"gzip": Gzip, "zstd": Zstd}


@contextlib.contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Keep other processes that do so from a file, in this block, where the file system can do that."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


class Compressed:
    """A file that each write() adds a block to, and after it what ends it, which the next block takes the place of."""

    def __init__(self, path: str, compression: str) -> None:
        """Go on after what is in the file."""
        self._descriptor = open_for_writing(path, keep=True, job_folder=True)
        self._kind = CODECS[compression]
        self._begin(os.fstat(self._descriptor).st_size)
        if not self.size:
            with contextlib.suppress(OSError):
                self._ending = self._codec.ending[:os.pwrite(self._descriptor, self._codec.ending, 0)]

    def _begin(self, at: int) -> None:
        """Begin a member, or frame."""
        self._at, self._ending = at, b""
        self._codec: Codec = self._kind()

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return self._at + len(self._ending)

    def write(self, data: bytes) -> int:
        """Write all of the data, and return how much that is; where that fails, the file is as it was before."""
        with locked(self._descriptor):
            self._write(data)
        return len(data)

    def _write(self, data: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        if size != self.size:  # another process has written to it, or emptied it
            self._begin(size)
        block = self._codec.block(data)
        rest, at = block + self._codec.ending, self._at
        try:
            while rest:
                count = os.pwrite(self._descriptor, rest, at)
                rest, at = rest[count:], at + count
        except OSError:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, self._ending, self._at)
                os.ftruncate(self._descriptor, self.size)
            self._begin(self.size)
            raise
        self._at, self._ending = self._at + len(block), self._codec.ending

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
