"""`python -m mpiddp.check`: start a job, and in each rank the check."""

from __future__ import annotations

import argparse
import functools
import os
from datetime import timedelta
from typing import TYPE_CHECKING

from ..base.config import LaunchConfig
from ..base.errors import EXIT_USAGE, LocalLaunchError
from ..bootstrap.refusal import refuse_alone, refuse_early
from . import EXIT_OUTLIERS
from .options import CheckOptions, parse_arguments

if TYPE_CHECKING:
    from ..runner.lifecycle import RunningJob

# Overrides what a job script sets. Otherwise NCCL's watchdog ends a process whose collective takes too long, and each
# wait polls once in a millisecond. The third variable would switch the first one on.
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


def check_in_rank(options: CheckOptions, job: RunningJob, config: LaunchConfig) -> int:
    """Check, and end this rank with the exit status: the check's on rank 0, 0 on other ranks."""
    from ..failure.root_cause import Report, ReportKind
    from .rpc import RpcController, worker_loop
    from .workers import ALLREDUCE_TIMEOUT_S, WorkerMethods  # loads torch, which the sentinel must not have

    assert job.termination
    try:
        member = job.membership
        if not options.nodes_only:
            os.environ.update(NCCL_WAITS)
            timeout = timedelta(seconds=max(ALLREDUCE_TIMEOUT_S, config.startup_timeout_s))
            member.create_group(timeout, refuse_alone, binds=False)
        env, methods = member.environment, WorkerMethods(member).by_name()
        if env.rank:
            worker_loop(member.comm, methods, config.startup_timeout_s)
        else:
            from .report import run_check  # the other ranks need not load it

            ranks = RpcController(member.comm, methods, member.rendezvous.name)
            job.termination.status = run_check(ranks, env, options, config.startup_timeout_s)
            for rank, doing in sorted(ranks.lost.items()):  # the job cannot end in order
                reason = f"did not answer: {doing}"
                host = member.seats[rank].host
                job.termination.fail(Report(rank, host, ReportKind.UNREACHABLE, reason, EXIT_OUTLIERS))
            ranks.dismiss()
        if not config.python_exit:
            job.termination.finish(job.termination.status)
    except LocalLaunchError as error:
        refuse_alone(error)
    except BaseException as error:
        return job.termination.fail_by_exception(error)
    return job.termination.status
