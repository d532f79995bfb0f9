"""Dispositions of signals as C has them: also those that Python does not know (man 2 sigaction)."""

from __future__ import annotations

from typing import Any

SIGACTION_BYTES = 256  # more than a struct sigaction of any C library on Linux


def get_action(number: int) -> Any:
    """Return how this process handles a signal, as C's struct sigaction."""
    import ctypes

    action = ctypes.create_string_buffer(SIGACTION_BYTES)
    ctypes.CDLL(None).sigaction(number, None, action)
    return action


def set_action(number: int, action: Any) -> None:
    """Make this process handle a signal as in a struct sigaction."""
    import ctypes

    ctypes.CDLL(None).sigaction(number, action, None)
