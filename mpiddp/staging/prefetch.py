"""Read the modules of this package in parallel, in the place of one after the other as imports do.

On a shared file system that is slow or far away, each import waits for some operations of its server: a hundred
modules take a second or two. Python's own loader checks what was read here, as always. Where opening a file takes no
time, as on a local disk, imports are quicker than threads.
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
SLOW_S = 0.0003  # to open a file
THREADS = 16


class Module(SourceFileLoader):
    """Loads a module from what was read of its files; reads what was not."""

    def __init__(self, name: str, file: str) -> None:
        """Read the module's bytecode, and the times of its source; raise OSError where there is none."""
        super().__init__(name, file)
        self._stats = super().path_stats(file)
        self._bytecode = cache_from_source(file)
        with open(self._bytecode, "rb", buffering=0) as read:
            self._data: bytes | None = read.read()

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Return when the source was changed, and its size."""
        return self._stats if path == self.path else super().path_stats(path)

    def get_data(self, path: str) -> bytes:
        """Return what a file holds: the bytecode once, as it was read."""
        data, self._data = (self._data, None) if path == self._bytecode else (None, self._data)
        return super().get_data(path) if data is None else data


class Finder:
    """Finds the modules of a package that were read."""

    def __init__(self, package: str, folder: str, left_out: Iterable[str] = ()) -> None:
        """Read the modules in a package's folder, and in the packages below it that are not `left_out`."""
        self._folder = folder
        self._packages = set[str]()
        self._files: list[tuple[str, str]] = []
        self._loaders: dict[str, Module] = {}
        names = self._list(package)
        folders = [name for name in names if name.isidentifier() and name != "__pycache__" and name not in left_out]
        run_in_threads(self._list, [f"{package}.{name}" for name in folders])
        # Folder by folder, threads would wait for each other: some kernels open the files of a folder one by one.
        files = sorted(self._files, key=lambda named_file: os.path.basename(named_file[1]))
        run_in_threads(self._read, [(name, file) for name, file in files if name not in sys.modules])

    def _list(self, package: str) -> list[str]:
        """Note the modules of a package, and return the names in its folder."""
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
        with contextlib.suppress(OSError, NotImplementedError):  # which says that nothing is compiled here
            self._loaders[name] = Module(name, file)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return how a module is loaded, None for one that was not read; the first time alone, as by a reload."""
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
    """Call a function once for each item, on THREADS threads, this one included."""
    remaining = iter(items)

    def run() -> None:
        for item in remaining:
            function(item)

    threads = [threading.Thread(target=run) for _ in range(THREADS - 1)]
    started = []
    with contextlib.suppress(RuntimeError):  # no more threads can be started
        for thread in threads:
            thread.start()
            started.append(thread)
    run()
    for thread in started:
        thread.join()


def begin() -> None:
    """Read the modules of a start if opening a file is slow. Helper processes, which are forked later, use them too."""
    began = time.perf_counter()
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.join(FOLDER, "launch.py"), os.O_RDONLY))
    if time.perf_counter() - began > SLOW_S:
        sys.meta_path.insert(0, Finder(PACKAGE, FOLDER, COMMANDS))
