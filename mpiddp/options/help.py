"""The layout of --help, and the error message for wrong usage."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from ..base.stderr import print_answer, write_line

# What to use instead of other launchers' options.
FOREIGN_OPTION_HINTS = {
    ("-n", "-np", "--np", "--nproc", "--nproc-per-node", "--nnodes", "--num-processes", "--num-machines"):
        "set the number of processes with the launcher (mpirun -n 2, srun --ntasks-per-node=2)",
    ("--standalone", "--node-rank", "--machine-rank", "--master-port", "--main-process-port", "--main-process-ip",
     "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id", "--local-addr"):
        "omit it: MPI assigns the ranks, and mpiddp chooses address and port (or set --interface and --port)",
    ("--max-restarts",):
        "to restart a failed job: python -m mpiddp.supervise --max-restarts 3 mpirun python -m mpiddp …",
    ("--tee", "--redirects", "--local-ranks-filter"):
        "use --log-dir to write each rank's output to a file, and --show to select the ranks to show",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that prints its help by print_answer(), and raises an error of one line, with a hint.

    `foreign` holds what to use instead of options that other launchers have.
    """

    def __init__(self, foreign: Mapping[tuple[str, ...], str] = {}, **details: Any) -> None:
        super().__init__(**details, formatter_class=HelpFormatter)
        self._foreign = foreign

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not None and file is not sys.stdout:
            write_line(message)
        elif status := print_answer(message):
            sys.exit(status)

    def error(self, message: str) -> NoReturn:
        """Raise argparse.ArgumentTypeError."""
        raise argparse.ArgumentTypeError(
            f"{self.prog}: {message}{self._hint_at_options(message)} (see python -m {self.prog} --help)")

    def _hint_at_options(self, message: str) -> str:
        """Return a hint what to use instead of unknown options; empty if there is none."""
        from difflib import get_close_matches

        unknown = [word.partition("=")[0].replace("_", "-") for word in message.partition("arguments: ")[2].split()]
        hints = [hint for options, hint in self._foreign.items() if set(unknown) & set(options)]
        if hints:
            return f"; {'; '.join(hints)}"
        matches = [match for word in unknown for match in get_close_matches(word, self._option_string_actions, 1, 0.75)]
        return f"; did you mean {matches[0]}?" if matches else ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats help in the width of the terminal, without shutil.

    argparse makes a formatter for each option that is added, and each would ask shutil for the width.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width() - 2)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Return how an option's value is written: an optional value must be joined to its option."""
        return f"[={action.metavar}]" if action.nargs == "?" else super()._format_args(action, default_metavar)


@functools.cache
def terminal_width() -> int:
    """Return the columns of the terminal as shutil.get_terminal_size() does, 80 if there is none."""
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except (ValueError, OSError):
        return 80
