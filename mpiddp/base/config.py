"""The options of a job, read once and never changed."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datetime import timedelta

DEFAULT_STARTUP_TIMEOUT_S = 300.0
DEFAULT_ABORT_GRACE_S = 5.0
DEFAULT_FOLD_WINDOW_S = 1.0
DEFAULT_PREFIX = "[{rank} {host}] "
BLOCKED_EXIT_TIMEOUT_S = 300.0  # --exit-timeout of a deadlock; NCCL's timeout is 600 s
AUTO_FOLDER = "auto"  # for --stage
RESTART_VARIABLE = "MPIDDP_RESTART_COUNT"  # which mpiddp.supervise sets
SITE_VARIABLE = "MPIDDP_SITE"  # names the site profile; empty: none is wanted
SITE_PREFIX_FILE = "share/mpiddp/site.toml"  # the site profile in the folder of Python's environment
RUNNING_SUFFIX = ".running"  # of the file beside a supervised job's report that exists until the job ends in order
STEPS_SUFFIX = ".steps"  # of the file with the number of steps of a job that ended in order, or that ranks stopped


class TextEnum(str, Enum):
    """An enumeration of texts that formats as its text (enum.StrEnum is new in Python 3.11)."""

    __str__ = str.__str__


class Binding(TextEnum):
    """--bind: a fair share of the node's cores, all that the node allows, or what the launcher gave."""

    AUTO = "auto"
    NONE = "none"
    LAUNCHER = "launcher"


class CheckMode(TextEnum):
    """--check: whether the nodes are measured before the script, and whether a bad one only causes a warning."""

    OFF = ""
    WARN = "warn"
    STRICT = "strict"


class Script(NamedTuple):
    """The program to run, with its own arguments: a file, a module if `is_module`, or the code itself if `is_code`.

    A file may be a folder or a zip file with a `__main__`.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_code: bool = False

    @property
    def is_file(self) -> bool:
        """Whether the program is at a path."""
        return not (self.is_module or self.is_code)

    @property
    def command(self) -> str:
        """What follows `python` in its command line; of code, only `-c`."""
        words = ["-c"] if self.is_code else ["-m", self.target] if self.is_module else [self.target]
        return " ".join([*words, *self.arguments])


class LocalStart(NamedTuple):
    """The ranks to start on this machine, and the arguments of each: options, script and the script's own."""

    ranks: int
    arguments: tuple[str, ...]


class DryRunShape(NamedTuple):
    """--dry-run: describe a job of this shape; `port` is 0 unless the user named one."""

    nodes: int
    ranks_per_node: int
    port: int = 0


class DryRunFacts(NamedTuple):
    """--dry-run --facts: plan a job from the facts in a file."""

    facts_file: str
    config: LaunchConfig


class OutputFilter(NamedTuple):
    """--show: show the output of all ranks, of those named by rank or local rank, or of all `folded`.

    If the folding `keeps_numbers`, lines that differ in numbers stay apart.
    """

    all_ranks: bool = True
    ranks: frozenset[int] = frozenset()
    local_ranks: frozenset[int] = frozenset()
    folded: bool = False
    keeps_numbers: bool = False

    def __str__(self) -> str:
        names = (*map(str, sorted(self.ranks)), *(f"local-{rank}" for rank in sorted(self.local_ranks)))
        if self.folded:
            return "fold-equal" if self.keeps_numbers else "fold"
        return "all" if self.all_ranks else ",".join(names) or "none"

    def has(self, rank: int, local_rank: int) -> bool:
        """Return whether a rank's output is shown."""
        return self.all_ranks or rank in self.ranks or local_rank in self.local_ranks


class LaunchConfig(NamedTuple):
    """The options of a job; the same on every rank."""

    script: Script | None = None  # None: the caller keeps its own main()
    backend: str | None = None  # of the process group; None: torch's own for the device
    device: str | None = None  # a type of torch's; None: the accelerator that torch finds
    init: bool = True  # whether we create the process group
    agent: bool = True  # whether the rank has an agent

    startup_timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S
    exit_timeout_s: float | None = None  # for which finished ranks wait for others; None: see BLOCKED_EXIT_TIMEOUT_S
    stall_s: float | None = None  # without progress, after which the ranks' places are printed; None: never
    stall_abort: bool = False  # the job ends then
    group_timeout: timedelta | None = None  # of the process group's collectives; None: torch's default
    abort_grace_s: float = DEFAULT_ABORT_GRACE_S  # for the ranks of a failed job to exit
    stop_before_s: float | None = None  # before the walltime, from which on should_stop() is True; None: never

    quiet: bool = False
    explain: int | None = None  # the rank whose environment is explained; the script does not run then
    error_file: str = ""  # receives the reason for a failure as JSON
    full_traceback: bool = False  # tracebacks include libraries' frames
    map_file: str = ""  # .json or .svg, receives every rank's placement
    trace_file: str = ""  # receives the times at which each rank began each stage
    facts_file: str = ""  # receives what each rank discovers on its node

    log_dir: str = ""
    output_filter: OutputFilter = OutputFilter()
    fold_window_s: float = DEFAULT_FOLD_WINDOW_S  # equal lines of several ranks are folded if they come within it
    drops_lines: bool = False  # a rank that prints more than can be shown does not wait, but loses lines
    prefix: str = ""  # of each line shown; str.format() with rank, local_rank, host, time (folded: rank, time)

    local_rank_option: str = ""  # by which the script gets its local rank; empty: none
    binding: Binding = Binding.AUTO
    threads: int | None = None  # of a rank; None: the number of its cores
    idle_gpus: bool = False  # the only rank of a node may have several GPUs
    share_gpus: bool = False  # several ranks may share a GPU
    virtual_local_rank: bool = False  # each rank sees only its own GPU, and LOCAL_RANK is 0
    gpu_aware_mpi: bool = False  # Cray MPICH's GPU support stays as the user has set it

    interface: str | None = None  # on which nodes meet; None: the best one
    master_addr: str | None = None
    port: int = 0  # of rank 0's store; the next one is that of its agent; 0: free ones

    check: CheckMode = CheckMode.OFF
    stage: str = ""  # the folder to which the environment is staged, or AUTO_FOLDER; empty: none
    stage_keep: bool = False  # the staged environment stays there at the end
    unknown_variables: tuple[str, ...] = ()  # that look like an option's
    site_options: tuple[str, ...] = ()  # with the site profile's value, as in --stall=600
    site_conflicts: tuple[str, ...] = ()  # which of the profile's options are not used, and why

    def job_wide_options(self) -> dict[str, str]:
        """Return the options on which all ranks must agree, those that are not at their defaults."""
        options = {name: str(value) for name in JOB_WIDE_FIELDS
                   if (value := getattr(self, name)) != self._field_defaults[name]}
        options |= {"show": str(self.output_filter)} if self.output_filter != OutputFilter() else {}
        return options | {name: "set" for name in ("log_dir", "trace_file") if getattr(self, name)}


# Each rank acts on these: with different values ranks would wait for each other for ever, or do only in part what the
# user wants, as if a variable reached the launcher's own node alone. Others concern one rank, or rank 0's counts.
JOB_WIDE_FIELDS = ("backend", "device", "init", "startup_timeout_s", "exit_timeout_s", "group_timeout", "explain",
                   "virtual_local_rank", "check", "stage", "prefix", "stop_before_s")
