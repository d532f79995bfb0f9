"""An accelerator that torch learns of from a package when it is imported, as of Ascend's or Gaudi's.

It has two devices and a backend, which is gloo, and no kernels. Torch calls it PrivateUse1. The device with the number
IMAGINED_BUSY fails when it is first used, as a GPU on which another job runs.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.utils import backend_registration

COUNT = 2


class Module:
    """What torch.imagined is."""

    current = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.current = torch.device(device).index
        if str(self.current) == os.environ.get("IMAGINED_BUSY"):
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """What torch.accelerator asks."""

    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, _: int) -> bool:
        return True


class Guard(torch._C._acc.DeviceGuard):
    """What tensors ask."""

    def type_(self) -> torch._C._autograd.DeviceType:
        return torch._C._autograd.DeviceType.PrivateUse1


def load() -> None:
    """Register it; torch calls this when it has imported itself."""
    backend_registration._setup_privateuseone_for_python_backend("imagined", Module(), Hooks(), Guard())
    dist.Backend.register_backend("imagiccl", dist.ProcessGroupGloo, devices=["imagined"])
