"""Rank 0 waits, without MPI, until all other ranks run this script, each of which writes a file to the folder named."""

import os
import sys
import time
from pathlib import Path

folder, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
(folder / str(rank)).touch()
while rank == 0 and len(list(folder.iterdir())) < size:
    time.sleep(0.02)
