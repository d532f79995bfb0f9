"""Why a script does something else than under plain Python: what is not explained here is a fault."""

from __future__ import annotations

import re
from typing import NamedTuple

from .ways import ONE_RANK, TORCHRUN, TWO_RANKS


class Reason(NamedTuple):
    """Explains differences, of which a pattern matches all, in some ways; of the named scripts, or of all."""

    ways: tuple[str, ...]
    difference: str
    why: str
    scripts: tuple[str, ...] = ()


OURS = (ONE_RANK, TWO_RANKS)

REASONS = [
    Reason((TORCHRUN,), r"status 1, not \d+", "torchrun's status is 1 for any failure"),
    Reason((TWO_RANKS,), r"status (6, not 134|9, not 137|11, not 139|14, not 142|15, not 1(34|37|39|42|43))$",
           "MPICH's mpiexec ends with the signal's number, or'ed with that of the signal that ends the other rank"),
    Reason(OURS, r"status 3, not 1|stderr lacks `SyntaxError",
           "refused before the start, with `script-error` and the line", ("syntax-error", "bad-encoding")),
    Reason(OURS, r"file a.txt `b'kept'`, not `b''`",
           "plain Python may close a file in a cycle before the buffer that writes to it", ("open-cycle",)),
    Reason(OURS, r"stderr lacks `(Exception ignored in: <function Log|NameError)|file a.txt `b'deleted'`, not",
           "plain Python has taken its builtins apart by then", ("del-writes",)),
    Reason(OURS, r"status 0, not 120|stderr lacks `(Exception ignored in|ValueError)",
           "the last flush of a stream that the script has put there, or taken apart, may fail",
           ("stdout-detached", "stdout-flush-raises")),
    Reason(OURS, r"stdout `True False", "torch's hook, which names the rank, comes with the process group",
           ("displayhook",)),
    Reason(OURS, r"stdout `\S+ \w+ True", "stdout is line-buffered", ("stdout-encoding",)),
    Reason((TORCHRUN,), r"stderr has .*(torch.distributed.elastic)", "torchrun's own report"),
]


def explain(name: str, way: str, difference: str) -> str:
    """Return why a script does something else in a way, empty if nobody knows."""
    for reason in REASONS:
        if way in reason.ways and name in (reason.scripts or (name,)) and re.match(reason.difference, difference):
            return reason.why
    return ""
