"""Where output goes: what a descriptor can't take is lost, and told of."""

from __future__ import annotations

from ..beside.detached import silence
from ..say import say, write_some


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
            say(f"mpiddp: {self._who}: cannot write {self._name}: {error.strerror} (at byte {self._size}); "
                "this output is lost, what follows is tried again")
        self.failed = True
