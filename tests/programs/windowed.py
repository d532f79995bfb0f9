"""A process with a window, and a child that it forks: windowed.py DESCRIPTOR WHAT; its ends go through the socket.

Both do the same for ever: `calls` makes Python call Python through C, `keeps` does so and lets no other thread run,
`sleeps` and `spins` stay in native code and keep the interpreter, `naps` lets it go, `raises` does what handlers of
signals interrupt all the time, with an exception.
"""

import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from ctypes import PyDLL

from mpiddp.where.dumper import StackDumper


def calls() -> None:
    """Make many frames of each kind."""
    numbers = list(range(300))
    while True:
        sorted(numbers, key=lambda one: -one)
        exec(compile("def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nf(8)", "made", "exec"), {})


def keeps() -> None:
    """Do the same, without a thread beside it."""
    sys.setswitchinterval(1000)
    calls()


def raises() -> None:
    """Wait for a signal a thousand times a second."""
    def handler(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, handler)
    lost = 0
    while not lost:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            time.sleep(0.5)
            lost = 1
        except TimeoutError:
            pass
    os._exit(9)


def sleeps() -> None:
    """Sleep in C, which a signal ends."""
    while True:
        PyDLL(None).sleep(1000)


def spins() -> None:
    """Compute in C."""
    sum(itertools.repeat(1))


def naps() -> None:
    """Sleep as Python does."""
    time.sleep(1000)


WHAT: dict[str, Callable[[], None]] = {one.__name__: one for one in (calls, keeps, raises, sleeps, spins, naps)}
link = socket.socket(fileno=int(sys.argv[1]))
(reading, writing), (its, own) = os.pipe(), socket.socketpair()
os.set_blocking(writing, False)
window = StackDumper(writing, own.fileno())
child = os.fork()
if child:
    socket.send_fds(link, [f"{writing} {child}".encode()], [reading, its.fileno()])
WHAT[sys.argv[2]]()
