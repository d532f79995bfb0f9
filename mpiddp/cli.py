"""The command line: arguments and ``MPIDDP_…`` variables in, a `LaunchConfig` out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from .config import DEFAULT_STARTUP_TIMEOUT_S, LaunchConfig, Script
from .errors import EXIT_USAGE
from .version import __version__

USAGE = """\
mpirun python -m mpiddp [options] script.py [script arguments]
       srun --mpi=pmix python -m mpiddp [options] -m package.module [arguments]"""

DESCRIPTION = "Start PyTorch distributed training in the processes that MPI started, one per GPU."

EPILOG = """\
Options come before the script; everything after it is the script's. Each option can also be given
as a variable, MPIDDP_STARTUP_TIMEOUT=60 for --startup-timeout 60; the command line wins.
Exit status: the script's own; 2 wrong usage; 3 the job could not be started."""

TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(f"mpiddp: {message} (see python -m mpiddp --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of a job from the command line and return its exit status."""
    try:
        config = read_config(sys.argv[1:] if arguments is None else arguments, os.environ)
    except argparse.ArgumentTypeError as error:
        from .act.failure import refuse

        return refuse(str(error), EXIT_USAGE)
    from .launch import launch

    return launch(config)


def read_config(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchConfig:
    """Return the configuration of a job.

    Raises argparse.ArgumentTypeError with one line for the user where they are wrong.
    """
    options = build_parser(environ).parse_args(list(arguments))
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    words = command if options.module is None else options.module
    if not words:
        missing = "a script or -m module" if options.module is None else "a module after -m"
        raise argparse.ArgumentTypeError(f"mpiddp: {missing} is needed (see python -m mpiddp --help)")
    return LaunchConfig(
        script=Script(words[0], tuple(words[1:]), is_module=options.module is not None),
        backend=options.backend,
        init=not options.no_init,
        startup_timeout_s=options.startup_timeout,
        exit_timeout_s=options.exit_timeout,
        quiet=options.quiet,
    )


def build_parser(environ: Mapping[str, str]) -> Parser:
    """Return the parser, with the ``MPIDDP_…`` variables of `environ` as its defaults."""
    parser = Parser(
        prog="mpiddp", usage=USAGE, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def option(name: str, default: str | None, **details: object) -> None:
        value = environ.get("MPIDDP_" + name.upper().replace("-", "_"), default)
        parser.add_argument(f"--{name}", default=value, **details)  # type: ignore[arg-type]

    def flag(name: str, text: str) -> None:
        variable = "MPIDDP_" + name.upper().replace("-", "_")
        parser.add_argument(f"--{name}", action="store_true", help=text,
                            default=read_flag(parser, variable, environ.get(variable, "")))

    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module",
                        help="run a library module as the script, as python -m does")
    option("backend", None, help="backend of the process group (default: the accelerator's own; gloo without one)")
    flag("no-init", "leave init_process_group() to the script; the environment is set all the same")
    option("startup-timeout", str(DEFAULT_STARTUP_TIMEOUT_S), type=seconds, metavar="SECONDS",
           help="give up when not all ranks are ready by then (default: %(default)s)")
    option("exit-timeout", None, type=seconds, metavar="SECONDS",
           help="give up when a rank has not ended this long after another did (default: wait for it)")
    flag("quiet", "print no start line")
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be greater than 0 and finite, got {text}")
    return value


def read_flag(parser: Parser, variable: str, text: str) -> bool:
    """Return the truth that a variable's text says."""
    if text.lower() not in (*TRUE, *FALSE):
        parser.error(f"{variable} must be one of {', '.join((*TRUE, *FALSE[1:]))}, got {text!r}")
    return text.lower() in TRUE
