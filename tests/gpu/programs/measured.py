"""Print a GPU's figures as JSON: those that a rank measures by itself, and those of plain torch with CUDA's events."""

import json

import torch

from mpiddp.check.bench import rank

here = torch.device("cuda", 0)


def seconds(work, times=50):
    """Return the shortest time of a piece of work, in windows of many."""
    for _ in range(times):
        work()
    found = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / times)
    return min(found)


def plain():
    """Return the figures of plain torch."""
    fast = torch.cuda.get_device_capability(here)[0] >= 8
    kind = torch.bfloat16 if fast else torch.float32
    one, other = torch.randn(8192, 8192, device=here).to(kind), torch.randn(8192, 8192, device=here).to(kind)
    there, copy = torch.ones(2**29, dtype=torch.uint8, device=here), torch.ones(2**29, dtype=torch.uint8, device=here)
    pinned, part = torch.ones(2**26, dtype=torch.uint8).pin_memory(), there[:2**26]
    return {
        "matrix": 2 * 8192**3 / seconds(lambda: one @ other, 50 if fast else 5),
        "device-memory": 2 * 2**29 / seconds(lambda: copy.copy_(there)),
        "to-device": 2**26 / seconds(lambda: part.copy_(pinned, non_blocking=True)),
        "from-device": 2**26 / seconds(lambda: pinned.copy_(part, non_blocking=True)),
    }


seen = plain()
torch.cuda.empty_cache()
seen["device-free"] = torch.cuda.mem_get_info(here)[0]
reserved = torch.cuda.memory_reserved(here)  # the matrix library's workspace, in a block of plain's
found = rank.measure_rank(here, False, 3.0)
left = torch.cuda.memory_reserved(here) - reserved
print(json.dumps({"own": found.values, "told": found.reports, "plain": seen, "left_bytes": left}))
