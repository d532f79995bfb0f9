"""Make a rank's device the current one."""

from __future__ import annotations

import torch


def use(name: str) -> torch.device:
    """Set the current device of this process and return it; the CPU needs no setting."""
    device = torch.device(name)
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    return device
