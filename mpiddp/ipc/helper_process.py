"""Helper processes of a rank: fork them, notice their death, dismiss them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from posix import fork  # os.fork may be a debugger's own, which holds the new process
from typing import Any, Generic

from ..base.stderr import write_line
from .channel import Channel, Codec, Received, Sent

END_SIGNAL = signal.SIGRTMAX  # a helper process has sent an urgent message, or has died
# Blocked in our threads: all signals except those of a fault in the thread itself.
THREAD_BLOCKED_SIGNALS = signal.valid_signals() - {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def fork_daemon(main: Callable[[], None], kept: Collection[int], name: str) -> int:
    """Run `main` in a new process that keeps stdin, stdout, stderr and the `kept` descriptors of this one.

    The process has a session of its own, so signals to the rank's session do not reach it. It is no child of the rank:
    a script that waits for its children does not find it. If `main` raises, or the process cannot be created, a line
    with its `name` is printed. Returns the child that forks it and ends, 0 if there is none; the caller has to reap()
    that child.
    """
    try:
        child = fork()
    except OSError as error:
        write_line(f"mpiddp: cannot start {name}: {error}")
        return 0
    if child:
        return child
    status = 1
    try:
        if fork() == 0:
            os.setsid()
            os.chdir("/")
            signal.set_wakeup_fd(-1)
            for number in TERMINAL_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            close_other_descriptors(kept)
            main()
        status = 0
    except Exception as error:
        write_line(f"mpiddp: {name} failed: {type(error).__name__}: {error}")
    finally:
        os._exit(status)


def reap(child: int) -> None:
    """Wait for a child that ends by itself; if SIGCHLD is ignored, nothing is left to wait for."""
    with contextlib.suppress(ChildProcessError):
        if child:
            os.waitpid(child, 0)


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


F_SETSIG = 10  # (asm-generic/fcntl.h): which signal is sent for a descriptor
DISMISSAL_TIMEOUT_S = 2.0


class OwnedDescriptors:
    """Descriptors of mpiddp. A script may close all descriptors, and open other files under the same numbers."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, int]] = {}

    def add(self, descriptor: int) -> int:
        """Record which file a descriptor refers to now, and return the descriptor."""
        self._files[descriptor] = file_identity(descriptor)
        return descriptor

    def owns(self, descriptor: int) -> bool:
        """Return whether a descriptor was added and still refers to the same file."""
        with contextlib.suppress(OSError, KeyError):
            return self._files[descriptor] == file_identity(descriptor)
        return False

    def close(self) -> None:
        """Close all that still refer to the same file."""
        for descriptor in filter(self.owns, list(self._files)):
            os.close(descriptor)
        self._files = {}


class HelperProcess(Generic[Sent, Received]):
    """The agent of a rank, or the relay of its output.

    It is forked twice, so it is no child that a script could find. `channel` is the connection to it. A pipe that
    stays empty shows that it is alive: the helper alone holds the writing end.
    """

    def __init__(self, name: str, run: Callable[[socket.socket], None], codec: Codec[Received],
                 kept: Collection[int] = ()) -> None:
        """Fork it: it calls `run` with its end of the connection, and keeps the descriptors `kept`.

        Messages call it `name`; `codec` decodes its messages. If it cannot be forked, or `run` raises, a line is
        printed, and the helper counts as dead from the beginning.
        """
        self.name = name
        ours, theirs = socket.socketpair()
        liveness_fd, its_liveness_fd = os.pipe()
        self._forking_child = fork_daemon(
            lambda: run(theirs), kept=(theirs.fileno(), its_liveness_fd, *kept), name=name)
        theirs.close()
        os.close(its_liveness_fd)
        os.set_blocking(liveness_fd, False)
        self.channel: Channel[Sent, Received] = Channel(ours, codec)
        self._liveness_fd = liveness_fd
        self._descriptors = OwnedDescriptors()
        self._descriptors.add(liveness_fd)
        self._on_death: Callable[[], object] | None = None

    def reap_forking_child(self) -> None:
        """Wait for the child that has forked the helper: then a script finds no trace of it."""
        reap(self._forking_child)
        self._forking_child = 0

    def monitor(self, on_death: Callable[[], object]) -> None:
        """Call `on_death` once when the helper has died, from handle_death(): END_SIGNAL comes then."""
        self.reap_forking_child()
        self._on_death = on_death
        monitored.append(self)
        arm_end_signal(self._liveness_fd)
        self.handle_death()

    def stop_monitoring(self) -> None:
        """Disarm END_SIGNAL, also if a child that C code has forked still holds the pipe."""
        self._on_death = None
        if self in monitored:
            monitored.remove(self)
        if self._descriptors.owns(self._liveness_fd):
            disarm_end_signal(self._liveness_fd)

    def handle_death(self) -> bool:
        """Call `on_death` if the helper has died, and return whether it has.

        Other signal handlers wait meanwhile. If a pending one raises first, END_SIGNAL is sent again.
        """
        if (self._on_death is None or not self._descriptors.owns(self._liveness_fd)
                or not has_no_writer(self._liveness_fd)):
            return False
        act, self._on_death = self._on_death, None  # so that no handler or other thread does the same
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
        """Return when the dismissed helper has ended, or after DISMISSAL_TIMEOUT_S."""
        deadline = time.monotonic() + DISMISSAL_TIMEOUT_S
        with contextlib.suppress(EOFError, OSError):
            while (left_s := deadline - time.monotonic()) > 0:
                self.channel.receive(left_s)

    def close(self) -> None:
        """Stop monitoring, and close this process's descriptors of it."""
        self.stop_monitoring()
        self.reap_forking_child()
        self.abandon()

    def abandon(self) -> None:
        """Close this process's descriptors of it, also in a forked child; the pipe's flags, which are shared, stay."""
        self._on_death = None
        if self in monitored:
            monitored.remove(self)
        self._descriptors.close()
        self.channel.close()


monitored: list[HelperProcess[Any, Any]] = []  # the helpers of this process whose deaths are handled


def set_process_title(title: str) -> None:
    """Show a title instead of the inherited command in `ps` and `top`; it is cut to the same length.

    The environment in /proc stays (setproctitle's SPT_NOENV). The import takes some milliseconds.
    """
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle

    setproctitle(title)


def handle_helper_deaths() -> bool:
    """Call `on_death` of each helper that has died, and return whether any has."""
    return bool([helper for helper in list(monitored) if helper.handle_death()])


def arm_end_signal(descriptor: int) -> None:
    """Send this process END_SIGNAL when a descriptor is readable, or its other end is closed."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, F_SETSIG, END_SIGNAL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


def disarm_end_signal(descriptor: int) -> None:
    """Undo arm_end_signal()."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)


def has_no_writer(pipe: int) -> bool:
    """Return whether no process holds the writing end of a pipe, which stays empty and does not block."""
    try:
        return not os.read(pipe, 1)
    except OSError:  # nothing can be read; or the script has closed it
        return False


def file_identity(descriptor: int) -> tuple[int, int]:
    """Return the device and inode of an open file."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
