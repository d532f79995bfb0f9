"""Which of the ranks' failure reports is the root cause of a job's failure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base.config import TextEnum
from ..base.text import MAX_LISTED, format_ranges, join_names, truncate_middle

MAX_STACK_CHARS = 50_000  # whole stacks might not fit into a message
SAME_ERROR_WAIT_S = 0.03  # for a second rank to report the same error; then SAME_CAUSE_WAIT_S for all that have it
SAME_CAUSE_WAIT_S = 0.15  # for all ranks to report that got the same signal, or that lost a peer
ROOT_CAUSE_WAIT_S = 1.0  # for the cause of what looks like a secondary failure to be reported

NOBODY = -1  # the rank of a report if no rank is known to be at fault
WALLTIME_SIGNAL = "SIGALRM"  # Flux sends it to all ranks at the time limit; a script that has set an alarm gets it too
OUTSIDE_SIGNALS = (  # from users and schedulers
    "SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", WALLTIME_SIGNAL,
)
CRASH_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")
NON_LAUNCHER_SIGNALS = (*CRASH_SIGNALS, "SIGHUP", "SIGUSR1", "SIGUSR2")  # no launcher ends ranks by these
ABORT_SIGNAL = "SIGABRT"  # from C's abort(), which NCCL's watchdog calls in a rank whose collective takes too long
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


class RootCause(NamedTuple):
    """The report of the rank that failed first, and the state of the others, in words.

    `outside`: a signal was sent to the job as a whole, and no rank failed; then `others` shows where ranks were.
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
    answer, the scripts of `finished` ones have ended, `interrupted` ones got a SIGINT. `end_order` has ranks in the
    order in which their processes ended, as far as it is known: a launcher kills the other ranks so soon that their
    reports may overtake the first one's. `by_node`: each node's daemon sends a scheduler's signals to its ranks, one
    later than another. `by_srun`: srun itself started the ranks. `reported_s` has the seconds from the first report to
    that of each rank. `exits` are reports on programs that raised SystemExit with an unknown status.
    """

    hosts: Mapping[int, str]
    silent: Collection[int] = ()
    finished: Collection[int] = ()
    interrupted: Collection[int] = ()
    end_order: Sequence[int] = ()
    by_node: bool = False
    by_srun: bool = False
    reported_s: Mapping[int, float] = {}
    world_size: int = 0
    activity: JobActivity = JobActivity()
    exits: Sequence[Report] = ()

    @property
    def awaits_ranks(self) -> bool:
        """Return whether some ranks' agents have not registered yet: a rank may die before its agent has."""
        return len(self.hosts) < self.world_size

    @property
    def has_one_rank(self) -> bool:
        """Return whether the job has one rank."""
        return len(self.hosts) == 1 and not self.awaits_ranks


def select_root_cause(reports: Sequence[Report], waited_s: float, context: FailureContext) -> RootCause | None:
    """Return which of the reports is the reason for the job's end; None to wait for more reports.

    The reports are in the order of their arrival, the first one `waited_s` ago.
    """
    interrupted = frozenset(context.interrupted)
    reports = [mark_interrupt(report, interrupted) for report in reports]
    secondary = [report for report in reports if report.kind == ReportKind.SECONDARY]
    errors = [report for report in reports if report.kind == ReportKind.ERROR]
    gone = [report for report in reports if report.kind in (ReportKind.PROCESS_EXIT, ReportKind.UNREACHABLE)]
    unreported = set(context.hosts) - {report.rank for report in reports}
    if errors and not is_maybe_caused_by(errors[0], gone, reports):
        return select_error(errors, secondary, len(reports), waited_s, context)
    if gone:
        root_cause = select_gone_rank(gone, secondary, unreported, waited_s, context)
        return root_cause and root_cause._replace(others=join_parts(root_cause.others, describe_later_errors(errors)))
    if not reports or (waited_s < ROOT_CAUSE_WAIT_S and (unreported or context.awaits_ranks)):
        return None
    if context.exits:
        return RootCause(context.exits[0], describe_secondary(secondary))
    return select_secondary(secondary, unreported, context)


def mark_interrupt(report: Report, interrupted: Collection[int]) -> Report:
    """Return the report on a KeyboardInterrupt as that of a rank that SIGINT ended, if the rank got one."""
    if report.kind != ReportKind.ERROR or not report.signal or report.rank not in interrupted:
        return report
    return report._replace(kind=ReportKind.PROCESS_EXIT, cause=f"{report.cause} ({report.signal})")


def is_maybe_caused_by(error: Report, gone: Sequence[Report], reports: Sequence[Report]) -> bool:
    """Return whether a rank's death may have caused the first error: scripts hide exceptions that they have caught.

    All ranks live on while an error is reported, so a rank that is dead by then did not die of it. A SIGABRT may come
    from NCCL's watchdog, which has waited for the rank with the error.
    """
    if not gone or any(report.signal != ABORT_SIGNAL for report in gone):
        return bool(gone)
    return reports.index(gone[0]) < reports.index(error)


def select_error(
    errors: Sequence[Report], secondary: Sequence[Report], reported: int, waited_s: float, context: FailureContext
) -> RootCause | None:
    """Return the first of the `errors` as the root cause; None to wait for more reports. So many ranks `reported`."""
    first = errors[0]._replace(signal="")
    same = [error for error in errors if (error.cause, error.where) == (first.cause, first.where)]
    is_spreading = len(same) > 1 or errors[0].signal  # other ranks may be about to report the signal
    is_complete = reported >= context.world_size and not errors[0].signal
    if not is_complete and waited_s < (SAME_CAUSE_WAIT_S if is_spreading else SAME_ERROR_WAIT_S):
        return None
    return RootCause(first, join_parts(describe_scope(same, context), describe_secondary(secondary)))


