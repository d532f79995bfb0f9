"""Flood ports with strangers: connect a thousand times a second; every second one says nonsense, the others nothing.

    python flooding.py FILE RATE

The file holds a line for each address and port, and may change. Ends with its stdin.
"""

import contextlib
import resource
import select
import socket
import sys
import time
from collections import deque
from pathlib import Path

STAY_S = 5.0  # that a connection is kept, if nobody closes it
TURN_S = 0.02
NONSENSE = b"GET / HTTP/1.1\r\n\r\n" + b"{" * 1000

file, rate = Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
open_ones, made = deque(), 0
start = time.monotonic()
while not select.select([sys.stdin], [], [], TURN_S)[0]:
    targets = [(address, int(port)) for address, port in map(str.split, file.read_text().splitlines())]
    now = time.monotonic()
    while open_ones and open_ones[0][0] < now - STAY_S:
        open_ones.popleft()[1].close()
    while targets and made < rate * (now - start):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(targets[made % len(targets)])
        if made // len(targets) % 2:
            with contextlib.suppress(OSError):
                one.send(NONSENSE)
        open_ones.append((now, one))
        made += 1
print(f"{made / (time.monotonic() - start):.0f} connections/s")
