"""Bytes and words over a TCP connection, timed: run in the namespaces of two hosts.

    python flow.py ADDRESS                        listens there, prints its port, and serves one connection
    python flow.py ADDRESS PORT BYTES TIMES       sends so many bytes so often, and prints their seconds
    python flow.py ADDRESS PORT 1 TIMES           the same with single bytes: the times of a round trip

Each message is answered when all of it has come. Two numbers are printed for each: the seconds until it had come, and
until its answer was there. The hosts share one machine's clock.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

TIMEOUT_S = 30.0
FIRST = struct.Struct("!QQ")  # bytes of a message, number of messages
ANSWER = struct.Struct("!d")  # when it had come


def serve(address: str) -> None:
    """Take messages of one connection, and answer each."""
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        server.settimeout(TIMEOUT_S)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size, times = FIRST.unpack(connection.recv(FIRST.size, socket.MSG_WAITALL))
        room = memoryview(bytearray(2**20))
        for _ in range(times):
            left = size
            while left:
                got = connection.recv_into(room[:left])
                if not got:
                    raise ConnectionError("closed by the sender")
                left -= got
            connection.sendall(ANSWER.pack(time.monotonic()))


def send(address: str, port: int, size: int, times: int) -> list[tuple[float, float]]:
    """Send messages, and return the seconds from the begin of each until it had come, and until its answer had."""
    message, seconds = bytes(size), []
    with socket.create_connection((address, port), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(FIRST.pack(size, times))
        for _ in range(times):
            begin = time.monotonic()
            connection.sendall(message)
            (came,) = ANSWER.unpack(connection.recv(ANSWER.size, socket.MSG_WAITALL))
            seconds.append((came - begin, time.monotonic() - begin))
    return seconds


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        print(json.dumps(send(sys.argv[1], *map(int, sys.argv[2:5]))))
