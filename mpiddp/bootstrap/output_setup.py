"""Agree on where the ranks' output goes: log files, their index, and the agents that fold it."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from ..base.config import RESTART_VARIABLE, LaunchConfig
from ..base.files import FolderClaim, claim_free_folder, format_os_error, open_for_writing
from ..base.ranks import LogPlan, RankPosition
from ..base.stderr import write_line
from ..discovery import runtime, schedulers
from ..ipc.channel import listen
from ..output.index import INDEX_NAME, write_index
from ..output.protocol import AggregationConfig
from ..planning.environment import Endpoint
from ..planning.problems import check_logs
from .rank0 import naming_port_errors
from .rollcall import Rendezvous

LOOPBACK_ADDRESSES = ("127.0.0.1", "::1")


class FoldingOffer(NamedTuple):
    """A rank's position, and where its agent will listen for others; port 0 if it does not."""

    place: RankPosition
    address: str = ""
    port: int = 0


class FoldingShare(NamedTuple):
    """A rank's part in folding, and a descriptor that listens for other ranks' agents, -1 for none."""

    folding: AggregationConfig
    listener: int


def join_folding(
    rendezvous: Rendezvous, place: RankPosition, endpoint: Endpoint, config: LaunchConfig
) -> FoldingShare:
    """Make each node's agents connect to local rank 0's, and these to rank 0's; return this rank's part. Collective.

    Raises LaunchError `port-taken`.
    """
    listener = None
    if place.rank == 0:
        port = config.port and config.port + 2
        with naming_port_errors(port, rendezvous.name(0)):
            listener = listen(endpoint.address, port)
    elif place.local_rank == 0:
        listener = listen_on_loopback()
    offer = FoldingOffer(place)
    if listener is not None:
        offer = FoldingOffer(place, *listener.getsockname()[:2])
    folding = rendezvous.exchange(
        "planning the folding of output", offer, lambda offers: plan_folding(offers, endpoint.agent_token, config))
    if listener is not None and folding.gathers:
        return FoldingShare(folding, listener.detach())
    if listener is not None:
        listener.close()
    return FoldingShare(folding, -1)


def listen_on_loopback() -> socket.socket:
    """Return a socket that listens for processes of this node; raise OSError if it has no loopback."""
    try:
        return listen(LOOPBACK_ADDRESSES[0], 0)
    except OSError:
        return listen(LOOPBACK_ADDRESSES[1], 0)


def plan_folding(offers: Sequence[FoldingOffer], token: str, config: LaunchConfig) -> list[AggregationConfig]:
    """Return each rank's part: rank 0 gathers all, local rank 0 of each node the node's ranks."""
    leaders = {offer.place.node_rank: offer for offer in offers if offer.place.local_rank == 0}
    node_ranks: dict[int, int] = {}  # of each node, as bits
    for offer in offers:
        node_ranks[offer.place.node_rank] = node_ranks.get(offer.place.node_rank, 0) | 1 << offer.place.rank
    all_ranks = (1 << len(offers)) - 1
    plans = []
    for rank, node in ((offer.place.rank, offer.place.node_rank) for offer in offers):
        leads = leaders[node].place.rank == rank
        above = offers[0] if leads else leaders[node]
        expected = all_ranks if rank == 0 else node_ranks[node] if leads else 1 << rank
        gathers = leads and (rank == 0 or expected != 1 << rank)
        plans.append(AggregationConfig(rank, f"{expected:x}", above.address, 0 if rank == 0 else above.port, token,
                             config.fold_window_s, config.drops_lines, gathers,
                             config.output_filter.keeps_numbers))
    return plans


class OpenedLog(NamedTuple):
    """A rank's log, and why it cannot be written, empty if it can."""

    log: LogPlan
    error: str


def open_log(rendezvous: Rendezvous, place: RankPosition, config: LaunchConfig, run_id: str) -> LogPlan:
    """Create this rank's log in a folder of the job's own and return how it is kept.

    The folder is named after the scheduler's number of the job, with that of the step from the second on, or the
    `run_id`; if `mpiddp.supervise` starts the job, also after the attempt. If another launch has that folder, a number
    is appended. Collective. Raises LaunchError `log-unwritable` on every rank.
    """
    name = schedulers.name_logs(os.environ) or run_id  # mpirun's daemons are steps of their own: rank 0 names all
    if RESTART_VARIABLE in os.environ:
        name = f"{schedulers.find_job(os.environ)[0] or run_id}-attempt-{runtime.count_restarts(os.environ)}"
    of_rank0 = name, os.urandom(16).hex()
    name, token = rendezvous.exchange("choosing a log folder", None, lambda ranks: [of_rank0] * len(ranks))
    folder = claim_folder(rendezvous, place, f"{config.log_dir}/{name}", run_id)
    host = runtime.hostname()
    path = f"{folder}/rank-{place.rank:05d}.{host.split('.')[0]}.log"
    index = f"{folder}/{INDEX_NAME}"
    log = LogPlan(path, place.rank, host, run_id, index, token)
    opened = OpenedLog(log, create_log(path))
    has_index = rendezvous.exchange("opening log files", opened, lambda ranks: begin_index(ranks, rendezvous.hosts))
    return log if has_index else log._replace(ranks_file="")


def claim_folder(rendezvous: Rendezvous, place: RankPosition, wanted: str, run_id: str) -> str:
    """Return the folder that is this launch's own on all nodes: the one that rank 0 wants, or one with a number.

    Each node claims it, since nodes may have log folders of their own. When Slurm has requeued a job, it gets the same
    folders as before, in the order in which its launches ask for them. Collective.
    """
    numbers = itertools.count(1)

    def choose(_: object) -> list[FolderClaim]:
        restarts = schedulers.count_requeues(os.environ)
        return [claim_free_folder(wanted, restarts, run_id, numbers)] * rendezvous.size

    while True:
        claim: FolderClaim = rendezvous.exchange("choosing a log folder", None, choose)
        if place.num_nodes == 1:
            return claim.folder
        is_acquired = place.local_rank > 0 or claim.acquire()
        if rendezvous.exchange("choosing a log folder", is_acquired, lambda acquired: [all(acquired)] * len(acquired)):
            return claim.folder
        if place.local_rank == 0:
            claim.release()


def create_log(path: str) -> str:
    """Create a log and the folders above it; return why that failed, empty if it did not."""
    try:
        os.close(open_for_writing(path, append=True, job_folder=True))
        return ""
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def begin_index(ranks: Sequence[OpenedLog], hosts: Sequence[str]) -> list[bool]:
    """Check the ranks' logs on rank 0, write their index, and return for each rank whether there is one."""
    check_logs([opened.error for opened in ranks], hosts)
    logs = [opened.log for opened in ranks]
    path = logs[0].ranks_file
    try:
        write_index(path, logs)
        return [True] * len(logs)
    except OSError as error:
        write_line(f"mpiddp: cannot write {path}: {format_os_error(error, path)}; continuing without it")
        return [False] * len(logs)
