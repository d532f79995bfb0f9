"""Where a rank's stdout and stderr go: to the terminal, to a log, or to both. Output of C code is included."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from ..base.config import DEFAULT_PREFIX, LaunchConfig
from ..base.errors import EXIT_OUTPUT_LOST
from ..base.files import open_for_writing
from ..base.stderr import STDERR, write_line
from ..base.termination import flush_python
from ..base.text import fill_fields
from ..discovery.runtime import hostname
from ..failure.rank import LogPlan
from ..ipc.helper_process import file_of
from .client import Relay
from .index import note_end
from .protocol import Forward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..bootstrap.membership import Membership

FOLDED = "[{rank}] "  # before folded lines
IOLBF = 1  # C's _IOLBF, as glibc and musl have it


class Outlet(NamedTuple):
    """Where a rank's output goes: to the terminal if `shown`, on a `way` that has the log, too.

    `listener` is a descriptor that listens for the relays of other ranks, -1 for none.
    """

    shown: bool
    way: Forward
    listener: int = -1


def outlet_of(membership: Membership, config: LaunchConfig) -> Outlet:
    """Return where the output of this rank goes."""
    place, host, log = membership.environment, hostname(), membership.log
    who, shown = f"rank {place.rank} on {host}", config.output_filter.has(place.rank, place.local_rank)
    if (share := membership.share) is not None:
        prefix = FOLDED if config.prefix in ("", DEFAULT_PREFIX) else config.prefix
        return Outlet(shown, Forward(log, prefix, who, shown, share.folding), share.listener)
    fields = {"rank": place.rank, "local_rank": place.local_rank, "host": host}
    return Outlet(shown, Forward(log, fill_fields(config.prefix, fields), who, shown))


def is_relayed(config: LaunchConfig) -> bool:
    """Tell whether output may have to go two ways, to get a prefix, or to be folded."""
    return bool(config.log_dir) or bool(config.prefix) or config.output_filter.folded


class Output:
    """The output of one rank. If it is shown and has neither log nor prefix, nothing is changed."""

    def __init__(self, relayed: bool) -> None:
        """Fork a relay, before MPI is there, if `relayed`: see is_relayed()."""
        occupy_closed()
        self._relay = Relay() if relayed else None
        self._terminal: tuple[int, int] | None = None
        self._files: list[tuple[int, int]] = []  # where ours lead instead, as file_of() has it
        self._shown = True
        self._lost = self._is_folded = False
        self._who, self._log = "", LogPlan()
        self._log_end = -1  # the log's size when the relay was gone

    def begin(self, outlet: Outlet) -> int:
        """Send what is written from now on to an outlet; return a socket for the sentinel, as Relay.begin() does."""
        shown, way, listener = outlet
        self._shown, self._who, self._log = shown, way.who, way.log
        if self._relay is not None and not shown and not way.log.path:
            self._relay.dismiss()
            self._relay = None
        if shown and not (way.log.path or way.prefix):
            return -1
        flush_python()
        self._terminal = os.dup(1), os.dup(2)
        if self._relay is not None:
            self._is_folded = way.folding is not None
            outflow = self._relay.begin(way, listener)
        else:
            outflow, file = -1, open_for_writing(os.devnull, append=True)
            for descriptor in (1, 2):
                os.dup2(file, descriptor)
            os.close(file)
        self._files = [file_of(descriptor) for descriptor in (1, 2)]
        if self._relay is not None:
            self._relay.watch(self._do_without_relay)
        return outflow

    def reveal(self, text: str) -> None:
        """Print a text on the terminal too, if this rank's output is not shown there."""
        if self._terminal and not self._shown:
            write_line(text, self._terminal[1])

    def settle(self) -> None:
        """Wait, not for long, until the terminal shows what all ranks have written, where that is folded."""
        if self._relay is not None and self._is_folded and self._terminal is not None:
            flush_python()
            self._relay.settle()

    def say(self, text: str) -> None:
        """Print a text past the relay that folds output, after all that was written before."""
        if self._is_folded and self._terminal is not None:
            self.settle()
            write_line(text, self._terminal[1])
        else:
            write_line(text)

    def log_lost(self, timeout_s: float) -> int:
        """Return the first byte that the log has lost so far, -1 for none, or where nobody knows."""
        if self._terminal is None or self._relay is None or not self._log.path:
            return self._log_end
        return self._relay.log_lost(timeout_s)

    def _do_without_relay(self) -> None:
        """Let this rank write to the terminal itself."""
        assert self._terminal is not None
        assert self._relay is not None
        relay, self._relay = self._relay, None
        self._restore_descriptors()
        relay.replace(self._terminal)
        self._is_folded, self._lost = False, self._shown
        words = "some output may be lost, and more goes straight to stdout and stderr"
        if self._shown:
            words += f"; the status of a job that ends in order is {EXIT_OUTPUT_LOST}"
        if self._log.path:
            words += f"; its log ends here: {self._log.path}"
            if not self._log.most_bytes:
                with contextlib.suppress(OSError):
                    self._log_end = os.stat(self._log.path).st_size
                    note_end(self._log, lost=self._log_end)
        write_line(f"mpiddp: the output relay of {self._who} exited unexpectedly: {words}")

    @property
    def terminal(self) -> int:
        """The descriptor of the terminal's stderr."""
        return self._terminal[1] if self._terminal else STDERR

    def _restore_descriptors(self) -> None:
        """Let stdout and stderr lead to the terminal again; one by which the script writes elsewhere is left alone."""
        assert self._terminal is not None
        for descriptor, former, ours in zip((1, 2), self._terminal, self._files, strict=True):
            if not is_open(descriptor) or file_of(descriptor) == ours:
                os.dup2(former, descriptor)

    def end(self, in_order: bool = False) -> bool:
        """Send output to the terminal again, wait until what was written has arrived, and tell whether some is lost.

        If this rank ends `in_order`, its log is complete.
        """
        if self._terminal is None:
            return self._lost
        flush_python()
        self._restore_descriptors()
        if self._relay is not None:
            try:
                self._lost = self._relay.end(in_order)
                self._relay.close()
            except (EOFError, OSError):
                self._do_without_relay()
        for former in self._terminal:
            os.close(former)
        self._terminal = None
        return self._lost

    def status(self, own: int, error: str = "") -> int:
        """Return a rank's exit status: its `own`, or if that is 0 and output was lost, Python's for that.

        `error` says why the last flush failed, empty if it did not.
        """
        if error:
            write_line(f"mpiddp: cannot write {error}")
        return own or (EXIT_OUTPUT_LOST if error or self._lost else 0)


