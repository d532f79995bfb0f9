"""The check, in which rank 0's accelerator never answers, and those of the others break."""

import os
import sys
import time

from mpiddp.check import command
from mpiddp.check.bench import rank

rank.DEVICE_START_TIMEOUT_S = 1.0
if os.environ["PMI_RANK"] == "0":
    rank.start_device = lambda _: time.sleep(600)
sys.exit(command.main())
