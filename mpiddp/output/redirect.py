"""Redirects a rank's stdout and stderr to the terminal, to a log, or to both. Output of C code is included."""

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
from ..ipc.helper_process import file_identity
from .client import RelayClient
from .index import try_update_record
from .protocol import ForwardConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..bootstrap.membership import Membership

FOLDED_PREFIX = "[{rank}] "
IOLBF = 1  # C's _IOLBF, as glibc and musl have it


class OutputTarget(NamedTuple):
    """Where a rank's output goes: to the terminal if `is_shown`, and as `forward` says, which has the log, too.

    `listener` is a descriptor that listens for the relays of other ranks, -1 for none.
    """

    is_shown: bool
    forward: ForwardConfig
    listener: int = -1


def choose_output_target(membership: Membership, config: LaunchConfig) -> OutputTarget:
    """Return where the output of this rank goes."""
    place, host, log = membership.environment, hostname(), membership.log
    who, is_shown = f"rank {place.rank} on {host}", config.output_filter.has(place.rank, place.local_rank)
    if (share := membership.share) is not None:
        prefix = FOLDED_PREFIX if config.prefix in ("", DEFAULT_PREFIX) else config.prefix
        return OutputTarget(is_shown, ForwardConfig(log, prefix, who, is_shown, share.folding), share.listener)
    fields = {"rank": place.rank, "local_rank": place.local_rank, "host": host}
    return OutputTarget(is_shown, ForwardConfig(log, fill_fields(config.prefix, fields), who, is_shown))


def is_relayed(config: LaunchConfig) -> bool:
    """Return whether output may go to a log, get a prefix, or be folded."""
    return bool(config.log_dir) or bool(config.prefix) or config.output_filter.folded


class Output:
    """The output of a rank. If it is shown and has neither log nor prefix, nothing is redirected."""

    def __init__(self, relayed: bool) -> None:
        """Fork a relay if `relayed` (see is_relayed()), before MPI is there."""
        open_closed_streams()
        self._relay = RelayClient() if relayed else None
        self._terminal: tuple[int, int] | None = None
        self._files: list[tuple[int, int]] = []  # the targets of stdout and stderr, as file_of() has them
        self._is_shown = True
        self._has_lost_output = self._is_folded = False
        self._rank_name, self._log = "", LogPlan()
        self._log_end = -1  # the log's size when the relay was gone

    def start(self, target: OutputTarget) -> int:
        """Redirect output to a target; return a socket for the sentinel, as RelayClient.start() does."""
        is_shown, forward, listener = target
        self._is_shown, self._rank_name, self._log = is_shown, forward.who, forward.log
        if self._relay is not None and not is_shown and not forward.log.path:
            self._relay.dismiss()
            self._relay = None
        if is_shown and not (forward.log.path or forward.prefix):
            return -1
        flush_python()
        self._terminal = os.dup(1), os.dup(2)
        if self._relay is not None:
            self._is_folded = forward.folding is not None
            outflow = self._relay.start(forward, listener)
        else:
            outflow, file = -1, open_for_writing(os.devnull, append=True)
            for descriptor in (1, 2):
                os.dup2(file, descriptor)
            os.close(file)
        self._files = [file_identity(descriptor) for descriptor in (1, 2)]
        if self._relay is not None:
            self._relay.watch(self._replace_relay)
        return outflow

    def tee_to_terminal(self, text: str) -> None:
        """Print a text on the terminal too, if this rank's output is not shown there."""
        if self._terminal and not self._is_shown:
            write_line(text, self._terminal[1])

    def flush(self) -> None:
        """Wait, not for long, until the terminal shows what all ranks have written, if that is folded."""
        if self._relay is not None and self._is_folded and self._terminal is not None:
            flush_python()
            self._relay.flush()

    def print_unfolded(self, text: str) -> None:
        """Print a text after all output that was written before; where output is folded, past the relay."""
        if self._is_folded and self._terminal is not None:
            self.flush()
            write_line(text, self._terminal[1])
        else:
            write_line(text)

    def query_log_loss(self, timeout_s: float) -> int:
        """Return the first byte that the log has lost so far, -1 for none, or if that is not known."""
        if self._terminal is None or self._relay is None or not self._log.path:
            return self._log_end
        return self._relay.query_log_loss(timeout_s)

    def _replace_relay(self) -> None:
        """Let this rank write to the terminal itself, since the relay is gone."""
        assert self._terminal is not None
        assert self._relay is not None
        relay, self._relay = self._relay, None
        self._restore_descriptors()
        relay.take_over(self._terminal)
        self._is_folded, self._has_lost_output = False, self._is_shown
        consequences = "some output may be lost, and more goes straight to stdout and stderr"
        if self._is_shown:
            consequences += f"; the status of a job that ends in order is {EXIT_OUTPUT_LOST}"
        if self._log.path:
            consequences += f"; its log ends here: {self._log.path}"
            if not self._log.most_bytes:
                with contextlib.suppress(OSError):
                    self._log_end = os.stat(self._log.path).st_size
                    try_update_record(self._log, lost=self._log_end)
        write_line(f"mpiddp: the output relay of {self._rank_name} exited unexpectedly: {consequences}")

    @property
    def terminal_fd(self) -> int:
        """The descriptor of the terminal's stderr."""
        return self._terminal[1] if self._terminal else STDERR

    def _restore_descriptors(self) -> None:
        """Redirect stdout and stderr to the terminal again, unless the script has redirected them."""
        assert self._terminal is not None
        for descriptor, terminal, file in zip((1, 2), self._terminal, self._files, strict=True):
            if not is_open(descriptor) or file_identity(descriptor) == file:
                os.dup2(terminal, descriptor)

    def finish(self, in_order: bool = False) -> bool:
        """Redirect output to the terminal again, wait until the relay has forwarded all, return whether some is lost.

        If this rank ends `in_order`, its log is complete.
        """
        if self._terminal is None:
            return self._has_lost_output
        flush_python()
        self._restore_descriptors()
        if self._relay is not None:
            try:
                self._has_lost_output = self._relay.finish(in_order)
                self._relay.close()
            except (EOFError, OSError):
                self._replace_relay()
        for descriptor in self._terminal:
            os.close(descriptor)
        self._terminal = None
        return self._has_lost_output

    def exit_status(self, own: int, error: str = "") -> int:
        """Return a rank's exit status: its `own`, or if that is 0 and output was lost, Python's for that.

        `error` says why the last flush failed, empty if it did not.
        """
        if error:
            write_line(f"mpiddp: cannot write {error}")
        return own or (EXIT_OUTPUT_LOST if error or self._has_lost_output else 0)


def open_closed_streams() -> None:
    """Open /dev/null as stdin, stdout or stderr if one is closed, so that no other file gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@contextlib.contextmanager
def keep_streams_open() -> Iterator[None]:
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
    """Return whether a descriptor is open."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def enable_line_buffering() -> None:
    """Flush stdout after each line, as on a terminal, unless nothing is buffered (python -u).

    A script may reconfigure its stdout, or replace it. C code prints on C's stdout, as NCCL does (its src/debug.cc).
    """
    import ctypes

    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, IOLBF, 0)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        with contextlib.suppress(OSError, ValueError):  # what was written before cannot be flushed; it is closed
            sys.stdout.reconfigure(line_buffering=True)


def make_flush_fail() -> None:
    """Make Python's last flush of stdout fail: Python then exits with its status for lost output."""
    def fail() -> None:
        raise OSError("output was lost")

    sys.stdout.flush = fail  # type: ignore[method-assign]
