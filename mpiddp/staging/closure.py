"""Which files a start opens: seen in this process, and kept in the user's cache for the next start."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.util import source_from_cache
from typing import Any, NamedTuple

from ..facts.files import open_for_reading, open_for_writing, user_folder
from .manifest import SELDOM, Range
from .trees import holds_installed, name_of, tree_of, within

FORM = 2  # of the file
PAGE = mmap.PAGESIZE
PRESENT = bytes(ord("1") if byte & 0x80 else ord("0") for byte in range(256))
BETWEEN = 2**16  # bytes that are read rather than left out


Part = tuple[int, int, int]  # of a mapped file: where in memory it begins and ends, and where in the file


class Closure(NamedTuple):
    """Paths that were opened in an environment, and of large files that were mapped, which parts were touched."""

    paths: frozenset[str] = frozenset()
    touched: Mapping[str, tuple[Range, ...]] = {}

    def with_more(self, other: Closure) -> Closure:
        """Return what is in either; of a file, all that was touched."""
        both = {path: merged([*self.touched.get(path, ()), *other.touched.get(path, ())])
                for path in {**self.touched, **other.touched}}
        return Closure(self.paths | other.paths, both)

    def without(self, paths: frozenset[str]) -> Closure:
        """Return what is left without some paths."""
        return Closure(self.paths - paths, {path: parts for path, parts in self.touched.items() if path not in paths})


def record_of(trees: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Return the file that keeps what is opened of an environment."""
    return os.path.join(user_folder(environ, "XDG_CACHE_HOME", ".cache"), f"stage-{name_of(trees)}.json")


def read(path: str) -> Closure:
    """Return what a record says, nothing where there is none that can be read."""
    try:
        with open(open_for_reading(path), encoding="utf-8", errors="surrogateescape") as file:
            found = json.load(file)
        if found["form"] != FORM:
            return Closure()
        touched = {str(name): tuple((int(at), int(length)) for at, length in parts)
                   for name, parts in found["touched"].items()}
        return Closure(frozenset(map(str, found["paths"])), touched)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Closure()


def write(path: str, closure: Closure) -> None:
    """Write a record in one step, so that none is read by half; raise OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = f"{path}.{os.uname().nodename}.{os.getpid()}"
    try:
        with open(open_for_writing(new), "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump({"form": FORM, "paths": sorted(closure.paths), "touched": closure.touched}, file)
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


class Recorder:
    """Sees what this process opens of some folders; `mirror` is where they are mirrored, without links, or empty."""

    def __init__(self, trees: tuple[str, ...]) -> None:
        self._trees, self._real = trees, {os.path.realpath(one): one for one in trees}
        self.mirror = ""
        self._opened: set[str] = set()
        self._places: dict[str, str] = {}  # of a folder, where that is in the environment, without links

    def listen(self) -> None:
        """Note all that Python opens to read from now on; what the process does costs a little more for it."""
        beginnings, opened = (*self._trees, *self._real), self._opened

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                path, _, flags = arguments
                if isinstance(path, str) and path.startswith(beginnings) and flags & os.O_ACCMODE == os.O_RDONLY:
                    opened.add(path)

        sys.addaudithook(hook)

    def loaded(self) -> frozenset[str]:
        """Return the files of modules that this process has loaded, and so has every other rank."""
        return frozenset(own for path in modules() if (own := self._own(path)))

    def found(self) -> Closure:
        """Return what was opened so far: modules, mapped files, and what was heard of."""
        maps = mapped()
        opened = {*modules(), *maps, *tuple(self._opened)}
        named = {path: own for path in {*opened, *sources(opened)} if (own := self._own(path))}
        large = {path: parts for path, parts in maps.items() if sum(end - begin for begin, end, _ in parts) > SELDOM}
        parts = {named[path]: touched(parts) for path, parts in large.items() if path in named}
        return Closure(frozenset(named.values()), {path: some for path, some in parts.items() if some})

    def _own(self, path: str) -> str:
        """Return where a file lies in the environment, of a copy where its original does; empty for any other.

        Of the folders above it none is a link then, so that each is in one place of the mirror.
        """
        folder, name = os.path.split(path)
        if folder not in self._places:
            real = os.path.realpath(folder)
            if self.mirror and within(real, self.mirror):
                place = real[len(self.mirror):]
            else:
                top = tree_of(real, self._real)
                place = self._real[top] + real[len(top):] if top else ""
            self._places[folder] = place if tree_of(place, self._trees) else ""
        own = os.path.join(place, name) if (place := self._places[folder]) else ""
        return own if own and holds_installed(own, tree_of(own, self._trees)) else ""


def modules() -> Iterable[str]:
    """Return the files of the modules that are loaded, sources and compiled ones."""
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        for name in ("origin", "cached"):
            path = getattr(spec, name, None)
            if isinstance(path, str) and os.path.isabs(path):
                yield path


def sources(paths: Iterable[str]) -> Iterable[str]:
    """Return what compiled modules are made of: Python asks for its time of change, but does not open it.

    Some modules put another object in their place (torch.backends), which does not tell.
    """
    for path in paths:
        if path.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # not in a folder of compiled modules
                yield source_from_cache(path)


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


def touched(parts: Iterable[Part]) -> tuple[Range, ...]:
    """Return which parts of a mapped file are in this process's memory; none where the kernel does not tell."""
    found: list[Range] = []
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:  # 8 bytes a page, the last one with a bit for that
            for begin, end, place in parts:
                file.seek(begin // PAGE * 8)
                pages = file.read((end - begin) // PAGE * 8)[7::8].translate(PRESENT)
                found += [(place + run.start() * PAGE, len(run[0]) * PAGE) for run in re.finditer(b"1+", pages)]
    except OSError:
        return ()
    return merged(found)


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in order, as one where little is between them."""
    found: list[Range] = []
    for at, length in sorted(ranges):
        if found and at <= sum(found[-1]) + BETWEEN:
            found[-1] = found[-1][0], max(sum(found[-1]), at + length) - found[-1][0]
        else:
            found.append((at, length))
    return tuple(found)
