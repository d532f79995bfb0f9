"""A window into a rank: its sentinel asks for its stack, and how far it is."""

from __future__ import annotations

import _thread
import contextlib
import errno
import functools
import gc
import operator
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from types import FrameType

from ..base.termination import flush_files
from ..base.text import CUT_STACK
from ..ipc.codec import encode
from ..ipc.helper_process import THREAD_BLOCKED_SIGNALS, file_identity
from .protocol import ASK_SIGNAL, FLUSH, TRACER, TRACER_END, WHERE, Progress, StackSample

ENDING_S = 1.0  # for the thread
UNHEARD = errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.EBADF  # the sentinel does not read, or is gone
MOST_CALLS = 100  # the innermost ones
OUTERMOST_CALLS = ("_run_module_as_main", "_bootstrap", "<module>")  # of `python -m`, of a thread, and of a script
YAMA = "/proc/sys/kernel/yama/ptrace_scope"
CHILDREN_ALONE = "1"  # there: a process traces its descendants alone, and those that let it
PR_SET_PTRACER = 0x59616D61  # (linux/prctl.h)


class Window:
    """What a sentinel sees its rank through: a pipe and a socket.

    By the socket a thread of the rank is asked to flush the files that the script has open, or for the stack of the
    main thread and a `Progress`, which it tells there as soon as the interpreter lets it. ASK_SIGNAL asks each process
    that the rank has forked for its stack, and the rank where that thread does not answer, by a handler in Python that
    tells it through the pipe. So the interpreter always reads its stack itself. A handler in C that does so, as
    faulthandler's, may crash the process: a signal comes between any two instructions, also where a call has been half
    made (python/cpython#116008).

    Where native code holds the interpreter, a program that the sentinel starts may read the stack from outside. Yama
    (prctl(2), PR_SET_PTRACER) forbids that on some systems, unless each process lets the sentinel do so.
    """

    def __init__(self) -> None:
        """Open it; raise OSError where that can't be, or something else uses the signal."""
        if caught([ASK_SIGNAL]) or signal.getsignal(ASK_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
            raise OSError("the signal is used already")
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)  # what the sentinel does not read is lost: the rank never waits for it
        try:
            self._ours, self.its = (one.detach() for one in socket.socketpair())
        except OSError:
            os.close(self.reading)
            os.close(self.writing)
            raise
        os.set_blocking(self._ours, False)
        self._files = {one: file_identity(one) for one in (self.reading, self.writing, self._ours, self.its)}
        self._watched = _thread.get_ident()
        self._asked, self._telling = 0, 0  # how often it was asked, and the process that tells
        self._handler = self._on_signal  # one object, by which it is known again
        self._allow: Callable[[], object] = bool  # the sentinel to trace this process
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(ASK_SIGNAL, self._handler)
            signal.siginterrupt(ASK_SIGNAL, False)
        os.register_at_fork(after_in_child=lambda: self._allow())
        self._answers = _thread.allocate_lock()  # held as long as the thread runs
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, THREAD_BLOCKED_SIGNALS)  # handlers that are due run here
            with contextlib.suppress(RuntimeError):  # no thread can be started
                _thread.start_new_thread(self._answer, ())  # which a script does not find in threading.enumerate()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def end(self) -> None:
        """Close it; a signal that is on its way is no harm, until forget()."""
        self._allow = bool
        with contextlib.suppress(ValueError):  # not in the main thread
            if signal.getsignal(ASK_SIGNAL) == self._handler:
                signal.signal(ASK_SIGNAL, signal.SIG_IGN)
        if self._is_ours(self.its):
            with socket.socket(fileno=os.dup(self.its)) as other, contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)  # which ends the thread
            self._answers.acquire(timeout=ENDING_S)
        for descriptor in filter(self._is_ours, self._files):
            os.close(descriptor)

    def forget(self) -> None:
        """Let the signal do what it did, because nobody is left to send it."""
        with contextlib.suppress(ValueError):  # not in the main thread
            if signal.getsignal(ASK_SIGNAL) == signal.SIG_IGN:
                signal.signal(ASK_SIGNAL, signal.SIG_DFL)

    def _is_ours(self, descriptor: int) -> bool:
        """Tell whether a descriptor is still that file: a program may have closed it, and opened another."""
        try:
            return file_identity(descriptor) == self._files[descriptor]
        except OSError as error:
            if error.errno != errno.EBADF:  # a handler of the script's has raised it, which interrupts this
                raise
            return False

    def _answer(self) -> None:
        """Answer the sentinel until the window is closed."""
        from .progress import progress

        asked = select.poll()
        asked.register(self._ours, select.POLLIN)
        with self._answers, contextlib.suppress(Exception):  # a thread of ours shows no traceback
            while asked.poll() and self._is_ours(self._ours) and (requests := os.read(self._ours, 100)):
                if WHERE in requests:
                    self._tell(self._ours, StackSample(os.getpid(), as_printed(frame_of(self._watched))))
                    self._tell(self._ours, progress())
                if FLUSH in requests:
                    flush_files()
                if TRACER in requests:
                    self._allow = allowing(int(requests.partition(TRACER)[2].partition(TRACER_END)[0]))
                    self._allow()

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        """Be the handler of ASK_SIGNAL; where it comes while that is at work, it tells the same once more."""
        self._asked += 1
        while (asked := self._asked) and self._telling != os.getpid():  # a fork may have come while another one told
            self._telling = os.getpid()
            try:
                with contextlib.suppress(RecursionError):  # the script is near its limit; all else is the script's own
                    self._tell(self.writing, calls_within(select.PIPE_BUF - 2, frame))
            finally:
                self._telling = 0
                self._asked -= asked

    def _tell(self, descriptor: int, message: StackSample | Progress) -> None:
        """Tell the sentinel, in a line of its own, unless it does not read."""
        try:
            if self._is_ours(descriptor):
                os.write(descriptor, b"\n" + encode(message) + b"\n")
        except OSError as error:
            if error.errno not in UNHEARD:
                raise


