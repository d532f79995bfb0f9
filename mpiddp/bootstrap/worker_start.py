"""What comes first in the processes that multiprocessing starts for `spawn` and `forkserver`.

They do not call MPI_Init, and leave to the rank the stop signals that a scheduler sends to all processes of a step:
SIGUSR1 for ever, SIGTERM until a worker has started. The fork server itself gets no SIGTERM; it ends with the rank.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

SKIP_MPI_CODE = """\
try:
    import mpi4py
    mpi4py.rc.initialize = False
except ImportError:
    pass
"""
LEAVE_USR1_CODE = """\
import signal
signal.signal(signal.SIGUSR1, lambda *_: None)
"""
HOLD_TERM_CODE = """\
from multiprocessing.process import BaseProcess
def bootstrap(*args, begin=BaseProcess._bootstrap, **options):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return begin(*args, **options)
BaseProcess._bootstrap = bootstrap
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
"""
START_CODE = SKIP_MPI_CODE + LEAVE_USR1_CODE + HOLD_TERM_CODE
CODE = {
    "spawn": START_CODE,
    "forkserver": START_CODE,
    "resource_tracker": LEAVE_USR1_CODE,  # it ignores SIGTERM itself
}


def prepare_workers() -> Callable[[], None]:
    """Make the processes that multiprocessing starts run our code first; return what undoes that.

    A second MPI_Init with a rank's variables aborts a worker. The variable MPI4PY_RC_INITIALIZE would also keep
    programs from MPI that a rank starts by a launcher of its own.
    """
    from multiprocessing import util as util_module

    util: Any = util_module
    spawn = util.spawnv_passfds

    @functools.wraps(spawn)
    def spawn_prepared(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
        pid: int = spawn(path, add_code(args), passfds)
        return pid

    def undo() -> None:
        if util.spawnv_passfds is spawn_prepared:
            util.spawnv_passfds = spawn

    util.spawnv_passfds = spawn_prepared
    return undo


def add_code(args: Sequence[Any]) -> list[Any]:
    """Return a command line of multiprocessing in which our code precedes the command that follows `-c`.

    The command imports a function of the module that the process runs; Python 3.14's begins with another import.
    """
    words = list(args)
    if "-c" in words[:-1]:
        place = words.index("-c") + 1
        module = re.search(r"\bfrom multiprocessing\.(\w+) import ", words[place])
        words[place] = CODE.get(module[1] if module else "", "") + words[place]
    return words
