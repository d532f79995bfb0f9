"""Which of several reports is the reason that a job failed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base.text import LISTED, listed, ranges, shortened

MAX_STACK_CHARS = 50_000  # characters of stacks; whole, they might not fit into a message
SAME_ERROR_WAIT_S = 0.03  # in which a second rank reports the same error; if one does, SETTLING_S for all that have it
SAME_CAUSE_WAIT_S = 0.15  # in which all ranks report that got the same signal, or that lost a peer
ROOT_CAUSE_WAIT_S = 1.0  # in which the reason for what looks like a consequence is reported

OWN, ENDED, CONSEQUENCE, ABSENT = "own", "ended", "consequence", "absent"
NOBODY = -1  # the rank of a report on a job of which no rank is known to be at fault
WALLTIME_SIGNAL = "SIGALRM"  # Flux sends it to all ranks at the time limit; a script that has set an alarm gets it, too
# from users and schedulers
OUTSIDE_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", WALLTIME_SIGNAL)

ABORT_SIGNAL = "SIGABRT"  # by which NCCL's watchdog ends a rank whose collective takes too long, and C's abort() any

NO_STEP_DAEMON = "lost slurmstepd, by which Slurm starts and ends the ranks of a node: it was killed there"

OUT_OF_MEMORY = "out of memory, as its cgroup counts"

LOST_PEER_WORDS = (  # as gloo, NCCL, torch's store and sockets say that another rank is gone or late
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "connection was",
    "no route to host", "connection timed out", "timed out waiting", "application timeout caused pair closure",
    "socket timeout", "wait timeout", "timeout after", "failed to recv", "failed to send", "unbound_buffer",
    "connectfullmesh", "communicator was aborted", "remote process exited", "ncclremoteerror", "ncclsystemerror",
    "collective operation timeout", "store is closed", "timed out after", "failed to connect", "monitoredbarrier",
)

EXIT_TIMEOUT_WORDS = "for the end of rank"  # a rank that has come to its end says so at --exit-timeout

COMMUNICATION_WORDS = (  # libraries by which ranks talk to each other, as their errors' types and texts name them
    "gloo", "nccl", "c10d", "tcpstore", "processgroup", "torch.distributed.", "mpi4py.mpi.exception",
)
COMMUNICATION_FILES = ("/torch/distributed/", "/torch/nn/parallel/")  # whose native code raises a plain RuntimeError
CHECKPOINT_FILES = "/torch/distributed/checkpoint/"

LATE_PEER_WORDS = (  # as they say that a rank has not come
    "ms for recv operation", "ms for send operation", "application timeout caused pair closure", "wait timeout after",
    "collective operation timeout", EXIT_TIMEOUT_WORDS, "failed to pass monitoredbarrier",
)


class Report(NamedTuple):
    """Why a rank ended, or the job, if `rank` is NOBODY.

    `kind` is OWN for an error of its own, ENDED for a process that is gone without having reported,
    CONSEQUENCE for the loss of another rank, ABSENT for a rank that is stopped or lost. `cause` is one
    line, `status` the exit status that the job gets. `where` is the line of the script. `text` has the
    stacks that faulthandler printed. `signal` is the name of the signal that ended the rank, empty for none;
    of an error of its own SIGINT if that is a KeyboardInterrupt, whether or not a signal came.
    """

    rank: int
    host: str
    kind: str
    cause: str
    status: int
    where: str = ""
    text: str = ""
    signal: str = ""


def truncate_report(report: Report) -> Report:
    """Return a report that fits into a message, with a cause short enough to read."""
    return report._replace(cause=shortened(report.cause), where=shortened(report.where),
                           text=shortened(report.text, MAX_STACK_CHARS))


class RootCause(NamedTuple):
    """The report of the rank that failed first, and what became of the others, in words.

    `outside` tells that a signal was sent to the job as a whole, and no rank failed; `others` shows where ranks were.
    """

    first: Report
    others: str = ""
    outside: bool = False


def is_peer_loss(error: str, file: str = "") -> bool:
    """Tell whether an error is one that ranks raise when another one is gone.

    `error` is its full type and its text; `file` is the innermost one of its traceback that is not Python's own. Words
    such as "connection refused" mean another rank only if a library raised them by which ranks talk to each other.
    """
    error = error.lower()
    from_library = any(words in error for words in COMMUNICATION_WORDS) or (
        any(part in file for part in COMMUNICATION_FILES) and CHECKPOINT_FILES not in file)
    return from_library and any(words in error for words in LOST_PEER_WORDS)


class JobActivity(NamedTuple):
    """Where ranks are, in words; those that are `free` wait for no other.

    `calls` has the line of the script, as in reports, at which a rank waits for others. `table` shows them together,
    empty where nothing follows from that. `looking` tells that it is being found out, `has_groups` that ranks have
    several process groups: who waits for whom is not known then. `deserted` is the report on ranks that wait for one
    which has come to its end, if they do.
    """

    places: Mapping[int, str] = {}
    free: Collection[int] = ()
    calls: Mapping[int, str] = {}
    table: str = ""
    looking: bool = False
    has_groups: bool = False
    deserted: Report | None = None


class FailureContext(NamedTuple):
    """What is known of the ranks besides their reports.

    `hosts` has the host of each rank that has joined, of `world_size` ranks. `silent` are ranks that were
    asked and did not answer, `left` those whose script had come to its end, `interrupted` those that got a
    SIGINT. `order` has ranks in the order in which their processes ended, as far as that is known: a launcher
    kills the other ranks so soon that their reports may overtake the first one's. `by_node` tells that each
    node's daemon sends a scheduler's signals to its ranks, one later than another; `by_srun`, that srun itself
    started the ranks. `came_s` has the seconds from the first report to that of each rank, `seen` where ranks are.
    `exits` are reports on programs that have raised SystemExit with a status that is not known.
    """

    hosts: Mapping[int, str]
    silent: Collection[int] = ()
    left: Collection[int] = ()
    interrupted: Collection[int] = ()
    order: Sequence[int] = ()
    by_node: bool = False
    by_srun: bool = False
    came_s: Mapping[int, float] = {}
    world_size: int = 0
    seen: JobActivity = JobActivity()
    exits: Sequence[Report] = ()

    @property
    def awaits_ranks(self) -> bool:
        """Tell whether there are ranks whose sentinels have not joined yet: a rank may die before its sentinel has."""
        return len(self.hosts) < self.world_size

    @property
    def has_one_rank(self) -> bool:
        """Tell whether the job has one rank."""
        return len(self.hosts) == 1 and not self.awaits_ranks


def select_root_cause(reports: Sequence[Report], waited_s: float, scene: FailureContext) -> RootCause | None:
    """Return which of the reports is the reason for the job's end; None to wait for more reports.

    The reports are in the order in which they came, the first one `waited_s` ago.
    """
    reports = [mark_interrupt(one, scene.interrupted) for one in reports]
    lost = [one for one in reports if one.kind == CONSEQUENCE]
    own = [one for one in reports if one.kind == OWN]
    gone = [one for one in reports if one.kind in (ENDED, ABSENT)]
    unheard = set(scene.hosts) - {one.rank for one in reports}
    if own and not is_maybe_caused_by(own[0], gone, reports):
        return select_error(own, lost, len(reports), waited_s, scene)
    if gone:
        verdict = select_lost_rank(gone, lost, unheard, waited_s, scene)
        return verdict and verdict._replace(others="; ".join(filter(None,
                                                                    (verdict.others, describe_later_errors(own)))))
    if not reports or (waited_s < ROOT_CAUSE_WAIT_S and (unheard or scene.awaits_ranks)):
        return None
    if scene.exits:
        return RootCause(scene.exits[0], describe_secondary(lost))
    lost.sort(key=lambda one: not is_timeout(one.cause))  # the others' connections end by a timeout, too
    if EXIT_TIMEOUT_WORDS in lost[0].cause and scene.seen.deserted is not None:
        report = scene.seen.deserted
        return RootCause(report._replace(cause=f"{report.cause}: {lost[0].cause}"))
    late = [rank for rank in unheard if rank in scene.seen.free]
    if len(late) == 1 and is_timeout(lost[0].cause) and not scene.seen.has_groups:
        return RootCause(report_late_rank(late[0], lost, scene),
                         "; ".join(describe_unreported(unheard - {late[0]}, scene)))
    calls = {**scene.seen.calls, **{one.rank: one.where for one in lost}}
    if is_timeout(lost[0].cause) and calls.keys() >= scene.hosts.keys() and len(set(calls.values())) > 1:
        return RootCause(report_different_calls(lost[0], calls))
    return RootCause(lost[0],
                     "; ".join(filter(None, (describe_secondary(lost[1:]), *describe_unreported(unheard, scene)))))


def mark_interrupt(report: Report, interrupted: Collection[int]) -> Report:
    """Return the report on a KeyboardInterrupt as that on a rank that SIGINT has ended, if the rank got one."""
    if report.kind != OWN or not report.signal or report.rank not in interrupted:
        return report
    return report._replace(kind=ENDED, cause=f"{report.cause} ({report.signal})")


def is_maybe_caused_by(own: Report, gone: Sequence[Report], reports: Sequence[Report]) -> bool:
    """Tell whether an error, the first one, may come of the death of a rank: scripts hide what they have caught.

    While an error is reported all ranks live on, so what died by then did not die of it. An abort() may be NCCL's
    watchdog's, which has waited for the rank with the error.
    """
    return any(one.signal != ABORT_SIGNAL or reports.index(one) < reports.index(own) for one in gone)


def select_error(
    own: Sequence[Report], lost: Sequence[Report], heard: int, waited_s: float, scene: FailureContext
) -> RootCause | None:
    """Return the first of errors that ranks raised by themselves as the reason; None to wait for more reports.

    `lost` are the reports of ranks that lost a peer; so many ranks are `heard`.
    """
    first = own[0]._replace(signal="")
    same = [one for one in own if (one.cause, one.where) == (first.cause, first.where)]
    settling = len(same) > 1 or own[0].signal  # word of the signal may be on its way
    is_all = heard >= scene.world_size and not own[0].signal
    if not is_all and waited_s < (SAME_CAUSE_WAIT_S if settling else SAME_ERROR_WAIT_S):
        return None
    return RootCause(first, "; ".join(filter(None, (describe_scope(same, scene), describe_secondary(lost)))))


def describe_later_errors(own: Sequence[Report]) -> str:
    """Return in words which errors ranks have raised when another one had died, empty for none."""
    if not own:
        return ""
    more = f", and {len(own) - 1:,} more" if len(own) > 1 else ""
    return f"rank {own[0].rank} on {own[0].host} failed, too: {shortened(own[0].cause, 200)}{more}"


def report_different_calls(lost: Report, calls: Mapping[int, str]) -> Report:
    """Return the report on a job whose ranks have waited for each other in unlike `calls` until the `lost` one did."""
    ranks_at: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks_at.setdefault(call, []).append(rank)
    words = listed([f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} at {call}" for call, ranks in ranks_at.items()])
    return Report(NOBODY, "", ABSENT, f"ranks have waited for each other in unlike calls, {words}: {lost.cause}",
                  lost.status)


def report_late_rank(late: int, lost: Sequence[Report], scene: FailureContext) -> Report:
    """Return the report on the rank that the `lost` ones have waited for in vain, the only one that waits for none."""
    at = f" at {lost[0].where}" if lost[0].where else ""
    waited = f"rank {lost[0].rank} has" if len(lost) == 1 else f"{len(lost):,} ranks have"
    return Report(late, scene.hosts[late], ABSENT, f"{waited} waited for it in vain{at}: {lost[0].cause}",
                  lost[0].status, scene.seen.places[late])


def is_timeout(error: str) -> bool:
    """Tell whether an error's text says that a rank was late, and not that it is gone."""
    return any(words in error.lower() for words in LATE_PEER_WORDS)


