"""The command line of `python -m mpiddp.check`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from ..base.config import LaunchConfig
from ..base.version import __version__
from ..cli import read_settings
from ..options.help import Parser
from ..options.table import OPTIONS, read_default, variable_name
from ..options.values import parse_path

USAGE = """\
mpirun python -m mpiddp.check [options]
       srun --mpi=pmix python -m mpiddp.check [options]"""
DESCRIPTION = """\
Benchmark every rank and every link between nodes; report outliers and the nodes to exclude.
It takes up to a minute on a few nodes, and starts like a training: mpirun python -m mpiddp.check"""
EPILOG = """\
Exit status: 0 all are alike; 1 something is odd; 2 wrong usage; 3 the job could not be started;
120 all are alike, but stdout could not be written."""
LAUNCH_OPTIONS = ("backend", "device", "interface", "master-addr", "port", "startup-timeout")  # as for mpiddp itself
HISTORY = "check-history"


class CheckOptions(NamedTuple):
    """What to measure, and the files to write, "" for none."""

    quick: bool = False
    nodes_only: bool = False
    svg: str = ""
    json: str = ""
    history: str = ""
    suspects: str = ""


def parse_arguments(arguments: list[str] | None, environ: Mapping[str, str]) -> tuple[CheckOptions, LaunchConfig]:
    """Return the check's options and the launcher's; raise argparse.ArgumentTypeError with a line for the user."""
    parser = Parser(prog="mpiddp.check", usage=USAGE, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one pass in place of three, which may err: about 10 s")
    parser.add_argument("--nodes-only", action="store_true", help="measure no links between ranks")
    parser.add_argument("--svg", default="", metavar="FILE", help="draw the links between nodes, and the all-reduce "
                        "(needs matplotlib)")
    parser.add_argument("--json", default="", metavar="FILE", help="write all that was measured")
    parser.add_argument(f"--{HISTORY}", default=read_default(HISTORY, environ), metavar="FILE", help="keep the figures "
                        "of each node in FILE, and compare it with its own former ones there")
    parser.add_argument("--suspects", default="", metavar="FILE", help="append a line for each node that should be "
                        "left out: time, host, why; for mpiddp.supervise --exclude FILE")
    for name in LAUNCH_OPTIONS:
        parser.add_argument(f"--{name}", **{**OPTIONS[name], "default": read_default(name, environ)})
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    given = parser.parse_args(arguments)
    options = CheckOptions(given.quick, given.nodes_only, parse_path(given.svg), parse_path(given.json),
                           parse_path(given.check_history), parse_path(given.suspects))
    return options, make_config(given, environ)


def make_config(given: argparse.Namespace, environ: Mapping[str, str]) -> LaunchConfig:
    """Return the launcher's configuration; what has no option here comes from variables."""
    settings = read_settings({name: value for name, value in environ.items() if name != variable_name(HISTORY)})
    return LaunchConfig(
        backend=given.backend or None, device=None if given.device in ("", "auto") else given.device,
        interface=given.interface, master_addr=given.master_addr, port=given.port,
        startup_timeout_s=given.startup_timeout, binding=settings.binding, threads=settings.threads,
        share_gpus=settings.share_gpus, virtual_local_rank=settings.virtual_local_rank,
        gpu_aware_mpi=settings.gpu_aware_mpi,
        unknown_variables=settings.unknown_variables, init=False, quiet=True)
