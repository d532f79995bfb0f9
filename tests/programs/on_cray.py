"""Run `python -m mpiddp` as on a Cray with verbs: a machine without one has neither the library nor the network."""

import sys

from mpiddp import cli
from mpiddp.facts import fabric
from mpiddp.join import initialise

initialise.is_cray = lambda *_: True
fabric.has_verbs = lambda: True
sys.exit(cli.main())
