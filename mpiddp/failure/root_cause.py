"""Which of the ranks' failure reports is the root cause of a job's failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base.config import TextEnum
from ..base.text import MAX_LISTED, format_ranges, join_names, truncate_middle
from ..systems.statuses import EXIT_KILLED

MAX_STACK_CHARS = 50_000  # whole stacks might not fit into a message
SAME_ERROR_WAIT_S = 0.03  # for a second rank to report the same error; then SAME_CAUSE_WAIT_S for all that have it
SAME_CAUSE_WAIT_S = 0.15  # for all ranks to report that got the same signal, or that lost a peer
KILL_SPREAD_S = 0.5  # in which an srun that has got a signal kills all agents, one by one
ROOT_CAUSE_WAIT_S = 1.0  # for the cause of what looks like a secondary failure to be reported

NOBODY = -1  # the rank of a report if no rank is known to be at fault
# From users and schedulers; Flux sends the last one at the time limit.
OUTSIDE_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM")
ABORT_SIGNAL = "SIGABRT"  # from C's abort(), which NCCL's watchdog calls in a rank whose collective takes too long
AGENT_KILLED = "its agent was killed, and the rank with it"
NODE_LOST = "cannot be reached: its node or its network is down"
STEP_DAEMON_KILLED = "slurmstepd, which manages the ranks of this node for Slurm, was killed"
OUT_OF_MEMORY = "out of memory (OOM kill counted by its cgroup)"
EXIT_TIMEOUT_WORDS = "other ranks did not finish within"  # in the error of a rank that has finished, at --exit-timeout
UNKNOWN_RANKS = "unknown ranks"  # in its place, if the late ranks are unknown
LOST_PEER_WORDS = (  # in errors of gloo, NCCL, torch's store and sockets if another rank has ended or is late
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "connection was",
    "no route to host", "connection timed out", "timed out waiting", "application timeout caused pair closure",
    "socket timeout", "wait timeout", "timeout after", "failed to recv", "failed to send", "unbound_buffer",
    "connectfullmesh", "communicator was aborted", "remote process exited", "ncclremoteerror", "ncclsystemerror",
    "collective operation timeout", "store is closed", "timed out after", "failed to connect", "monitoredbarrier",
)
LATE_PEER_WORDS = (  # in the same errors if another rank is late
    "ms for recv operation", "ms for send operation", "application timeout caused pair closure", "wait timeout after",
    "collective operation timeout", EXIT_TIMEOUT_WORDS, "failed to pass monitoredbarrier",
)
COMMUNICATION_WORDS = (  # in the types and texts of errors of the libraries by which ranks communicate
    "gloo", "nccl", "c10d", "tcpstore", "processgroup", "torch.distributed.", "mpi4py.mpi.exception",
)
COMMUNICATION_FILES = ("/torch/distributed/", "/torch/nn/parallel/")  # their native code raises a plain RuntimeError
CHECKPOINT_FILES = "/torch/distributed/checkpoint/"


class Wait(TextEnum):
    """A conclusion: more reports may come."""

    WAIT = "wait"


WAIT = Wait.WAIT


class ReportKind(TextEnum):
    """The cause of a report; the values stand in --error-file and in messages."""

    ERROR = "own"  # of the rank itself
    PROCESS_EXIT = "ended"  # the process ended without a report
    SECONDARY = "consequence"  # of the loss of another rank
    UNREACHABLE = "absent"  # the rank is stopped or lost


class Report(NamedTuple):
    """Why a rank ended, or the job, if `rank` is NOBODY.

    `kind` is a ReportKind; a message carries its value. `cause` is one line, `status` the exit status that the job
    gets, `where` the line of the script. `text` has the stacks that faulthandler printed. `signal` is the name of the
    signal that ended the rank, empty for none; of an ERROR it is SIGINT if that is a KeyboardInterrupt, whether or not
    a signal came.
    """

    rank: int
    host: str
    kind: ReportKind | str
    cause: str
    status: int
    where: str = ""
    text: str = ""
    signal: str = ""


def truncate_report(report: Report) -> Report:
    """Return a report that fits into a message, with a cause short enough to read."""
    return report._replace(cause=truncate_middle(report.cause), where=truncate_middle(report.where),
                           text=truncate_middle(report.text, MAX_STACK_CHARS))


def make_loss_report(rank: int, host: str, error: str) -> Report:
    """Return the report on a rank whose agent has ended, or, for the reason in `error`, cannot be reached."""
    cause, status = (f"{NODE_LOST} ({error})", 1) if error else (AGENT_KILLED, EXIT_KILLED)
    return Report(rank, host, ReportKind.UNREACHABLE, cause, status)


def is_node_loss(report: Report) -> bool:
    """Return whether a report says that a rank cannot be reached."""
    return report.cause.startswith(NODE_LOST)


class RootCause(NamedTuple):
    """The report of the rank that failed first, and the state of the others, in words.

    `outside`: a signal was sent to the job as a whole, and no rank failed; then `others` shows where ranks were, in
    indented lines.
    """

    first: Report
    others: str = ""
    outside: bool = False


class JobActivity(NamedTuple):
    """Where ranks are, in words; the `free` ones wait for no other rank.

    `calls` has the line of the script, as in reports, at which a rank waits for others. `table` shows all ranks, empty
    if nothing follows from it. `is_pending`: a snapshot of this is being taken. `has_groups`: ranks have several
    process groups, so that it is unknown who waits for whom. `deadlock` is the report on ranks that wait for one that
    has finished, None if they do not.
    """

    places: Mapping[int, str] = {}
    free: Collection[int] = ()
    calls: Mapping[int, str] = {}
    table: str = ""
    is_pending: bool = False
    has_groups: bool = False
    deadlock: Report | None = None


class FailureContext(NamedTuple):
    """What is known of the ranks besides their reports.

    `hosts` has the host of each rank that has registered, of `world_size` ranks. `silent` ranks were probed and did not
    answer, the scripts of `finished` ones have ended. `signals` has the signals from outside that agents got.
    `by_srun`: srun itself started the agents.
    """

    hosts: Mapping[int, str]
    silent: Collection[int] = ()
    finished: Collection[int] = ()
    signals: Collection[str] = ()
    world_size: int = 0
    activity: JobActivity = JobActivity()
    by_srun: bool = False


class Reports:
    """The reports so far, in the order of their arrival; to add one costs the same however many there are."""

    def __init__(self, reports: Iterable[Report] = ()) -> None:
        self.all: list[Report] = []
        self.ranks: set[int] = set()  # that have reported
        self.secondary: list[Report] = []
        self.errors: list[Report] = []
        self.same_errors: list[Report] = []  # those that equal the first one
        self.error_is_first = False  # no death was reported before the first error
        self.deaths: list[Report] = []  # of ranks or agents
        self.first_death: Report | None = None  # but by ABORT_SIGNAL
        self.first_end: Report | None = None  # by a death or a signal
        self.interrupted: Report | None = None  # of the lowest rank that has a line in the script
        self.step_daemon: Report | None = None  # which was killed
        for report in reports:
            self.add(report)

    def add(self, report: Report) -> None:
        """Add a report."""
        self.all.append(report)
        self.ranks.add(report.rank)
        if report.kind == ReportKind.SECONDARY:
            self.secondary.append(report)
        elif report.kind == ReportKind.ERROR:
            self.error_is_first |= not (self.errors or self.deaths)
            self.errors.append(report)
            if report.signal and report.where and (self.interrupted is None or report.rank < self.interrupted.rank):
                self.interrupted = report
            if report.cause == self.errors[0].cause and report.where == self.errors[0].where:
                self.same_errors.append(report)
        else:
            self.deaths.append(report)
            if self.first_death is None and report.signal != ABORT_SIGNAL:
                self.first_death = report
            if self.step_daemon is None and report.cause == STEP_DAEMON_KILLED:
                self.step_daemon = report
        if self.first_end is None and (report.signal or report.kind not in (ReportKind.SECONDARY, ReportKind.ERROR)):
            self.first_end = report


class Case(NamedTuple):
    """The reports so far, the first one `waited_s` ago, and what else is known."""

    reports: Reports
    waited_s: float
    context: FailureContext

    @property
    def is_complete(self) -> bool:
        """Return whether all ranks have reported; the agents of some may not have registered yet."""
        return len(self.reports.ranks) >= max(len(self.context.hosts), self.context.world_size)

    @property
    def may_change(self) -> bool:
        """Return whether a rank may still report what looks like a consequence now."""
        return self.waited_s < ROOT_CAUSE_WAIT_S and not self.is_complete

    def find_unreported(self) -> set[int]:
        """Return the ranks without a report."""
        return self.context.hosts.keys() - self.reports.ranks


class Rule(NamedTuple):
    """What is `observed`, what is `said` of it, and the function that finds out.

    It returns the root cause, WAIT for more reports, or None for the next rule. To wait must be cheap: the rules are
    applied to each new report.
    """

    observed: str
    said: str
    conclude: Callable[[Case], RootCause | Wait | None]


def select_root_cause(reports: Reports, waited_s: float, context: FailureContext) -> RootCause | None:
    """Return which of the reports is the reason for the job's end; None to wait for more reports.

    The first report came `waited_s` ago. Nobody ends a rank before this has decided: so the first death that is no
    consequence of another is the root cause.
    """
    case = Case(reports, waited_s, context)
    for rule in RULES:
        if (conclusion := rule.conclude(case)) is not None:
            return conclusion if isinstance(conclusion, RootCause) else None
    return None


def conclude_step_daemon(case: Case) -> RootCause | None:
    """Name the node whose slurmstepd was killed, which may end its ranks."""
    return RootCause(case.reports.step_daemon) if case.reports.step_daemon is not None else None


def conclude_outside(case: Case) -> RootCause | Wait | None:
    """Say that a signal ended the job if agents got it, and a rank ended by it: errors of others are consequences."""
    ended = case.reports.first_end
    if ended is None or ended.signal not in OUTSIDE_SIGNALS:
        return None
    if ended.signal not in case.context.signals:  # it may have reached the rank before the agent
        return WAIT if case.waited_s < SAME_CAUSE_WAIT_S else None
    if ended.signal == "SIGINT" and case.context.activity.is_pending and case.waited_s < ROOT_CAUSE_WAIT_S:
        return WAIT
    if ended.kind == ReportKind.ERROR:  # a KeyboardInterrupt
        ended = ended._replace(kind=ReportKind.PROCESS_EXIT, cause=f"{ended.cause} ({ended.signal})")
    return RootCause(ended, case.context.activity.table or describe_interrupted(case), outside=True)


def conclude_isolation(case: Case) -> RootCause | Wait | None:
    """Name rank 0's node if no agent of another node answers: it is cut off, or, of two nodes, either is."""
    reports, hosts = case.reports, case.context.hosts
    death = reports.first_death
    if not (is_node_loss(death) if death is not None else not reports.errors):
        return None
    if case.may_change:
        return WAIT
    lost = {report.rank for report in reports.deaths if is_node_loss(report)}
    lost |= {rank for rank in case.context.silent if rank not in reports.ranks}
    others = {host for host in hosts.values() if host != hosts.get(0)}
    if not others or 0 in lost or any(host in others and rank not in lost for rank, host in hosts.items()):
        return None
    later = describe_later_errors(reports.secondary)
    if len(others) == 1:
        cause = f"{hosts[0]} and {min(others)} cannot reach each other: the network, or one of them, is down"
        return RootCause(Report(NOBODY, "", ReportKind.UNREACHABLE, cause, 1), later)
    cause = f"{hosts[0]} has lost its network: no response from {join_names(sorted(others))}"
    return RootCause(Report(0, hosts[0], ReportKind.UNREACHABLE, cause, 1), later)


