"""Print a line every second, without a flush, and note in a file of the rank's when, in seconds since the epoch."""

import os
import sys
import time
from pathlib import Path

with Path(sys.argv[1], os.environ["RANK"]).open("w", buffering=1) as times:
    for step in range(int(sys.argv[2])):
        time.sleep(1)
        print(f"step {step}", time.time(), file=times)
        print(f"epoch 3 step {step}")