def allowing(tracer: int) -> Callable[[], object]:
    """Return what lets a process, and its descendants, trace the one that calls it, where Yama asks for that."""
    with contextlib.suppress(OSError), open(YAMA) as file:
        if file.read().strip() == CHILDREN_ALONE:
            import ctypes  # which torch has imported

            return functools.partial(ctypes.CDLL(None).prctl, PR_SET_PTRACER, ctypes.c_ulong(tracer), 0, 0, 0)
    return bool


def frame_of(thread: int) -> FrameType | None:
    """Return the frame in which a thread is; from CPython 3.11 a garbage collection may never return meanwhile.

    That is python/cpython#106883.
    """
    if sys.version_info[:2] != (3, 11):
        return sys._current_frames().get(thread)
    # One instruction makes all three calls, so that no other thread, which may set the same, comes between them.
    collects, _, frames = map(operator.methodcaller("__call__"), (gc.isenabled, gc.disable, sys._current_frames))
    if collects:
        gc.enable()
    found: FrameType | None = frames.get(thread)
    return found


def as_printed(frame: FrameType | None, most: int = MOST_CALLS) -> str:
    """Return a frame and those that have called it, as faulthandler prints them: a line each, the innermost first.

    A thread that runs again meanwhile may have left some: then the outermost ones lack, too.
    """
    lines: list[str] = []
    outermost = ""
    while frame is not None and len(lines) < most:
        outermost = frame.f_code.co_name
        file, function = (name.replace("\n", "\\n") for name in (frame.f_code.co_filename, outermost))
        lines.append(f'  File "{file}", line {frame.f_lineno or "???"} in {function}')
        frame = frame.f_back
    is_whole = frame is None and outermost in OUTERMOST_CALLS
    return "\n".join(lines if is_whole else [*lines, CUT_STACK]) + "\n"


def calls_within(most_bytes: int, frame: FrameType | None) -> StackSample:
    """Return the innermost calls of this process that a message of so many bytes has room for."""
    most = MOST_CALLS
    while len(encode(calls := StackSample(os.getpid(), as_printed(frame, most)))) > most_bytes and most > 1:
        most = most * 2 // 3
    return calls


def caught(numbers: Iterable[int]) -> set[int]:
    """Return the signals for which this process has a handler, Python's or another one."""
    mask = 0
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as file:  # a name may be no text
        mask = next((int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:")), 0)
    return {number for number in numbers if mask >> (number - 1) & 1}
