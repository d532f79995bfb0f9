"""``python -m mpiddp``."""

import os
import sys

if __name__ == "__main__":
    os.environ.pop("_MPIDDP_STAGED_BY", None)  # of a job that has started this one: its mirror goes with it
    from .cli import main

    sys.exit(main())