def conclude_death(case: Case) -> RootCause | Wait | None:
    """Name the first rank that died. One with an error lives until the root cause is selected: it may be a consequence.

    Scripts hide exceptions that they have caught, so that the error may not look like one.
    """
    death = case.reports.first_death
    if death is None:
        return None
    if case.context.by_srun and death.cause == AGENT_KILLED and case.waited_s < KILL_SPREAD_S:
        return WAIT  # for srun to kill this agent, too
    if case.waited_s < SAME_CAUSE_WAIT_S and not case.is_complete:
        return WAIT  # for the ranks that have noticed
    return RootCause(death, join_parts(describe_secondary(case.reports.secondary),
                                       describe_later_errors(case.reports.errors)))


def conclude_error(case: Case) -> RootCause | Wait | None:
    """Name the first error, and how many ranks have the same one."""
    if not case.reports.error_is_first:
        return None
    same = case.reports.same_errors
    if not case.is_complete and case.waited_s < (SAME_CAUSE_WAIT_S if len(same) > 1 else SAME_ERROR_WAIT_S):
        return WAIT
    return RootCause(same[0]._replace(signal=""), join_parts(
        describe_scope(same, case.context), describe_secondary(case.reports.secondary)))


def conclude_abort(case: Case) -> RootCause | Wait | None:
    """Name a rank that C's abort() ended, if no other is found for which it may have waited in vain."""
    if not case.reports.deaths:
        return None
    if case.may_change:
        return WAIT
    return RootCause(case.reports.deaths[0], join_parts(
        describe_secondary(case.reports.secondary), *describe_unreported(case.find_unreported(), case.context),
        describe_later_errors(case.reports.errors)))


