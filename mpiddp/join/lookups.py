"""Connect torch's store without looking up host names."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

WARNING, ERROR = 1, 2  # levels of c10's log


class Resolver(ctypes.Structure):
    """The start of the C library's resolver of a thread (resolv.h, `struct __res_state`)."""

    _fields_ = (("timeout_s", ctypes.c_int), ("tries", ctypes.c_int))


@contextmanager
def suspended() -> Iterator[None]:
    """Make TCPStore's connections, to numeric addresses, in this block.

    For its log TCPStore asks the name server who its peer is, at both ends of each connection. Its server
    does so for one rank after the other: when a packet is lost, all ranks wait five seconds (resolver(3)).
    From torch 2.9 on a process stops asking once a look-up has failed (pytorch#159007). So this block lets
    this thread's look-ups fail at once, and hides torch's warning about it. If torch's log level shows more
    than warnings, the look-ups stay: somebody reads that log.
    """
    level, resolver = log_level(), this_threads_resolver()
    if level is None or resolver is None or level.value < WARNING:
        yield
        return
    shown, tries = level.value, resolver.tries
    level.value, resolver.tries = max(shown, ERROR), 0
    try:
        yield
    finally:
        level.value, resolver.tries = shown, tries


def log_level() -> ctypes.c_int | None:
    """Return the variable that holds torch's log level, None if this build has none."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so", os.RTLD_NOLOAD), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def this_threads_resolver() -> Resolver | None:
    """Return this thread's resolver, initialised, None if the C library has none of this form."""
    library = ctypes.CDLL(None)
    try:
        library.__res_state.restype = ctypes.POINTER(Resolver)
        library.__res_init()
    except AttributeError:
        return None
    found: Resolver = library.__res_state().contents
    return found
