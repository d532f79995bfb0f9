"""Where output goes: what a descriptor can't take is lost, and told of."""

from __future__ import annotations

from ..beside.detached import silence
from ..say import say, write_some


class Sink:
    """A descriptor that output goes to. What it can't take, on a full disk, is lost; that is said once.

    `size` is the position of the first byte. If `marks`, a line in the output says how much is missing.
    """

    def __init__(self, descriptor: int, name: str, who: str, size: int = 0, marks: bool = False) -> None:
        self.failed = False
        self._descriptor, self._name, self._who, self._size, self._marks = descriptor, name, who, size, marks
        self._missing = 0  # bytes since the last that was written

    def write(self, data: bytes) -> None:
        """Write as much of the data as the descriptor takes; drop it if nobody reads any more."""
        if not data:
            return
        mark = b"\n[mpiddp: %d bytes are missing here]\n" % self._missing if self._marks and self._missing else b""
        rest = mark + data
        try:
            while rest:
                count = write_some(self._descriptor, rest)
                rest, self._size = rest[count:], self._size + count
        except BrokenPipeError:
            silence(self._descriptor)
            return
        except OSError as error:
            self._fail(error)
        self._missing = len(rest) if len(rest) <= len(data) else self._missing + len(data)

    def _fail(self, error: OSError) -> None:
        """Say that output is lost, the first time that it happens."""
        if not self.failed:
            say(f"mpiddp: {self._who}: cannot write {self._name}: {error.strerror} (at byte {self._size}); "
                "this output is lost, what follows is tried again")
        self.failed = True
