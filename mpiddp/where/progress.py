"""How far this rank is: the steps that it has made, and the collectives that it has entered."""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
import time
from collections.abc import Iterator
from typing import Any

from ..base.text import format_ranges
from .protocol import Progress

MOST_GROUPS = 64  # that are told of
FEW = 5  # ranges of ranks

_count = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")  # calls of mpiddp.should_stop(), shared with the sentinel
_step_s = 0.0  # when the last one was, on time.monotonic()'s clock


def note_step() -> None:
    """Count a step."""
    global _step_s
    _count[0] += 1
    _step_s = time.monotonic()


def steps() -> int:
    """Return how many steps this rank has made, or this sentinel's, also one that is gone."""
    return _count[0]


def progress() -> Progress:
    """Return how far this rank is, from any of its threads."""
    cuda = sys.modules.get("torch.cuda")
    return Progress(steps(), round(time.monotonic() - _step_s, 1) if steps() else 0.0, json.dumps([*collectives()]),
                    bool(cuda and getattr(cuda, "is_initialized", bool)()))


def collectives() -> Iterator[tuple[int, str, str]]:
    """Yield of each process group how many collectives the rank has entered there, its ranks, and its name.

    torch counts them itself, for gloo and NCCL alike (torch/csrc/distributed/c10d/ProcessGroup.hpp,
    getSequenceNumberForGroup); a group that does not count is left out.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world: Any = getattr(c10d, "_world", None)
    for group in list(getattr(world, "pg_names", ()))[:MOST_GROUPS]:
        with contextlib.suppress(Exception):  # a group that a program has made may raise anything
            number, name = group._get_sequence_number_for_group(), world.pg_names[group]
            yield int(number), format_ranges(world.pg_group_ranks[group], FEW), str(name)
