"""Which of several reports is the reason that a job failed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base.text import MAX_LISTED, format_ranges, join_names, truncate_middle

LONG_TEXT = 50_000  # characters of stacks; whole, they might not fit into a message
ALONE_S = 0.03  # in which a second rank reports the same error; if one does, SETTLING_S for all that have it
SETTLING_S = 0.15  # in which all ranks report that got the same signal, or that lost a peer
SEARCHING_S = 1.0  # in which the reason for what looks like a consequence is reported

OWN, ENDED, CONSEQUENCE, ABSENT = "own", "ended", "consequence", "absent"
NOBODY = -1  # the rank of a report on a job of which no rank is known to be at fault
WALLTIME = "SIGALRM"  # Flux sends it to all ranks at the time limit; a script that has set an alarm gets it, too
FROM_OUTSIDE = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", WALLTIME)  # from users and schedulers

GIVING_UP = "SIGABRT"  # by which NCCL's watchdog ends a rank whose collective takes too long, and C's abort() any

NO_STEP_DAEMON = "lost slurmstepd, by which Slurm starts and ends the ranks of a node: it was killed there"

OUT_OF_MEMORY = "out of memory, as its cgroup counts"

LOST_PEERS = (  # as gloo, NCCL, torch's store and sockets say that another rank is gone or late
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "connection was",
    "no route to host", "connection timed out", "timed out waiting", "application timeout caused pair closure",
    "socket timeout", "wait timeout", "timeout after", "failed to recv", "failed to send", "unbound_buffer",
    "connectfullmesh", "communicator was aborted", "remote process exited", "ncclremoteerror", "ncclsystemerror",
    "collective operation timeout", "store is closed", "timed out after", "failed to connect", "monitoredbarrier",
)

AT_THE_END = "for the end of rank"  # a rank that has come to its end says so at --exit-timeout

COMMUNICATION = (  # libraries by which ranks talk to each other, as their errors' types and texts name them
    "gloo", "nccl", "c10d", "tcpstore", "processgroup", "torch.distributed.", "mpi4py.mpi.exception",
)
COMMUNICATION_FILES = ("/torch/distributed/", "/torch/nn/parallel/")  # whose native code raises a plain RuntimeError
STORAGE = "/torch/distributed/checkpoint/"

TOO_LATE = (  # as they say that a rank has not come
    "ms for recv operation", "ms for send operation", "application timeout caused pair closure", "wait timeout after",
    "collective operation timeout", AT_THE_END, "failed to pass monitoredbarrier",
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


def brief(report: Report) -> Report:
    """Return a report that fits into a message, with a cause short enough to read."""
    return report._replace(cause=truncate_middle(report.cause), where=truncate_middle(report.where),
                           text=truncate_middle(report.text, LONG_TEXT))


class Verdict(NamedTuple):
    """The report of the rank that failed first, and what became of the others, in words.

    `outside` tells that a signal was sent to the job as a whole, and no rank failed; `others` shows where ranks were.
    """

    first: Report
    others: str = ""
    outside: bool = False


def is_consequence(error: str, file: str = "") -> bool:
    """Tell whether an error is one that ranks raise when another one is gone.

    `error` is its full type and its text; `file` is the innermost one of its traceback that is not Python's own. Words
    such as "connection refused" mean another rank only if a library raised them by which ranks talk to each other.
    """
    error = error.lower()
    from_library = any(words in error for words in COMMUNICATION) or (
        any(part in file for part in COMMUNICATION_FILES) and STORAGE not in file)
    return from_library and any(words in error for words in LOST_PEERS)


class Seen(NamedTuple):
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


class Scene(NamedTuple):
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
    seen: Seen = Seen()
    exits: Sequence[Report] = ()

    @property
    def awaits_ranks(self) -> bool:
        """Tell whether there are ranks whose sentinels have not joined yet: a rank may die before its sentinel has."""
        return len(self.hosts) < self.world_size

    @property
    def has_one_rank(self) -> bool:
        """Tell whether the job has one rank."""
        return len(self.hosts) == 1 and not self.awaits_ranks


def judge(reports: Sequence[Report], waited_s: float, scene: Scene) -> Verdict | None:
    """Return which of the reports is the reason for the job's end; None to wait for more reports.

    The reports are in the order in which they came, the first one `waited_s` ago.
    """
    reports = [with_signal(one, scene.interrupted) for one in reports]
    lost = [one for one in reports if one.kind == CONSEQUENCE]
    own = [one for one in reports if one.kind == OWN]
    gone = [one for one in reports if one.kind in (ENDED, ABSENT)]
    unheard = set(scene.hosts) - {one.rank for one in reports}
    if own and not may_follow(own[0], gone, reports):
        return judge_own(own, lost, len(reports), waited_s, scene)
    if gone:
        verdict = judge_gone(gone, lost, unheard, waited_s, scene)
        return verdict and verdict._replace(others="; ".join(filter(None, (verdict.others, failed_too(own)))))
    if not reports or (waited_s < SEARCHING_S and (unheard or scene.awaits_ranks)):
        return None
    if scene.exits:
        return Verdict(scene.exits[0], told(lost))
    lost.sort(key=lambda one: not is_timeout(one.cause))  # the others' connections end by a timeout, too
    if AT_THE_END in lost[0].cause and scene.seen.deserted is not None:
        report = scene.seen.deserted
        return Verdict(report._replace(cause=f"{report.cause}: {lost[0].cause}"))
    late = [rank for rank in unheard if rank in scene.seen.free]
    if len(late) == 1 and is_timeout(lost[0].cause) and not scene.seen.has_groups:
        return Verdict(waited_for(late[0], lost, scene), "; ".join(whereabouts(unheard - {late[0]}, scene)))
    calls = {**scene.seen.calls, **{one.rank: one.where for one in lost}}
    if is_timeout(lost[0].cause) and calls.keys() >= scene.hosts.keys() and len(set(calls.values())) > 1:
        return Verdict(unlike(lost[0], calls))
    return Verdict(lost[0], "; ".join(filter(None, (told(lost[1:]), *whereabouts(unheard, scene)))))


def with_signal(report: Report, interrupted: Collection[int]) -> Report:
    """Return the report on a KeyboardInterrupt as that on a rank that SIGINT has ended, if the rank got one."""
    if report.kind != OWN or not report.signal or report.rank not in interrupted:
        return report
    return report._replace(kind=ENDED, cause=f"{report.cause} ({report.signal})")


def may_follow(own: Report, gone: Sequence[Report], reports: Sequence[Report]) -> bool:
    """Tell whether an error, the first one, may come of the death of a rank: scripts hide what they have caught.

    While an error is reported all ranks live on, so what died by then did not die of it. An abort() may be NCCL's
    watchdog's, which has waited for the rank with the error.
    """
    return any(one.signal != GIVING_UP or reports.index(one) < reports.index(own) for one in gone)


def judge_own(
    own: Sequence[Report], lost: Sequence[Report], heard: int, waited_s: float, scene: Scene
) -> Verdict | None:
    """Return the first of errors that ranks raised by themselves as the reason; None to wait for more reports.

    `lost` are the reports of ranks that lost a peer; so many ranks are `heard`.
    """
    first = own[0]._replace(signal="")
    same = [one for one in own if (one.cause, one.where) == (first.cause, first.where)]
    settling = len(same) > 1 or own[0].signal  # word of the signal may be on its way
    is_all = heard >= scene.world_size and not own[0].signal
    if not is_all and waited_s < (SETTLING_S if settling else ALONE_S):
        return None
    return Verdict(first, "; ".join(filter(None, (extent(same, scene), told(lost)))))


def failed_too(own: Sequence[Report]) -> str:
    """Return in words which errors ranks have raised when another one had died, empty for none."""
    if not own:
        return ""
    more = f", and {len(own) - 1:,} more" if len(own) > 1 else ""
    return f"rank {own[0].rank} on {own[0].host} failed, too: {truncate_middle(own[0].cause, 200)}{more}"


def unlike(lost: Report, calls: Mapping[int, str]) -> Report:
    """Return the report on a job whose ranks have waited for each other in unlike `calls` until the `lost` one did."""
    ranks_at: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks_at.setdefault(call, []).append(rank)
    words = join_names([f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)} at {call}"
                        for call, ranks in ranks_at.items()])
    return Report(NOBODY, "", ABSENT, f"ranks have waited for each other in unlike calls, {words}: {lost.cause}",
                  lost.status)


def waited_for(late: int, lost: Sequence[Report], scene: Scene) -> Report:
    """Return the report on the rank that the `lost` ones have waited for in vain, the only one that waits for none."""
    at = f" at {lost[0].where}" if lost[0].where else ""
    waited = f"rank {lost[0].rank} has" if len(lost) == 1 else f"{len(lost):,} ranks have"
    return Report(late, scene.hosts[late], ABSENT, f"{waited} waited for it in vain{at}: {lost[0].cause}",
                  lost[0].status, scene.seen.places[late])


def is_timeout(error: str) -> bool:
    """Tell whether an error's text says that a rank was late, and not that it is gone."""
    return any(words in error.lower() for words in TOO_LATE)


