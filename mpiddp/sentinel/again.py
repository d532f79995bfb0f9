"""Be the sentinel of a rank whose own was killed; the rank starts this program (beside/ends.py)."""

from __future__ import annotations

import json
import socket

from ..beside.detached import fork_detached, reap
from ..beside.messages import Watched
from ..beside.wire import Wire
from .process import watch


def main(given: str) -> None:
    """Watch the process that `given` tells; its three descriptors stand in the order of beside/ends.py."""
    first, pid, known, began_s = json.loads(given)

    def begin() -> None:
        wire, signals = Wire(socket.socket(fileno=first)), socket.socket(fileno=first + 1)
        watch(wire, signals, pid, Watched(**known, hosts=list), began_s, is_first=False)

    reap(fork_detached(begin, kept=range(first, first + 3), name=f"the sentinel of {known['who']}"))

