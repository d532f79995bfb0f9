"""The report that a job prints when it has failed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from ..base.stderr import say
from ..base.text import memory_advice
from ..where import progress
from .rank import RankIdentity
from .root_cause import NOBODY, OWN, RootCause


def print_failure(verdict: RootCause, who: RankIdentity | None, after_s: float, log_lost: int = -1,
         speak: Callable[[str], None] = say) -> str:
    """Print why the job failed, in one piece, and return the text.

    `who` is the rank that failed, `after_s` after its start; None if only the verdict is known. `log_lost` is the first
    byte that its log has lost, -1 for none. `speak` prints.
    """
    words = format_failure(verdict, who, after_s, log_lost)
    speak(words)
    return words


def format_error_file(verdict: RootCause, who: RankIdentity | None, callstack: str = "") -> str:
    """Return why a job failed, as --error-file has it."""
    return json.dumps(make_error_record(verdict, who, callstack, int(time.time())))


def format_failure(verdict: RootCause, who: RankIdentity | None, after_s: float, log_lost: int = -1) -> str:
    """Return why a job failed, in a block of lines; in one line if a signal from outside ended it.

    `who` is the rank that failed, `after_s` after its start; None if only the verdict is known. `log_lost` is the first
    byte that its log has lost, -1 for none.
    """
    first = verdict.first
    if verdict.outside:
        line = f"mpiddp: ended by {first.signal} after {after_s:.1f} s, sent to the job from outside"
        return "\n".join(filter(None, (line, verdict.others))) + "\n"
    rows = [("where", first.where)]
    if who is not None:
        place = f"{who.rank} of {who.world_size}, local rank {who.local_rank} on {who.host}"
        rows.append(("rank", f"{place}, {who.device}, pid {who.pid}"))
    if first.signal == "SIGKILL" or "is killed by signal: Killed" in first.cause:  # a DataLoader's worker
        rows.append(("do", (who.memory_advice if who else "") or memory_advice()))
    rows += [("when", f"{after_s:.1f} s after the start"), ("status", str(first.status)), ("others", verdict.others),
             ("log", who.log.path + (f" (incomplete from byte {log_lost} on)" if log_lost >= 0 else "") if who else "")]
    lines = [f"mpiddp: failed: {'' if first.rank == NOBODY else f'rank {first.rank} on {first.host}: '}{first.cause}"]
    lines += [f"  {label:<8} {text}" for label, text in rows if text]
    stacks = [f"[rank {first.rank} on {first.host}] {line}" for line in first.text.splitlines()]
    return "\n".join([*stacks, *lines]) + "\n"


def make_error_record(
    verdict: RootCause, who: RankIdentity | None, callstack: str, timestamp: int
) -> dict[str, object]:
    """Return what torchelastic's error files hold (torch.distributed.elastic.multiprocessing.errors).

    `timestamp` is in seconds since the epoch. Our own besides: `kind`, `cause`, `where`, `signal` and `outside` as in
    Verdict; the rank whose process writes it has made `steps` (calls of mpiddp.should_stop()).
    """
    first = verdict.first
    rank = first.rank if first.rank != NOBODY else None
    message = first.cause if first.kind == OWN or rank is None else f"rank {rank} on {first.host}: {first.cause}"
    extra = {"py_callstack": callstack or first.text, "timestamp": str(timestamp), "rank": rank,
             "host": first.host, "exitcode": first.status, "pid": who.pid if who else None, "kind": first.kind,
             "cause": first.cause, "where": first.where, "signal": first.signal, "outside": verdict.outside,
             "steps": progress.steps()}
    return {"message": {"message": message, "errorCode": first.status, "extraInfo": extra}}