def judge_gone(
    gone: Sequence[Report], lost: Sequence[Report], unheard: Collection[int], waited_s: float, scene: Scene
) -> Verdict | None:
    """Return which of the ranks that are gone is the reason for the job's end; None to wait for more reports.

    `lost` are the reports of ranks that lost a peer, `unheard` the ranks that have not reported.
    """
    if orphans := [one for one in gone if one.cause == NO_STEP_DAEMON]:  # their node's ranks may end by that
        return Verdict(orphans[0])
    killed = were_killed_at_once(gone, scene)
    alive = set(scene.hosts) - set(scene.order) - {one.rank for one in gone}
    if was_sent_to_all(gone, scene) or (killed and not alive):
        if scene.interrupted and scene.seen.looking and waited_s < SEARCHING_S:
            return None
        return Verdict(gone[0], scene.seen.table, outside=True)
    if gone[0].signal == GIVING_UP:  # perhaps because it has waited in vain for another rank
        absent = [one for one in gone if one.kind == ABSENT]
        if not absent and unheard and waited_s < SEARCHING_S:
            return None
        gone = absent or gone
    if gone[0].kind == ENDED:
        seen = [one for rank in scene.order for one in gone if one.rank == rank]
        unclear = len(seen) < len(gone) > 1 or set(unheard) & set(scene.order)
        others_may_get_it = scene.by_node and unheard and gone[0].signal in FROM_OUTSIDE
        if (unclear or others_may_get_it or killed) and waited_s < SEARCHING_S:
            return None
        crashed = gone[0] not in seen and gone[0].signal not in (*FROM_OUTSIDE, "SIGKILL", GIVING_UP)
        gone = gone if crashed else seen or gone  # nobody saw it end, but a launcher ends no rank so
    if waited_s < SETTLING_S:
        return None
    where = whereabouts(unheard, scene) if gone[0].signal == GIVING_UP else ()
    return Verdict(gone[0], "; ".join(filter(None, (told(lost), *where))))


