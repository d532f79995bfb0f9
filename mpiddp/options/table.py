"""The options of a job: syntax, meaning, and the ``MPIDDP_…`` variable with each one's default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base.config import (
    AUTO_FOLDER,
    BLOCKED_EXIT_TIMEOUT_S,
    DEFAULT_ABORT_GRACE_S,
    DEFAULT_FOLD_WINDOW_S,
    DEFAULT_PREFIX,
    DEFAULT_STARTUP_TIMEOUT_S,
    RESTART_VARIABLE,
    SITE_VARIABLE,
    CheckMode,
)
from .parser import (
    FALSE,
    TRUE,
    is_stage_folder,
    parse_check_mode,
    parse_either,
    parse_interface,
    parse_map_file,
    parse_name,
    parse_option_name,
    parse_output_filter,
    parse_path,
    parse_port,
    parse_positive_int,
    parse_prefix,
    parse_rank,
    parse_seconds,
    parse_stage_folder,
    parse_timeout,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "backend": {
        "default": None, "type": parse_name,
        "help": "backend of the process group (default: torch's default for the accelerator, gloo without one)",
    },
    "device": {
        "default": "auto", "type": parse_name, "metavar": "TYPE",
        "help": "device type of the ranks: cpu, or an accelerator that torch supports, such as cuda or xpu (default: "
                "the accelerator that all ranks see, otherwise cpu)",
    },
    "interface": {
        "default": None, "type": parse_interface, "metavar": "NAME",
        "help": "network interface for traffic between nodes: a name, the beginning of a name, a network such as "
                "10.1.0.0/16, or a comma-separated list of these (default: the fastest one whose network all nodes "
                "share)",
    },
    "master-addr": {
        "default": None, "type": parse_name, "metavar": "ADDRESS",
        "help": "address of rank 0's node to which the other nodes connect (default: that of the interface)",
    },
    "port": {
        "default": 0, "type": parse_port, "metavar": "N",
        "help": "port of the store on rank 0's node; the agents use N+1, --show fold N+2 (default: free ports). "
                "NCCL, gloo and MPI use other ports, which have their own settings",
    },
    "bind": {
        "default": "auto", "choices": ("auto", "none", "launcher"),
        "help": "cores of a rank: auto divides the node's cores evenly if the launcher gave ranks shared or single "
                "cores, none allows all cores of the node, launcher keeps the launcher's binding (default: "
                "%(default)s)",
    },
    "threads": {
        "default": None, "type": parse_positive_int, "metavar": "N",
        "help": "threads of a rank (default: OMP_NUM_THREADS, SLURM_CPUS_PER_TASK, or the rank's cores)",
    },
    "group-timeout": {
        "default": None, "type": parse_timeout, "metavar": "SECONDS",
        "help": "timeout of the process group's collectives (default: torch's)",
    },
    "startup-timeout": {
        "default": str(DEFAULT_STARTUP_TIMEOUT_S), "type": parse_seconds, "metavar": "SECONDS",
        "help": "end the job if not all ranks are ready within this time (default: %(default)s)",
    },
    "exit-timeout": {
        "default": None, "type": parse_seconds, "metavar": "SECONDS",
        "help": "end the job if a rank is still running this long after another one finished (default: no limit, but "
                f"{BLOCKED_EXIT_TIMEOUT_S:g} in a deadlock, also if no rank has finished)",
    },
    "stall": {
        "default": None, "type": parse_seconds, "metavar": "SECONDS",
        "help": "print where each rank is if no rank has made progress for this long (default: never)",
    },
    "abort-grace": {
        "default": str(DEFAULT_ABORT_GRACE_S), "type": parse_seconds, "metavar": "SECONDS",
        "help": "after a failure, kill ranks that have not exited within this time (default: %(default)s)",
    },
    "stop-before": {
        "default": None, "type": parse_seconds, "metavar": "SECONDS",
        "help": "make mpiddp.should_stop() return True this long before the walltime; with this option, a script "
                "that never calls it ignores SIGTERM and SIGUSR1",
    },
    "error-file": {
        "default": "", "type": parse_path, "metavar": "FILE",
        "help": "write the reason for a failure to FILE, in torchelastic's format (default: TORCHELASTIC_ERROR_FILE)",
    },
    "log-dir": {
        "default": "", "type": parse_path, "metavar": "DIR",
        "help": "also write each rank's output to DIR/JOB/rank-00013.HOST.log, where JOB is the scheduler's job "
                "ID, or a random name without a scheduler; failure reports show the path. ranks.json in that "
                "folder has a line for each rank",
    },
    "prefix": {
        "default": "", "type": parse_prefix, "nargs": "?", "const": DEFAULT_PREFIX, "metavar": "FORMAT",
        "help": "print this before each line of output, for example '[{rank}.{local_rank} {host} "
                "{time:%%H:%%M:%%S}] ' (default: '" + DEFAULT_PREFIX + "'); a FORMAT without fields needs the "
                "equals sign: --prefix='> '",
    },
    "show": {
        "default": "all", "type": parse_output_filter, "metavar": "RANKS",
        "help": "ranks whose output to show: all, none, or a list such as 0,4,local-0; fold shows equal lines of "
                "several ranks once, with the ranks' numbers, also if numbers in them differ; fold-equal does so only "
                "if they do not (default: %(default)s)",
    },
    "fold-window": {
        "default": DEFAULT_FOLD_WINDOW_S, "type": parse_seconds, "metavar": "SECONDS",
        "help": "with --show fold: how long to wait for another rank to print the same line (default: %(default)s)",
    },
    "overflow": {
        "default": "wait", "type": parse_either("wait", "drop"), "metavar": "wait|drop",
        "help": "with --show fold, when a rank prints faster than the terminal: block the rank, or drop lines and "
                "print their number; logs are always complete (default: %(default)s)",
    },
    "map": {
        "default": "", "type": parse_map_file, "metavar": "FILE",
        "help": "write the placement of all ranks to FILE, as records (.json) or as a picture (.svg)",
    },
    "facts": {
        "default": "", "type": parse_path, "metavar": "FILE",
        "help": "write what each rank finds on its node to FILE, before placement; with --dry-run, read FILE instead "
                "and show the placement, on any machine",
    },
    "check": {
        "default": "", "type": parse_check_mode, "nargs": "?", "const": "warn", "metavar": "strict",
        "help": "benchmark the nodes before the script, in about a second, and warn of nodes that are slower than the "
                "others or short of space; with strict, do not start on such a node",
    },
    "stage": {
        "default": "", "type": parse_stage_folder, "nargs": "?", "const": AUTO_FOLDER, "metavar": "DIR",
        "help": "read Python's environment from shared file systems once for the whole job, and mirror it in DIR on "
                "each node (default: SLURM_TMPDIR, TMPDIR on a local disk, or /dev/shm). Only files that a start opens "
                "are staged; the first run only records which these are",
    },
    "trace": {
        "default": "", "type": parse_path, "metavar": "FILE",
        "help": "write a timeline of each rank's start to FILE, for ui.perfetto.dev; adds a collective to the start",
    },
    "traceback": {
        "default": "short", "type": parse_either("short", "full"), "metavar": "short|full",
        "help": "traceback of a failed rank: short folds the frames of libraries, full shows them; --error-file always "
                "has all (default: %(default)s)",
    },
    "pass-local-rank": {
        "default": "", "type": parse_option_name, "nargs": "?", "const": "--local-rank", "metavar": "NAME",
        "help": "pass --local-rank=N to the script before its own arguments, as torch.distributed.launch does; NAME is "
                "the script's spelling of the option (--local_rank)",
    },
    "explain": {
        "default": None, "type": parse_rank, "nargs": "?", "const": 0, "metavar": "RANK",
        "help": "start the job, print the source of each variable of RANK (default: 0), and exit without running the "
                "script",
    },
    "nodes": {"default": None, "type": parse_positive_int, "metavar": "N", "help": "number of nodes, for --dry-run"},
    "ranks-per-node": {
        "default": None, "type": parse_positive_int, "metavar": "M", "help": "ranks on each node, for --dry-run",
    },
}
FLAGS = {
    "dry-run": "print the ranks and variables of a job with --nodes and --ranks-per-node, or the map of a job on the "
               "nodes of --facts; start nothing",
    "no-init": "leave init_process_group() to the script; the environment variables are still set",
    "no-agent": "run the script in the launcher's own process, for a debugger or profiler that needs that: no reports, "
                "where, logs, prefix or --show; an uncaught exception ends the job by MPI_Abort",
    "stage-keep": "with --stage, keep the staged files on the nodes for the next job",
    "stall-abort": "end the job, with status 124, if no rank has made progress for --stall seconds",
    "quiet": "do not print the start line and the map",
    "allow-idle-gpus": "allow a single rank on a node with several GPUs, for a script that uses all in one process",
    "share-gpus": "let several ranks share a GPU, with gloo",
    "gpu-aware-mpi": "with Cray MPICH, keep MPICH_GPU_SUPPORT_ENABLED: the script passes GPU buffers to MPI itself",
    "virtual-local-rank": "show each rank only its own GPU and set LOCAL_RANK=0, like torchrun's option",
}
# The field of LaunchConfig that an option fills, if its name is another one.
CONFIG_FIELDS = {
    "startup-timeout": "startup_timeout_s", "exit-timeout": "exit_timeout_s", "abort-grace": "abort_grace_s",
    "stop-before": "stop_before_s", "stall": "stall_s", "fold-window": "fold_window_s", "overflow": "drops_lines",
    "show": "output_filter", "traceback": "full_traceback", "bind": "binding", "map": "map_file",
    "trace": "trace_file", "facts": "facts_file", "pass-local-rank": "local_rank_option",
    "allow-idle-gpus": "idle_gpus",
}


# Where an option's value may be left out: which next word is one, and not the script. Others need an equals sign.
OPTIONAL_VALUES: dict[str, Callable[[str], bool]] = {
    "prefix": lambda word: "{" in word, "check": lambda word: word in [*CheckMode], "stage": is_stage_folder,
    "explain": str.isdigit,
}


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our own options, and the command after them: a script, -m or -c, with all that follows.

    argparse has no option that takes all arguments after it, "--" included, unchanged. Our options may be written with
    underscores, as torchrun's may.
    """
    ours: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "--", "-"):
        name, *value = rest.pop(0).split("=", 1)
        name = dashed if (dashed := name.replace("_", "-")).removeprefix("--") in {*OPTIONS, *FLAGS} else name
        if count := re.fullmatch(r"-np?(\d*)", name):
            value = [count[1]] if count[1] else value
            ours += ["-n", *(value or rest[:1])]
            rest = rest[not value:]
            continue
        ours.append("=".join([name, *value]))
        option = name.removeprefix("--")
        is_optional = "nargs" in OPTIONS.get(option, {})
        if option in OPTIONS and rest and not value and (
                not is_optional or (option in OPTIONAL_VALUES and OPTIONAL_VALUES[option](rest[0]))):
            ours.append(rest.pop(0))
    return ours, rest