def select_gone_rank(
    gone: Sequence[Report], secondary: Sequence[Report], unreported: Collection[int], waited_s: float,
    context: FailureContext,
) -> RootCause | None:
    """Return which of the ranks that are `gone` is the root cause; None to wait for more reports."""
    if orphans := [report for report in gone if report.cause == STEP_DAEMON_KILLED]:  # which may end its ranks
        return RootCause(orphans[0])
    killed = were_killed_at_once(gone, context)
    alive = set(context.hosts) - set(context.end_order) - {report.rank for report in gone}
    if was_sent_to_all(gone, context) or (killed and not alive):
        if context.interrupted and context.activity.is_pending and waited_s < ROOT_CAUSE_WAIT_S:
            return None
        return RootCause(gone[0], context.activity.table, outside=True)
    if gone[0].signal == ABORT_SIGNAL:  # perhaps because it has waited in vain for another rank
        unreachable = [report for report in gone if report.kind == ReportKind.UNREACHABLE]
        if not unreachable and unreported and waited_s < ROOT_CAUSE_WAIT_S:
            return None
        gone = unreachable or gone
    if gone[0].kind == ReportKind.PROCESS_EXIT:
        by_rank: dict[int, list[Report]] = {}
        for report in gone:
            by_rank.setdefault(report.rank, []).append(report)
        ordered = [report for rank in context.end_order for report in by_rank.get(rank, ())]
        is_unclear = len(ordered) < len(gone) > 1 or set(unreported) & set(context.end_order)
        others_may_get_it = context.by_node and unreported and gone[0].signal in OUTSIDE_SIGNALS
        others_may_have_crashed = context.by_srun and unreported and not gone[0].signal
        if (is_unclear or others_may_get_it or others_may_have_crashed or killed) and waited_s < ROOT_CAUSE_WAIT_S:
            return None
        # a process that is not in `end_order` has crashed by itself if launchers do not send its signal
        has_crashed = gone[0] not in ordered and gone[0].signal not in (*OUTSIDE_SIGNALS, "SIGKILL", ABORT_SIGNAL)
        gone = gone if has_crashed else ordered or gone
        if gone[0].signal == "SIGKILL" and OUT_OF_MEMORY not in gone[0].cause:
            # MPICH's mpiexec kills all ranks once one has closed its connection, before that one's process has ended
            gone = [report for report in gone if report.signal in NON_LAUNCHER_SIGNALS] or gone
        if context.by_srun and not gone[0].signal:  # Open MPI exits by itself when srun says that a rank has crashed
            host = gone[0].host  # the order in which processes end is known within a host
            gone = [report for report in gone if report.signal in CRASH_SIGNALS and report.host != host] or gone
    if waited_s < SAME_CAUSE_WAIT_S:
        return None
    others = describe_unreported(unreported, context) if gone[0].signal == ABORT_SIGNAL else ()
    return RootCause(gone[0], join_parts(describe_secondary(secondary), *others))


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
    unnamed = set(unreported) & set(context.silent) if names_late else unreported
    return RootCause(first, join_parts(describe_secondary(others), *describe_unreported(unnamed, context)))


def make_late_rank_report(late: int, secondary: Sequence[Report], context: FailureContext) -> Report:
    """Return the report on the only rank that waits for no other; the `secondary` ones timed out waiting for it."""
    first = secondary[0]
    waiting = f"rank {first.rank}" if len(secondary) == 1 else f"{len(secondary):,} ranks"
    before_exec, is_at_exit, limit = first.cause.partition(EXIT_TIMEOUT_WORDS)
    if is_at_exit:
        cause = f"did not finish within{limit}; {waiting} timed out waiting {before_exec}".rstrip(", ")
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


def was_sent_to_all(gone: Sequence[Report], context: FailureContext) -> bool:
    """Return whether other ranks got the same signal as the first rank that ended."""
    first, others = gone[0], [report.signal for report in gone[1:]]
    others += ["SIGINT" for rank in context.interrupted if rank != first.rank]
    was_killed_too = first.signal == "SIGINT" and "SIGKILL" in others  # by srun, right after Ctrl-C
    is_alone = context.has_one_rank and first.signal != WALLTIME_SIGNAL
    return first.signal in OUTSIDE_SIGNALS and (is_alone or first.signal in others or was_killed_too)


def were_killed_at_once(gone: Sequence[Report], context: FailureContext) -> bool:
    """Return whether srun has begun to kill all ranks, as it does on SIGTERM and SIGHUP.

    If one rank alone was killed, by a user or for lack of memory, the others live on until mpiddp ends them. In a job
    of one rank it was srun, unless the kernel counted an OOM kill.
    """
    is_plain = context.by_srun and all(
        report.signal == "SIGKILL" and OUT_OF_MEMORY not in report.cause for report in gone)
    if not is_plain or len(gone) == 1:
        return is_plain and context.has_one_rank
    first_s, second_s = sorted(context.reported_s[report.rank] for report in gone)[:2]
    return second_s - first_s < SAME_CAUSE_WAIT_S


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


def describe_unreported(unreported: Collection[int], context: FailureContext) -> Iterator[str]:
    """Yield texts on what the ranks without a report do."""
    for rank in sorted(set(unreported) & set(context.activity.free))[:MAX_LISTED]:
        yield f"rank {rank} on {context.hosts[rank]} was at {context.activity.places[rank]}"
    if silent := set(unreported) & set(context.silent):
        yield f"no response from {describe_ranks(silent, context.hosts)}"
    if context.finished:
        yield f"{describe_ranks(context.finished, context.hosts)} had finished the script"
        if busy := set(unreported) - set(context.silent) - set(context.finished):
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
