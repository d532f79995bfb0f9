"""What the user asked for, read once and never changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datetime import timedelta

DEFAULT_STARTUP_TIMEOUT_S = 300.0
RESTARTS = "MPIDDP_RESTART_COUNT"  # a variable that mpiddp.supervise sets
RUNNING = ".running"  # ends the name of a file beside the report of a job that it started, until the job ends in order
STOPPED = ".stopped"  # ends the name of a file with the number of steps of a job that ranks have agreed to stop
DEFAULT_ABORT_GRACE_S = 5.0
DEFAULT_FOLD_WINDOW_S = 1.0
DESERTED_TIMEOUT_S = 300.0  # --exit-timeout where all others wait in vain; NCCL gives up after 600 s
PREFIX = "[{rank} {host}] "
AUTO = "auto"  # for --stage
STANDARD_INPUT = "-"  # in the place of a script's path


class Script(NamedTuple):
    """The program to run, with its own arguments: a file, a module if `is_module` is true, or the code itself.

    A file may be a folder or a zip file with a `__main__`, or STANDARD_INPUT.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_code: bool = False

    @property
    def is_file(self) -> bool:
        """Whether the program is at a path."""
        return not (self.is_module or self.is_code or self.is_input)

    @property
    def is_input(self) -> bool:
        """Whether the program is read from standard input."""
        return self.target == STANDARD_INPUT and not (self.is_module or self.is_code)


class Shape(NamedTuple):
    """The shape of a job that is described and not started (--dry-run); `port` is 0 unless the user named one."""

    nodes: int
    ranks_per_node: int
    port: int = 0


class Desk(NamedTuple):
    """A job that is planned from the facts in a file, and not started (--dry-run --facts)."""

    facts_file: str
    config: LaunchConfig


class Shown(NamedTuple):
    """The ranks whose output is shown: all, or those named by rank or by local rank; or all, `folded`."""

    everyone: bool = True
    ranks: frozenset[int] = frozenset()
    local_ranks: frozenset[int] = frozenset()
    folded: bool = False

    def has(self, rank: int, local_rank: int) -> bool:
        """Tell whether a rank's output is shown."""
        return self.everyone or rank in self.ranks or local_rank in self.local_ranks


class LaunchConfig(NamedTuple):
    """The options of a job; the same on every rank.

    `script` is None if the caller keeps its own main(). `backend` None takes torch's own backend for the
    device. `device` None takes the accelerator that torch finds. `group_timeout` is for the process group's
    collectives; None takes torch's default. `exit_timeout_s` is how long finished ranks wait for the others;
    None sets no limit, but DESERTED_TIMEOUT_S where all others wait in collectives for finished ones. When no rank has
    moved for `stall_s`, rank 0's sentinel says where they are, and ends the job if `stall_abort`; None never does.
    `explain` is a rank whose environment is explained; the script does not run then.
    `abort_grace_s` is the time that the ranks of a failed job have to end. `error_file` receives the reason of a
    failure as JSON, `log_dir` each rank's output; empty writes neither. `log_compress` is gzip, zstd, or empty for
    logs as they are; a log that has `log_max_bytes` goes on in another file, unless that is 0. `full_traceback` shows
    libraries' frames in what a rank that fails prints. `prefix` is put before each line of output, with the fields
    `rank`, `local_rank`, `host` and `time` of str.format(); of folded lines, `rank` and `time`. Lines are folded that
    ranks say within `fold_window_s` of each other; a rank that says more than can be shown waits, unless `drops_lines`.
    `python_exit` ends the process by the interpreter's own exit. `binding` is a policy for the cores
    (`plan.cores.shares`). `threads` is the number of a rank's threads; None takes the number of its cores. Rank 0
    writes every rank's place to `map_file`, a .json or .svg file, and the times
    at which each rank began each stage to `trace_file`; empty writes neither. `stop_before_s` is how long
    before the end of the Slurm job mpiddp.should_stop() becomes true; None leaves that to signals.
    `idle_gpus` lets the only rank of a node have several GPUs. `share_gpus` lets several ranks share a GPU.
    `virtual_local_rank` shows each rank only its own GPU and exports LOCAL_RANK=0. `gpu_aware_mpi` leaves Cray MPICH's
    support for GPUs as the user set it. `interface` and
    `master_addr` name the network on which nodes meet; None takes the best one. `port` of rank 0's node is where
    they do, and the next one is its sentinel's; 0 takes free ones. `local_rank_option` is the
    option by which the script is told its local rank, empty for none. Rank 0 writes what each rank sees of its
    node to `facts_file`; empty writes nothing. `check` is warn or strict where nodes are measured before the script,
    empty where they are not; rank 0 keeps the figures in `check_history`, unless that is empty. `stage` is the folder
    into which the environment is staged, AUTO for the best one, empty for none; `stage_keep` leaves it there at the
    end. `unknown_variables` are those that look like options' and are none.
    """

    script: Script | None = None
    backend: str | None = None
    device: str | None = None
    init: bool = True
    startup_timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S
    exit_timeout_s: float | None = None
    stall_s: float | None = None
    stall_abort: bool = False
    group_timeout: timedelta | None = None
    quiet: bool = False
    explain: int | None = None
    abort_grace_s: float = DEFAULT_ABORT_GRACE_S
    error_file: str = ""
    full_traceback: bool = False
    log_dir: str = ""
    log_compress: str = ""
    log_max_bytes: int = 0
    shown: Shown = Shown()
    fold_window_s: float = DEFAULT_FOLD_WINDOW_S
    drops_lines: bool = False
    prefix: str = ""
    python_exit: bool = False
    binding: str = "auto"
    threads: int | None = None
    map_file: str = ""
    trace_file: str = ""
    stop_before_s: float | None = None
    idle_gpus: bool = False
    share_gpus: bool = False
    virtual_local_rank: bool = False
    gpu_aware_mpi: bool = False
    interface: str | None = None
    master_addr: str | None = None
    port: int = 0
    local_rank_option: str = ""
    facts_file: str = ""
    check: str = ""
    check_history: str = ""
    stage: str = ""
    stage_keep: bool = False
    unknown_variables: tuple[str, ...] = ()

    def common(self) -> dict[str, str]:
        """Return the options that all ranks have to have alike, as far as they are not left at their defaults."""
        found = {name: str(getattr(self, name)) for name in COMMON if getattr(self, name) != self._field_defaults[name]}
        found |= {"show": "fold"} if self.shown.folded else {}
        return found | {name: "set" for name in ("log_dir", "trace_file") if getattr(self, name)}


# What each rank acts on, so that some would wait for others in vain; the rest is for rank 0 to know, or for one rank.
COMMON = ("backend", "device", "init", "startup_timeout_s", "exit_timeout_s", "group_timeout", "explain",
          "virtual_local_rank", "check", "stage")