def conclude_secondary(case: Case) -> RootCause | Wait | None:
    """Name the rank that others have waited for, or else the first that noticed."""
    if not case.reports.secondary or case.may_change:
        return WAIT
    return select_secondary(case.reports.secondary, case.find_unreported(), case.context)


# In this order.
RULES = (
    Rule("the slurmstepd of a node ends", "it was killed, and manages the ranks of this node", conclude_step_daemon),
    Rule("agents got a signal, and ranks died of it (from a user, a launcher, a scheduler)",
         "ended by the signal, sent to the job from outside", conclude_outside),
    Rule("no agent of another node answers rank 0's", "rank 0's node has lost its network", conclude_isolation),
    Rule("a rank's process has ended, or its agent's connection", "its status, signal or loss", conclude_death),
    Rule("a rank reports an exception of its own", "the exception", conclude_error),
    Rule("a rank has aborted, as NCCL's watchdog does after a timeout", "the abort, and what the others did",
         conclude_abort),
    Rule("ranks report that they have lost another, or waited in vain", "the late rank if it is known",
         conclude_secondary),
)


def select_secondary(
    secondary: Sequence[Report], unreported: Collection[int], context: FailureContext
) -> RootCause:
    """Return the root cause if ranks report only the loss of another one: the late rank, if it is known."""
    first, *others = sorted(secondary, key=lambda report: not is_timeout(report.cause))  # a timeout closes connections
    activity = context.activity
    is_exit_timeout = EXIT_TIMEOUT_WORDS in first.cause
    summary = first.cause.partition(": ")[0] if is_exit_timeout else first.cause  # without the late ranks' names
    if is_exit_timeout and activity.deadlock is not None:
        return RootCause(activity.deadlock._replace(cause=f"{activity.deadlock.cause}; {summary}"))
    late = [rank for rank in unreported if rank in activity.free]
    if len(late) == 1 and is_timeout(first.cause) and not activity.has_groups:
        return RootCause(make_late_rank_report(late[0], [first._replace(cause=summary), *others], context),
                         join_parts(*describe_unreported(set(unreported) - {late[0]}, context)))
    calls = {**activity.calls, **{report.rank: report.where for report in secondary}}
    if is_timeout(first.cause) and calls.keys() >= context.hosts.keys() and len(set(calls.values())) > 1:
        return RootCause(make_different_calls_report(first, calls))
    names_late = is_exit_timeout and UNKNOWN_RANKS not in first.cause
    unnamed = set(unreported) & {*context.silent, *context.finished} if names_late else unreported
    return RootCause(first, join_parts(describe_secondary(others), *describe_unreported(unnamed, context)))


