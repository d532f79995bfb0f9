"""Where output goes, and what is dropped: what a descriptor does not take is lost, and this is reported."""

from __future__ import annotations

from collections.abc import Callable

from ..base.stderr import write_line, write_some
from ..ipc.helper_process import silence


class Sink:
    """A descriptor that output goes to. What it can't take, on a full disk, is lost; that is said once."""

    def __init__(self, descriptor: int, name: str, who: str) -> None:
        self.failed = False
        self._descriptor, self._name, self._who = descriptor, name, who
        self._size = 0

    def write(self, data: bytes) -> None:
        """Write as much of the data as the descriptor takes; drop it if nobody reads any more."""
        try:
            while data:
                count = write_some(self._descriptor, data)
                data, self._size = data[count:], self._size + count
        except BrokenPipeError:
            silence(self._descriptor)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Say that output is lost, the first time that it happens."""
        if not self.failed:
            write_line(f"mpiddp: {self._who}: cannot write {self._name}: {error.strerror} (at byte {self._size}); "
                       "this output is lost, what follows is tried again")
        self.failed = True


LONGEST_BYTES = 2**16  # of a line that is dropped as a whole


class Overflow:
    """Lets lines through as long as there is room; others are counted, and the count is put in their place."""

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._begun = {1: b"", 2: b""}
        self._dropped = {1: 0, 2: 0}

    def let_through(self, stream: int, data: bytes) -> bytes:
        """Return what may go on when data has come: whole lines."""
        data = self._begun[stream] + data
        whole, end, self._begun[stream] = data.rpartition(b"\n")
        if not end and len(data) > LONGEST_BYTES:
            whole, self._begun[stream] = data, b""
        whole += end
        if not whole:
            return b""
        if not self._has_room():
            self._dropped[stream] += whole.count(b"\n")
            return b""
        return self._note(stream) + whole

    def rest(self, stream: int) -> bytes:
        """Return what is left where the stream pauses: how many lines are missing, and a line without an end."""
        begun, self._begun[stream] = self._begun[stream], b""
        return self._note(stream) + begun

    def _note(self, stream: int) -> bytes:
        dropped, self._dropped[stream] = self._dropped[stream], 0
        return b"[mpiddp: %d lines are dropped here]\n" % dropped if dropped else b""