def whereabouts(unheard: Collection[int], scene: Scene) -> Iterator[str]:
    """Yield in words what the ranks do that have not reported."""
    for rank in sorted(set(unheard) & set(scene.seen.free))[:MAX_LISTED]:
        yield f"rank {rank} on {scene.hosts[rank]} was at {scene.seen.places[rank]}"
    if silent := set(unheard) & set(scene.silent):
        yield f"nothing is heard of {named(silent, scene.hosts)}"
    if scene.left:
        yield f"{named(scene.left, scene.hosts)} had come to the end of the script"
        if busy := set(unheard) - set(scene.silent) - set(scene.left):
            yield f"{named(busy, scene.hosts)} had not"


def was_sent_to_all(gone: Sequence[Report], scene: Scene) -> bool:
    """Tell whether other ranks got the same signal as the first that is gone."""
    first, others = gone[0], [one.signal for one in gone[1:]]
    others += ["SIGINT" for rank in scene.interrupted if rank != first.rank]
    killed_too = first.signal == "SIGINT" and "SIGKILL" in others  # by srun, right after Ctrl-C
    is_alone = scene.has_one_rank and first.signal != WALLTIME
    return first.signal in FROM_OUTSIDE and (is_alone or first.signal in others or killed_too)


def were_killed_at_once(gone: Sequence[Report], scene: Scene) -> bool:
    """Tell whether srun has begun to kill all ranks, as it does on SIGTERM and SIGHUP.

    If only one rank was killed, by hand or for lack of memory, the others live on until this job ends them. A job of
    one rank has no others: there it was srun, unless the kernel tells of a lack of memory.
    """
    plain = scene.by_srun and all(one.signal == "SIGKILL" and OUT_OF_MEMORY not in one.cause for one in gone)
    if not plain or len(gone) == 1:
        return plain and scene.has_one_rank
    first_s, second_s = sorted(scene.came_s[one.rank] for one in gone)[:2]
    return second_s - first_s < SETTLING_S


def extent(same: Sequence[Report], scene: Scene) -> str:
    """Return in words which ranks failed with the same error, empty for one rank."""
    hosts = {one.host for one in same}
    if len(same) == 1:
        return ""
    if len(same) == scene.world_size:
        return f"the same on all {len(same):,} ranks"
    if len(same) == sum(host in hosts for host in scene.hosts.values()):
        return f"the same on the {len(same):,} ranks of {join_names(sorted(hosts))}"
    return f"the same on {len(same):,} of {scene.world_size:,} ranks"


def told(lost: Sequence[Report]) -> str:
    """Return in words how many ranks lost their connection."""
    if not lost:
        return ""
    others = f"{len(lost)} other rank{'s' * (len(lost) > 1)}"
    return f"{others} waited in vain, too" if is_timeout(lost[0].cause) else f"{others} lost the connection to it"


def named(ranks: Collection[int], hosts: Mapping[int, str], places: Mapping[int, str] = {}) -> str:
    """Return ranks and their hosts in words, and where they are, as far as that is known."""
    order = sorted(ranks)
    words = [f"rank {rank} on {hosts[rank]}{f' ({places[rank]})' if rank in places else ''}"
             for rank in order[:MAX_LISTED]]
    return join_names(words + [""] * len(order[MAX_LISTED:]))
