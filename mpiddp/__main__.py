"""``python -m mpiddp``."""

import sys

if __name__ == "__main__":
    from .entry import main

    sys.exit(main())
