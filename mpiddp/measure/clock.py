"""How far a rank's clock is from rank 0's."""

from __future__ import annotations

import struct
import time

from .channels import Channel

STAMP = struct.Struct("d")
TRIPS = 10


def compare(channel: Channel, asks: bool) -> float:
    """Return by how many seconds the other rank's clock is ahead of this one's, to the one that `asks`; else 0.

    As in NTP (RFC 5905): the other's time is taken for that of the middle of the shortest of a few round trips.
    """
    buffer = bytearray(STAMP.size)
    best = (float("inf"), 0.0)
    for _ in range(TRIPS):
        if asks:
            began, here = time.monotonic(), time.time()
            channel.send([buffer])
            channel.receive([buffer])
            took = time.monotonic() - began
            best = min(best, (took, STAMP.unpack(buffer)[0] - here - took / 2))
        else:
            channel.receive([buffer])
            buffer[:] = STAMP.pack(time.time())
            channel.send([buffer])
    return best[1] if asks else 0.0
