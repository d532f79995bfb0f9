"""Redirects a rank's stdout and stderr, including output of C code, to the terminal, to a log, or to both."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from ..base.config import DEFAULT_PREFIX, LaunchConfig
from ..base.ranks import LogPlan
from ..base.stderr import STDERR, write_line
from ..base.termination import flush_python
from ..base.text import fill_fields
from ..discovery.runtime import hostname
from ..ipc.helper_process import OwnedDescriptors, file_identity, redirect_to_devnull
from ..systems.statuses import EXIT_OUTPUT_LOST
from .client import RelayClient
from .index import try_update_record
from .protocol import ForwardConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..bootstrap.membership import Membership

FOLDED_PREFIX = "[{rank}] "
IOLBF = 1  # C's _IOLBF in glibc and musl
C_BUFFER_BYTES = 8192  # C's BUFSIZ in glibc


class OutputTarget(NamedTuple):
    """Where a rank's output goes: to the terminal if `is_shown`; `forward` configures the relay, with the log.

    The relay accepts the relays of other ranks on the descriptor `listener`, -1 for none.
    """

    is_shown: bool
    forward: ForwardConfig
    listener: int = -1


def choose_output_target(membership: Membership, config: LaunchConfig) -> OutputTarget:
    """Return where this rank's output goes."""
    place, host, log = membership.environment, hostname(), membership.log
    who, is_shown = f"rank {place.rank} on {host}", config.output_filter.has(place.rank, place.local_rank)
    if (share := membership.share) is not None:
        prefix = FOLDED_PREFIX if config.prefix in ("", DEFAULT_PREFIX) else config.prefix
        return OutputTarget(is_shown, ForwardConfig(log, prefix, who, is_shown, share.folding), share.listener)
    fields = {"rank": place.rank, "local_rank": place.local_rank, "host": host}
    return OutputTarget(is_shown, ForwardConfig(log, fill_fields(config.prefix, fields), who, is_shown))


def is_relayed(config: LaunchConfig) -> bool:
    """Return whether output may be logged, prefixed or folded."""
    return bool(config.log_dir) or bool(config.prefix) or config.output_filter.folded


