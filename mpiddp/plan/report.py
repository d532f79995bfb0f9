"""The last words of a job that failed."""

from __future__ import annotations

from typing import NamedTuple

from .verdict import OWN, Verdict


class Member(NamedTuple):
    """What is told of a rank where it fails, and how it ends.

    `log` is the file that has its output, empty for none; `error_file` is where the reason is written
    as JSON, empty for nowhere. `grace_s` is the time in which the ranks of a failed job end by
    themselves. `exits` tells that each rank exits by itself with the job's status, because the
    launcher would lose the status that MPI_Abort was given.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    device: str
    pid: int
    run_id: str
    grace_s: float
    exits: bool = False
    log: str = ""
    error_file: str = ""


def block(verdict: Verdict, who: Member | None, after_s: float) -> str:
    """Return why a job failed, in a block of lines; in one line where a signal ended it from outside.

    `who` is the rank that failed, None where no more is known of it than the verdict says. `after_s`
    is the time since its start.
    """
    first = verdict.first
    if verdict.outside:
        return f"mpiddp: ended by {first.signal} after {after_s:.1f} s, sent to the job from outside\n"
    rows = [("where", first.where)]
    if who is not None:
        place = f"{who.rank} of {who.world_size}, local rank {who.local_rank} on {who.host}"
        rows.append(("rank", f"{place}, {who.device}, pid {who.pid}"))
    rows += [("when", f"{after_s:.1f} s after the start"), ("status", str(first.status)), ("others", verdict.others),
             ("log", who.log if who else "")]
    lines = [f"mpiddp: failed: rank {first.rank} on {first.host}: {first.cause}"]
    lines += [f"  {label:<8} {text}" for label, text in rows if text]
    stacks = [f"[rank {first.rank} on {first.host}] {line}" for line in first.text.splitlines()]
    return "\n".join([*stacks, *lines]) + "\n"


def error_record(verdict: Verdict, who: Member | None, callstack: str, timestamp: int) -> dict[str, object]:
    """Return what torchelastic's error files hold (torch.distributed.elastic.multiprocessing.errors).

    `timestamp` is in seconds since the epoch.
    """
    first = verdict.first
    rank = f"rank {first.rank} on {first.host}"
    message = first.cause if first.kind == OWN else f"{rank}: {first.cause}"
    extra = {"py_callstack": callstack or first.text, "timestamp": str(timestamp), "rank": first.rank,
             "host": first.host, "exitcode": first.status, "pid": who.pid if who else None}
    return {"message": {"message": message, "errorCode": first.status, "extraInfo": extra}}
