"""The prompt on all ranks, `python -m mpiddp.run -i`: reads a source, and the next one when all ranks have run it."""

from __future__ import annotations

import code
import contextlib
import json
import platform
import re
import signal
import sys

from ..base.stderr import write_all, write_line
from ..base.text import format_ranges
from . import protocol
from .client import ToServer, receive
from .console import FILE, READY

PREFIX = "[{rank}] "
OPTIONS = ("--show", "fold-equal", "--prefix", PREFIX, "-m", f"{__package__}.console")
READY_LINE = re.compile(rb"\[(?P<ranks>[\d,-]+)\] (?P<text>.*)" + READY.encode())
STREAMS = (1, 2)
NAME_AFTER_S = 10.0  # without output, if some ranks are ready: the others are named


class Prompt(code.InteractiveConsole):
    """Knows which ranks are ready for the next source."""

    def __init__(self, server: ToServer, ranks: int) -> None:
        super().__init__(filename=FILE)
        self._server, self._all = server, frozenset(range(ranks))
        self._ready = dict.fromkeys(STREAMS, frozenset[int]())
        self._begun = dict.fromkeys(STREAMS, b"")  # lines that have not ended
        self._is_waiting = True  # for the ranks
        signal.signal(signal.SIGINT, self._interrupt)

    def talk(self) -> None:
        """Talk to the user until the end of stdin; raise SystemExit with the run's status."""
        self._await_ready()
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (for input(): line editing, and the lines before)
        self.interact(f"Python {platform.python_version()}: each line runs on {len(self._all)} ranks; Ctrl-D ends this",
                      exitmsg="")
        if self.buffer:  # a block that the end of stdin has ended
            self.push("")
        self._is_waiting = True
        self._server.send(protocol.Input(b""))
        while True:
            self._receive()

    def raw_input(self, prompt: object = "") -> str:
        """Read a line; a prompt is for a terminal alone."""
        return input(str(prompt) if sys.stdin.isatty() else "")

    def runsource(self, source: str, filename: str = FILE, symbol: str = "single") -> bool:
        """Let all ranks run a source if it is complete, and return whether it is not."""
        try:
            if self.compile(source, filename, symbol) is None:
                return True
        except (OverflowError, SyntaxError, ValueError, MemoryError, RecursionError):
            self.showsyntaxerror(filename)
            return False
        if len(data := json.dumps(source).encode() + b"\n") > protocol.MAX_INPUT_BYTES:
            write_line("mpiddp.run: this is too long for a prompt; save it in a file")
        elif source.strip():
            self._ready = dict.fromkeys(STREAMS, frozenset[int]())
            self._is_waiting = True
            self._server.send(protocol.Input(data))
            self._await_ready()
        return False

    def _await_ready(self) -> None:
        while self._late:
            self._receive()
        self._is_waiting = False

    @property
    def _late(self) -> frozenset[int]:
        """The ranks that are not ready, on both streams: each has what was printed before."""
        return self._all - frozenset.intersection(*self._ready.values())

    def _interrupt(self, *_: object) -> None:
        """Interrupt the ranks, or the line that the user types."""
        if not self._is_waiting:
            raise KeyboardInterrupt
        self._server.send(protocol.Signal(signal.SIGINT))

    def _receive(self) -> None:
        try:
            receive(self._server, NAME_AFTER_S, self._show)
        except TimeoutError:
            if self._late and self._late != self._all:
                write_line(f"mpiddp.run: rank {format_ranges(sorted(self._late))} has not ended that line "
                           "yet; Ctrl-C interrupts it")

    def _show(self, stream: int, data: bytes) -> None:
        """Write output, and take the lines that say which ranks are ready."""
        *lines, self._begun[stream] = (self._begun[stream] + data).split(b"\n")
        for line in lines:
            if match := READY_LINE.fullmatch(line):
                self._ready[stream] |= read_ranks(match["ranks"].decode())
            if not match or match["text"]:
                write_all(stream, line.removesuffix(READY.encode()) + b"\n")


def read_ranks(text: str) -> set[int]:
    """Return ranks as a line's prefix has them: {0, 1, 2, 8} of "0-2,8"."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return ranks
