"""The progress of a rank: the steps that it has made, and the collectives that it has entered."""

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

MAX_GROUPS = 64
MAX_RANGES = 5  # of a group's ranks

_count = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")  # calls of mpiddp.should_stop(), shared with the sentinel
_step_s = 0.0  # when the last one was, on time.monotonic()'s clock


def count_step() -> None:
    """Count a step."""
    global _step_s
    _count[0] += 1
    _step_s = time.monotonic()


def step_count() -> int:
    """Return how many steps this rank has made, or this sentinel's rank, even if it is gone."""
    return _count[0]


def read_progress() -> Progress:
    """Return this rank's progress, from any of its threads."""
    cuda = sys.modules.get("torch.cuda")
    age_s = round(time.monotonic() - _step_s, 1) if step_count() else 0.0
    return Progress(step_count(), age_s, json.dumps([*collective_sequences()]),
                    bool(cuda and getattr(cuda, "is_initialized", bool)()))


def collective_sequences() -> Iterator[tuple[int, str, str]]:
    """Yield, for each process group, its sequence number in this rank, its ranks, and its name.

    torch counts collectives itself, for gloo and NCCL alike (torch/csrc/distributed/c10d/ProcessGroup.hpp,
    getSequenceNumberForGroup); a group that does not count is left out.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world: Any = getattr(c10d, "_world", None)
    for group in list(getattr(world, "pg_names", ()))[:MAX_GROUPS]:
        with contextlib.suppress(Exception):  # a group that a program has made may raise anything
            number, name = group._get_sequence_number_for_group(), world.pg_names[group]
            yield int(number), format_ranges(world.pg_group_ranks[group], MAX_RANGES), str(name)
