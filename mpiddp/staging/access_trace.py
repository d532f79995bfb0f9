"""The files that a start opens: traced in this process, recorded in the user's cache for the next start."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.util import source_from_cache
from typing import Any, NamedTuple

from ..base.files import open_for_reading, replace_file, user_folder
from ..discovery.site_profile import find_state_folder
from .manifest import PYCACHE, Range, environment_name, is_environment_file, is_within, root_of

RECORD_FORMAT = 3
PAGE = mmap.PAGESIZE
PRESENT_DIGITS = bytes(ord("1") if byte & 0x80 else ord("0") for byte in range(256))  # by a page entry's last byte
MAX_GAP_BYTES = 2**16  # between ranges that are read as one: reading the gap costs less than a second request
LARGE_FILE_BYTES = 2**24  # smaller files are always copied
STARTS_PER_KEPT_COPY = 16  # assumed

MappedPart = tuple[int, int, int]  # of a file: begin and end in memory, offset in the file


class TouchedFile(NamedTuple):
    """A large file: its size in bytes, and the ranges that a start reads."""

    size: int
    ranges: tuple[Range, ...]

    def is_worth_copying(self, nodes: int, keep: bool) -> bool:
        """Return whether copying the whole file is cheaper than reading its ranges on each node."""
        reads = max(nodes, STARTS_PER_KEPT_COPY if keep else 1)
        return sum(length for _, length in self.ranges) * reads >= self.size


class AccessTrace(NamedTuple):
    """The paths opened in an environment, and the ranges touched of the large mapped files among them."""

    paths: frozenset[str] = frozenset()
    touched: Mapping[str, TouchedFile] = {}

    def merge(self, other: AccessTrace) -> AccessTrace:
        """Return the union of two traces."""
        touched = {**self.touched, **{
            path: TouchedFile(size, merge_ranges([*ranges, *self.touched[path].ranges])
                              if path in self.touched else ranges)
            for path, (size, ranges) in other.touched.items()}}
        return AccessTrace(self.paths | other.paths, touched)


def record_path(roots: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Return the path of an environment's record."""
    folder = user_folder(environ, "XDG_CACHE_HOME", ".cache", site=find_state_folder(environ))
    return os.path.join(folder, f"stage-{environment_name(roots)}.json")


def read_record(path: str) -> AccessTrace:
    """Return the trace in a record; an empty one if the record cannot be read."""
    try:
        with open(open_for_reading(path), encoding="utf-8", errors="surrogateescape") as file:
            record = json.load(file)
        if record["format"] != RECORD_FORMAT:
            return AccessTrace()
        touched = {str(name): TouchedFile(int(size), tuple((int(start), int(length)) for start, length in ranges))
                   for name, (size, ranges) in record["touched"].items()}
        return AccessTrace(frozenset(map(str, record["paths"])), touched)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return AccessTrace()


