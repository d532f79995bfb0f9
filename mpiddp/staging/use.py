"""Let this process, and the Pythons that it starts, find the environment in a mirror."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping, Sequence

from . import copies
from .copies import Copy
from .trees import is_installed, tree_of, within


def use(copy: Copy, trees: Sequence[str], set_all: Callable[[dict[str, str]], object]) -> None:
    """Look for modules in the mirror from now on, in this process and, by PYTHONPATH, in those that it starts.

    Packages that are loaded already find their other modules there. `set_all` sets variables.
    """
    redirect(copy, trees, alone=True)
    start = os.path.join(copy.path, copies.START)
    others = os.environ.get("PYTHONPATH", "")
    set_all({"PYTHONPATH": f"{start}{os.pathsep}{others}" if others else start,
             copies.BY: f"{os.uname().nodename}:{os.getpid()}"})


def redirect(copy: Copy, trees: Sequence[str], alone: bool) -> None:
    """Put the places in a mirror before entries of sys.path and of the paths of loaded packages, or instead of them."""
    there = [tree for tree in trees if os.path.isdir(copy.root + tree)]
    entries = [entry for entry in sys.path if is_installed(entry) and tree_of(entry, there)]

    def moved(path: list[str]) -> list[str]:
        new = [copy.root + entry if isinstance(entry, str) and tree_of(entry, entries) else entry for entry in path]
        return list(dict.fromkeys(new if alone or new == path else [*new, *path]))

    change_paths(moved)


def take_back(copy: Copy) -> None:
    """Look for nothing in a mirror any more, but where the originals are."""
    def back(entry: str) -> str:
        return entry[len(copy.root):] if isinstance(entry, str) and within(entry, copy.root) else entry

    change_paths(lambda path: list(dict.fromkeys(map(back, path))))


def change_paths(change: Callable[[list[str]], list[str]]) -> None:
    """Change sys.path, and the paths of packages that are loaded."""
    for path in [sys.path, *(getattr(module, "__path__", None) for module in list(sys.modules.values()))]:
        if type(path) is list:
            path[:] = change(path)


def leave_others(environ: MutableMapping[str, str]) -> None:
    """Go back from the mirror of a job that has started this one: it holds no lock for us."""
    begin = f"{os.sep}mpiddp-stage-{os.geteuid()}{os.sep}"

    def back(entry: str) -> str:
        rest = str(entry).partition(begin)[2].partition(f"{os.sep}{copies.ROOT}{os.sep}")[2]
        return f"{os.sep}{rest}" if rest else entry

    change_paths(lambda path: list(dict.fromkeys(map(back, path))))
    kept = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and begin not in entry]
    environ["PYTHONPATH"] = os.pathsep.join(kept)
    del environ[copies.BY]
