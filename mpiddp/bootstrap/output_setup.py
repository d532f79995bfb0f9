"""Agree on where the ranks' output goes: the files that hold it, their index, and the relays that fold it."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from ..base.config import RESTARTS, LaunchConfig
from ..base.files import Claim, free_claim, open_for_writing, reason
from ..base.ranks import Place
from ..base.stderr import say
from ..discovery import runtime, schedulers
from ..failure.rank import LogPlan
from ..ipc.channel import listen
from ..output.index import NAME, write_index
from ..output.protocol import Folding
from ..planning.environment import Endpoint
from ..planning.problems import check_logs
from .rank0 import listening_on
from .rollcall import RollCall

LOOPBACK = ("127.0.0.1", "::1")


class Offer(NamedTuple):
    """A rank's place, and where its relay takes the output of others; port 0 for nowhere."""

    place: Place
    address: str = ""
    port: int = 0


class Share(NamedTuple):
    """A rank's part in what is folded, and a descriptor that listens for the relays of others, -1 for none."""

    folding: Folding
    listener: int


def share(roll: RollCall, place: Place, endpoint: Endpoint, config: LaunchConfig) -> Share:
    """Let the relays of each node's ranks meet at local rank 0's, and these at rank 0's. Collective.

    Raises LaunchError `port-taken`.
    """
    listener = None
    if place.rank == 0:
        port = config.port and config.port + 2
        with listening_on(port, roll.name(0)):
            listener = listen(endpoint.address, port)
    elif place.local_rank == 0:
        listener = listen_on_loopback()
    offer = Offer(place)
    if listener is not None:
        offer = Offer(place, *listener.getsockname()[:2])
    folding = roll.agree("naming relays", offer, lambda offers: foldings(offers, endpoint.watch_token, config))
    if listener is not None and folding.gathers:
        return Share(folding, listener.detach())
    if listener is not None:
        listener.close()
    return Share(folding, -1)


def listen_on_loopback() -> socket.socket:
    """Return a socket that listens for processes of this node; raise OSError where it has no loopback."""
    try:
        return listen(LOOPBACK[0], 0)
    except OSError:
        return listen(LOOPBACK[1], 0)


def foldings(offers: Sequence[Offer], token: str, config: LaunchConfig) -> list[Folding]:
    """Return each rank's part: rank 0 gathers all, local rank 0 of each node the node's ranks."""
    leaders = {one.place.node_rank: one for one in offers if one.place.local_rank == 0}
    nodes: dict[int, int] = {}
    for one in offers:
        nodes[one.place.node_rank] = nodes.get(one.place.node_rank, 0) | 1 << one.place.rank
    everyone = (1 << len(offers)) - 1
    found = []
    for rank, node in ((one.place.rank, one.place.node_rank) for one in offers):
        leads = leaders[node].place.rank == rank
        above = offers[0] if leads else leaders[node]
        expected = everyone if rank == 0 else nodes[node] if leads else 1 << rank
        gathers = leads and (rank == 0 or expected != 1 << rank)
        found.append(Folding(rank, f"{expected:x}", above.address, 0 if rank == 0 else above.port, token,
                             config.fold_window_s, config.drops_lines, gathers))
    return found


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
        name = f"{schedulers.find_job(os.environ)[0] or run_id}-attempt-{runtime.count_restarts(os.environ)}"
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
        return [free_claim(wanted, schedulers.count_slurm_restarts(os.environ), run_id, numbers)] * roll.size

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