class Output:
    """A rank's output. If it is shown and has neither log nor prefix, nothing is redirected."""

    def __init__(self, relayed: bool) -> None:
        """Fork a relay if `relayed` (see is_relayed()); called before MPI is loaded."""
        open_closed_streams()
        self._relay = RelayClient() if relayed else None
        self._terminal: tuple[int, int] | None = None
        self._descriptors = OwnedDescriptors()  # those of `_terminal`
        self._files: list[tuple[int, int]] = []  # the targets of stdout and stderr, as of file_identity()
        self._is_shown = True
        self._has_lost_output = self._is_folded = False
        self._rank_name, self._log = "", LogPlan()
        self._log_end = -1  # the log's size when the relay was killed

    def start(self, target: OutputTarget) -> int:
        """Redirect output to a target; return a socket for the agent, as RelayClient.start() does."""
        is_shown, forward, listener = target
        self._is_shown, self._rank_name, self._log = is_shown, forward.who, forward.log
        if self._relay is not None and not is_shown and not forward.log.path:
            self._relay.dismiss()
            self._relay = None
        if is_shown and not (forward.log.path or forward.prefix):
            return -1
        flush_python()
        self._terminal = os.dup(1), os.dup(2)
        for descriptor in self._terminal:
            self._descriptors.add(descriptor)
        os.register_at_fork(after_in_child=self._in_child)
        if self._relay is not None:
            self._is_folded = forward.folding is not None
            relay_socket = self._relay.start(forward, listener)
        else:
            relay_socket = -1
            redirect_to_devnull(1, 2)
        self._files = [file_identity(descriptor) for descriptor in (1, 2)]
        if self._relay is not None:
            self._relay.watch(self._replace_relay)
        return relay_socket

    def tee_to_terminal(self, text: str) -> None:
        """Print a text on the terminal as well if this rank's output is not shown there."""
        if self._terminal and not self._is_shown:
            write_line(text, self._terminal[1])

    def flush(self) -> None:
        """If output is folded, wait briefly until the terminal shows all output that the ranks have written."""
        if self._is_folded and self._terminal is not None:
            flush_python()
            if (relay := self._relay) is not None:  # it may be replaced meanwhile
                relay.flush()

    def print_unfolded(self, text: str) -> None:
        """Print a text after all earlier output; if output is folded, print it directly, not through the relay."""
        if self._is_folded and self._terminal is not None:
            self.flush()
            write_line(text, self._terminal[1])
        else:
            write_line(text)

    def query_log_loss(self, timeout_s: float) -> int:
        """Return the position of the first byte that the log has lost so far, -1 if none, or if unknown."""
        if self._terminal is None or self._relay is None or not self._log.path:
            return self._log_end
        return self._relay.query_log_loss(timeout_s)

    def _replace_relay(self) -> None:
        """Write directly to the terminal from now on: the relay was killed."""
        assert self._terminal is not None
        assert self._relay is not None
        relay, self._relay = self._relay, None
        self._restore_descriptors()
        relay.take_over(self._terminal)
        self._is_folded, self._has_lost_output = False, self._is_shown
        consequences = "some output may be lost; later output goes directly to stdout and stderr"
        if self._is_shown:
            consequences += f"; the job exits with status {EXIT_OUTPUT_LOST} if it otherwise succeeds"
        if self._log.path:
            consequences += f"; the log ends here: {self._log.path}"
            with contextlib.suppress(OSError):
                self._log_end = os.stat(self._log.path).st_size
                try_update_record(self._log, lost=self._log_end)
        write_line(f"mpiddp: the output relay of {self._rank_name} exited unexpectedly: {consequences}")

    def _in_child(self) -> None:
        """Close in a process that the script has forked what belongs to the rank: launchers wait for their streams."""
        self._descriptors.close()
        self._terminal = None
        if self._relay is not None:
            self._relay.abandon()
            self._relay = None

    @property
    def terminal_fd(self) -> int:
        """The descriptor of stderr on the terminal."""
        return self._terminal[1] if self._terminal else STDERR

    def _restore_descriptors(self) -> None:
        """Redirect stdout and stderr back to the terminal, unless the script has redirected them."""
        assert self._terminal is not None
        for descriptor, terminal, file in zip((1, 2), self._terminal, self._files, strict=True):
            if not is_open(descriptor) or file_identity(descriptor) == file:
                os.dup2(terminal, descriptor)

    def finish(self) -> bool:
        """Restore stdout and stderr, wait until the relay has forwarded all output, return whether some is lost."""
        if self._terminal is None:
            return self._has_lost_output
        flush_python()
        self._restore_descriptors()
        if self._relay is not None:
            try:
                self._has_lost_output = self._relay.finish()
                self._relay.close()
            except (EOFError, OSError):
                self._replace_relay()
        self._descriptors.close()
        self._terminal = None
        return self._has_lost_output

    def exit_status(self, own: int, error: str = "") -> int:
        """Return a rank's exit status: its `own`, or EXIT_OUTPUT_LOST if that is 0 and output was lost.

        `error` is the reason if the last flush failed, else empty.
        """
        if error:
            write_line(f"mpiddp: cannot write {error}")
        return own or (EXIT_OUTPUT_LOST if error or self._has_lost_output else 0)


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr, so that no other file gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@contextlib.contextmanager
def keep_streams_open() -> Iterator[None]:
    """Reopen stdout and stderr at the end of this block if a file object that the script made for them closed them."""
    copies: dict[int, int] = {}
    with contextlib.suppress(OSError):  # one is already closed, or no descriptor is left
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


def make_flush_fail() -> None:
    """Make Python's last flush of stdout fail, so that Python exits with status EXIT_OUTPUT_LOST."""
    def fail() -> None:
        raise OSError("output was lost")

    sys.stdout.flush = fail  # type: ignore[method-assign]
