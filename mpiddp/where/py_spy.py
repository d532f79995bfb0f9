"""Threads of a process, seen from outside by a program made for that: py-spy, where a site lets it look."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from posix import fork  # as in ipc/helper_process.py

from ..base.stderr import STDERR
from ..ipc.event_loop import EventLoop
from ..ipc.helper_process import close_other_descriptors, redirect_to_devnull

NEEDED = "py-spy is not installed in the job's environment: pip install py-spy"
NATIVE = "--native"  # the frames of C code, too: the process is stopped for that
NONBLOCKING = "--nonblocking"  # the process goes on
JSON = "--json"
REAPING_S = 0.1  # after the end of its output
STDOUT = 1


def inspect(loop: EventLoop, pid: int, options: list[str], patience_s: float, then: Callable[[str], object]) -> None:
    """Call `then` with what `py-spy dump` prints of a process, or with what it has printed when its time is over.

    Raises OSError where it cannot be started. It is a child of this process: Yama lets it look where the process lets
    this one.
    """
    reading, writing = os.pipe()
    try:
        child = fork()
        if not child:
            become(pid, options, writing)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    os.set_blocking(reading, False)
    printed, timer = b"", f"py-spy {child}"

    def read() -> None:
        nonlocal printed
        with contextlib.suppress(BlockingIOError):
            data = os.read(reading, 65536)
            printed += data
            if not data:
                end()

    def end(late: str = "") -> None:
        loop.cancel_timers(timer)
        loop.unwatch(reading)
        os.close(reading)
        if not reap(child):
            os.kill(child, signal.SIGKILL)
            loop.set_timer(f"end of {timer}", REAPING_S, partial(reap, child))
        then(printed.decode(errors="replace") + late)

    loop.set_timer(timer, patience_s, lambda: end(f"\npy-spy has taken more than {patience_s:.1f} s"))
    loop.watch(reading, read)


def reap(child: int) -> bool:
    """Tell whether a child has ended, and leave nothing of it then; one that a file system holds ends later."""
    return bool(os.waitpid(child, os.WNOHANG)[0])


def become(pid: int, options: list[str], output: int) -> None:
    """Be py-spy, in a new process: it, and not this one's parent, waits for the files that it needs."""
    try:
        os.setsid()
        redirect_to_devnull(0)
        os.dup2(output, STDOUT)
        os.dup2(output, STDERR)
        close_other_descriptors(())
        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        os.execvp("py-spy", ["py-spy", "dump", "--pid", str(pid), *options])  # noqa: S606 (no shell: it takes a number)
    except OSError:
        os.write(STDOUT, NEEDED.encode())
    finally:
        os._exit(1)
