"""The form of --help."""

from __future__ import annotations

import argparse
import functools
import os


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
