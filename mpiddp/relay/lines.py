"""The lines of a stream, what stands before them, and the states of a progress bar, of which the last one counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

WRITE_BYTES = 4096  # PIPE_BUF: what a pipe takes in one piece (man 7 pipe)
LONGEST_BYTES = 2**16  # of a line; a longer one is taken for several
BAR_S = 10.0  # between two states of a bar, where each takes a line of its own


class Splitter:
    """Splits a stream into lines. A carriage return begins a line anew, as on a terminal: its last state counts."""

    def __init__(self) -> None:
        self._begun = b""
        self.bar = b""  # the state of a progress bar that is being drawn, empty for none

    def take(self, data: bytes) -> list[bytes]:
        """Return the lines that new data completes; empty data completes what has begun."""
        if not data:
            lines, self._begun = [last_state(self._begun)] if self._begun.strip(b"\r") else [], b""
        else:
            *lines, self._begun = (self._begun + data).split(b"\n")
            if b"\r" in data or any(b"\r" in line for line in lines[:1]):
                lines = list(map(last_state, lines))
            while len(self._begun) > LONGEST_BYTES:
                lines.append(self._begun[:LONGEST_BYTES])
                self._begun = self._begun[LONGEST_BYTES:]
        self.bar = b""
        if b"\r" in self._begun:
            self.bar = last_state(self._begun)
            self._begun = b"\r" + self.bar + (b"\r" if self._begun.endswith(b"\r") else b"")
        return lines


def last_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line in which carriage returns stand."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Prefixer:
    """Puts a prefix before each line of a stream; a progress bar gets a line every BAR_S."""

    def __init__(self, prefix: Callable[[], bytes]) -> None:
        self._splitter, self._prefix, self._drawn_s = Splitter(), prefix, -BAR_S

    def take(self, data: bytes, now_s: float) -> list[bytes]:
        """Return the lines that new data completes, in pieces that a pipe takes whole; as Splitter.take()."""
        lines = self._splitter.take(data)
        if self._splitter.bar.strip() and now_s - self._drawn_s >= BAR_S:
            lines.append(self._splitter.bar)
            self._drawn_s = now_s
        prefix = self._prefix() if lines else b""
        return pieces(prefix + line for line in lines)


def pieces(lines: Iterable[bytes]) -> list[bytes]:
    """Return lines, which get their ends, in pieces that a pipe takes whole."""
    found: list[bytes] = []
    room = 0
    for line in lines:
        if len(line) >= room:
            found.append(b"")
            room = WRITE_BYTES
        found[-1] += line + b"\n"
        room -= len(line) + 1
    return found
