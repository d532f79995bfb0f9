"""Before MPI: what a former start has staged on this node serves the first imports, too.

Only `stage` finds out whether a mirror still is what lies on the shared file system. Until then the originals stay
within reach, and nothing but mpiddp and mpi4py comes from the mirror.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ..command.options import split
from ..command.values import stage
from ..config import AUTO
from . import copies, room
from .copies import Copy
from .trees import name_of, trees
from .use import redirect, take_back

copy: Copy | None = None  # that this process uses already
settled = False  # whether it is known which mirror is used


def asked_for(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the folder that --stage names, AUTO for none in particular; empty without that option."""
    words, _ = split(arguments)
    found = stage(environ.get("MPIDDP_STAGE", ""))
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--stage":
            following = words[number + 1:number + 2]
            found = stage(value or (following[0] if following and not following[0].startswith("-") else AUTO))
    return found


def use_former() -> None:
    """Use a mirror of the environment that is on this node already, if --stage is among the arguments."""
    global copy
    folder = asked_for(sys.argv[1:], os.environ)
    if not folder or not (found := trees()):
        return
    for one in map(room.ours, room.asked(folder, os.environ)):
        for path in copies.find(one, name_of(found)) if room.is_ours(one) else ():
            copy = copies.share(path)
            if copy is not None and is_as_it_was(path):
                redirect(copy, found, alone=False)
                os.register_at_fork(after_in_child=in_child)
                return
            if copy is not None:
                os.close(copy.lock)
                copy = None


def is_as_it_was(path: str) -> bool:
    """Tell whether nothing was put into, or taken from, the environment's entries of sys.path since a mirror was made.

    That is what pip does to install something.
    """
    try:
        mark = copies.mark_of(path)
        changed = mark.changed if mark else ()
        return bool(changed) and all(os.stat(entry).st_mtime_ns == at for entry, at in changed)
    except OSError:
        return False


def settle(chosen: Copy | None) -> None:
    """Go on with the mirror that was chosen, and with no other.

    The former one stays locked as long as the process lives: there may be no room for another before that.
    """
    global settled
    settled = True
    if copy is not None and (chosen is None or chosen.path != copy.path):
        take_back(copy)


def in_child() -> None:
    """Go back to the originals in a process that watches this one: it may outlive the mirror."""
    if copy is not None and not settled:
        take_back(copy)


def end(chosen: Copy | None) -> None:
    """Use the former mirror no more; remove it if another one was chosen, so that there is room."""
    global copy
    if copy is not None:
        os.close(copy.lock)
        if chosen is None or chosen.path != copy.path:
            copies.remove(copy.path)
        copy = None
