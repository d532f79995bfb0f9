"""Hold ranks in which scripts start at once: `mpirun python -m mpiddp.hold`, or with srun; then `mpiddp.run`."""

from __future__ import annotations

import argparse
import functools
import os
import sys

from ..bootstrap.refusal import refuse_early
from ..cli import read_settings
from ..options.parser import Parser
from ..systems.statuses import EXIT_USAGE


def main(arguments: list[str] | None = None) -> int:
    """Hold this rank, and return its exit status."""
    parser = Parser(prog="mpiddp.hold", description=__doc__, allow_abbrev=False)
    parser.add_argument("--preload", default="", metavar="NAMES", help="packages to import besides torch, with commas")
    try:
        given = parser.parse_args(arguments)
        config = read_settings(os.environ)
    except argparse.ArgumentTypeError as error:
        refuse_early(str(error))
        return EXIT_USAGE
    from ..launch import launch
    from .server import hold

    return launch(config._replace(script=None, init=False), functools.partial(hold, given.preload))


if __name__ == "__main__":
    sys.exit(main())