def make_late_rank_report(late: int, secondary: Sequence[Report], context: FailureContext) -> Report:
    """Return the report on the only rank that waits for no other; the `secondary` ones timed out waiting for it."""
    first = secondary[0]
    waiting = f"rank {first.rank}" if len(secondary) == 1 else f"{len(secondary):,} ranks"
    _, is_at_exit, limit = first.cause.partition(EXIT_TIMEOUT_WORDS)
    if is_at_exit:
        cause = f"did not finish within{limit}; {waiting} timed out waiting"
    else:
        cause = f"did not reach {first.where or 'the collective'}, where {waiting} timed out: {first.cause}"
    return Report(late, context.hosts[late], ReportKind.UNREACHABLE, cause, first.status, context.activity.places[late])


def make_different_calls_report(timeout: Report, calls: Mapping[int, str]) -> Report:
    """Return the report on a job whose ranks waited for each other in different `calls` until a `timeout`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks_of.setdefault(call, []).append(rank)
    waiting = join_names([f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)} at {call}" for call,
                          ranks in ranks_of.items()])
    return Report(NOBODY, "", ReportKind.UNREACHABLE,
                  f"ranks timed out waiting for each other in different calls ({waiting}): {timeout.cause}",
                  timeout.status)


def is_peer_loss(error: str, file: str = "") -> bool:
    """Return whether an error is one that ranks raise if another rank has ended.

    `error` is its full type and its text; `file` is the innermost file of its traceback outside Python's own library.
    Words such as "connection refused" mean another rank only if a communication library raised the error.
    """
    error = error.lower()
    from_library = any(words in error for words in COMMUNICATION_WORDS) or (
        any(part in file for part in COMMUNICATION_FILES) and CHECKPOINT_FILES not in file)
    return from_library and any(words in error for words in LOST_PEER_WORDS)


def is_timeout(error: str) -> bool:
    """Return whether an error's text says that another rank was late, not that it has ended."""
    return any(words in error.lower() for words in LATE_PEER_WORDS)