def write_record(path: str, trace: AccessTrace) -> None:
    """Replace a record atomically; raise OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    record = {"format": RECORD_FORMAT, "paths": sorted(trace.paths), "touched": trace.touched}
    with replace_file(path, f"{path}.{os.uname().nodename}.{os.getpid()}") as file:
        file.write(json.dumps(record).encode())


class Tracer:
    """Traces the files below `roots` that this process opens; `mirror` is the mirror's path without links, or empty."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots, self._real_roots = roots, {os.path.realpath(root): root for root in roots}
        self.mirror = ""
        self._opened: set[str] = set()
        self._original_folders: dict[str, str] = {}  # by folder, its path in the environment, without links

    def watch_opens(self) -> None:
        """Trace the files that Python opens for reading from now on; this slows the process slightly."""
        prefixes, opened = (*self._roots, *self._real_roots), self._opened

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                path, _, flags = arguments
                if isinstance(path, str) and path.startswith(prefixes) and flags & os.O_ACCMODE == os.O_RDONLY:
                    opened.add(path)

        sys.addaudithook(hook)

    def loaded_files(self) -> frozenset[str]:
        """Return the files of the loaded modules, which every other rank has loaded, too."""
        return frozenset(filter(None, map(self._original, module_files())))

    def trace(self) -> AccessTrace:
        """Return the files opened so far: modules, mapped files, and those that watch_opens() has seen."""
        parts = mapped_parts()
        opened = {*module_files(), *parts, *tuple(self._opened)}
        # Python checks a module's source without opening it, and a module that replaces itself in sys.modules
        # (torch.backends) does not name its source.
        sources = {source for path in opened if (source := find_source(path))}
        originals = {path: original for path in opened | sources if (original := self._original(path))}
        touched = {}
        for path in parts.keys() & originals.keys():
            if sum(end - begin for begin, end, _ in parts[path]) > LARGE_FILE_BYTES:
                with contextlib.suppress(OSError):  # the file was removed, or the kernel gives no page map
                    touched[originals[path]] = TouchedFile(os.stat(path).st_size, touched_ranges(parts[path]))
        return AccessTrace(frozenset(originals.values()), touched)

    def _original(self, path: str) -> str:
        """Return the path in the environment of a file, or of the original of a copy; "" for any other file.

        The path has no links as folders, so that each folder has one place in the mirror.
        """
        folder, name = os.path.split(path)
        if folder not in self._original_folders:
            real = os.path.realpath(folder)
            if self.mirror and is_within(real, self.mirror):
                place = real[len(self.mirror):]
            else:
                root = root_of(real, self._real_roots)
                place = self._real_roots[root] + real[len(root):] if root else ""
            self._original_folders[folder] = place if root_of(place, self._roots) else ""
        original = os.path.join(place, name) if (place := self._original_folders[folder]) else ""
        return original if original and is_environment_file(original, root_of(original, self._roots)) else ""


def find_source(path: str) -> str:
    """Return the source of a bytecode file; empty for any other file, and if its name is none that Python gives."""
    if path.endswith(".pyc") and os.path.basename(os.path.dirname(path)) == PYCACHE:
        with contextlib.suppress(ValueError):  # of llama.v2.cpython-311.pyc, which a module of llama.v2.py has
            return source_from_cache(path)
    return ""


def module_files() -> Iterator[str]:
    """Yield the source and bytecode files of the loaded modules."""
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        for path in (getattr(spec, "origin", None), getattr(spec, "cached", None)):
            if isinstance(path, str) and os.path.isabs(path):
                yield path


def mapped_parts() -> dict[str, list[MappedPart]]:
    """Return the parts of files that are mapped into this process, by path."""
    parts: dict[str, list[MappedPart]] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                begin, end = (int(address, 16) for address in fields[0].split("-"))
                parts.setdefault(fields[5], []).append((begin, end, int(fields[2], 16)))
    return parts


def touched_ranges(parts: Collection[MappedPart]) -> tuple[Range, ...]:
    """Return the ranges of a mapped file that are in this process's memory; raise OSError.

    /proc/self/pagemap has 8 bytes per page; the highest bit is set if the page is present (man 5 proc_pid_pagemap).
    """
    ranges: list[Range] = []
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for begin, end, offset in parts:
            file.seek(begin // PAGE * 8)
            pages = file.read((end - begin) // PAGE * 8)[7::8].translate(PRESENT_DIGITS)
            ranges += [(offset + run.start() * PAGE, len(run[0]) * PAGE) for run in re.finditer(b"1+", pages)]
    return merge_ranges(ranges)


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in order, merged where the gap between them is small."""
    merged: list[Range] = []
    for start, length in sorted(ranges):
        if merged and start <= sum(merged[-1]) + MAX_GAP_BYTES:
            merged[-1] = merged[-1][0], max(sum(merged[-1]), start + length) - merged[-1][0]
        else:
            merged.append((start, length))
    return tuple(merged)
