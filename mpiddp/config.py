"""What the user asked for, read once and never changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datetime import timedelta

DEFAULT_STARTUP_TIMEOUT_S = 300.0
DEFAULT_ABORT_GRACE_S = 5.0


class Script(NamedTuple):
    """The program to run: a file, or a module where `is_module`, with its own arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


class Shape(NamedTuple):
    """The shape of a job that is only thought of."""

    nodes: int
    ranks_per_node: int


class Shown(NamedTuple):
    """The ranks whose output is shown: all, or those named by rank or by local rank."""

    everyone: bool = True
    ranks: frozenset[int] = frozenset()
    local_ranks: frozenset[int] = frozenset()

    def has(self, rank: int, local_rank: int) -> bool:
        """Tell whether a rank's output is shown."""
        return self.everyone or rank in self.ranks or local_rank in self.local_ranks


class LaunchConfig(NamedTuple):
    """The options of a job; the same on every rank.

    `script` is None where the caller keeps its own main(). `backend` None asks torch for the device's
    own, `device` None takes the accelerator that there is. `group_timeout` is for the process group's
    collectives, None for torch's default. `exit_timeout_s` None waits for the last rank as long as it
    runs. `explain` is a rank whose environment shall be explained, in the place of running the script.
    `abort_grace_s` is the time that the ranks of a failed job have to end. `error_file` is where the
    reason is written as JSON, `log_dir` where each rank's output is, both empty for nowhere. `prefix`
    puts rank and host before each line. `python_exit` leaves the process by the interpreter's own exit.
    `binding` is a policy for the cores (`plan.cores.shares`), `threads` the number of a rank's threads,
    None for as many as it has cores. `map_file` is where rank 0 writes every rank's place, a .json or
    .svg; `trace_file` where it writes when each began which stage; both empty for nowhere. `stop_before_s`
    is how long before the end of its Slurm job a script that asks shall stop, None for as long as it
    runs. `idle_gpus` lets the only rank of a node have several GPUs, `share_gpus` lets several ranks have
    one; `virtual_local_rank` shows each rank its own alone and exports LOCAL_RANK=0. `interface` and
    `master_addr` name the network on which nodes meet, None for the best one.
    """

    script: Script | None = None
    backend: str | None = None
    device: str | None = None
    init: bool = True
    startup_timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S
    exit_timeout_s: float | None = None
    group_timeout: timedelta | None = None
    quiet: bool = False
    explain: int | None = None
    abort_grace_s: float = DEFAULT_ABORT_GRACE_S
    error_file: str = ""
    log_dir: str = ""
    shown: Shown = Shown()
    prefix: bool = False
    python_exit: bool = False
    binding: str = "auto"
    threads: int | None = None
    map_file: str = ""
    trace_file: str = ""
    stop_before_s: float | None = None
    idle_gpus: bool = False
    share_gpus: bool = False
    virtual_local_rank: bool = False
    interface: str | None = None
    master_addr: str | None = None
