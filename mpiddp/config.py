"""What the user asked for, read once and never changed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

DEFAULT_STARTUP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Script:
    """The program to run: a file, or a module where `is_module`, with its own arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True)
class Shape:
    """The shape of a job that is only thought of."""

    nodes: int
    ranks_per_node: int


@dataclass(frozen=True)
class LaunchConfig:
    """The options of a job; the same on every rank.

    `script` is None where the caller keeps its own main(). `backend` None asks torch for the device's
    own. `group_timeout` is for the process group's collectives, None for torch's default.
    `exit_timeout_s` None waits for the last rank as long as it runs. `explain` is a rank whose
    environment shall be explained, in the place of running the script.
    """

    script: Script | None = None
    backend: str | None = None
    init: bool = True
    startup_timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S
    exit_timeout_s: float | None = None
    group_timeout: timedelta | None = None
    quiet: bool = False
    explain: int | None = None
