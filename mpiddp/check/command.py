"""The command line of a check: options in, the program started in each rank."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..base.config import LaunchConfig
from ..base.errors import EXIT_USAGE
from ..base.version import __version__
from ..bootstrap.refusal import refuse_early
from ..cli import read_settings
from ..options.help import Parser
from ..options.table import OPTIONS, read_default, variable_name
from ..options.values import parse_path
from . import CheckOptions

if TYPE_CHECKING:
    from ..runner.lifecycle import RunningJob

DESCRIPTION = """\
Benchmark every rank and every link between nodes; report outliers and the nodes to exclude.
It takes up to a minute on a few nodes, and starts like a training: mpirun python -m mpiddp.check"""
EPILOG = """\
Exit status: 0 all are alike; 1 something is odd; 2 wrong usage; 3 the job could not be started;
120 all are alike, but stdout could not be written."""
LAUNCHERS = ("backend", "device", "interface", "master-addr", "port", "startup-timeout")  # options of mpiddp, as there


def main(arguments: list[str] | None = None) -> int:
    """Check this job's nodes and return the exit status."""
    try:
        given = parsed(arguments, os.environ)
        config = configuration(given, os.environ)
    except argparse.ArgumentTypeError as error:
        refuse_early(str(error))
        return EXIT_USAGE
    from ..launch import launch

    asked = CheckOptions(given.quick, given.nodes_only, parse_path(given.svg), parse_path(given.json),
                  parse_path(given.check_history), parse_path(given.suspects))
    return launch(config, functools.partial(run, asked))


def run(asked: CheckOptions, job: RunningJob, config: LaunchConfig) -> int:
    """Check, in a rank that has started, and return its exit status."""
    from .program import check  # loads torch, which the sentinel must not have

    return check(asked, job, config)


def parsed(arguments: list[str] | None, environ: Mapping[str, str]) -> argparse.Namespace:
    """Return the options of the command line; raise argparse.ArgumentTypeError with a line for the user."""
    parser = Parser(prog="mpiddp.check", usage="mpirun python -m mpiddp.check [options]\n"
                    "       srun --mpi=pmix python -m mpiddp.check [options]", description=DESCRIPTION, epilog=EPILOG,
                    allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one pass in place of three, which may err: about 10 s")
    parser.add_argument("--nodes-only", action="store_true", help="measure no links between ranks")
    parser.add_argument("--svg", default="", metavar="FILE", help="draw the links between nodes, and the all-reduce "
                        "(needs matplotlib)")
    parser.add_argument("--json", default="", metavar="FILE", help="write all that was measured")
    history = read_default("check-history", environ)
    parser.add_argument("--check-history", default=history, metavar="FILE", help="keep the figures of each node in "
                        "FILE, and compare it with its own former ones there")
    parser.add_argument("--suspects", default="", metavar="FILE", help="append a line for each node that should be "
                        "left out: time, host, why; for mpiddp.supervise --exclude FILE")
    for name in LAUNCHERS:
        parser.add_argument(f"--{name}", **{**OPTIONS[name], "default": read_default(name, environ)})
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    return parser.parse_args(arguments)


def configuration(given: argparse.Namespace, environ: Mapping[str, str]) -> LaunchConfig:
    """Return what the launcher needs, from the command line and, for what has no option here, from variables."""
    settings = read_settings({name: value for name, value in environ.items() if name != variable_name("check-history")})
    return LaunchConfig(
        backend=given.backend or None, device=None if given.device in ("", "auto") else given.device,
        interface=given.interface, master_addr=given.master_addr, port=given.port,
        startup_timeout_s=given.startup_timeout, binding=settings.binding, threads=settings.threads,
        share_gpus=settings.share_gpus, virtual_local_rank=settings.virtual_local_rank,
        gpu_aware_mpi=settings.gpu_aware_mpi,
        unknown_variables=settings.unknown_variables, init=False, quiet=True)
