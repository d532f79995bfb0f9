"""Finds a job's endpoint and requests a snapshot from its coordinator."""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from ..base.text import format_columns, join_names
from ..base.version import __version__
from ..discovery.schedulers import name_job, run_command
from ..ipc.authentication import connect
from ..ipc.channel import Channel, Codec
from ..systems.launchers import HOLD, SRUN
from .protocol import (
    AskerToCoordinator,
    CoordinatorToAsker,
    SnapshotReply,
    SnapshotRequest,
    ThreadsReply,
    ThreadsRequest,
)
from .registry import JobEndpoint, endpoint_path, read_endpoints, remove_file
from .snapshot import Snapshot, from_json

CoordinatorChannel = Channel[AskerToCoordinator, CoordinatorToAsker]
CODEC: Codec[CoordinatorToAsker] = Codec(CoordinatorToAsker)

CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 1.0
MAX_PROBES = 100  # at a time
SQUEUE_TIMEOUT_S = 5.0
MAX_JOB_AGE_S = 30 * 86400.0  # older jobs that cannot be reached are considered over
MAX_INSPECTED = 4  # ranks
INSPECT_TIMEOUT_S = 20.0  # for all of them
SNAPSHOT_TIMEOUT_S = 15.0  # the coordinator waits two seconds for the ranks; a busy node may take longer for the rest
AGENT_KILLED = "the agent of its rank 0 was killed; check the job's output"

Reply = TypeVar("Reply", SnapshotReply, ThreadsReply)


class InspectOptions(NamedTuple):
    """Which threads to request: all of some ranks, with the frames of C code if `native`."""

    native: bool

    def choose_ranks(self, snapshot: Snapshot) -> list[int]:
        """Return at most MAX_INSPECTED ranks: the outliers, or one rank of each location if there are none."""
        groups = [group for group in snapshot.groups if group.is_outlier] or list(snapshot.groups)
        has_one_outlier_group = len(groups) == 1 and groups[0].is_outlier
        ranks = groups[0].ranks if has_one_outlier_group else [group.ranks[0] for group in groups]
        return list(ranks[:MAX_INSPECTED])


class UnansweredError(Exception):
    """No job answers; the text has the reason, and what to do."""


class JobState(enum.Enum):
    """Whether a job runs, as far as this host can see."""

    RUNS = "its coordinator answers"
    OVER = "no program listens on its port, or another one does"
    UNKNOWN = "it cannot be reached, or did not answer in time"


def find_endpoint(job: str) -> JobEndpoint:
    """Return the endpoint of a job by its number or the beginning of its name; of the only running job if `job` is "".

    Raises UnansweredError if no job matches, or more than one.
    """
    endpoints = read_endpoints()
    wanted = name_job(job)
    by_path = {path: endpoint for path, endpoint in endpoints.items()
               if not job or wanted in endpoint.names or endpoint.run_id.startswith(job)
               or (endpoint.number and not endpoint.by_slurm and not endpoint.step
                   and wanted.partition(".")[0] == endpoint.number)}
    if not job and any(endpoint.script != HOLD.name for endpoint in by_path.values()):
        by_path = {path: endpoint for path, endpoint in by_path.items() if endpoint.script != HOLD.name}
    matches = list(by_path.values())
    if len(matches) > 1:
        running, silent = find_running(by_path)
        matches = running or silent or (matches if job else [])
        if len(matches) > 1:
            which = f"that match {job}" if job else "of yours"
            problem = (f"{len(matches)} jobs {which} are running" if running else
                       f"none of {len(matches)} jobs {which} answers on this host, and they may be over")
            raise UnansweredError("\n".join([f"{problem}; name one: python -m mpiddp.where {name_alone(matches)}",
                                             *list_jobs(matches)]))
    if matches:
        return matches[0]
    if not job:
        raise UnansweredError("no job of yours runs under `python -m mpiddp`, or it is still starting")
    others = f"; jobs found: {join_names([endpoint.name for endpoint in endpoints.values()])}" if endpoints else ""
    raise UnansweredError(f"no mpiddp job {job} of yours is running{others}")


