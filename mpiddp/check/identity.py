"""Who a rank is in a check, and what it is compared by."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from ..base.ranks import JobEnv, RankPosition
from ..discovery.runtime import hostname
from .bench import machine
from .bench.rank import ANSWER_S
from .bench.timeouts import on_device
from .stats.schema import RankInfo

Answer = TypeVar("Answer")


def describe(place: RankPosition | JobEnv, device: torch.device) -> RankInfo:
    """Return who this rank is; its kind is the type of its device where that does not tell more."""
    threads = torch.get_num_threads()  # of this thread
    kind = told(device, lambda: machine.kind(device, threads), device.type)
    return RankInfo(hostname(), place.node_rank, place.local_rank, str(device), kind, machine.switch(os.environ))


def told(device: torch.device, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Return what a device tells of itself, or `otherwise` where it fails or hangs: that is told when it measures."""
    try:
        return on_device(device, ANSWER_S, ask)
    except (RuntimeError, AssertionError, OSError):  # torch's, of a driver; TimeoutError is an OSError
        return otherwise
