"""`python -m mpiddp.check`: its command line, and the job in which each rank runs the check."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from ..base.config import LaunchConfig
from ..base.errors import LocalLaunchError
from ..base.version import __version__
from ..bootstrap.refusal import refuse_early
from ..cli import read_settings
from ..options.parser import Parser, parse_path
from ..options.site import read_site_defaults
from ..options.table import OPTIONS, read_default
from ..systems.launchers import MPIRUN, SRUN_PMIX
from ..systems.statuses import EXIT_CANNOT_START, EXIT_OUTPUT_LOST, EXIT_USAGE, describe_statuses
from . import EXIT_OUTLIERS, PASSES, CheckOptions

if TYPE_CHECKING:
    from ..runner.lifecycle import RunningJob

USAGE = f"""\
{MPIRUN.command} python -m mpiddp.check [options]
       {SRUN_PMIX} python -m mpiddp.check [options]"""
DESCRIPTION = f"""\
Benchmark every rank and every link between nodes; report outliers and the nodes to exclude.
The check takes up to a minute on a few nodes. Start it like the training: {MPIRUN.command} python -m mpiddp.check"""
EPILOG = f"""\
Exit status: 0 no findings; {EXIT_OUTLIERS} findings; {describe_statuses(EXIT_USAGE, EXIT_CANNOT_START)};
{EXIT_OUTPUT_LOST} no findings, but stdout could not be written."""
END_TIMEOUT_S = 300.0  # for rank 0 to print and write the results, while the other ranks wait for its end
LAUNCH_OPTIONS = ("backend", "device", "interface", "master-addr", "port", "startup-timeout")  # as for mpiddp itself
# Override the job script's values. Otherwise NCCL's watchdog ends a process whose collective takes too long, and each
# wait polls once in a millisecond. The third variable would enable the first one.
NCCL_WAITS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_DESYNC_DEBUG": "0"}


def main(arguments: list[str] | None = None) -> int:
    """Check this job's nodes and return the exit status."""
    try:
        options, config = parse_arguments(arguments, os.environ)
    except argparse.ArgumentTypeError as error:
        refuse_early(str(error))
        return EXIT_USAGE
    from ..launch import launch

    return launch(config, functools.partial(check_in_rank, options))


def parse_arguments(arguments: list[str] | None, environ: Mapping[str, str]) -> tuple[CheckOptions, LaunchConfig]:
    """Return the check's options and the launcher's; raise argparse.ArgumentTypeError with a line for the user.

    Launcher settings without an option here come from the ``MPIDDP_…`` variables.
    """
    parser = Parser(prog="mpiddp.check", usage=USAGE, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one pass instead of three: about 10 s, less reliable")
    parser.add_argument("--nodes-only", action="store_true", help="do not measure links between ranks")
    parser.add_argument("--json", default="", type=parse_path, metavar="FILE", help="write all measurements")
    parser.add_argument("--suspects", default="", type=parse_path, metavar="FILE", help="append a line for each node "
                        "to exclude (time, host, reason), for mpiddp.supervise --exclude FILE")
    defaults = {**read_site_defaults(environ), **environ}
    for name in LAUNCH_OPTIONS:
        parser.add_argument(f"--{name}", **{**OPTIONS[name], "default": read_default(name, defaults)})
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    given = parser.parse_args(arguments)
    settings = read_settings(environ)
    options = CheckOptions(given.quick, given.nodes_only, given.json, given.suspects)
    return options, LaunchConfig(
        backend=given.backend or None, device=None if given.device in ("", "auto") else given.device,
        interface=given.interface, master_addr=given.master_addr, port=given.port,
        startup_timeout_s=given.startup_timeout, binding=settings.binding, threads=settings.threads,
        share_gpus=settings.share_gpus, virtual_local_rank=settings.virtual_local_rank,
        gpu_aware_mpi=settings.gpu_aware_mpi, unknown_variables=settings.unknown_variables, init=False, quiet=True,
        exit_timeout_s=END_TIMEOUT_S)


def check_in_rank(options: CheckOptions, job: RunningJob, config: LaunchConfig) -> int:
    """Check, and end this rank with the exit status: the check's on rank 0, 0 on other ranks."""
    from ..failure.root_cause import Report, ReportKind
    from .bench.transport import pairwise_backend  # loads torch, which the agent must not have
    from .schedule import ALLREDUCE_TIMEOUT_S, prepare_schedule

    assert job.termination
    status = 0
    try:
        member = job.membership
        if not options.nodes_only:
            os.environ.update(NCCL_WAITS)
            timeout = timedelta(seconds=max(ALLREDUCE_TIMEOUT_S, config.startup_timeout_s))
            member.create_group(timeout, job.refuse_alone, binds=False)
        schedule = prepare_schedule(member)
        env = member.environment
        backend = pairwise_backend(env.backend, env.device)
        schedule.compare_clocks()
        measured = schedule.run_passes(1 if options.quick else PASSES, bool(backend) and not options.nodes_only)
        if env.rank == 0:
            from .report import report_results  # only rank 0 needs it

            status = report_results(measured, env.backend, backend, options)
            for rank, reason in sorted(measured.lost.items()):  # a lost rank cannot end by itself
                return job.termination.fail(Report(rank, measured.ranks[rank].host, ReportKind.UNREACHABLE, reason,
                                                   EXIT_OUTLIERS))
        return status
    except LocalLaunchError as error:
        job.refuse_alone(error)
    except BaseException as error:
        return job.termination.fail_by_exception(error)