def name_alone(endpoints: Sequence[JobEndpoint]) -> str:
    """Return a name of the first of these jobs that none of the others has."""
    first, *others = endpoints
    name = first.names[-1]
    return first.run_id if any(name in other.names for other in others) else name


def list_jobs(endpoints: Sequence[JobEndpoint]) -> list[str]:
    """Return the lines of a table of jobs."""
    rows = [(endpoint.full_name, endpoint.script, endpoint.host,
             time.strftime("%Y-%m-%d %H:%M", time.localtime(endpoint.started_s)) if endpoint.started_s else "")
            for endpoint in endpoints]
    return format_columns([("job", "script", "host", "started"), *rows])


def describe_unseen(shown: JobEndpoint) -> str:
    """Return in words which jobs besides the one `shown` may run, but cannot be seen from this host; empty for none."""
    others = {path: endpoint for path, endpoint in read_endpoints().items()
              if endpoint.run_id != shown.run_id and endpoint.script != HOLD.name}
    running, silent = find_running(others) if others else ([], [])
    unseen = running or silent
    if not unseen:
        return ""
    names = join_names([f"{endpoint.full_name} on {endpoint.host}" for endpoint in unseen])
    return f"not shown: {names}; name one: python -m mpiddp.where {name_alone(unseen)}"


def find_running(endpoints: Mapping[str, JobEndpoint]) -> tuple[list[JobEndpoint], list[JobEndpoint]]:
    """Ask the jobs of these endpoints, given by their files; return those that answer, and others that may run.

    Removes the files of jobs that are over. An unreachable job may run if Slurm lists it, or its file is not outdated.
    """
    with ThreadPoolExecutor(MAX_PROBES) as executor:
        states = dict(zip(endpoints, executor.map(probe_job, endpoints.values()), strict=True))
    unknown = {path: endpoint for path, endpoint in endpoints.items() if states[path] is JobState.UNKNOWN}
    queued = list_slurm_jobs() if any(endpoint.by_slurm for endpoint in unknown.values()) else None
    for path in endpoints:
        if states[path] is JobState.OVER or (path in unknown and is_outdated(path, endpoints[path])):
            unknown.pop(path, None)
            remove_file(path)
    running = [endpoint for path, endpoint in endpoints.items() if states[path] is JobState.RUNS]
    return running, [endpoint for endpoint in unknown.values()
                     if not endpoint.by_slurm or queued is None or endpoint.number in queued]


def is_outdated(path: str, endpoint: JobEndpoint) -> bool:
    """Return whether an endpoint file is older than any job, or, if the job ran on this host, than the last boot."""
    try:
        written_s = os.stat(path).st_mtime
    except OSError:
        return False
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return written_s < time.time() - MAX_JOB_AGE_S or (
        endpoint.host == socket.gethostname() and written_s < booted_s)


def list_slurm_jobs() -> set[str] | None:
    """Return the numbers of this user's running and pending Slurm jobs, None if Slurm does not answer."""
    done = run_command("squeue", "--noheader", "--me", "--format=%A", timeout_s=SQUEUE_TIMEOUT_S)
    return set(done.stdout.split()) if done is not None and done.returncode == 0 else None


def probe_job(endpoint: JobEndpoint) -> JobState:
    """Return whether a job runs."""
    if not is_reachable(endpoint):
        return JobState.UNKNOWN
    try:
        connect((endpoint.address, endpoint.port), endpoint.token, PROBE_TIMEOUT_S, PROBE_TIMEOUT_S).close()
    except (ConnectionRefusedError, PermissionError):
        return JobState.OVER if endpoint.host == socket.gethostname() else JobState.UNKNOWN
    except (EOFError, OSError):
        return JobState.UNKNOWN
    return JobState.RUNS


def is_reachable(endpoint: JobEndpoint) -> bool:
    """Return False if a job listens on the loopback interface of another host, else True."""
    return not ipaddress.ip_address(endpoint.address).is_loopback or endpoint.host == socket.gethostname()


