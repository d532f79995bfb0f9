"""Import relatively, as a module that is run with -m can."""

import sys

from ..words import WORD

if __name__ == "__main__":
    print(WORD, __package__, __spec__.name, sys.argv[1:], flush=True)
