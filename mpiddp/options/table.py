"""The options of a job: syntax, meaning, and the ``MPIDDP_…`` variable with each one's default."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.config import (
    AUTO_FOLDER,
    BLOCKED_EXIT_TIMEOUT_S,
    DEFAULT_ABORT_GRACE_S,
    DEFAULT_FOLD_WINDOW_S,
    DEFAULT_PREFIX,
    DEFAULT_STARTUP_TIMEOUT_S,
    RESTART_VARIABLE,
    STANDARD_INPUT,
    CheckMode,
)
from .values import (
    FALSE,
    TRUE,
    parse_byte_count,
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
        "help": "backend of the process group (default: the accelerator's own, gloo without one)",
    },
    "device": {
        "default": "auto", "type": parse_name, "metavar": "TYPE",
        "help": "what the ranks compute on: cpu, or a device type that torch knows, such as cuda or xpu (default: the "
                "accelerator that all of them see, or else the CPU)",
    },
    "interface": {
        "default": None, "type": parse_interface, "metavar": "NAME",
        "help": "network interface on which nodes meet: a name, the beginning of one, a network such as 10.1.0.0/16, "
                "or several with commas between (default: the fastest whose network all of them are on)",
    },
    "master-addr": {
        "default": None, "type": parse_name, "metavar": "ADDRESS",
        "help": "address of rank 0's node at which nodes meet (default: that of the interface)",
    },
    "port": {
        "default": 0, "type": parse_port, "metavar": "N",
        "help": "port of rank 0's node at which the ranks meet, and N+1 for their sentinels (default: free ones); "
                "NCCL, gloo and MPI take others, for which they have settings of their own",
    },
    "bind": {
        "default": "auto", "choices": ("auto", "none", "launcher"),
        "help": "the cores of a rank: an even part of the node's where the launcher gave it no good one, all that "
                "the node allows, or what the launcher gave (default: %(default)s)",
    },
    "threads": {
        "default": None, "type": parse_positive_int, "metavar": "N",
        "help": "threads of a rank (default: OMP_NUM_THREADS, SLURM_CPUS_PER_TASK, or the rank's cores)",
    },
    "group-timeout": {
        "default": None, "type": parse_timeout, "metavar": "SECONDS",
        "help": "how long a collective of the process group may take (default: torch's own)",
    },
    "startup-timeout": {
        "default": str(DEFAULT_STARTUP_TIMEOUT_S), "type": parse_seconds, "metavar": "SECONDS",
        "help": "give up when not all ranks are ready by then (default: %(default)s)",
    },
    "exit-timeout": {
        "default": None, "type": parse_seconds, "metavar": "SECONDS",
        "help": "give up when a rank has not ended this long after another did (default: wait for it, but "
                f"{BLOCKED_EXIT_TIMEOUT_S:g} where all ranks that have not ended wait in a collective for one that "
                "has)",
    },
    "stall": {
        "default": None, "type": parse_seconds, "metavar": "SECONDS",
        "help": "print where the ranks are when none of them has moved for this long (default: never)",
    },
    "abort-grace": {
        "default": str(DEFAULT_ABORT_GRACE_S), "type": parse_seconds, "metavar": "SECONDS",
        "help": "after a failure, kill the ranks that have not ended within this time (default: %(default)s)",
    },
    "stop-before": {
        "default": None, "type": parse_seconds, "metavar": "SECONDS",
        "help": "make mpiddp.should_stop() true this long before the walltime",
    },
    "error-file": {
        "default": "", "type": parse_path, "metavar": "FILE",
        "help": "write why the job failed to FILE, as torchelastic does (default: TORCHELASTIC_ERROR_FILE)",
    },
    "log-dir": {
        "default": "", "type": parse_path, "metavar": "DIR",
        "help": "write each rank's output to a file, too: DIR/JOB/rank-00013.HOST.log, where JOB is the scheduler's "
                "number of the job, or a random name that the report of a failure tells; ranks.json there has a line "
                "for each",
    },
    "log-compress": {
        "default": "", "choices": ("gzip", "zstd"),
        "help": "compress a log when it is complete: .log.gz, .log.zst (default: not)",
    },
    "log-max-bytes": {
        "default": 0, "type": parse_byte_count, "metavar": "N",
        "help": "rotate a log to .log.1 when it reaches N bytes, and keep one old file; also as in 100M (default: no "
                "limit)",
    },
    "prefix": {
        "default": "", "type": parse_prefix, "nargs": "?", "const": DEFAULT_PREFIX, "metavar": "FORMAT",
        "help": "put this before each line of output that is shown, as in '[{rank}.{local_rank} {host} "
                "{time:%%H:%%M:%%S}] ' (default: '" + DEFAULT_PREFIX + "'); one without fields only as --prefix='> '",
    },
    "show": {
        "default": "all", "type": parse_output_filter, "metavar": "RANKS",
        "help": "whose output to show: all, none, or ranks as in 0,4,local-0; fold shows once what several ranks say, "
                "and which ones do (default: %(default)s)",
    },
    "fold-window": {
        "default": DEFAULT_FOLD_WINDOW_S, "type": parse_seconds, "metavar": "SECONDS",
        "help": "with --show fold: how long to wait for one more rank to say the same (default: %(default)s)",
    },
    "overflow": {
        "default": "wait", "type": parse_either("wait", "drop"), "metavar": "wait|drop",
        "help": "with --show fold, when a rank prints faster than can be shown: let it wait, or drop lines and say how "
                "many; logs get all (default: %(default)s)",
    },
    "map": {
        "default": "", "type": parse_map_file, "metavar": "FILE",
        "help": "write where each rank sits to FILE, as records (.json) or a picture (.svg)",
    },
    "facts": {
        "default": "", "type": parse_path, "metavar": "FILE",
        "help": "write what each rank sees of its node to FILE, before anything is planned; with --dry-run, plan from "
                "such a file, on any machine",
    },
    "check": {
        "default": "", "type": parse_check_mode, "nargs": "?", "const": "warn", "metavar": "strict",
        "help": "measure the nodes before the script, in about a second, and warn of one that is slower than the "
                "others or has no room; strict does not start on it",
    },
    "check-history": {
        "default": "", "type": parse_path, "metavar": "FILE",
        "help": "with --check, keep each node's figures in FILE, and compare it with its own of former jobs, too",
    },
    "stage": {
        "default": "", "type": parse_stage_folder, "nargs": "?", "const": AUTO_FOLDER, "metavar": "DIR",
        "help": "read what a start opens of Python's environment once for the whole job, from shared file systems, and "
                "keep it in DIR on each node (default: SLURM_TMPDIR, TMPDIR on a local disk, or /dev/shm); the first "
                "run only records which files to stage",
    },
    "trace": {
        "default": "", "type": parse_path, "metavar": "FILE",
        "help": "write when each rank began which stage to FILE, for ui.perfetto.dev; adds a collective to the start",
    },
    "exit": {
        "default": "quick", "type": parse_either("quick", "python"), "metavar": "quick|python",
        "help": "python tears down the modules of libraries at the end, too, which is slow (default: %(default)s)",
    },
    "traceback": {
        "default": "short", "type": parse_either("short", "full"), "metavar": "short|full",
        "help": "what a rank that fails prints of libraries' frames: short folds them, --error-file has all (default: "
                "%(default)s)",
    },
    "pass-local-rank": {
        "default": "", "type": parse_option_name, "nargs": "?", "const": "--local-rank", "metavar": "NAME",
        "help": "give the script --local-rank=N before its own arguments, as torch.distributed.launch does; NAME is "
                "how it spells that option (--local_rank)",
    },
    "explain": {
        "default": None, "type": parse_rank, "nargs": "?", "const": 0, "metavar": "RANK",
        "help": "start the job, print where each variable of RANK (default: 0) comes from, and end",
    },
    "nodes": {"default": None, "type": parse_positive_int, "metavar": "N", "help": "number of nodes, for --dry-run"},
    "ranks-per-node": {
        "default": None, "type": parse_positive_int, "metavar": "M", "help": "ranks on each, for --dry-run",
    },
}
FLAGS = {
    "dry-run": "print the ranks and variables that a job of --nodes and --ranks-per-node would get, or the map of one "
               "on the nodes of --facts; start nothing",
    "no-init": "leave init_process_group() to the script; the environment is set all the same",
    "stage-keep": "with --stage, leave it on the nodes for the next job",
    "stall-abort": "end the job when no rank has moved for --stall seconds; --error-file has status 124",
    "quiet": "print no start line and no map",
    "allow-idle-gpus": "let the only rank of a node have several GPUs: the script uses more than its own",
    "share-gpus": "let several ranks have one GPU, with gloo",
    "gpu-aware-mpi": "keep MPICH_GPU_SUPPORT_ENABLED with Cray MPICH: the script passes GPU buffers to MPI itself",
    "virtual-local-rank": "show each rank its own GPU alone and set LOCAL_RANK=0, as torchrun's option does",
}
# The field of LaunchConfig that an option fills, if its name is another one.
CONFIG_FIELDS = {
    "startup-timeout": "startup_timeout_s", "exit-timeout": "exit_timeout_s", "abort-grace": "abort_grace_s",
    "stop-before": "stop_before_s", "stall": "stall_s", "fold-window": "fold_window_s", "overflow": "drops_lines",
    "show": "output_filter", "traceback": "full_traceback", "exit": "python_exit", "bind": "binding", "map": "map_file",
    "trace": "trace_file", "facts": "facts_file", "pass-local-rank": "local_rank_option",
    "allow-idle-gpus": "idle_gpus",
}


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our own options, and the command after them: a script, -m or -c, with all that follows.

    argparse has no option that takes all arguments after it, "--" included, unchanged. Our options may be written with
    underscores, as torchrun's may.
    """
    ours: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "--", STANDARD_INPUT):
        name, *value = rest.pop(0).split("=", 1)
        name = dashed if (dashed := name.replace("_", "-")).removeprefix("--") in {*OPTIONS, *FLAGS} else name
        ours.append("=".join([name, *value]))
        details = OPTIONS.get(name.removeprefix("--"))
        if details and rest and not value and ("nargs" not in details or consumes_value(details, rest[0])):
            ours.append(rest.pop(0))
    return ours, rest


def consumes_value(details: Mapping[str, Any], word: str) -> bool:
    """Return whether a word is the value of the option before it, whose value is optional, and not the script."""
    parse = details["type"]
    if parse is parse_check_mode:
        return word in (CheckMode.WARN, CheckMode.STRICT)
    if parse is parse_stage_folder:
        return word == AUTO_FOLDER or (word.startswith("/") and not word.endswith(".py") and not os.path.isfile(word))
    return word.isdigit() if parse is parse_rank else parse is parse_prefix and "{" in word


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

    known = {RESTART_VARIABLE, *(variable_name(option) for option in (*OPTIONS, *FLAGS))}
    texts = []
    for name in sorted(name for name in environ if name.startswith("MPIDDP_") and name not in known):
        matches = get_close_matches(name, known, 1, 0.85)
        texts.append(f"{name} (did you mean {matches[0]}?)" if matches else name)
    return texts
