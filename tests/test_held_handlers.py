"""While a rank reports its failure, the script's handlers of signals wait: one may raise at any line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from mpiddp.runner import signals
from mpiddp.runner.signals import hold_handlers

called: list[int] = []


def raise_in_handler(number: int, frame: FrameType | None) -> None:
    """Raise as torch's handler of SIGCHLD does."""
    called.append(number)
    raise RuntimeError("a worker has ended")


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Let SIGUSR2 have a handler that raises."""
    called.clear()
    former = signal.signal(signal.SIGUSR2, raise_in_handler)
    yield
    signal.signal(signal.SIGUSR2, former)


def test_a_handler_waits_and_what_it_raises_is_dropped() -> None:
    release = hold_handlers()
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    assert called == []
    release()
    assert called == [signal.SIGUSR2] * 2
    with pytest.raises(RuntimeError):
        signal.raise_signal(signal.SIGUSR2)


def test_a_handler_that_raises_while_handlers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    install = signals.signal.signal
    left = [signal.SIGUSR2] * 3

    def interrupted(number: int, handler: object) -> object:
        if left:
            signal.raise_signal(left.pop())
        return install(number, handler)  # type: ignore[arg-type]

    monkeypatch.setattr(signals.signal, "signal", interrupted)
    release = hold_handlers()
    signal.raise_signal(signal.SIGUSR2)
    seen = len(called)
    left.append(signal.SIGUSR2)
    release()
    assert len(called) == seen + 2
    assert signal.getsignal(signal.SIGUSR2) is raise_in_handler


def test_ctrl_c_waits() -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        release = hold_handlers()
        signal.raise_signal(signal.SIGINT)
        release()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    release = hold_handlers()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    release()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN


def test_another_thread_holds_nothing() -> None:
    thread = threading.Thread(target=lambda: hold_handlers()())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) is raise_in_handler
