"""What starts several processes of a training on a node by itself, and must not be started by a launcher."""

from __future__ import annotations

from typing import NamedTuple


class Starter(NamedTuple):
    """A starter of processes: its program, and the modules that python -m runs instead."""

    name: str
    program: str
    modules: tuple[str, ...] = ()


TORCHRUN = Starter("torchrun", "torchrun", ("torch.distributed.run", "torch.distributed.elastic.run"))
TORCH_LAUNCH = Starter("torch.distributed.launch", "", ("torch.distributed.launch",))
ACCELERATE = Starter("accelerate launch", "accelerate", ("accelerate.commands.launch", "accelerate.launch"))
DEEPSPEED = Starter("deepspeed", "deepspeed", ("deepspeed.launcher.runner", "deepspeed"))
STARTERS: tuple[Starter, ...] = (TORCHRUN, TORCH_LAUNCH, ACCELERATE, DEEPSPEED)


def is_starter(target: str) -> bool:
    """Return whether a program or module starts processes by itself."""
    return any(target == row.program or target in row.modules for row in STARTERS) and bool(target)
