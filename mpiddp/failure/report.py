"""The report of a job's failure: as text on the terminal, and as JSON for --error-file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from ..base.ranks import RankIdentity
from ..base.stderr import write_line
from ..base.text import memory_advice
from .root_cause import NOBODY, ReportKind, RootCause

KILLED_WORDS = (  # of a rank, a worker of a DataLoader, of torch.multiprocessing.spawn()
    "killed by SIGKILL", "is killed by signal: Killed", "terminated with signal SIGKILL")
POOL_ERROR = "BrokenProcessPool: "  # of concurrent.futures, which does not say how its worker has ended
POOL_ADVICE = ("find out how a worker of the pool ended: it exited, crashed or was killed (a lack of memory), "
               'or it was spawned by a script without `if __name__ == "__main__":`')
PROMPT_ERRORS = ("BdbQuit", "EOFError: EOF when reading a line")  # of pdb and input() at the end of stdin
PROMPT_ADVICE = "and only rank 0 has the terminal: use `if dist.get_rank() == 0: breakpoint()`"


def print_failure(root_cause: RootCause, rank: RankIdentity | None, after_s: float, log_lost: int = -1,
                  print_text: Callable[[str], None] = write_line) -> str:
    """Print why the job failed, in one piece, and return the text; see format_failure()."""
    text = format_failure(root_cause, rank, after_s, log_lost)
    print_text(text)
    return text


def format_failure(root_cause: RootCause, rank: RankIdentity | None, after_s: float, log_lost: int = -1) -> str:
    """Return why a job failed, in a block of lines; in one line if a signal from outside ended it.

    `rank` failed `after_s` after its start; None if only the root cause is known. `log_lost` is the first byte that its
    log has lost, -1 for none.
    """
    first = root_cause.first
    if root_cause.outside:
        line = f"mpiddp: ended by {first.signal}, sent to the job from outside, {after_s:.1f} s after the start"
        return "\n".join(filter(None, (line, root_cause.others))) + "\n"
    rows = [("where", first.where)]
    if rank is not None:
        place = f"{rank.rank} of {rank.world_size}, local rank {rank.local_rank} on {rank.host}"
        rows.append(("rank", f"{place}, {rank.device}, pid {rank.pid}"))
    if first.signal == "SIGKILL" or any(words in first.cause for words in KILLED_WORDS):
        rows.append(("do", (rank.memory_advice if rank else "") or memory_advice()))
    if first.cause.startswith(POOL_ERROR):
        rows.append(("do", POOL_ADVICE))
    if first.cause.startswith(PROMPT_ERRORS) and first.rank > 0:
        rows.append(("do", f"rank {first.rank} was at a prompt, {PROMPT_ADVICE}"))
    if first.cause.startswith("ModuleNotFoundError: "):
        rows.append(
            ("do", f"install it in the environment of {sys.executable}, or activate the environment that has it"))
    log = rank.log.path + (f" (incomplete from byte {log_lost})" if log_lost >= 0 else "") if rank else ""
    rows += [("when", f"{after_s:.1f} s after the start"), ("status", str(first.status)),
             ("others", root_cause.others), ("log", log)]
    name = "" if first.rank == NOBODY else f"rank {first.rank} on {first.host}: "
    stacks = [f"[rank {first.rank} on {first.host}] {line}" for line in first.text.splitlines()]
    return "\n".join([*stacks, f"mpiddp: failed: {name}{first.cause}",
                      *(f"  {label:<8} {text}" for label, text in rows if text)]) + "\n"


def format_error_file(root_cause: RootCause, rank: RankIdentity | None, steps: int, callstack: str = "") -> str:
    """Return why a job failed, as the JSON of --error-file; the rank that writes it has made `steps`."""
    return json.dumps(make_error_record(root_cause, rank, callstack, int(time.time()), steps))


def make_error_record(
    root_cause: RootCause, rank: RankIdentity | None, callstack: str, timestamp: int, steps: int
) -> dict[str, object]:
    """Return what torchelastic's error files hold (torch.distributed.elastic.multiprocessing.errors).

    `timestamp` is in seconds since the epoch. Additions of ours: `kind`, `cause`, `where`, `signal` and `outside` as in
    RootCause, and the `steps` (calls of mpiddp.should_stop()) of the rank whose process writes it.
    """
    first = root_cause.first
    number = first.rank if first.rank != NOBODY else None
    name = "" if first.kind == ReportKind.ERROR or number is None else f"rank {number} on {first.host}: "
    extra = {"py_callstack": callstack or first.text, "timestamp": str(timestamp), "rank": number,
             "host": first.host, "exitcode": first.status, "pid": rank.pid if rank else None, "kind": first.kind,
             "cause": first.cause, "where": first.where, "signal": first.signal, "outside": root_cause.outside,
             "steps": steps}
    return {"message": {"message": name + first.cause, "errorCode": first.status, "extraInfo": extra}}
