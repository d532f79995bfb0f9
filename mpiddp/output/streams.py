"""One output stream: split into lines, prefixed, dropped if there is no room."""

from __future__ import annotations

from collections.abc import Callable

WRITE_BYTES = 4096  # PIPE_BUF: writes to a pipe up to this size are atomic (man 7 pipe)
MAX_LINE_BYTES = 2**16  # a longer line is split
BAR_INTERVAL_S = 10.0  # between two states of a progress bar if each gets its own line


class Splitter:
    """Splits a stream into lines. A carriage return restarts a line, as on a terminal; only its last state is kept."""

    def __init__(self) -> None:
        self._begun = b""
        self.bar = b""  # the current state of a progress bar, empty for none

    def take(self, data: bytes) -> bytes | None:
        """Return the lines that new data completes, as a block without the last line end; None for none.

        Empty data completes an unfinished line.
        """
        if b"\r" in data or b"\r" in self._begun:
            return self._take_with_bar(data)
        block, end, self._begun = (self._begun + data).rpartition(b"\n")
        if (not data or len(self._begun) > MAX_LINE_BYTES) and self._begun:
            block, end, self._begun = block + end + self._begun, b"\n", b""
        return block if end else None

    def _take_with_bar(self, data: bytes) -> bytes | None:
        """Take data with carriage returns; return as take() does."""
        *lines, begun = (self._begun + data).split(b"\n")
        lines = list(map(last_state, lines))
        state = last_state(begun)
        is_drawn = b"\r" in begun.rstrip(b"\r")  # a single one at the end may be the first half of "\r\n"
        self.bar = state if is_drawn else b""
        if not data or len(begun) > MAX_LINE_BYTES:
            lines += [state] if begun.strip(b"\r") else []
            self.bar = self._begun = b""
        else:
            self._begun = b"\r" * is_drawn + state + b"\r" * begun.endswith(b"\r")
        return b"\n".join(lines) if lines else None


def last_state(line: bytes) -> bytes:
    """Return the text that a terminal shows for a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Prefixer:
    """Puts a prefix before each line of a stream; a progress bar gets a line every BAR_INTERVAL_S.

    When a bar's line ends, its last state is not shown again.
    """

    def __init__(self, prefix: Callable[[], bytes]) -> None:
        self._splitter, self._prefix, self._shown_s = Splitter(), prefix, -BAR_INTERVAL_S
        self._shown_bar: bytes | None = None  # the last state shown, until its line ends

    def take(self, data: bytes, now_s: float) -> list[bytes]:
        """Return the lines that new data completes (see Splitter.take()), in pieces as of split_for_pipe()."""
        block = self._splitter.take(data)
        if block is not None:
            first, end, rest = block.partition(b"\n")
            block = block if first != self._shown_bar else rest if end else None
            self._shown_bar = None
        if self._splitter.bar.strip() and now_s - self._shown_s >= BAR_INTERVAL_S:
            block = self._splitter.bar if block is None else block + b"\n" + self._splitter.bar
            self._shown_s, self._shown_bar = now_s, self._splitter.bar
        return split_for_pipe(add_prefix(block, self._prefix())) if block is not None else []


def add_prefix(block: bytes, prefix: bytes) -> bytes:
    """Return a block of lines with a prefix before each line and a line end after the last."""
    return prefix + block.replace(b"\n", b"\n" + prefix) + b"\n"


def split_for_pipe(text: bytes) -> list[bytes]:
    """Return whole lines in pieces of at most WRITE_BYTES; only a longer line makes a larger piece."""
    pieces, start = [], 0
    while len(text) - start > WRITE_BYTES:
        end = text.rfind(b"\n", start, start + WRITE_BYTES) + 1 or text.index(b"\n", start) + 1
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]] if start < len(text) else pieces


class DropPolicy:
    """Drops lines while there is no room; a note with their number replaces them."""

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._begun = {1: b"", 2: b""}
        self._dropped = {1: 0, 2: 0}

    def admit(self, stream: int, data: bytes) -> bytes:
        """Take data; return the whole lines that can be forwarded."""
        data = self._begun[stream] + data
        lines, end, self._begun[stream] = data.rpartition(b"\n")
        if not end and len(data) > MAX_LINE_BYTES:
            lines, self._begun[stream] = data, b""
        lines += end
        if not lines:
            return b""
        if not self._has_room():
            self._dropped[stream] += lines.count(b"\n")
            return b""
        return self._take_note(stream) + lines

    def finish(self, stream: int) -> bytes:
        """Return what is left when the stream pauses: a note on dropped lines, and an unfinished line."""
        begun, self._begun[stream] = self._begun[stream], b""
        return self._take_note(stream) + begun

    def _take_note(self, stream: int) -> bytes:
        dropped, self._dropped[stream] = self._dropped[stream], 0
        return b"[mpiddp: lines dropped here: %d]\n" % dropped if dropped else b""
