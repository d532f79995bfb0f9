"""A helper process of a rank: how it is forked, how its death is noticed, and how it is dismissed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from posix import fork  # os.fork may be a debugger's own, which holds up the process that it makes

from ..base.stderr import write_line
from ..sentinel.protocol import END_SIGNAL
from .channel import Wire

FROM_TERMINALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def fork_detached(main: Callable[[], None], kept: Collection[int], name: str) -> int:
    """Run `main` in a new process that keeps stdin, stdout, stderr and the `kept` descriptors of this one.

    The process has a session of its own: signals that are sent to the rank's do not reach it. It is no child
    of the rank: a script that waits for its children does not find it. Where `main` raises, or the process cannot be
    made, that is said in a line with its `name`. Returns the child that forks it and ends, 0 if there is none; the
    caller has to reap() that child.
    """
    try:
        child = fork()
    except OSError as error:
        write_line(f"mpiddp: {name} cannot be started: {error}")
        return 0
    if child:
        return child
    status = 1
    try:
        if fork() == 0:
            os.setsid()
            os.chdir("/")
            signal.set_wakeup_fd(-1)
            for number in FROM_TERMINALS:
                signal.signal(number, signal.SIG_IGN)
            close_all_but(kept)
            main()
        status = 0
    except Exception as error:
        write_line(f"mpiddp: {name} has failed: {type(error).__name__}: {error}")
    finally:
        os._exit(status)


def reap(child: int) -> None:
    """Wait for a child that ends by itself; if SIGCHLD is ignored, nothing is left of it to wait for."""
    with contextlib.suppress(ChildProcessError):
        if child:
            os.waitpid(child, 0)


def close_all_but(kept: Collection[int]) -> None:
    """Close what was inherited: a launcher's connection, for one, must end with the rank."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the folder itself is closed already
                os.close(descriptor)


def silence(*descriptors: int) -> None:
    """Let descriptors lead to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


F_SETSIG = 10  # (asm-generic/fcntl.h): which signal tells of a descriptor
DISMISSAL_TIMEOUT_S = 2.0


class OwnDescriptors:
    """Descriptors of this process. A script may close all that it has, and open other files under the same numbers."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, int]] = {}

    def keep(self, descriptor: int) -> int:
        """Note what a descriptor leads to now, and return it."""
        self._files[descriptor] = file_of(descriptor)
        return descriptor

    def has(self, descriptor: int) -> bool:
        """Tell whether a descriptor was kept and still leads to the same file."""
        with contextlib.suppress(OSError, KeyError):
            return self._files[descriptor] == file_of(descriptor)
        return False

    def close(self) -> None:
        """Close all that still lead to the same file."""
        for descriptor in filter(self.has, list(self._files)):
            os.close(descriptor)
        self._files = {}


class HelperProcess:
    """The sentinel of a rank, or the relay of its output.

    It is forked twice, so it is no child that a script could find. `channel` is the connection to it. A pipe that
    stays empty shows that it is alive: the helper alone holds the writing end.
    """

    def __init__(self, name: str, run: Callable[[Wire], None], kept: Collection[int] = ()) -> None:
        """Fork it: it calls `run` with its end of the channel, and keeps the descriptors `kept`.

        `name` is what messages call it. Where it cannot be forked, or `run` raises, a line says so, and the helper is
        dead from the beginning.
        """
        self.name = name
        ours, its = socket.socketpair()
        alive, its_alive = os.pipe()
        self._forking = fork_detached(lambda: run(Wire(its)), kept=(its.fileno(), its_alive, *kept), name=name)
        its.close()
        os.close(its_alive)
        os.set_blocking(alive, False)
        self.channel = Wire(ours)
        self._alive = alive
        self._descriptors = OwnDescriptors()
        self._descriptors.keep(alive)
        self._on_death: Callable[[], object] | None = None

    def reap_forker(self) -> None:
        """Wait for the child that has forked the helper: a script finds no trace of it then."""
        reap(self._forking)
        self._forking = 0

    def watch(self, on_death: Callable[[], object]) -> None:
        """Call `on_death` once when the helper has died, from check(): END_SIGNAL comes then."""
        self.reap_forker()
        self._on_death = on_death
        watched.append(self)
        send_signal_on(self._alive)
        self.check()

    def stop_watching(self) -> None:
        """Let no END_SIGNAL come any more, also where a child that C code has forked still holds the pipe."""
        self._on_death = None
        if self in watched:
            watched.remove(self)
        if self._descriptors.has(self._alive):
            send_no_signal_on(self._alive)

    def check(self) -> bool:
        """Call `on_death` if the helper has died, and tell whether that was so.

        Other handlers wait meanwhile. If one that is due raises before, END_SIGNAL comes once more.
        """
        if self._on_death is None or not self._descriptors.has(self._alive) or not has_hung_up(self._alive):
            return False
        act, self._on_death = self._on_death, None  # a handler, or another thread, does not begin the same
        mask: set[signal.Signals | int] | None = None
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # handlers that are due run here
        except BaseException:
            self._on_death = act
            os.kill(os.getpid(), END_SIGNAL)
            if mask is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        try:
            act()
        except OSError as error:  # the script has closed a descriptor of ours; it goes on
            write_line(f"mpiddp: {self.name} exited unexpectedly: {error}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return True

    def await_end(self) -> None:
        """Return when the helper, which was told to end, has ended, or does not within DISMISSAL_TIMEOUT_S."""
        deadline = time.monotonic() + DISMISSAL_TIMEOUT_S
        with contextlib.suppress(EOFError, OSError):
            while (left_s := deadline - time.monotonic()) > 0:
                self.channel.receive(left_s)

    def close(self) -> None:
        """Close what this process has of it."""
        self.stop_watching()
        self.reap_forker()
        self.forget()

    def forget(self) -> None:
        """Close what this process has of it, in a child that was forked, too: the pipe's flags are the parent's."""
        self._on_death = None
        if self in watched:
            watched.remove(self)
        self._descriptors.close()
        self.channel.close()


watched: list[HelperProcess] = []  # the helpers of this process that are missed when they die


def take_title(title: str) -> None:
    """Show a title in the place of the command that was inherited, in `ps` and `top`; it is cut to the same length.

    What /proc tells of the environment stays (setproctitle's SPT_NOENV). The import takes some milliseconds.
    """
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle

    setproctitle(title)


def check_helpers() -> bool:
    """Tell whether a helper of this process has died, and call its `on_death`."""
    return bool([helper for helper in list(watched) if helper.check()])


def send_signal_on(descriptor: int) -> None:
    """Let END_SIGNAL come when something can be read from a descriptor, or its other end is closed."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, F_SETSIG, END_SIGNAL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


def send_no_signal_on(descriptor: int) -> None:
    """Undo send_signal_on()."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)


def has_hung_up(pipe: int) -> bool:
    """Tell whether nobody holds the writing end of a pipe that stays empty and does not block."""
    try:
        return not os.read(pipe, 1)
    except OSError:  # nothing can be read; or the script has closed it
        return False


def file_of(descriptor: int) -> tuple[int, int]:
    """Return what tells an open file from others."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
