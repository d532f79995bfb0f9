"""What should_stop() costs a step, beside gloo's own all-reduce.

Run it by `mpiexec -n 2 python -m mpiddp tests/benchmarks/stopping.py [CALLS]`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import mpiddp

STEP_S = 0.001  # between two calls, as training has it


def median_us(call: Callable[[], object], calls: int) -> float:
    """Return the microseconds of a call, median."""
    found = []
    for _ in range(calls):
        busy_until = time.perf_counter() + STEP_S
        while time.perf_counter() < busy_until:
            pass
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found) * 1e6


def main() -> None:
    """Print the costs on rank 0."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    flag = torch.zeros(1)
    ours, blocking = median_us(mpiddp.should_stop, calls), median_us(lambda: dist.all_reduce(flag), calls)
    if dist.get_rank() == 0:
        print(f"should_stop() {ours:.1f} us, gloo all-reduce {blocking:.1f} us, median of {calls} calls", flush=True)


main()
