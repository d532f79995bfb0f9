"""The command line of a check: options in, the program started in each rank."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..cli import read_settings
from ..command.help import Parser
from ..command.options import OPTIONS, default_of, variable
from ..command.values import absolute
from ..config import DEFAULT_READY_S, LaunchConfig
from ..errors import EXIT_USAGE
from ..join.refusal import refuse_early
from ..version import __version__
from . import Asked

if TYPE_CHECKING:
    from ..run.running import RunningJob

DESCRIPTION = """\
Measure each rank, and the ways between nodes in pairs, and say what is odd: which node to leave out.
It takes half a minute on a few nodes, and starts like a training: mpirun python -m mpiddp.check"""
EPILOG = """\
Exit status: 0 all are alike; 1 something is odd; 2 wrong usage; 3 the job could not be started."""
QUICK_READY_S = 30.0  # until it can be asked where it is: what sentinels load for that disturbs a short measurement
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

    asked = Asked(given.quick, given.nodes_only, absolute(given.svg), absolute(given.json),
                  absolute(given.check_history), absolute(given.suspects))
    return launch(config, functools.partial(run, asked))


def run(asked: Asked, job: RunningJob, config: LaunchConfig) -> int:
    """Check, in a rank that has started, and return its exit status."""
    from .program import check  # loads torch, which the sentinel must not have

    return check(asked, job, config)


def parsed(arguments: list[str] | None, environ: Mapping[str, str]) -> argparse.Namespace:
    """Return the options of the command line; raise argparse.ArgumentTypeError with a line for the user."""
    parser = Parser(prog="mpiddp.check", usage="mpirun python -m mpiddp.check [options]\n"
                    "       srun --mpi=pmix python -m mpiddp.check [options]", description=DESCRIPTION, epilog=EPILOG,
                    allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="shorter measurements: 10 s on a few nodes")
    parser.add_argument("--nodes-only", action="store_true", help="measure no ways between ranks")
    parser.add_argument("--svg", default="", metavar="FILE", help="draw the ways between nodes, and the all-reduce "
                        "(needs matplotlib)")
    parser.add_argument("--json", default="", metavar="FILE", help="write all that was measured")
    history = default_of("check-history", environ)
    parser.add_argument("--check-history", default=history, metavar="FILE", help="keep the figures of each node in "
                        "FILE, and compare it with its own former ones there")
    parser.add_argument("--suspects", default="", metavar="FILE", help="append a line for each node that should be "
                        "left out: time, host, why; for mpiddp.supervise --exclude FILE")
    for name in LAUNCHERS:
        parser.add_argument(f"--{name}", **{**OPTIONS[name], "default": default_of(name, environ)})
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    return parser.parse_args(arguments)


def configuration(given: argparse.Namespace, environ: Mapping[str, str]) -> LaunchConfig:
    """Return what the launcher needs, from the command line and, for what has no option here, from variables."""
    settings = read_settings({name: value for name, value in environ.items() if name != variable("check-history")})
    return LaunchConfig(
        backend=given.backend or None, device=None if given.device in ("", "auto") else given.device,
        interface=given.interface, master_addr=given.master_addr, port=given.port,
        startup_timeout_s=given.startup_timeout, binding=settings.binding, threads=settings.threads,
        share_gpus=settings.share_gpus, virtual_local_rank=settings.virtual_local_rank,
        gpu_aware_mpi=settings.gpu_aware_mpi,
        unknown_variables=settings.unknown_variables, ready_s=QUICK_READY_S if given.quick else DEFAULT_READY_S,
        init=False, quiet=True)
