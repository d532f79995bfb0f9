"""While a rank reports its failure, what the script's handlers of signals raise is dropped: one may at any line."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from mpiddp.runner import signals
from mpiddp.runner.signals import HandlerGuard

frames: list[FrameType | None] = []


def raise_in_handler(_: int, frame: FrameType | None) -> None:
    """Raise as torch's handler of SIGCHLD does."""
    frames.append(frame)
    raise RuntimeError("a worker has ended")


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Let SIGUSR2 have a handler that raises."""
    frames.clear()
    former = signal.signal(signal.SIGUSR2, raise_in_handler)
    yield
    signal.signal(signal.SIGUSR2, former)


def test_what_a_handler_raises_is_dropped_until_the_end() -> None:
    guard = HandlerGuard()
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR2)
    assert len(frames) == 2 and None not in frames
    guard.end()
    assert signal.getsignal(signal.SIGUSR2) is raise_in_handler


def test_a_hook_of_the_scripts_own_can_be_interrupted() -> None:
    guard = HandlerGuard()
    guard.is_active = False
    with pytest.raises(RuntimeError):
        signal.raise_signal(signal.SIGUSR2)
    guard.end()


def test_ctrl_c() -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        guard = HandlerGuard()
        signal.raise_signal(signal.SIGINT)
        guard.end()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_handler_that_raises_while_handlers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    install = signals.signal.signal
    left = [signal.SIGUSR2] * 3

    def interrupted(number: int, handler: object) -> object:
        if left:
            signal.raise_signal(left.pop())
        return install(number, handler)  # type: ignore[arg-type]

    monkeypatch.setattr(signals.signal, "signal", interrupted)
    guard = HandlerGuard()
    signal.raise_signal(signal.SIGUSR2)
    left.append(signal.SIGUSR2)
    guard.end()
    assert len(frames) == 5
    assert signal.getsignal(signal.SIGUSR2) is raise_in_handler


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    guard = HandlerGuard()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    guard.end()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN


def test_a_guard_that_is_put_back_later_guards_nothing() -> None:
    """As by a hook that saves the handler, and an atexit function."""
    guard = HandlerGuard()
    saved = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    guard.end()
    signal.signal(signal.SIGUSR2, saved)
    with pytest.raises(RuntimeError):
        signal.raise_signal(signal.SIGUSR2)


def test_what_c_knows_of_a_signal_stays() -> None:
    read, write = os.pipe()
    signal.siginterrupt(signal.SIGUSR2, False)
    guard = HandlerGuard()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    threading.Timer(0.3, os.write, (write, b"x")).start()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.read(read, ctypes.create_string_buffer(1), 1) == 1, os.strerror(ctypes.get_errno())
    guard.end()
    os.close(read)
    os.close(write)


@pytest.mark.process
def test_a_child_that_is_forked_meanwhile_is_not_guarded() -> None:
    guard = HandlerGuard()
    pid = os.fork()
    if pid == 0:
        try:
            signal.raise_signal(signal.SIGUSR2)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    guard.end()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_another_thread_guards_nothing() -> None:
    thread = threading.Thread(target=lambda: HandlerGuard().end())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) is raise_in_handler