def request_snapshot(endpoint: JobEndpoint, options: InspectOptions | None = None) -> tuple[Snapshot, dict[int, str]]:
    """Return a job's snapshot, and the threads of some ranks if `options` are given.

    Raises UnansweredError if the job does not answer.
    """
    if not is_reachable(endpoint):
        raise UnansweredError(unreachable_hint(endpoint, "loopback interface"))
    if endpoint.version != __version__ and probe_job(endpoint) is not JobState.OVER:
        raise UnansweredError(
            f"the job runs mpiddp {endpoint.version}, but this is {__version__}; use the job's environment")
    is_local = endpoint.host == socket.gethostname()
    try:
        with connect((endpoint.address, endpoint.port), endpoint.token, CONNECT_TIMEOUT_S,
                     SNAPSHOT_TIMEOUT_S) as connection:
            return exchange(endpoint, connection, options)
    except (ConnectionRefusedError, PermissionError) as error:
        if not is_local:
            reason = ("another program listens on its port" if isinstance(error, PermissionError) else
                      "connection refused: the job is over, or a firewall blocks it")
            raise UnansweredError(unreachable_hint(endpoint, reason)) from None
        remove_file(endpoint_path(endpoint))
        raise UnansweredError(f"job {endpoint.name} is no longer running: it was killed") from None
    except (EOFError, ConnectionResetError, BrokenPipeError):
        raise UnansweredError(f"job {endpoint.name} has just ended, or {AGENT_KILLED}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise UnansweredError(f"job {endpoint.name} sent an answer that this mpiddp cannot read") from None
    except TimeoutError:
        raise UnansweredError(f"job {endpoint.name} does not answer: {AGENT_KILLED}" if is_local else
                              unreachable_hint(endpoint, "timed out")) from None
    except OSError as error:
        raise UnansweredError(unreachable_hint(endpoint, str(error))) from None


def exchange(
    endpoint: JobEndpoint, connection: socket.socket, options: InspectOptions | None
) -> tuple[Snapshot, dict[int, str]]:
    """Request a snapshot over a connection; return as request_snapshot() does.

    Raises EOFError if the coordinator closes the connection, and UnansweredError at the timeout.
    """
    wire = CoordinatorChannel(connection, CODEC)
    wire.send(SnapshotRequest())
    replies = receive_n(wire, SnapshotReply, 1, SNAPSHOT_TIMEOUT_S)
    if not replies:
        raise UnansweredError(f"job {endpoint.name} did not answer within {SNAPSHOT_TIMEOUT_S:.0f} s")
    snapshot = from_json(replies[0].snapshot, endpoint.ranks)
    ranks = options.choose_ranks(snapshot) if options is not None else []
    for rank in ranks:
        wire.send(ThreadsRequest(rank, options is not None and options.native))
    threads = {reply.rank: reply.text for reply in receive_n(wire, ThreadsReply, len(ranks), INSPECT_TIMEOUT_S)}
    return snapshot, {rank: threads.get(rank, f"no answer within {INSPECT_TIMEOUT_S:.0f} s") for rank in ranks}


def receive_n(wire: CoordinatorChannel, kind: type[Reply], count: int, timeout_s: float) -> list[Reply]:
    """Return `count` messages of a kind, or fewer at the timeout."""
    deadline = time.monotonic() + timeout_s
    replies: list[Reply] = []
    while len(replies) < count and (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):
            replies += [message for message in wire.receive(left_s) if isinstance(message, kind)]
    return replies


def unreachable_hint(endpoint: JobEndpoint, reason: str) -> str:
    """Return what to do if a job cannot be reached from this host."""
    problem = f"cannot reach job {endpoint.name} at {endpoint.address} on {endpoint.host} from this host ({reason})"
    if not endpoint.by_slurm:
        return f"{problem}; run this command on {endpoint.host}"
    number, host = shlex.quote(endpoint.number), shlex.quote(endpoint.host)
    return (f"{problem}; run\n  {SRUN.command} --jobid={number} --overlap -N1 -n1 -w {host} "
            f"python -m mpiddp.where {endpoint.run_id}")
