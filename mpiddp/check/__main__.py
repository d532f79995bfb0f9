"""Check the nodes of an allocation: `mpirun python -m mpiddp.check`, or with srun."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
