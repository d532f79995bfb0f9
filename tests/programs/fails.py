"""Exit with a status on one rank, while the others sleep."""

import os
import sys
import time

failing, status = map(int, sys.argv[1:])
if int(os.environ["RANK"]) == failing:
    sys.exit(status)
time.sleep(600)