def occupy_closed() -> None:
    """Open /dev/null as stdin, stdout or stderr if one is closed, so that no other file gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@contextlib.contextmanager
def keeping_open() -> Iterator[None]:
    """Keep stdout and stderr open in this block: a file that the script has made for them closes them at its end."""
    copies: dict[int, int] = {}
    with contextlib.suppress(OSError):  # one is closed already, or no descriptor is left
        for descriptor in (1, 2):
            copies[descriptor] = os.dup(descriptor)
    try:
        yield
    finally:
        for descriptor, copy in copies.items():
            if not is_open(descriptor):
                os.dup2(copy, descriptor)
            os.close(copy)


def is_open(descriptor: int) -> bool:
    """Tell whether a descriptor is open."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def buffer_by_lines() -> None:
    """Let stdout pass on each line that is printed, as on a terminal, unless nothing is buffered (python -u).

    A script may reconfigure its stdout, or replace it. C code prints on C's stdout, as NCCL does (its src/debug.cc).
    """
    import ctypes

    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, IOLBF, 0)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        with contextlib.suppress(OSError, ValueError):  # what was written before cannot be passed on; it is closed
            sys.stdout.reconfigure(line_buffering=True)


def let_flush_fail() -> None:
    """Let Python's last flush of stdout fail: Python then exits with its status for lost output."""
    def fail() -> None:
        raise OSError("output was lost")

    sys.stdout.flush = fail  # type: ignore[method-assign]
