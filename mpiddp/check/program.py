"""The program that each rank runs in a check."""

from __future__ import annotations

import os
from datetime import timedelta

from ..base.config import LaunchConfig
from ..base.errors import LocalLaunchError
from ..bootstrap.refusal import refuse_alone
from ..failure.root_cause import Report, ReportKind
from ..runner.lifecycle import RunningJob
from . import ODD, CheckOptions
from .rpc import RpcController, worker_loop
from .workers import REDUCING_LIMIT_S, Meeting, measuring

# Whatever a job script has them say: else a collective that takes too long ends the process, and not only the
# measurement, and each wait looks once in a millisecond. The third one would switch the first one on.
PATIENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_DESYNC_DEBUG": "0"}


def check(asked: CheckOptions, job: RunningJob, config: LaunchConfig) -> int:
    """Measure and compare, and end this rank with the exit status: that of the check on rank 0, 0 on the others."""
    assert job.termination
    try:
        member = job.membership
        if not asked.nodes_only:
            os.environ.update(PATIENT)
            limit = timedelta(seconds=max(REDUCING_LIMIT_S, config.startup_timeout_s))
            member.create_group(limit, refuse_alone, binds=False)
        env = member.environment
        works = {**measuring(env, env.device, env.backend), **Meeting(member).by_name()}
        if env.rank:
            worker_loop(member.comm, works, config.startup_timeout_s)
        else:
            from .report import inspect  # the other ranks need not load it

            ranks = RpcController(member.comm, works, member.rendezvous.name)
            job.termination.status = inspect(ranks, env, asked, config.startup_timeout_s)
            for rank, words in sorted(ranks.lost.items()):  # the job cannot end in order
                job.termination.fail(Report(rank, member.seats[rank].host, ReportKind.UNREACHABLE,
                                            f"did not answer: {words}", ODD))
            ranks.dismiss()
        if not config.python_exit:
            job.termination.finish(job.termination.status)
    except LocalLaunchError as error:
        refuse_alone(error)
    except BaseException as error:
        return job.termination.fail_by_exception(error)
    return job.termination.status
