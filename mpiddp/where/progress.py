"""The progress of a rank: its steps, and the collectives that it has entered."""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from ..base.text import format_ranges
from ..failure.stack import BACKWARD_FUNCTION
from .protocol import Progress

C10D_MODULE = "torch.distributed.distributed_c10d"
MAX_GROUPS = 64
MAX_RANGES = 5  # of a group's ranks

_count = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")  # calls of mpiddp.should_stop(), shared with the agent
_noted = _count[1:2]  # a bit for each signal that is noted for should_stop(), shared as well
_step_s = 0.0  # time of the last one (time.monotonic())


def count_step() -> None:
    """Count a step."""
    global _step_s
    _count[0] += 1
    _step_s = time.monotonic()


def step_count() -> int:
    """Return the number of steps of this rank, or of this agent's rank, even after that has ended."""
    return _count[0]


def publish_noted_signals(numbers: Iterable[int]) -> None:
    """Tell the agent which signals are noted for should_stop()."""
    _noted[0] = sum(1 << number for number in numbers)


def is_noted(number: int) -> bool:
    """Return whether a signal is noted for should_stop(), and nothing else happens."""
    return bool(_noted[0] >> number & 1)


def find_unasked_signal(numbers: Iterable[int]) -> int:
    """Return the most urgent of these signals that waits for this rank's first should_stop(), 0 for none."""
    return 0 if step_count() else max((number for number in numbers if _noted[0] >> number & 1), default=0)


def read_progress(frame: FrameType | None) -> Progress:
    """Return this rank's progress, with its main thread at `frame`; may be called in any thread."""
    cuda = sys.modules.get("torch.cuda")
    age_s = round(time.monotonic() - _step_s, 1) if step_count() else 0.0
    return Progress(step_count(), age_s, json.dumps([*collective_sequences()]),
                    bool(cuda and getattr(cuda, "is_initialized", bool)()), find_waited_group(frame))


def collective_sequences() -> Iterator[tuple[int, str, str]]:
    """Yield, for each process group, its sequence number in this rank, its ranks, and its name.

    torch counts collectives for gloo and NCCL alike (torch/csrc/distributed/c10d/ProcessGroup.hpp,
    getSequenceNumberForGroup). Groups that do not count are omitted.
    """
    world: Any = getattr(sys.modules.get(C10D_MODULE), "_world", None)
    for group in list(getattr(world, "pg_names", ()))[:MAX_GROUPS]:
        with contextlib.suppress(Exception):  # a group defined by the script may raise anything
            number, name = group._get_sequence_number_for_group(), world.pg_names[group]
            yield int(number), format_ranges(world.pg_group_ranks[group], MAX_RANGES), str(name)


def find_waited_group(frame: FrameType | None) -> str:
    """Return the name of the process group in whose collective a stack ends; empty if it ends elsewhere, or if unknown.

    The functions of torch's module that take a `group` wait for it in C++; a backward pass waits in the only group.
    What other backends than gloo and NCCL do is unknown.
    """
    c10d: Any = sys.modules.get(C10D_MODULE)
    with contextlib.suppress(Exception):  # no such module, frame, variable or group
        names = c10d._world.pg_names
        if frame is not None and frame.f_globals is vars(c10d):
            group = frame.f_locals["group"] or c10d._world.default_pg
        elif frame is not None and frame.f_code.co_name == BACKWARD_FUNCTION:
            (group,) = names
        else:
            return ""
        backends = {part.partition(":")[2] for part in c10d.get_backend_config(group).split(",")}
        return str(names[group]) if backends <= {"gloo", "nccl"} else ""
    return ""
