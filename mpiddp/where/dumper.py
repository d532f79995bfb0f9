"""Stack dumps inside a rank, sent with its progress when its agent requests them."""

from __future__ import annotations

import _thread
import contextlib
import errno
import gc
import operator
import os
import select
import signal
import sys
from collections.abc import Iterable
from types import FrameType

from ..base.files import file_identity
from ..base.process import THREAD_BLOCKED_SIGNALS
from ..base.termination import flush_files
from ..base.text import CUT_STACK
from ..ipc.channel import encode
from . import progress
from .protocol import ASK_SIGNAL, END, WHERE, Progress, StackSample

NO_READER = errno.EAGAIN, errno.EPIPE, errno.ECONNRESET, errno.EBADF  # the agent does not read, or is gone
MAX_CALLS = 100  # the innermost ones
OUTERMOST_CALLS = ("_run_module_as_main", "_bootstrap", "<module>")  # of `python -m`, of a thread, and of a script


class StackDumper:
    """The rank's ends of a pipe and a socket to its agent.

    A thread of the rank answers requests on the socket: for the main thread's stack and a `Progress`, or to end the
    rank. ASK_SIGNAL requests the stack of a process that the rank has forked, and of the rank if its thread does not
    answer: a handler in Python writes it to the pipe. A handler in C, such as faulthandler's, could crash the process,
    since the signal may arrive in the middle of a call (python/cpython#116008).
    """

    def __init__(self, pipe: int, query_socket: int) -> None:
        """Start; raise OSError if another handler uses the signal."""
        if handled_signals([ASK_SIGNAL]) or signal.getsignal(ASK_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
            raise OSError(f"signal {ASK_SIGNAL} is already in use")
        self._pipe, self._socket = pipe, query_socket
        self._files = {descriptor: file_identity(descriptor) for descriptor in (pipe, query_socket)}
        self._main_thread = _thread.get_ident()
        self._signals, self._writing_pid = 0, 0  # signals not yet answered; the process whose handler is writing
        self._handler = self._on_signal  # one object, so that it can be compared with getsignal()
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(ASK_SIGNAL, self._handler)
            signal.siginterrupt(ASK_SIGNAL, False)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, THREAD_BLOCKED_SIGNALS)  # pending handlers run here
            with contextlib.suppress(RuntimeError):  # no thread can be started
                _thread.start_new_thread(self._serve, ())  # so that threading.enumerate() does not show it
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _is_ours(self, descriptor: int) -> bool:
        """Return whether a descriptor is still our file: a script may have closed it, and opened another."""
        try:
            return file_identity(descriptor) == self._files[descriptor]
        except OSError as error:
            if error.errno != errno.EBADF:  # raised by a signal handler of the script
                raise
            return False

    def _serve(self) -> None:
        """Answer requests until the socket is closed; the body of the thread."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        with contextlib.suppress(Exception):  # print no traceback into the script's output
            while poll.poll() and self._is_ours(self._socket) and (requests := os.read(self._socket, 100)):
                if WHERE in requests:
                    frame = read_frame(self._main_thread)
                    self._send(self._socket, StackSample(os.getpid(), format_calls(frame)))
                    self._send(self._socket, progress.read_progress(frame))
                    del frame  # it would keep the main thread's objects alive
                if END in requests:
                    flush_files()
                    end_by_signal()

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        """Handle ASK_SIGNAL; if it arrives again while the handler runs, the same stack is written once more."""
        self._signals += 1
        while (signals := self._signals) and self._writing_pid != os.getpid():  # else the handler is already running
            self._writing_pid = os.getpid()
            try:
                with contextlib.suppress(RecursionError):  # near the script's limit; other errors are the script's own
                    self._send(self._pipe, fit_calls(select.PIPE_BUF, frame))
            finally:
                self._writing_pid = 0
                self._signals -= signals

    def _send(self, descriptor: int, message: StackSample | Progress) -> None:
        """Send a message to the agent; to the pipe, drop it if the agent does not read."""
        try:
            if self._is_ours(descriptor):
                os.write(descriptor, encode(message))
        except OSError as error:
            if error.errno not in NO_READER:
                raise


def end_by_signal() -> None:
    """End this process as SIGTERM does, by the script's own handler if it has one; note no signal for should_stop()."""
    has_handler = callable(signal.getsignal(signal.SIGTERM)) and not progress.is_noted(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM if has_handler else signal.SIGKILL)


def read_frame(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread.

    In CPython 3.11, a garbage collection during the call may never return (python/cpython#106883), so it is disabled.
    """
    if sys.version_info[:2] != (3, 11):
        return sys._current_frames().get(thread)
    # One instruction makes all three calls, so that no other thread can run between them.
    was_enabled, _, frames = map(operator.methodcaller("__call__"), (gc.isenabled, gc.disable, sys._current_frames))
    if was_enabled:
        gc.enable()
    frame: FrameType | None = frames.get(thread)
    return frame


def format_calls(frame: FrameType | None, max_calls: int = MAX_CALLS) -> str:
    """Return a frame and its callers as faulthandler prints them: one line each, the innermost first.

    If the thread runs meanwhile and returns from some calls, the outermost ones are missing, too.
    """
    lines: list[str] = []
    outermost = ""
    while frame is not None and len(lines) < max_calls:
        outermost = frame.f_code.co_name
        file, function = (name.replace("\n", "\\n") for name in (frame.f_code.co_filename, outermost))
        lines.append(f'  File "{file}", line {frame.f_lineno or "???"} in {function}')
        frame = frame.f_back
    is_whole = frame is None and outermost in OUTERMOST_CALLS
    return "\n".join(lines if is_whole else [*lines, CUT_STACK]) + "\n"


def fit_calls(max_bytes: int, frame: FrameType | None) -> StackSample:
    """Return the innermost calls of this process that fit into a message of `max_bytes`."""
    max_calls = MAX_CALLS
    while len(encode(calls := StackSample(os.getpid(), format_calls(frame, max_calls)))) > max_bytes and max_calls > 1:
        max_calls = max_calls * 2 // 3
    return calls


def handled_signals(numbers: Iterable[int], pid: int | str = "self") -> set[int]:
    """Return which of these signals a process has a handler for, in Python or in C."""
    mask = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # a process name may be invalid UTF-8
        mask = next((int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:")), 0)
    return {number for number in numbers if mask >> (number - 1) & 1}