def select_lost_rank(
    gone: Sequence[Report], lost: Sequence[Report], unheard: Collection[int], waited_s: float, scene: FailureContext
) -> RootCause | None:
    """Return which of the ranks that are gone is the reason for the job's end; None to wait for more reports.

    `lost` are the reports of ranks that lost a peer, `unheard` the ranks that have not reported.
    """
    if orphans := [one for one in gone if one.cause == NO_STEP_DAEMON]:  # their node's ranks may end by that
        return RootCause(orphans[0])
    killed = were_killed_at_once(gone, scene)
    alive = set(scene.hosts) - set(scene.order) - {one.rank for one in gone}
    if was_sent_to_all(gone, scene) or (killed and not alive):
        if scene.interrupted and scene.seen.looking and waited_s < ROOT_CAUSE_WAIT_S:
            return None
        return RootCause(gone[0], scene.seen.table, outside=True)
    if gone[0].signal == ABORT_SIGNAL:  # perhaps because it has waited in vain for another rank
        absent = [one for one in gone if one.kind == ABSENT]
        if not absent and unheard and waited_s < ROOT_CAUSE_WAIT_S:
            return None
        gone = absent or gone
    if gone[0].kind == ENDED:
        seen = [one for rank in scene.order for one in gone if one.rank == rank]
        unclear = len(seen) < len(gone) > 1 or set(unheard) & set(scene.order)
        others_may_get_it = scene.by_node and unheard and gone[0].signal in OUTSIDE_SIGNALS
        if (unclear or others_may_get_it or killed) and waited_s < ROOT_CAUSE_WAIT_S:
            return None
        crashed = gone[0] not in seen and gone[0].signal not in (*OUTSIDE_SIGNALS, "SIGKILL", ABORT_SIGNAL)
        gone = gone if crashed else seen or gone  # nobody saw it end, but a launcher ends no rank so
    if waited_s < SAME_CAUSE_WAIT_S:
        return None
    where = describe_unreported(unheard, scene) if gone[0].signal == ABORT_SIGNAL else ()
    return RootCause(gone[0], "; ".join(filter(None, (describe_secondary(lost), *where))))


