"""A rank's stdout and stderr: pipes to its agent, if its output is logged, prefixed, folded or hidden."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..base.config import DEFAULT_PREFIX, LaunchConfig
from ..base.text import fill_fields
from ..discovery.runtime import hostname
from .protocol import ForwardConfig

if TYPE_CHECKING:
    from ..bootstrap.membership import Membership

FOLDED_PREFIX = "[{rank}] "
IOLBF = 1  # C's _IOLBF in glibc and musl
C_BUFFER_BYTES = 8192  # C's BUFSIZ in glibc


def is_forwarded(config: LaunchConfig) -> bool:
    """Return whether agents forward their ranks' output; else the ranks have the launcher's own streams."""
    return bool(config.log_dir or config.prefix or config.output_filter.folded or not config.output_filter.all_ranks)


def redirect_streams(pipes: Mapping[int, tuple[int, int]]) -> None:
    """Make the writing ends of pipes the streams of these numbers, 1 and 2, of this process; close the reading ends."""
    for stream, (reading, writing) in pipes.items():
        os.dup2(writing, stream)
        os.close(writing)
        os.close(reading)


def choose_output_target(membership: Membership, config: LaunchConfig) -> tuple[ForwardConfig, int]:
    """Return how this rank's output is forwarded, and the descriptor at which other ranks' agents connect, or -1."""
    place, host, log = membership.environment, hostname(), membership.log
    who, is_shown = f"rank {place.rank} on {host}", config.output_filter.has(place.rank, place.local_rank)
    if (share := membership.share) is not None:
        prefix = FOLDED_PREFIX if config.prefix in ("", DEFAULT_PREFIX) else config.prefix
        return ForwardConfig(log, prefix, who, is_shown, share.folding), share.listener
    fields = {"rank": place.rank, "local_rank": place.local_rank, "host": host}
    return ForwardConfig(log, fill_fields(config.prefix, fields), who, is_shown), -1


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr, so that no other file gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def enable_line_buffering() -> None:
    """Flush stdout after each line, as on a terminal; Python's not if it is unbuffered (python -u).

    This includes C's stdout, on which NCCL prints (its src/debug.cc). A script may reconfigure or replace its stdout.
    MPICH and python -u make C's stdout unbuffered: without a new buffer it would keep one of a single character, and
    lines of ranks would mix.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    buffer = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(C_BUFFER_BYTES)))  # C uses it until the process has ended
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), buffer, IOLBF, ctypes.c_size_t(C_BUFFER_BYTES))
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        with contextlib.suppress(OSError, ValueError):  # earlier output cannot be flushed; it is closed
            sys.stdout.reconfigure(line_buffering=True)
