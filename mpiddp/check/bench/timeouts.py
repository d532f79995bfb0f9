"""Work that may hang, with a deadline: in a thread of its own, which goes on then and is waited for by nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...discovery.devices import use_device

Answer = TypeVar("Answer")


def within(limit_s: float, work: Callable[[], Answer]) -> Answer:
    """Return what `work` returns or raise what it raises; raise TimeoutError where it takes longer."""
    done: list[Any] = []

    def run() -> None:
        try:
            done[:] = (True, work())
        except BaseException as error:
            done[:] = (False, error)

    thread = threading.Thread(target=run, daemon=True, name="mpiddp-deadline")
    thread.start()
    thread.join(limit_s)
    if not done:
        raise TimeoutError
    well, answer = done
    try:
        if not well:
            raise answer
        return answer  # type: ignore[no-any-return]
    finally:
        done.clear()  # an error holds this frame, and what was done in the thread: no cycle keeps that
        del answer


def on_device(device: torch.device, limit_s: float, work: Callable[[], Answer]) -> Answer:
    """Return what `work` on a device returns; raise TimeoutError where an accelerator takes longer.

    A CPU's work is done at once, without a thread: it cannot hang in a driver.
    """
    if device.type == "cpu":
        return work()

    def with_device() -> Answer:
        use_device(str(device))  # a thread begins with the first one
        return work()

    return within(limit_s, with_device)
