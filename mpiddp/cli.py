"""The command line: arguments and ``MPIDDP_…`` variables in, a `LaunchConfig` out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from .base.config import DEFAULT_FOLD_WINDOW_S, PREFIX, Desk, LaunchConfig, Script, Shape
from .base.errors import EXIT_USAGE
from .base.stderr import answer, say, warn
from .base.version import __version__
from .options.help import Parser
from .options.table import FIELDS, FLAGS, OPTIONS, default_of, flag_of, split, unknown
from .options.values import absolute

USAGE = """\
mpirun python -m mpiddp [options] script.py [arguments]
       srun --mpi=pmix python -m mpiddp [options] -m package.module [arguments]
       … python -m mpiddp [options] -c code [arguments]"""

DESCRIPTION = """\
Start PyTorch distributed training in the processes that MPI started, one per GPU, and run a script
in each, or with -m a module, as python itself would: a folder or zip file with a __main__.py, bytecode,
or - for standard input, too."""

EPILOG = """\
Options come before the script; everything after it is the script's. Each option can also be given
as a variable, MPIDDP_STARTUP_TIMEOUT=60 for --startup-timeout 60; the command line wins.
Exit status: the script's own; 2 wrong usage; 3 the job could not be started; 75 all ranks agreed
to stop, and the job can go on later; 120 output was lost."""

def main() -> int:
    """Run one rank of a job from the command line and return its exit status."""
    try:
        job = read_config(sys.argv[1:], os.environ)
    except argparse.ArgumentTypeError as error:
        from .bootstrap.refusal import refuse_early

        refuse_early(str(error))
        return EXIT_USAGE
    if isinstance(job, Desk):
        return plan_at_desk(job)
    if isinstance(job, Shape):
        from .discovery.schedulers import list_slurm_hosts
        from .planning.job import describe_dry_run

        return answer(describe_dry_run(job, list_slurm_hosts(os.environ)))
    from .launch import launch

    return launch(job)


def plan_at_desk(job: Desk) -> int:
    """Print the map of a job on nodes whose facts are in a file, or why it could not start; return the exit status."""
    from .base.errors import EXIT_CANNOT_START, LaunchError
    from .discovery import serialization
    from .planning.job import plan_dry_run
    from .reporting.map import format_map

    try:
        found, warnings = plan_dry_run(serialization.read_facts(job.facts_file), job.config)
    except (OSError, ValueError) as error:
        say(f"mpiddp: --facts: {error}")
        return EXIT_USAGE
    except LaunchError as error:
        say(str(error))
        return EXIT_CANNOT_START
    warn(warnings)
    status = answer("\n".join(format_map(found)))
    if job.config.map_file:
        from .reporting.map import write_map

        write_map(found, job.config.map_file)
    return status


def read_config(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchConfig | Shape | Desk:
    """Return the configuration of a job, or what --dry-run asks about: a shape, or a job on known nodes.

    Raises argparse.ArgumentTypeError with one line for the user where they are wrong.
    """
    parser = build_parser(environ)
    ours, command = split(arguments)
    options = parser.parse_args(ours)
    if options.dry_run and any(one.startswith("--explain") for one in ours):
        parser.error("--explain starts a job, and --dry-run does not")
    if options.dry_run and options.facts_file and options.nodes is None:
        return Desk(options.facts_file, configuration(options, Script(""), environ))
    if options.dry_run:
        if options.nodes is None or options.ranks_per_node is None:
            parser.error("--dry-run needs --nodes and --ranks-per-node, or --facts")
        return Shape(options.nodes, options.ranks_per_node, options.port)
    way = command[0] if command[:1] in (["-m"], ["-c"]) else ""
    words = command[1:] if way or command[:1] == ["--"] else command
    if not words and (way or options.explain is None):
        parser.error(NEEDED[way])
    if told := conflict(options):
        parser.error(told)
    script = Script(words[0], tuple(words[1:]), is_module=way == "-m", is_code=way == "-c") if words else None
    return configuration(options, script, environ)


NEEDED = {"": "a script is needed, or -m and a module", "-m": "a module is needed after -m",
          "-c": "code is needed after -c"}


def read_settings(environ: Mapping[str, str]) -> LaunchConfig:
    """Return what the ``MPIDDP_…`` variables say for a program with its own main().

    Raises argparse.ArgumentTypeError with one line for the user where they are wrong.
    """
    parser = build_parser(environ)
    options = parser.parse_args([])
    if told := conflict(options):
        parser.error(told)
    return configuration(options, None, environ)


def configuration(options: argparse.Namespace, script: Script | None, environ: Mapping[str, str]) -> LaunchConfig:
    """Return the configuration that options, a script and torchelastic's variable in `environ` make."""
    fields = {name: value for name, value in vars(options).items() if name in LaunchConfig._fields}
    fields["error_file"] = options.error_file or absolute(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return LaunchConfig(script=script, init=not options.no_init, unknown_variables=tuple(unknown(environ)), **fields)


def fits_folded(prefix: str) -> bool:
    """Tell whether a prefix can stand before lines of several ranks."""
    from datetime import datetime  # seldom needed

    try:
        prefix.format(rank="0-3", time=datetime.now().astimezone())
    except Exception:
        return False
    return True


def conflict(options: argparse.Namespace) -> str:
    """Return in words which options do not go together, empty if all do."""
    if options.stall_abort and options.stall_s is None:
        return "--stall-abort needs --stall SECONDS"
    if (options.log_compress or options.log_max_bytes) and not options.log_dir:
        return f"--log-{'compress' if options.log_compress else 'max-bytes'} needs --log-dir DIR"
    if options.check_history and not options.check:
        return "--check-history needs --check"
    if options.stage_keep and not options.stage:
        return "--stage-keep needs --stage"
    if not options.shown.folded and (options.fold_window_s != DEFAULT_FOLD_WINDOW_S or options.drops_lines):
        return f"--{'overflow' if options.drops_lines else 'fold-window'} needs --show fold"
    if options.shown.folded and options.port > 65533:
        return f"--port {options.port}: --show fold needs two more ports after it"
    if options.shown.folded and options.prefix != PREFIX and not fits_folded(options.prefix):
        return (f"--prefix {options.prefix!r}: lines of several ranks, as --show fold makes them, have two "
                "fields alone: rank, a text as in 0-3, and time")
    return ""


def build_parser(environ: Mapping[str, str]) -> Parser:
    """Return the parser of our own options, with the ``MPIDDP_…`` variables of `environ` as defaults."""
    parser = Parser(prog="mpiddp", usage=USAGE, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    try:
        for name, details in OPTIONS.items():
            parser.add_argument(f"--{name}", dest=FIELDS.get(name), **{**details, "default": default_of(name, environ)})
        for name, text in FLAGS.items():
            parser.add_argument(f"--{name}", dest=FIELDS.get(name), action="store_true",
                                default=flag_of(name, environ), help=text)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    return parser