def describe_unreported(unheard: Collection[int], scene: FailureContext) -> Iterator[str]:
    """Yield in words what the ranks do that have not reported."""
    for rank in sorted(set(unheard) & set(scene.seen.free))[:LISTED]:
        yield f"rank {rank} on {scene.hosts[rank]} was at {scene.seen.places[rank]}"
    if silent := set(unheard) & set(scene.silent):
        yield f"nothing is heard of {describe_ranks(silent, scene.hosts)}"
    if scene.left:
        yield f"{describe_ranks(scene.left, scene.hosts)} had come to the end of the script"
        if busy := set(unheard) - set(scene.silent) - set(scene.left):
            yield f"{describe_ranks(busy, scene.hosts)} had not"


def was_sent_to_all(gone: Sequence[Report], scene: FailureContext) -> bool:
    """Tell whether other ranks got the same signal as the first that is gone."""
    first, others = gone[0], [one.signal for one in gone[1:]]
    others += ["SIGINT" for rank in scene.interrupted if rank != first.rank]
    killed_too = first.signal == "SIGINT" and "SIGKILL" in others  # by srun, right after Ctrl-C
    is_alone = scene.has_one_rank and first.signal != WALLTIME_SIGNAL
    return first.signal in OUTSIDE_SIGNALS and (is_alone or first.signal in others or killed_too)


