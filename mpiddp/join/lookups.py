"""Connect torch's store without a look-up of its peers' names."""

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
    """Make TCPStore's connections in this block, to addresses that are numbers already.

    TCPStore asks the name server who its peer is, for its log, on both ends of each connection, and the
    server asks for one rank after the other; when a packet is lost, all ranks wait for five seconds
    (resolver(3)). Once a look-up has failed, a process makes no more of them from torch 2.9 on
    (pytorch#159007). So this thread's look-ups fail here at once, of which torch would warn. A
    log level that shows more than warnings leaves them as they are.
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
    """Return torch's variable of what its log shows, None where a build has none."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so", os.RTLD_NOLOAD), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def this_threads_resolver() -> Resolver | None:
    """Return this thread's resolver, configured, None with a C library that has none of this form."""
    library = ctypes.CDLL(None)
    try:
        library.__res_state.restype = ctypes.POINTER(Resolver)
        library.__res_init()
    except AttributeError:
        return None
    found: Resolver = library.__res_state().contents
    return found
