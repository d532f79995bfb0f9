"""The form of --help, and of what is said of wrong usage."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import Any, NoReturn

from ..base.stderr import print_answer, write_line

# What other launchers' options are here.
INSTEAD = {
    ("-n", "-np", "--np", "--nproc", "--nproc-per-node", "--nnodes", "--num-processes", "--num-machines"):
        "how many processes start is for the launcher to say (mpirun -n 2, srun --ntasks-per-node=2)",
    ("--standalone", "--node-rank", "--machine-rank", "--master-port", "--main-process-port", "--main-process-ip",
     "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id", "--local-addr"):
        "leave it out: MPI tells the ranks, and mpiddp finds address and port (--interface and --port name them)",
    ("--max-restarts",): "python -m mpiddp.supervise --max-restarts 3 mpirun python -m mpiddp … starts a job again",
    ("--tee", "--redirects", "--local-ranks-filter"):
        "--log-dir writes each rank's output to a file, --show tells whose is shown",
}


class PlainParser(argparse.ArgumentParser):
    """An argument parser that prints its help as any other answer."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not None and file is not sys.stdout:
            write_line(message)
        elif status := print_answer(message):
            sys.exit(status)


class Parser(PlainParser):
    """An argument parser that says what is wrong in one line."""

    def __init__(self, **details: Any) -> None:
        super().__init__(**details, formatter_class=Help)

    def error(self, message: str) -> NoReturn:
        """Raise argparse.ArgumentTypeError."""
        raise argparse.ArgumentTypeError(
            f"{self.prog}: {message}{self._instead(message)} (see python -m {self.prog} --help)")

    def _instead(self, message: str) -> str:
        """Return in words what to take in the place of options that are unknown, empty where that is unknown, too."""
        from difflib import get_close_matches

        unknown = [word.partition("=")[0].replace("_", "-") for word in message.partition("arguments: ")[2].split()]
        told = [words for options, words in INSTEAD.items() if set(unknown) & set(options)]
        if told:
            return f"; {'; '.join(told)}"
        near = [one for word in unknown for one in get_close_matches(word, self._option_string_actions, 1, 0.75)]
        return f"; did you mean {near[0]}?" if near else ""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help in the width of the terminal.

    argparse makes a formatter for each option that it is told of, and imports shutil to find the width.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width() - 2)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Return the form of an option's value; one that may be left out has to be joined to its option."""
        return f"[={action.metavar}]" if action.nargs == "?" else super()._format_args(action, default_metavar)


@functools.cache
def terminal_width() -> int:
    """Return the columns of the terminal, 80 where there is none, as shutil.get_terminal_size() finds them."""
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except (ValueError, OSError):
        return 80
