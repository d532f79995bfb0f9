"""Drop what a script has made as Python's end does: its modules, and with them its objects and open files.

The modules of libraries stay: to take torch apart is what makes Python's own end slow.
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

from ..base.termination import flush_files
from ..discovery.script import is_installed
from . import signal_dispositions

MAIN = "__main__"
LIBRARIES = ("mpiddp", "torch", "mpi4py")  # kept also where they run from a source tree
LAYERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)  # of a file, the outermost first
YIELDING_S = 0.01  # for the script's threads to end, unless they wait for something
STREAMS = ("stdin", "stdout", "stderr")
LAST = ("last_exc", "last_type", "last_value", "last_traceback")  # what Python printed last
HANDLED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # that come from outside


def note_loaded() -> frozenset[str]:
    """Return the modules that are there before the script; leave their objects out of garbage collections from now on.

    So a collection at the end takes a thousandth of a second, and not a tenth.
    """
    gc.freeze()
    return frozenset(sys.modules)


def is_handling_signals() -> bool:
    """Tell whether a signal from outside may still run Python code of the script's: that needs its modules."""
    found = map(signal.getsignal, HANDLED)
    return any(callable(handler) and handler is not signal.default_int_handler
               and not signal_dispositions.is_ours(handler) for handler in found)


def drop(
    loaded: Collection[str] = (), spared: threading.Thread | None = None, main: dict[str, Any] | None = None
) -> None:
    """Drop the script's modules but those that were `loaded` before, as Py_FinalizeEx() does.

    Each is removed from sys.modules; what nothing else holds is destroyed. Modules that are still there are emptied,
    the last one first. `main` are the globals of a program with its own main(): they, and its modules, are emptied
    without a garbage collection, which would take long beside torch. All files are flushed, also those that stay open
    because a library holds them.
    """
    stop_threads(spared)
    vars(sys).update(dict.fromkeys(LAST))
    for name in STREAMS:
        setattr(sys, name, getattr(sys, f"__{name}__", None))  # a script may have deleted it
    names = own_modules(loaded)
    if main is not None:
        flush_files()
        for contents in [main, *(sys.modules[name].__dict__ for name in reversed(names))]:
            empty(contents)
        flush_files()
        return
    left = remove(names)
    collect()
    for reference in reversed(left):
        if isinstance(module := reference(), types.ModuleType):
            empty(module.__dict__)
    collect()


def collect() -> None:
    """Collect garbage, and close files that are garbage from the outside in.

    A collection alone may close a file before the buffer that writes to it, and lose what that holds.
    """
    files = [file for file in flush_files() if type(file) in LAYERS]
    files.sort(key=lambda file: LAYERS.index(type(file)), reverse=True)
    gc.collect()
    while files:
        files.pop()


def stop_threads(spared: threading.Thread | None) -> None:
    """Let the script's daemon threads run no further, as Python's end does, and print nothing about it.

    SystemExit is raised in each when it comes back to Python code.
    """
    threads = [one for one in threading.enumerate()
               if one.ident and one not in (spared, threading.main_thread(), threading.current_thread())]
    if threads:
        import ctypes

        threading.excepthook = lambda _: None
        for one in threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(one.ident or 0), ctypes.py_object(SystemExit))
        time.sleep(YIELDING_S)


def own_modules(loaded: Collection[str]) -> list[str]:
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


def remove(names: Collection[str]) -> list[weakref.ref[types.ModuleType]]:
    """Remove modules, so that importing them again fails; return references to them that keep none alive."""
    references = []
    for name in names:
        with contextlib.suppress(TypeError):  # the script has put something else there
            references.append(weakref.ref(sys.modules[name]))
        sys.modules[name] = None  # type: ignore[assignment]
    return references


def empty(contents: dict[str, Any]) -> None:
    """Set all that a module holds to None, the last name first: an object may use what was there before it."""
    for name in reversed(list(contents)):
        if name != "__builtins__" and contents.get(name) is not None:
            contents[name] = None