def variable_name(option: str) -> str:
    """Return the variable with an option's default."""
    return "MPIDDP_" + option.upper().replace("-", "_")


def read_default(option: str, environ: Mapping[str, str]) -> Any:
    """Return an option's default: the value of its variable, if that is set and not empty.

    Raises argparse.ArgumentTypeError with the variable's name.
    """
    name, details = variable_name(option), OPTIONS[option]
    if not (text := environ.get(name, "")):
        return details["default"]
    try:
        value = details.get("type", str)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name} {error}") from None
    if value not in details.get("choices", (value,)):
        raise argparse.ArgumentTypeError(f"{name} must be one of {', '.join(details['choices'])}, got {text!r}")
    return value


def read_flag(flag: str, environ: Mapping[str, str]) -> bool:
    """Return the truth value of a flag's variable; raise argparse.ArgumentTypeError with the variable's name."""
    name = variable_name(flag)
    text = environ.get(name, "").lower()
    if text not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(f"{name} must be one of {', '.join((*TRUE, *FALSE[1:]))}, got {text!r}")
    return text in TRUE


def options_to_variables(text: str) -> str:
    """Return a text with our options replaced by their variables: --share-gpus is MPIDDP_SHARE_GPUS=1."""
    import re

    def variable(match: re.Match[str]) -> str:
        option, value = match.groups()
        if option not in {*OPTIONS, *FLAGS}:
            return match[0]
        return variable_name(option) + (value or "=1" * (option in FLAGS))

    return re.sub(r"(?<![\w-])--([a-z][a-z-]*)(=?)", variable, text)


def find_unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the ``MPIDDP_…`` variables that belong to no option, each with the variable that may be meant."""
    from difflib import get_close_matches

    known = {RESTART_VARIABLE, SITE_VARIABLE, *(variable_name(option) for option in (*OPTIONS, *FLAGS))}
    texts = []
    for name in sorted(name for name in environ if name.startswith("MPIDDP_") and name not in known):
        matches = get_close_matches(name, known, 1, 0.85)
        texts.append(f"{name} (did you mean {matches[0]}?)" if matches else name)
    return texts
