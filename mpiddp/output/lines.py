"""The lines of a stream, what stands before them, and the states of a progress bar, of which the last one counts."""

from __future__ import annotations

from collections.abc import Callable

WRITE_BYTES = 4096  # PIPE_BUF: what a pipe takes in one piece (man 7 pipe)
LONGEST_BYTES = 2**16  # of a line; a longer one is taken for several
BAR_S = 10.0  # between two states of a bar, where each takes a line of its own


class Splitter:
    """Splits a stream into lines. A carriage return begins a line anew, as on a terminal: its last state counts."""

    def __init__(self) -> None:
        self._begun = b""
        self.bar = b""  # the state of a progress bar that is being drawn, empty for none

    def take(self, data: bytes) -> bytes | None:
        """Return the lines that new data completes, as a block without the last end, None for none.

        Empty data completes what has begun.
        """
        if b"\r" in data or b"\r" in self._begun:
            return self._take_with_bar(data)
        block, end, self._begun = (self._begun + data).rpartition(b"\n")
        if (not data or len(self._begun) > LONGEST_BYTES) and self._begun:
            block, end, self._begun = block + end + self._begun, b"\n", b""
        return block if end else None

    def _take_with_bar(self, data: bytes) -> bytes | None:
        """As take(), where lines have states."""
        *lines, begun = (self._begun + data).split(b"\n")
        lines = list(map(last_state, lines))
        state = last_state(begun)
        is_drawn = b"\r" in begun.rstrip(b"\r")  # one at the end alone may be the first half of a line's end
        self.bar = state if is_drawn else b""
        if not data or len(begun) > LONGEST_BYTES:
            lines += [state] if begun.strip(b"\r") else []
            self.bar = self._begun = b""
        else:
            self._begun = b"\r" * is_drawn + state + b"\r" * begun.endswith(b"\r")
        return b"\n".join(lines) if lines else None


def last_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line in which carriage returns stand."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Prefixer:
    """Puts a prefix before each line of a stream; a progress bar gets a line every BAR_S.

    A bar's last state that was shown already is not shown once more when its line ends.
    """

    def __init__(self, prefix: Callable[[], bytes]) -> None:
        self._splitter, self._prefix, self._drawn_s = Splitter(), prefix, -BAR_S
        self._drawn: bytes | None = None  # the state that was shown last, if its line has not ended

    def take(self, data: bytes, now_s: float) -> list[bytes]:
        """Return the lines that new data completes, in pieces that a pipe takes whole; as Splitter.take()."""
        block = self._splitter.take(data)
        if block is not None:
            first, end, rest = block.partition(b"\n")
            block = block if first != self._drawn else rest if end else None
            self._drawn = None
        if self._splitter.bar.strip() and now_s - self._drawn_s >= BAR_S:
            block = self._splitter.bar if block is None else block + b"\n" + self._splitter.bar
            self._drawn_s, self._drawn = now_s, self._splitter.bar
        return pieces(prefixed(block, self._prefix())) if block is not None else []


def prefixed(block: bytes, prefix: bytes) -> bytes:
    """Return lines, each after a prefix, and the last one with its end, too."""
    return prefix + block.replace(b"\n", b"\n" + prefix) + b"\n"


def pieces(text: bytes) -> list[bytes]:
    """Return whole lines in pieces that a pipe takes whole, as far as lines are not longer."""
    found, at = [], 0
    while len(text) - at > WRITE_BYTES:
        end = text.rfind(b"\n", at, at + WRITE_BYTES) + 1 or text.index(b"\n", at) + 1
        found.append(text[at:end])
        at = end
    return [*found, text[at:]] if at < len(text) else found
