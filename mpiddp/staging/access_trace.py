"""Which files a start opens: traced in this process, and recorded in the user's cache for the next start."""

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

from ..base.files import open_for_reading, open_for_writing, user_folder
from .manifest import COMPILED, Range, holds_installed, is_within, name_of, root_of

FORMAT = 3  # of the record
PAGE = mmap.PAGESIZE
PRESENT = bytes(ord("1") if byte & 0x80 else ord("0") for byte in range(256))
SMALL_GAP = 2**16  # bytes between two ranges that are read rather than left out
LARGE = 2**24  # bytes: only larger files stay where they are when little of them is touched
STARTS_PER_COPY = 16  # a kept copy of a file is worth so many times what a start touches of it

Part = tuple[int, int, int]  # of a mapped file: where in memory it begins and ends, and where in the file


class Touched(NamedTuple):
    """The size of a large file in bytes, and which ranges of it were touched."""

    size: int
    ranges: tuple[Range, ...]

    def is_worth_copying(self, nodes: int, keep: bool) -> bool:
        """Tell whether copying all of it costs less than that each node reads what it touches."""
        return sum(length for _, length in self.ranges) * max(nodes, STARTS_PER_COPY if keep else 1) >= self.size


class AccessTrace(NamedTuple):
    """Paths that were opened in an environment, and what was touched of the large mapped files among them."""

    paths: frozenset[str] = frozenset()
    touched: Mapping[str, Touched] = {}

    def merge(self, other: AccessTrace) -> AccessTrace:
        """Return what is in either trace."""
        touched = {**self.touched, **{
            path: Touched(size, merged([*ranges, *self.touched[path].ranges]) if path in self.touched else ranges)
            for path, (size, ranges) in other.touched.items()}}
        return AccessTrace(self.paths | other.paths, touched)


def record_of(roots: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Return the file that records what is opened of an environment."""
    return os.path.join(user_folder(environ, "XDG_CACHE_HOME", ".cache"), f"stage-{name_of(roots)}.json")


def read(path: str) -> AccessTrace:
    """Return the trace in a record; an empty one if there is no record that can be read."""
    try:
        with open(open_for_reading(path), encoding="utf-8", errors="surrogateescape") as file:
            record = json.load(file)
        if record["format"] != FORMAT:
            return AccessTrace()
        touched = {str(name): Touched(int(size), tuple((int(start), int(length)) for start, length in ranges))
                   for name, (size, ranges) in record["touched"].items()}
        return AccessTrace(frozenset(map(str, record["paths"])), touched)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return AccessTrace()


def write(path: str, trace: AccessTrace) -> None:
    """Write a record and replace the former one atomically; raise OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = f"{path}.{os.uname().nodename}.{os.getpid()}"
    try:
        with open(open_for_writing(new), "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump({"format": FORMAT, "paths": sorted(trace.paths), "touched": trace.touched}, file)
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


class Tracer:
    """Traces what this process opens below some roots; `mirror` is their mirror, a path without links, or empty."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots, self._real = roots, {os.path.realpath(root): root for root in roots}
        self.mirror = ""
        self._opened: set[str] = set()
        self._places: dict[str, str] = {}  # of a folder, where it is in the environment, without links

    def listen(self) -> None:
        """Note all that Python opens for reading from now on, which slows the process a little."""
        prefixes, opened = (*self._roots, *self._real), self._opened

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                path, _, flags = arguments
                if isinstance(path, str) and path.startswith(prefixes) and flags & os.O_ACCMODE == os.O_RDONLY:
                    opened.add(path)

        sys.addaudithook(hook)

    def loaded(self) -> frozenset[str]:
        """Return the files of the modules that this process has loaded, and so has every other rank."""
        return frozenset(filter(None, map(self._original, module_files())))

    def trace(self) -> AccessTrace:
        """Return what was opened so far: modules, mapped files, and what the hook has noted."""
        maps = mapped()
        opened = {*module_files(), *maps, *tuple(self._opened)}
        # Python asks for a source's time of change without opening it. A module that puts another object in its place
        # (torch.backends) does not name its source.
        sources = {source_from_cache(path) for path in opened
                   if path.endswith(".pyc") and os.path.basename(os.path.dirname(path)) == COMPILED}
        originals = {path: original for path in opened | sources if (original := self._original(path))}
        touched = {}
        for path in maps.keys() & originals.keys():
            if sum(end - begin for begin, end, _ in maps[path]) > LARGE:
                with contextlib.suppress(OSError):  # the file is gone, or the kernel does not tell
                    touched[originals[path]] = Touched(os.stat(path).st_size, touched_ranges(maps[path]))
        return AccessTrace(frozenset(originals.values()), touched)

    def _original(self, path: str) -> str:
        """Return where a file, or the original of a copy, lies in the environment; empty for any other file.

        No folder above it is a link then, so that each folder has one place in the mirror.
        """
        folder, name = os.path.split(path)
        if folder not in self._places:
            real = os.path.realpath(folder)
            if self.mirror and is_within(real, self.mirror):
                place = real[len(self.mirror):]
            else:
                top = root_of(real, self._real)
                place = self._real[top] + real[len(top):] if top else ""
            self._places[folder] = place if root_of(place, self._roots) else ""
        original = os.path.join(place, name) if (place := self._places[folder]) else ""
        return original if original and holds_installed(original, root_of(original, self._roots)) else ""


def module_files() -> Iterator[str]:
    """Return the files of the modules that are loaded, sources and compiled ones."""
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        for path in (getattr(spec, "origin", None), getattr(spec, "cached", None)):
            if isinstance(path, str) and os.path.isabs(path):
                yield path


def mapped() -> dict[str, list[Part]]:
    """Return the files that are mapped into this process, and which parts of them."""
    found: dict[str, list[Part]] = {}
    with open("/proc/self/maps", errors="surrogateescape") as file:
        for line in file:
            words = line.rstrip("\n").split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/"):
                begin, end = (int(word, 16) for word in words[0].split("-"))
                found.setdefault(words[5], []).append((begin, end, int(words[2], 16)))
    return found


def touched_ranges(parts: Collection[Part]) -> tuple[Range, ...]:
    """Return which ranges of a mapped file are in this process's memory; raise OSError if the kernel does not tell."""
    found: list[Range] = []
    with open("/proc/self/pagemap", "rb", buffering=0) as file:  # 8 bytes a page, with one bit for that
        for begin, end, offset in parts:
            file.seek(begin // PAGE * 8)
            pages = file.read((end - begin) // PAGE * 8)[7::8].translate(PRESENT)
            found += [(offset + run.start() * PAGE, len(run[0]) * PAGE) for run in re.finditer(b"1+", pages)]
    return merged(found)


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in order, and those with a small gap between them as one."""
    found: list[Range] = []
    for start, length in sorted(ranges):
        if found and start <= sum(found[-1]) + SMALL_GAP:
            found[-1] = found[-1][0], max(sum(found[-1]), start + length) - found[-1][0]
        else:
            found.append((start, length))
    return tuple(found)
