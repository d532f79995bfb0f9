"""The files that hold the ranks' output, and their index."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from ..beside.index import NAME, write_index
from ..config import RESTARTS, LaunchConfig
from ..environment import Place
from ..facts import runtime, schedulers
from ..facts.files import Claim, free_claim, open_for_writing, reason
from ..plan.member import LogPlan
from ..plan.problems import check_logs
from ..say import say
from .rollcall import RollCall

ZSTD = ("_zstd", "zstandard")  # modules that compress so: Python's own, and a package


class Opened(NamedTuple):
    """A rank's log, and why it cannot be written: `error`, or that Python has no zstd."""

    log: LogPlan
    error: str
    lacks_zstd: bool


def open_log(roll: RollCall, place: Place, config: LaunchConfig, run_id: str) -> LogPlan:
    """Make this rank's log in a folder of the job's own and return how it is kept.

    That folder has the scheduler's number of the job, with that of the step from the second on, or the job's `run_id`;
    where `mpiddp.supervise` starts the job, that of the attempt, too. Where another launch has that folder, a number
    follows.
    Collective. Raises LaunchError `log-unwritable` or `no-zstd` on every rank.
    """
    name = schedulers.name_logs(os.environ) or run_id  # mpirun's daemons are steps of their own: rank 0 names all
    if RESTARTS in os.environ:
        name = f"{schedulers.find_job(os.environ)[0] or run_id}-attempt-{runtime.restart_count(os.environ)}"
    named = name, os.urandom(16).hex()
    name, token = roll.agree("naming logs", None, lambda ranks: [named] * len(ranks))
    folder = claim_folder(roll, place, f"{config.log_dir}/{name}", run_id)
    host, kind, most_bytes = runtime.hostname(), config.log_compress, config.log_max_bytes
    path = f"{folder}/rank-{place.rank:05d}.{host.split('.')[0]}.log"
    log = LogPlan(path, place.rank, host, run_id, f"{folder}/{NAME}", kind, most_bytes, token)
    opened = Opened(log, create(path), kind == "zstd" and not any(map(find_spec, ZSTD)))
    has_index = roll.agree("opening logs", opened, lambda ranks: begin(ranks, roll.hosts))
    return log if has_index else log._replace(ranks_file="")


def claim_folder(roll: RollCall, place: Place, wanted: str, run_id: str) -> str:
    """Return the folder that is this launch's own on all nodes: the one that rank 0 wants, or that with a number.

    Each node claims it, since nodes may have a log folder of their own. When Slurm has queued a job again, it takes
    the folders of the time before, in the order in which its launches ask for them. Collective.
    """
    numbers = itertools.count(1)

    def choose(_: object) -> list[Claim]:
        return [free_claim(wanted, schedulers.slurm_restarts(os.environ), run_id, numbers)] * roll.size

    while True:
        claim: Claim = roll.agree("naming logs", None, choose)
        if place.num_nodes == 1:
            return claim.folder
        is_made = place.local_rank > 0 or claim.make()
        if roll.agree("naming logs", is_made, lambda made: [all(made)] * len(made)):
            return claim.folder
        if place.local_rank == 0:
            claim.drop()


def create(log: str) -> str:
    """Make a file and the folders above it; return why that failed, or an empty text."""
    try:
        os.close(open_for_writing(log, append=True, job_folder=True))
        return ""
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def begin(ranks: Sequence[Opened], hosts: Sequence[str]) -> list[bool]:
    """Check the ranks' logs on rank 0, write their index, and tell each rank whether there is one."""
    check_logs([one.error for one in ranks], [one.lacks_zstd for one in ranks], hosts)
    logs = [one.log for one in ranks]
    try:
        write_index(logs[0].ranks_file, logs)
        return [True] * len(logs)
    except OSError as error:
        path = logs[0].ranks_file
        say(f"mpiddp: cannot write {path}: {reason(error, path)}; the job goes on without it")
        return [False] * len(logs)