def describe_scope(same: Sequence[Report], context: FailureContext) -> str:
    """Return text on which ranks failed with the same error, empty for one rank."""
    hosts = {report.host for report in same}
    if len(same) == 1:
        return ""
    if len(same) == context.world_size:
        return f"same error on all {len(same):,} ranks"
    if len(same) == sum(host in hosts for host in context.hosts.values()):
        return f"same error on the {len(same):,} ranks of {join_names(sorted(hosts))}"
    return f"same error on {len(same):,} of {context.world_size:,} ranks"


def describe_secondary(secondary: Sequence[Report]) -> str:
    """Return text on how many ranks lost their connection, or timed out."""
    if not secondary:
        return ""
    others = f"{len(secondary)} other rank{'s' * (len(secondary) > 1)}"
    return f"{others} timed out, too" if is_timeout(secondary[0].cause) else f"{others} lost the connection to it"


def describe_later_errors(errors: Sequence[Report]) -> str:
    """Return text on the errors that ranks raised after another rank had died, empty for none."""
    if not errors:
        return ""
    more = f" (and {len(errors) - 1:,} more)" if len(errors) > 1 else ""
    return f"rank {errors[0].rank} on {errors[0].host} also failed: {truncate_middle(errors[0].cause, 200)}{more}"


def describe_interrupted(case: Case) -> str:
    """Return an indented line on where rank 0 was when a signal ended the job, or another rank if that is unknown."""
    rank, where = 0, case.context.activity.calls.get(0, "")
    interrupted = case.reports.interrupted
    if interrupted is not None and (interrupted.rank == 0 or not where):
        rank, where = interrupted.rank, interrupted.where
    return f"  rank {rank} on {case.context.hosts[rank]} was at {where}" if where else ""


def describe_unreported(unreported: Collection[int], context: FailureContext) -> Iterator[str]:
    """Yield texts on what the ranks without a report do."""
    for rank in sorted(set(unreported) & set(context.activity.free))[:MAX_LISTED]:
        yield f"rank {rank} on {context.hosts[rank]} was at {context.activity.places[rank]}"
    if silent := set(unreported) & set(context.silent):
        yield f"no response from {describe_ranks(silent, context.hosts)}"
    if finished := set(unreported) & set(context.finished):
        yield f"{describe_ranks(finished, context.hosts)} had finished the script"
        if busy := set(unreported) - set(context.silent) - finished:
            yield f"{describe_ranks(busy, context.hosts)} had not"


def describe_ranks(ranks: Collection[int], hosts: Mapping[int, str], places: Mapping[int, str] = {}) -> str:
    """Return ranks with their hosts, and their places if known: "rank 3 on n07 (train.py:5 main)"."""
    order = sorted(ranks)
    words = [f"rank {rank} on {hosts[rank]}{f' ({places[rank]})' if rank in places else ''}"
             for rank in order[:MAX_LISTED]]
    return join_names(words + [""] * len(order[MAX_LISTED:]))


def join_parts(*parts: str) -> str:
    """Return the parts that are not empty, joined by semicolons."""
    return "; ".join(filter(None, parts))
