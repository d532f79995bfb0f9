"""Be `python -m mpiddp`, whose agent answers as soon as the rank has: it does not measure how busy that is."""

import sys

from mpiddp.cli import main
from mpiddp.where import sampler

sampler.CPU_INTERVAL_S = 0.0
sys.exit(main())
