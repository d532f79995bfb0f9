"""Where a rank sits."""

from __future__ import annotations

from typing import NamedTuple

from ..facts.gpus import Gpu


class Seat(NamedTuple):
    """Where a rank sits: its node (by number and by hostname), device, CPUs, threads, network interface and process.

    `gpu` is what is known of the device, None for a CPU. `numa` are the NUMA nodes of the CPUs.
    `interface` is empty if torch chooses it.
    """

    rank: int
    node: int
    host: str
    device: str
    gpu: Gpu | None
    cpus: frozenset[int]
    numa: tuple[int, ...]
    threads: int
    interface: str
    pid: int = 0
