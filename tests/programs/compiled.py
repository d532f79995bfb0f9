"""Compile a function with torch.compile on the CPU, and say what came out, to the bit."""

import torch


@torch.compile
def act(x: torch.Tensor) -> torch.Tensor:
    """Return what several operations make of a tensor, in one kernel."""
    return (x.sin() * 2 + x.exp().relu()).cumsum(0)


torch.manual_seed(0)
print(act(torch.randn(1000)).numpy().tobytes().hex()[:400], flush=True)
