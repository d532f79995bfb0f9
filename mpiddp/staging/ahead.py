"""Read the modules that a start needs all at once, instead of one after the other as imports do.

From a shared file system that is slow, or far away, each import waits for some operations of its server: a hundred
modules for a second or two. What is read here serves Python's own loader, which checks it as always, and nothing but
modules of this package. Where opening a file takes no time, as on a local disk, imports are quicker than threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import cache_from_source
from typing import Any

PACKAGE = __name__.partition(".")[0]
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SLOW_S = 0.0003  # to open a file
THREADS = 16
SENTINEL = """
beside.entrance beside.handshake
sentinel sentinel.calls sentinel.connections sentinel.errands sentinel.events sentinel.leftovers sentinel.machine
sentinel.postmortem sentinel.process sentinel.segments sentinel.start sentinel.watcher
"""  # of a rank's sentinel alone
COORDINATOR = "sentinel.coordinator sentinel.office sentinel.peers where where.cards"  # of rank 0's, more
MODULES = f"""
api cli config environment errors exits launch say version waiting
beside beside.asking beside.detached beside.handle beside.helper_process beside.index beside.lines beside.loop
beside.messages beside.outflow beside.programs beside.progress beside.wakeup beside.window beside.wire
command command.help command.options command.values
facts facts.cpus facts.devices facts.fabric facts.files facts.gpus facts.host facts.library facts.look facts.mpi
facts.launchers facts.process facts.runtime facts.schedulers facts.script facts.software
join join.gathering join.hosting join.importing join.initialise join.logs join.lookups join.membership join.prepare
join.probe join.process_group join.refusal join.rendezvous join.rollcall join.variables join.watched join.workers
plan plan.advice plan.cores plan.devices plan.environment plan.fit plan.gpus plan.job plan.member plan.network
plan.problems plan.seat plan.topology plan.transports plan.verdict plan.words
relay relay.handle relay.lines relay.log relay.process relay.sink
run run.caller run.ending run.execution run.failure run.handlers run.modules run.output run.running run.script
run.signals run.walltime
show show.files show.report
{SENTINEL}"""  # of any rank and of its sentinel, up to the script
STAGING = """
staging.access_trace staging.broadcast staging.lease staging.manifest staging.mirror staging.roots staging.stage
"""  # more, with --stage

is_slow = False  # to open a file of this package
tried: set[str] = set()  # the modules that were read, or could not be


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
    """Finds the modules that were read."""

    def __init__(self, package: str, folder: str, names: Sequence[str]) -> None:
        """Read those of a package in a folder; a name with another one below it is a package, too."""
        self._rooms = {f"{package}.{name.partition('.')[0]}" for name in names if "." in name}
        self._found: dict[str, Module] = {}
        apart = sorted(names, key=lambda name: name.rpartition(".")[2])  # a kernel may look into a folder name by name
        todo = iter([(f"{package}.{name}", os.path.join(folder, *name.split("."))) for name in apart])
        helpers = [threading.Thread(target=self._read, args=(todo,)) for _ in range(THREADS - 1)]
        started = []
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            for helper in helpers:
                helper.start()
                started.append(helper)
        self._read(todo)
        for helper in started:
            helper.join()

    def _read(self, todo: Iterator[tuple[str, str]]) -> None:
        for name, path in todo:
            file = os.path.join(path, "__init__.py") if name in self._rooms else f"{path}.py"
            with contextlib.suppress(OSError, NotImplementedError):  # which says that nothing is compiled here
                self._found[name] = Module(name, file)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return how a module is loaded, None for one that was not read; the first time alone, as by a reload."""
        del path, target
        loader = self._found.pop(fullname, None)
        if loader is None:
            return None
        spec = ModuleSpec(fullname, loader, origin=loader.path, is_package=fullname in self._rooms)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(os.path.dirname(loader.path))
        spec.has_location = True
        return spec


def is_staged() -> bool:
    """Tell whether --stage may be among the arguments."""
    return "MPIDDP_STAGE" in os.environ or any(word.startswith("--stage") for word in sys.orig_argv)


def begin() -> None:
    """Read what a start needs, with --stage more, if opening a file is slow."""
    global is_slow
    began = time.perf_counter()
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.join(FOLDER, "launch.py"), os.O_RDONLY))
    is_slow = time.perf_counter() - began > SLOW_S
    read(MODULES + STAGING if is_staged() else MODULES)


def prepare_sentinel(coordinates: bool) -> None:
    """Read what a sentinel needs, and rank 0's, which coordinates them, more."""
    read(f"{SENTINEL} {COORDINATOR if coordinates else ''}")


def read(names: str) -> None:
    """Read modules that are not loaded, if opening a file is slow."""
    if is_slow:
        missing = [name for name in names.split() if name not in tried and f"{PACKAGE}.{name}" not in sys.modules]
        tried.update(missing)
        sys.meta_path.insert(0, Finder(PACKAGE, FOLDER, missing))
