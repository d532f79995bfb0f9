"""The files that hold the ranks' output."""

from __future__ import annotations

import os

from ..config import RESTARTS
from ..facts import runtime
from ..facts.files import open_for_writing
from ..plan.problems import check_logs
from .rollcall import RollCall


def open_log(roll: RollCall, folder: str, run_id: str) -> str:
    """Make this rank's log in a folder of the job's own and return its path.

    That folder has the Slurm job's number, with that of the step from the second on, or the job's `run_id`; where
    `mpiddp.supervise` starts the job, that of the attempt, too.
    Collective. Raises LaunchError `log-unwritable` on every rank.
    """
    name = runtime.slurm_name(os.environ) or run_id  # mpirun's daemons are steps of their own: rank 0 names all
    if RESTARTS in os.environ:
        name = f"{runtime.slurm_job(os.environ) or run_id}-attempt-{runtime.restart_count(os.environ)}"
    job = roll.agree("naming logs", None, lambda ranks: [name] * len(ranks))
    log = f"{folder}/{job}/rank-{roll.rank:05d}.{runtime.hostname().split('.')[0]}.log"
    roll.agree("opening logs", create(log), lambda errors: check_logs(errors, roll.hosts))
    return log


def create(log: str) -> str:
    """Make a file and the folders above it; return why that failed, or an empty text."""
    try:
        os.makedirs(os.path.dirname(log), exist_ok=True)
        os.close(open_for_writing(log, append=True))
        return ""
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
