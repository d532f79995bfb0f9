"""Workers that multiprocessing starts as programs and that import mpi4py do not start MPI again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

PREFIX = """\
try:
    import mpi4py
    mpi4py.rc.initialize = False
except ImportError:
    pass
"""
BEGINNINGS = ("from multiprocessing.spawn ", "from multiprocessing.forkserver ")


def keep_from_mpi() -> Callable[[], None]:
    """Let workers of the methods spawn and forkserver import mpi4py without MPI_Init; return what undoes this.

    A second MPI_Init with a rank's variables aborts the worker. The variable MPI4PY_RC_INITIALIZE would keep programs
    from MPI, too, that a rank starts by a launcher of its own. A forked worker has the rank's mpi4py.
    """
    from multiprocessing import util as found

    util: Any = found
    start = util.spawnv_passfds

    @functools.wraps(start)
    def started(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
        pid: int = start(path, [f"{PREFIX}{one}" if str(one).startswith(BEGINNINGS) else one for one in args], passfds)
        return pid

    def undo() -> None:
        if util.spawnv_passfds is started:
            util.spawnv_passfds = start

    util.spawnv_passfds = started
    return undo
