"""The package's program."""

import sys

from .words import WORD

print(WORD, __package__, __spec__.name, sys.argv[1:], flush=True)
