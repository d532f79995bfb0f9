"""Run a command whose stdout is a pipe that does not block, read it slowly, and print what came."""

import os
import subprocess
import sys
import time

read_end, write_end = os.pipe2(os.O_CLOEXEC)
os.set_blocking(write_end, False)
process = subprocess.Popen(sys.argv[1:], stdout=write_end, close_fds=False)  # the command needs PMI_FD
os.close(write_end)
found = []
while text := os.read(read_end, 4096):
    found.append(text)
    time.sleep(0.07)
sys.stdout.buffer.write(b"".join(found))
sys.exit(process.wait())
