"""Run a command, and print with their times each of its writes to stdout and stderr, and its exit status."""

import fcntl
import json
import os
import subprocess
import sys
import time


def tell(what: str) -> None:
    """Print what came, and when."""
    os.write(1, json.dumps([time.monotonic(), what]).encode() + b"\n")


read_end, write_end = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)  # each write is read alone (man 2 pipe)
fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 2**20)
process = subprocess.Popen(sys.argv[1:], stdout=write_end, stderr=write_end, close_fds=False)  # it needs PMI_FD
os.close(write_end)
while text := os.read(read_end, 2**16):
    tell(text.decode())
tell(f"status {process.wait()}")
