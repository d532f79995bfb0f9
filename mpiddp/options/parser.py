"""The parser of command lines, and the functions that parse options' values.

For wrong usage, and for a wrong value, each raises argparse.ArgumentTypeError.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ..base.config import AUTO_FOLDER, DEFAULT_PREFIX, CheckMode, OutputFilter
from ..base.stderr import print_answer, write_line
from ..base.text import fill_fields
from ..systems.launchers import MPIRUN, SRUN

if TYPE_CHECKING:
    from datetime import timedelta

MAX_SECONDS = 10**9  # 31 years
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
# What to use instead of other launchers' options.
FOREIGN_OPTION_HINTS = {
    ("--np", "--nproc", "--nproc-per-node", "--nnodes", "--num-processes", "--num-machines"):
        f"set the number of processes with the launcher ({MPIRUN.command} -n 2, "
        f"{SRUN.command} {SRUN.ranks_per_node.format(2)})",
    ("--standalone", "--node-rank", "--machine-rank", "--master-port", "--main-process-port", "--main-process-ip",
     "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id", "--local-addr"):
        "omit it: MPI assigns the ranks, and mpiddp chooses address and port (or set --interface and --port)",
    ("--max-restarts",):
        f"to restart a failed job: python -m mpiddp.supervise --max-restarts 3 {MPIRUN.command} python -m mpiddp …",
    ("--tee", "--redirects", "--local-ranks-filter"):
        "use --log-dir to write each rank's output to a file, and --show to select the ranks to show",
    ("--local-rank",): "to pass it to the script: --pass-local-rank, or with its spelling, after an equals sign: "
                       "--pass-local-rank=--local_rank",
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


def parse_seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be greater than 0 and at most {MAX_SECONDS:,}, got {text}")
    return value


def parse_timeout(text: str) -> timedelta:
    """Return a positive number of seconds as a timedelta."""
    from datetime import timedelta  # seldom needed

    return timedelta(seconds=parse_seconds(text))


def parse_rank(text: str) -> int:
    """Return a number that is not negative."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a rank, got {text!r}")
    return int(text)


def parse_positive_int(text: str) -> int:
    """Return a number greater than 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")
    return int(text)


def is_stage_folder(word: str) -> bool:
    """Return whether a word is the folder of --stage, and not the script."""
    return word == AUTO_FOLDER or (word.startswith("/") and not word.endswith(".py") and not os.path.isfile(word))


def parse_stage_folder(text: str) -> str:
    """Return a folder as an absolute path, or AUTO_FOLDER, also for a truth value such as 1; empty for 0."""
    if text.lower() in FALSE:
        return ""
    return AUTO_FOLDER if text == AUTO_FOLDER or text.lower() in TRUE else os.path.abspath(text)


def parse_port(text: str) -> int:
    """Return a port that is not the last one, because the next port is also used."""
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65534, got {text!r}")
    return int(text)


def parse_output_filter(text: str) -> OutputFilter:
    """Return which ranks' output is shown."""
    words = text.split(",")
    if text in ("all", "none", "fold", "fold-equal"):
        return OutputFilter(text != "none", folded=text.startswith("fold"), keeps_numbers=text == "fold-equal")
    local = [word.removeprefix("local-") for word in words if word.startswith("local-")]
    ranks = [word for word in words if not word.startswith("local-")]
    if not all(word.isdecimal() for word in (*local, *ranks)):
        raise argparse.ArgumentTypeError("must be all, none, fold, fold-equal, or ranks such as 0,4,local-0, got "
                                         f"{text!r}")
    return OutputFilter(False, frozenset(map(int, ranks)), frozenset(map(int, local)))


def parse_name(text: str) -> str | None:
    """Return a name, None if torch or mpiddp chooses."""
    return None if text in ("", "auto") else text


def parse_interface(text: str) -> str | None:
    """Return names of interfaces and networks, None for none; networks are checked."""
    for part in text.split(","):
        if "/" in part:
            import ipaddress  # seldom needed

            try:
                ipaddress.ip_network(part, strict=False)
            except ValueError:
                raise argparse.ArgumentTypeError(
                    f"must be names of interfaces, or networks such as 10.1.0.0/16, got {part!r}") from None
    return text or None


def parse_path(path: str) -> str:
    """Return an absolute path, empty for none."""
    return os.path.abspath(path) if path else ""


def parse_prefix(text: str) -> str:
    """Return a prefix with fields; a truth value stands for DEFAULT_PREFIX or for none."""
    if text.lower() in (*TRUE, *FALSE):
        return DEFAULT_PREFIX if text.lower() in TRUE else ""
    from datetime import datetime  # seldom needed

    try:  # as the rank and its agent do
        fill_fields(text, {"rank": 0, "local_rank": 0, "host": ""}).format(time=datetime.now().astimezone())
    except Exception as error:
        why = f"unknown field {error}" if isinstance(error, KeyError) else error
        raise argparse.ArgumentTypeError(
            f"may use only the fields rank, local_rank, host and time, as in '{DEFAULT_PREFIX}'; got {text!r}: {why}"
        ) from None
    return text


def parse_map_file(text: str) -> str:
    """Return the path of a map file."""
    if text and not text.endswith((".json", ".svg")):
        raise argparse.ArgumentTypeError(f"must end in .json or .svg, got {text!r}")
    return parse_path(text)


def parse_check_mode(text: str) -> CheckMode:
    """Return how nodes are checked; a truth value stands for WARN or OFF."""
    if text in (CheckMode.WARN, CheckMode.STRICT):
        return CheckMode(text)
    if text.lower() not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"must be warn, strict or 0, got {text!r}")
    return CheckMode.WARN if text.lower() in TRUE else CheckMode.OFF


def parse_option_name(text: str) -> str:
    """Return the name of an option of the script."""
    if text and not text.startswith("--"):
        raise argparse.ArgumentTypeError(f"must be an option's name such as --local-rank, got {text!r}")
    return text


def parse_either(usual: str, other: str) -> Callable[[str], bool]:
    """Return a parser for one of two words: whether it is the other one."""
    def is_other(text: str) -> bool:
        if text not in (usual, other):
            raise argparse.ArgumentTypeError(f"must be {usual} or {other}, got {text!r}")
        return text == other

    return is_other