def were_killed_at_once(gone: Sequence[Report], scene: FailureContext) -> bool:
    """Tell whether srun has begun to kill all ranks, as it does on SIGTERM and SIGHUP.

    If only one rank was killed, by hand or for lack of memory, the others live on until this job ends them. A job of
    one rank has no others: there it was srun, unless the kernel tells of a lack of memory.
    """
    plain = scene.by_srun and all(one.signal == "SIGKILL" and OUT_OF_MEMORY not in one.cause for one in gone)
    if not plain or len(gone) == 1:
        return plain and scene.has_one_rank
    first_s, second_s = sorted(scene.came_s[one.rank] for one in gone)[:2]
    return second_s - first_s < SAME_CAUSE_WAIT_S


def describe_scope(same: Sequence[Report], scene: FailureContext) -> str:
    """Return in words which ranks failed with the same error, empty for one rank."""
    hosts = {one.host for one in same}
    if len(same) == 1:
        return ""
    if len(same) == scene.world_size:
        return f"the same on all {len(same):,} ranks"
    if len(same) == sum(host in hosts for host in scene.hosts.values()):
        return f"the same on the {len(same):,} ranks of {listed(sorted(hosts))}"
    return f"the same on {len(same):,} of {scene.world_size:,} ranks"


def describe_secondary(lost: Sequence[Report]) -> str:
    """Return in words how many ranks lost their connection."""
    if not lost:
        return ""
    others = f"{len(lost)} other rank{'s' * (len(lost) > 1)}"
    return f"{others} waited in vain, too" if is_timeout(lost[0].cause) else f"{others} lost the connection to it"


def describe_ranks(ranks: Collection[int], hosts: Mapping[int, str], places: Mapping[int, str] = {}) -> str:
    """Return ranks and their hosts in words, and where they are, as far as that is known."""
    order = sorted(ranks)
    words = [f"rank {rank} on {hosts[rank]}{f' ({places[rank]})' if rank in places else ''}" for rank in order[:LISTED]]
    return listed(words + [""] * len(order[LISTED:]))
