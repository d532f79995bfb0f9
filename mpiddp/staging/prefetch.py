"""Read the modules of this package in parallel, instead of one after the other as imports do.

On a slow shared file system each import waits for several server operations: a hundred modules take a second or two.
Python's own loader validates the bytecode as usual. On a local disk, plain imports are faster.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import cache_from_source
from typing import Any, TypeVar

Item = TypeVar("Item")

PACKAGE = __name__.partition(".")[0]
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMANDS = ("check", "supervise")  # packages that a start does not import
SLOW_OPEN_S = 0.0003  # opening a file takes a few µs on a local disk
THREADS = 16


class PrefetchedLoader(SourceFileLoader):
    """Loads a module from prefetched bytecode."""

    def __init__(self, name: str, file: str) -> None:
        """Read the module's bytecode and its source's status; raise OSError if one is missing."""
        super().__init__(name, file)
        self._stats = super().path_stats(file)
        self._bytecode = cache_from_source(file)
        with open(self._bytecode, "rb", buffering=0) as file_object:
            self._data: bytes | None = file_object.read()

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Return the source's time of change and its size."""
        return self._stats if path == self.path else super().path_stats(path)

    def get_data(self, path: str) -> bytes:
        """Return a file's content; the prefetched bytecode is used once, then freed."""
        data, self._data = (self._data, None) if path == self._bytecode else (None, self._data)
        return super().get_data(path) if data is None else data


class PrefetchedFinder:
    """Finds the prefetched modules of a package."""

    def __init__(self, package: str, folder: str, excluded: Iterable[str] = ()) -> None:
        """Read the modules in a package's folder and in its subpackages, except those `excluded`."""
        self._folder = folder
        self._packages = set[str]()
        self._files: list[tuple[str, str]] = []
        self._loaders: dict[str, PrefetchedLoader] = {}
        names = self._list(package)
        folders = [name for name in names if name.isidentifier() and name != "__pycache__" and name not in excluded]
        run_in_threads(self._list, [f"{package}.{name}" for name in folders])
        # Sorted by name to mix folders: some kernels open the files of a folder serially.
        files = sorted(self._files, key=lambda named_file: os.path.basename(named_file[1]))
        run_in_threads(self._read, [(name, file) for name, file in files if name not in sys.modules])

    def _list(self, package: str) -> list[str]:
        """Add the modules of a package; return the names in its folder."""
        path = os.path.join(self._folder, *package.split(".")[1:])
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(path)
        if "__init__.py" in names:
            self._packages.add(package)
        for name in sorted(names):
            module, _, suffix = name.partition(".")
            if suffix == "py" and module != "__main__":
                full_name = package if module == "__init__" else f"{package}.{module}"
                self._files.append((full_name, os.path.join(path, name)))
        return names

    def _read(self, named_file: tuple[str, str]) -> None:
        name, file = named_file
        with contextlib.suppress(OSError, NotImplementedError):  # this Python writes no bytecode
            self._loaders[name] = PrefetchedLoader(name, file)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a prefetched module once; a reload reads the file."""
        del path, target
        loader = self._loaders.pop(fullname, None)
        if loader is None:
            return None
        spec = ModuleSpec(fullname, loader, origin=loader.path, is_package=fullname in self._packages)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(os.path.dirname(loader.path))
        spec.has_location = True
        return spec


def run_in_threads(function: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Call a function once for each item, on THREADS threads including this one."""
    remaining = iter(items)

    def run() -> None:
        for item in remaining:
            function(item)

    threads = [threading.Thread(target=run) for _ in range(THREADS - 1)]
    started = []
    with contextlib.suppress(RuntimeError):  # no more threads can be started; this one does the rest
        for thread in threads:
            thread.start()
            started.append(thread)
    run()
    for thread in started:
        thread.join()


def prefetch_modules() -> None:
    """Prefetch the modules of a start if opening a file is slow. Helper processes, forked later, have them, too."""
    start = time.perf_counter()
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.join(FOLDER, "launch.py"), os.O_RDONLY))
    if time.perf_counter() - start > SLOW_OPEN_S:
        sys.meta_path.insert(0, PrefetchedFinder(PACKAGE, FOLDER, COMMANDS))
