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
    log level that shows more than warnings, and a C library or a torch without these variables, leave all as it is.
    """
    try:
        library, c10 = ctypes.CDLL(None), ctypes.CDLL("libc10.so", os.RTLD_NOLOAD)
        level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
        library.__res_state.restype = ctypes.POINTER(Resolver)
        library.__res_init()
        resolver: Resolver = library.__res_state().contents
    except (OSError, AttributeError, ValueError):
        yield
        return
    shown, tries = level.value, resolver.tries
    if shown >= WARNING:
        level.value, resolver.tries = max(shown, ERROR), 0
    try:
        yield
    finally:
        level.value, resolver.tries = shown, tries
