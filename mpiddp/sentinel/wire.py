"""Messages between a rank, its sentinel and the coordinator: a line of JSON each, over a stream socket."""

from __future__ import annotations

import json
import signal
import socket
from typing import Any

from ..plan.verdict import Report, Verdict

PATIENCE_S = 2.0  # for the other end to take a message
LONGEST_LINE = 2**20
END = signal.SIGRTMAX  # asks a rank to end itself with the status that its sentinel tells it

Message = dict[str, Any]


class Wire:
    """One end of a connection.

    A line that is not one of our messages is handed over as {"text": line}: faulthandler writes so.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(PATIENCE_S)
        self._begun = b""

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._socket.fileno()

    def send(self, **message: object) -> bool:
        """Send a message and tell whether the other end is there to take it."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float = PATIENCE_S) -> list[Message]:
        """Return the messages of one read, which may be none.

        Raises TimeoutError when nothing has come by then, EOFError when the other end is gone, and
        another OSError when it cannot be reached any more.
        """
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(65536)
        except ConnectionResetError:
            data = b""
        finally:
            self._socket.settimeout(PATIENCE_S)
        if not data:
            raise EOFError
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST_LINE:
            raise EOFError
        return [parsed(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def parsed(line: bytes) -> Message:
    """Return the message that a line holds."""
    if line.startswith(b"{"):
        try:
            message: Message = json.loads(line)
        except (ValueError, RecursionError):
            pass
        else:
            return message
    return {"text": line.decode(errors="replace")}


def verdict_message(verdict: Verdict) -> Message:
    """Return a verdict as a message."""
    return {"first": verdict.first._asdict(), "others": verdict.others, "outside": verdict.outside}


def read_verdict(message: Message) -> Verdict:
    """Return the verdict of a message."""
    return Verdict(Report(**message["first"]), message["others"], message["outside"])
