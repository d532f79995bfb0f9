"""Stacks of a process, read from outside by py-spy if the site permits that."""

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

INSTALL_HINT = "py-spy is not installed in the job's environment (pip install py-spy)"
NATIVE = "--native"  # also the frames of C code; stops the process meanwhile
NONBLOCKING = "--nonblocking"  # does not stop the process
JSON = "--json"
REAP_DELAY_S = 0.1  # after SIGKILL
STDOUT = 1


def dump_stacks(
    loop: EventLoop, pid: int, options: list[str], timeout_s: float, on_output: Callable[[str], object]
) -> None:
    """Call `on_output` with the output of `py-spy dump` for a process, up to the timeout.

    Raises OSError if py-spy cannot be started. It is a child of this process, so Yama lets it trace what this process
    may trace.
    """
    reading, writing = os.pipe()
    try:
        child = fork()
        if not child:
            exec_py_spy(pid, options, writing)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    os.set_blocking(reading, False)
    output, timer = b"", f"py-spy {child}"

    def read() -> None:
        nonlocal output
        with contextlib.suppress(BlockingIOError):
            data = os.read(reading, 65536)
            output += data
            if not data:
                end()

    def end(note: str = "") -> None:
        loop.cancel_timers(timer)
        loop.unwatch(reading)
        os.close(reading)
        if not reap(child):
            os.kill(child, signal.SIGKILL)
            loop.set_timer(f"end of {timer}", REAP_DELAY_S, partial(reap, child))
        on_output(output.decode(errors="replace") + note)

    loop.set_timer(timer, timeout_s, lambda: end(f"\npy-spy did not finish within {timeout_s:.1f} s"))
    loop.watch(reading, read)


def reap(child: int) -> bool:
    """Reap a child if it has ended, and return whether it has; a file system that hangs delays its end."""
    return bool(os.waitpid(child, os.WNOHANG)[0])


def exec_py_spy(pid: int, options: list[str], output: int) -> None:
    """Become py-spy, in a forked process: a slow file system delays that process, not the parent."""
    try:
        os.setsid()
        redirect_to_devnull(0)
        os.dup2(output, STDOUT)
        os.dup2(output, STDERR)
        close_other_descriptors(())
        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        os.execvp("py-spy", ["py-spy", "dump", "--pid", str(pid), *options])  # noqa: S606 (no shell: it takes a number)
    except OSError:
        os.write(STDOUT, INSTALL_HINT.encode())
    finally:
        os._exit(1)
