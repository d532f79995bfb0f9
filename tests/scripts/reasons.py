"""Why a script does something else than under plain Python: what is not explained here is a fault."""

from __future__ import annotations

import re
from typing import NamedTuple

from .ways import HELD, ONE_RANK, TORCHRUN, TWO_RANKS


class Reason(NamedTuple):
    """Explains differences, of which a pattern matches all, in some ways; of the named scripts, or of all."""

    ways: tuple[str, ...]
    difference: str
    why: str
    scripts: tuple[str, ...] = ()


OURS = (ONE_RANK, TWO_RANKS, HELD)

REASONS = [
    Reason((TORCHRUN,), r"status 1, not \d+", "torchrun's status is 1 for any failure"),
    Reason(OURS, r"status 3, not 1|stderr lacks `SyntaxError",
           "refused before the start, with `script-error` and the line", ("syntax-error", "bad-encoding")),
    Reason(OURS, r"stdout `True False", "torch's hook, which names the rank, comes with the process group",
           ("displayhook",)),
    Reason(OURS, r"stdout `\S+ \w+ True", "stdout is line-buffered", ("stdout-encoding",)),
    Reason((HELD,), r"file \S+ `b'kept'`, not `b''`", "open files are flushed before Python's end", ("open-cycle",)),
    Reason((TORCHRUN,), r"stderr has .*(torch.distributed.elastic)", "torchrun's own report"),
]


def explain(name: str, way: str, difference: str) -> str:
    """Return why a script does something else in a way, empty if nobody knows."""
    for reason in REASONS:
        if way in reason.ways and name in (reason.scripts or (name,)) and re.match(reason.difference, difference):
            return reason.why
    return ""
