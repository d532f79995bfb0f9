"""The form of --help, and of what is said of wrong usage."""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any, NoReturn

TORCHRUNS = (" --nproc", " --nnodes", " --node-rank", " --node_rank", " --standalone", " --rdzv", " --master-port",
             " --master_port")
INSTEAD = ("how many processes start is for the launcher to say (mpirun -n 2, srun --ntasks-per-node=2), "
           "and mpiddp finds the port")


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def __init__(self, **details: Any) -> None:
        super().__init__(**details, formatter_class=Help)

    def error(self, message: str) -> NoReturn:
        """Raise argparse.ArgumentTypeError."""
        instead = f"; {INSTEAD}" if any(option in message for option in TORCHRUNS) else ""
        raise argparse.ArgumentTypeError(f"mpiddp: {message}{instead} (see python -m mpiddp --help)")


class Help(argparse.RawDescriptionHelpFormatter):
    """Help in the width of the terminal.

    argparse makes a formatter for each option that it is told of, and imports shutil to find the width.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width() - 2)


@functools.cache
def terminal_width() -> int:
    """Return the columns of the terminal, 80 where there is none, as shutil.get_terminal_size() finds them."""
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except (ValueError, OSError):
        return 80
