"""Drops a script's modules, and with them its objects and open files, as Python's exit does.

The modules of libraries stay: tearing down torch is what makes Python's own exit slow.
"""

from __future__ import annotations

import contextlib
import gc
import io
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Collection
from typing import Any

from ..base.termination import find_files, flush_files
from ..discovery.script import is_installed
from . import signals

MAIN = "__main__"
LIBRARIES = ("mpiddp", "torch", "mpi4py")  # kept also where they run from a source tree
FILE_LAYERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)  # the outermost first
THREAD_END_S = 0.01  # for the script's threads to end, unless they are blocked
STREAM_NAMES = ("stdin", "stdout", "stderr")
LAST_ERROR_NAMES = ("last_exc", "last_type", "last_value", "last_traceback")  # of sys
OUTSIDE_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def freeze_loaded() -> frozenset[str]:
    """Return the modules that exist before the script; exclude their objects from garbage collections from now on.

    So a collection at the end takes 1 ms instead of 100.
    """
    gc.freeze()
    return frozenset(sys.modules)


def is_handling_signals() -> bool:
    """Return whether a signal from outside may still run one of the script's handlers, which need its modules."""
    handlers = map(signal.getsignal, OUTSIDE_SIGNALS)
    return any(callable(handler) and handler is not signal.default_int_handler and not signals.is_ours(handler)
               for handler in handlers)


def drop_modules(
    loaded: Collection[str] = (), spared: threading.Thread | None = None, main_globals: dict[str, Any] | None = None
) -> None:
    """Drop the script's modules, those that were not `loaded` before, as Py_FinalizeEx() does.

    Each is removed from sys.modules; what nothing else references is destroyed. Modules that still exist are emptied,
    the last one first. For a program with its own main(), its `main_globals` and its modules are emptied without a
    garbage collection, which would take long beside torch. All files are flushed, also those that stay open because a
    library holds them, but not those that a destructor opens. The thread `spared` keeps running.
    """
    stop_threads(spared)
    vars(sys).update(dict.fromkeys(LAST_ERROR_NAMES))
    for name in STREAM_NAMES:
        setattr(sys, name, getattr(sys, f"__{name}__", None))  # a script may have deleted it
    names, files = find_own_modules(loaded), [weakref.ref(file) for file in find_files()]
    if main_globals is not None:
        flush_files(list_living(files))
        for contents in [main_globals, *(sys.modules[name].__dict__ for name in reversed(names))]:
            empty_module(contents)
        flush_files(list_living(files))
        return
    references = remove_modules(names)
    collect_garbage(files)
    for reference in reversed(references):
        if isinstance(module := reference(), types.ModuleType):
            empty_module(module.__dict__)
    collect_garbage(files)


def collect_garbage(files: Collection[weakref.ref[Any]]) -> None:
    """Flush `files`, collect garbage, and close those that are garbage from the outside in.

    A collection alone may close a file before the buffer that writes to it, and lose the buffer's data.
    """
    flush_files(list_living(files))
    layers = [file for file in list_living(files) if type(file) in FILE_LAYERS]
    layers.sort(key=lambda file: FILE_LAYERS.index(type(file)), reverse=True)
    gc.collect()
    while layers:
        layers.pop()


def list_living(files: Collection[weakref.ref[Any]]) -> list[Any]:
    """Return those files that still exist."""
    return [file for file in [reference() for reference in files] if file is not None]


def stop_threads(spared: threading.Thread | None) -> None:
    """Stop the script's daemon threads, as Python's exit does, without printing anything.

    SystemExit is raised in each when it comes back to Python code.
    """
    threads = [thread for thread in threading.enumerate()
               if thread.ident and thread not in (spared, threading.main_thread(), threading.current_thread())]
    if threads:
        import ctypes

        threading.excepthook = lambda _: None
        for thread in threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        time.sleep(THREAD_END_S)


def find_own_modules(loaded: Collection[str]) -> list[str]:
    """Return the names of the script's modules: `__main__`, and those that are neither installed nor `loaded`."""
    def is_own(name: object, module: object) -> bool:
        if name == MAIN:
            return True
        if name in loaded or not isinstance(name, str) or not isinstance(module, types.ModuleType):
            return False
        if name.partition(".")[0] in LIBRARIES:
            return False
        file = module.__dict__.get("__file__")  # no attribute: a lazy module would load something
        return isinstance(file, str) and file.endswith((".py", ".pyc")) and not is_installed(file)

    return [name for name, module in list(sys.modules.items()) if is_own(name, module)]


def remove_modules(names: Collection[str]) -> list[weakref.ref[types.ModuleType]]:
    """Remove modules, so that importing them again fails; return weak references to them."""
    references = []
    for name in names:
        with contextlib.suppress(TypeError):  # no module: the script has replaced it
            references.append(weakref.ref(sys.modules[name]))
        sys.modules[name] = None  # type: ignore[assignment]
    return references


def empty_module(contents: dict[str, Any]) -> None:
    """Set all names of a module to None, the last one first: an object may use what was defined before it."""
    for name in reversed(list(contents)):
        if name != "__builtins__" and contents.get(name) is not None:
            contents[name] = None
