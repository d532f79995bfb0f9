"""A DataLoader's workers leave the stop signals to their rank: schedulers send them to all processes of a step.

torch ends a worker at a SIGTERM that its loader has not sent. Here a worker ignores SIGTERM, and torch's handler, in C,
moves to another signal, by which the loader ends a worker from now on: even one that is stuck in native code.
"""

from __future__ import annotations

import functools
import multiprocessing.popen_fork
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ..base.sigaction import get_action, set_action
from ..where.dumper import handled_signals

TERMINATE_SIGNAL = signal.SIGRTMAX - 3  # by which a loader ends a worker that ignores SIGTERM

Initialise = Callable[[int], object]  # a DataLoader's worker_init_fn


class InitFunction:
    """The attribute in which an iterator of a DataLoader has the `worker_init_fn` for the workers that it starts."""

    def __set__(self, iterator: Any, initialise: Initialise | None) -> None:
        vars(iterator)["_worker_init_fn"] = functools.partial(initialise_worker, initialise)

    def __get__(self, iterator: Any, _: object = None) -> Initialise:
        return vars(iterator)["_worker_init_fn"]  # type: ignore[no-any-return]


def protect_workers() -> None:
    """Make the workers that DataLoaders start from now on, by any method, leave the stop signals to this rank."""
    dataloader: Any = sys.modules.get("torch.utils.data.dataloader")
    if dataloader is not None and "_worker_init_fn" not in vars(dataloader._BaseDataLoaderIter):
        dataloader._BaseDataLoaderIter._worker_init_fn = InitFunction()
        popen: Any = multiprocessing.popen_fork.Popen
        popen.terminate = with_terminate_signal(popen.terminate)


def with_terminate_signal(terminate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a method like Popen.terminate(), which sends TERMINATE_SIGNAL to a worker that handles it."""
    @functools.wraps(terminate)
    def terminate_worker(worker: Any) -> None:
        if handled_signals([TERMINATE_SIGNAL], worker.pid):
            worker._send_signal(TERMINATE_SIGNAL)
        else:
            terminate(worker)

    return terminate_worker


def initialise_worker(initialise: Initialise | None, number: int) -> None:
    """Leave the stop signals to the rank in this worker, except those that the script's function handles."""
    leave = functools.partial(leave_to_parent, os.getppid())
    set_action(TERMINATE_SIGNAL, get_action(signal.SIGTERM))  # torch's
    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, leave)
    if initialise is not None:
        initialise(number)
    if signal.getsignal(signal.SIGTERM) is not leave:
        signal.signal(TERMINATE_SIGNAL, signal.SIG_DFL)


def leave_to_parent(parent: int, number: int, _: object) -> None:
    """Handle a stop signal by doing nothing, unless the parent has ended. Programs do not inherit that, as SIG_IGN."""
    if os.getppid() != parent:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
