"""Run a command, and print with their times each of its writes to stdout and stderr, and its exit status."""

import json
import os
import select
import socket
import subprocess
import sys
import time

MOST_BYTES = 200_000  # of one write


def tell(what: str) -> None:
    """Print what came, and when."""
    os.write(1, json.dumps([time.monotonic(), what]).encode() + b"\n")


ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET)  # each write is read alone (man 7 unix)
its.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_BYTES)
process = subprocess.Popen(sys.argv[1:], stdout=its, stderr=its, close_fds=False)  # it needs PMI_FD
its.close()
ended = select.poll()
ended.register(ours, 0)  # for POLLHUP: a write of no bytes is read like an end
while (text := ours.recv(MOST_BYTES)) or not ended.poll(0):
    if text:
        tell(text.decode())
tell(f"status {process.wait()}")
