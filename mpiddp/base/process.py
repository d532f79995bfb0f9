"""A process itself: its descriptors, the signals of its threads, its title."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection

# Blocked in our threads: all signals except those of a fault in the thread itself.
THREAD_BLOCKED_SIGNALS = signal.valid_signals() - {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def close_other_descriptors(kept: Collection[int]) -> None:
    """Close inherited descriptors: the launcher's connection, for example, must close with the rank."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the folder itself is closed already
                os.close(descriptor)


def redirect_to_devnull(*descriptors: int) -> None:
    """Redirect descriptors to /dev/null."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(devnull, descriptor)
    os.close(devnull)


def set_process_title(title: str, name: str = "") -> None:
    """Show a title in the place of the command in `ps` and `nvidia-smi`; it is cut to the same length.

    The environment in /proc stays (setproctitle's SPT_NOENV). The import takes some milliseconds. `name`, which `top`
    and `pkill` see, is the title by default. It has no space: Slurm's proctrack/linuxproc, which reads /proc/PID/stat
    with scanf(), would send no signals to what this process has started.
    """
    is_set = "SPT_NOENV" in os.environ
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle, setthreadtitle

    setproctitle(title)
    setthreadtitle((name or title).replace(" ", ""))
    if not is_set:
        del os.environ["SPT_NOENV"]  # the first call has read it
