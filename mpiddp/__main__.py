"""``python -m mpiddp``."""

import os
import sys

if __name__ == "__main__":
    os.environ.pop("_MPIDDP_STAGED_BY", None)  # set by a job that has started this one, whose mirror ends with it
    from .cli import main

    sys.exit(main())
