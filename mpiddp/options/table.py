"""The options of a job: how each is written, what it means, and the ``MPIDDP_…`` variable that gives it a default."""

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
)
from .values import (
    CHECKS,
    FALSE,
    TRUE,
    absolute,
    check,
    chosen,
    either,
    interface,
    map_file,
    option_name,
    port,
    positive,
    prefix,
    ranks,
    seconds,
    size,
    stage,
    timeout,
    whole,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "backend": {
        "default": None, "type": chosen,
        "help": "backend of the process group (default: the accelerator's own, gloo without one)",
    },
    "device": {
        "default": "auto", "type": chosen, "metavar": "TYPE",
        "help": "what the ranks compute on: cpu, or a device type that torch knows, such as cuda or xpu (default: the "
                "accelerator that all of them see, or else the CPU)",
    },
    "interface": {
        "default": None, "type": interface, "metavar": "NAME",
        "help": "network interface on which nodes meet: a name, the beginning of one, a network such as 10.1.0.0/16, "
                "or several with commas between (default: the fastest whose network all of them are on)",
    },
    "master-addr": {
        "default": None, "type": chosen, "metavar": "ADDRESS",
        "help": "address of rank 0's node at which nodes meet (default: that of the interface)",
    },
    "port": {
        "default": 0, "type": port, "metavar": "N",
        "help": "port of rank 0's node at which the ranks meet, and N+1 for their sentinels (default: free ones); "
                "NCCL, gloo and MPI take others, for which they have settings of their own",
    },
    "bind": {
        "default": "auto", "choices": ("auto", "none", "launcher"),
        "help": "the cores of a rank: an even part of the node's where the launcher gave it no good one, all that "
                "the node allows, or what the launcher gave (default: %(default)s)",
    },
    "threads": {
        "default": None, "type": positive, "metavar": "N",
        "help": "threads of a rank (default: OMP_NUM_THREADS, SLURM_CPUS_PER_TASK, or the rank's cores)",
    },
    "group-timeout": {
        "default": None, "type": timeout, "metavar": "SECONDS",
        "help": "how long a collective of the process group may take (default: torch's own)",
    },
    "startup-timeout": {
        "default": str(DEFAULT_STARTUP_TIMEOUT_S), "type": seconds, "metavar": "SECONDS",
        "help": "give up when not all ranks are ready by then (default: %(default)s)",
    },
    "exit-timeout": {
        "default": None, "type": seconds, "metavar": "SECONDS",
        "help": "give up when a rank has not ended this long after another did (default: wait for it, but "
                f"{BLOCKED_EXIT_TIMEOUT_S:g} where all ranks that have not ended wait in a collective for one that "
                "has)",
    },
    "stall": {
        "default": None, "type": seconds, "metavar": "SECONDS",
        "help": "print where the ranks are when none of them has moved for this long (default: never)",
    },
    "abort-grace": {
        "default": str(DEFAULT_ABORT_GRACE_S), "type": seconds, "metavar": "SECONDS",
        "help": "after a failure, kill the ranks that have not ended within this time (default: %(default)s)",
    },
    "stop-before": {
        "default": None, "type": seconds, "metavar": "SECONDS",
        "help": "make mpiddp.should_stop() true this long before the walltime",
    },
    "error-file": {
        "default": "", "type": absolute, "metavar": "FILE",
        "help": "write why the job failed to FILE, as torchelastic does (default: TORCHELASTIC_ERROR_FILE)",
    },
    "log-dir": {
        "default": "", "type": absolute, "metavar": "DIR",
        "help": "write each rank's output to a file, too: DIR/JOB/rank-00013.HOST.log, where JOB is the scheduler's "
                "number of the job, or a random name that the report of a failure tells; ranks.json there has a line "
                "for each",
    },
    "log-compress": {
        "default": "", "choices": ("gzip", "zstd"),
        "help": "compress a log when it is complete: .log.gz, .log.zst (default: not)",
    },
    "log-max-bytes": {
        "default": 0, "type": size, "metavar": "N",
        "help": "rotate a log to .log.1 when it reaches N bytes, and keep one old file; also as in 100M (default: no "
                "limit)",
    },
    "prefix": {
        "default": "", "type": prefix, "nargs": "?", "const": DEFAULT_PREFIX, "metavar": "FORMAT",
        "help": "put this before each line of output that is shown, as in '[{rank}.{local_rank} {host} "
                "{time:%%H:%%M:%%S}] ' (default: '" + DEFAULT_PREFIX + "'); one without fields only as --prefix='> '",
    },
    "show": {
        "default": "all", "type": ranks, "metavar": "RANKS",
        "help": "whose output to show: all, none, or ranks as in 0,4,local-0; fold shows once what several ranks say, "
                "and which ones do (default: %(default)s)",
    },
    "fold-window": {
        "default": DEFAULT_FOLD_WINDOW_S, "type": seconds, "metavar": "SECONDS",
        "help": "with --show fold: how long to wait for one more rank to say the same (default: %(default)s)",
    },
    "overflow": {
        "default": "wait", "type": either("wait", "drop"), "metavar": "wait|drop",
        "help": "with --show fold, when a rank prints faster than can be shown: let it wait, or drop lines and say how "
                "many; logs get all (default: %(default)s)",
    },
    "map": {
        "default": "", "type": map_file, "metavar": "FILE",
        "help": "write where each rank sits to FILE, as records (.json) or a picture (.svg)",
    },
    "facts": {
        "default": "", "type": absolute, "metavar": "FILE",
        "help": "write what each rank sees of its node to FILE, before anything is planned; with --dry-run, plan from "
                "such a file, on any machine",
    },
    "check": {
        "default": "", "type": check, "nargs": "?", "const": "warn", "metavar": "strict",
        "help": "measure the nodes before the script, in about a second, and warn of one that is slower than the "
                "others or has no room; strict does not start on it",
    },
    "check-history": {
        "default": "", "type": absolute, "metavar": "FILE",
        "help": "with --check, keep each node's figures in FILE, and compare it with its own of former jobs, too",
    },
    "stage": {
        "default": "", "type": stage, "nargs": "?", "const": AUTO_FOLDER, "metavar": "DIR",
        "help": "read what a start opens of Python's environment once for the whole job, from shared file systems, and "
                "keep it in DIR on each node (default: SLURM_TMPDIR, TMPDIR on a local disk, or /dev/shm); the first "
                "run only records which files to stage",
    },
    "trace": {
        "default": "", "type": absolute, "metavar": "FILE",
        "help": "write when each rank began which stage to FILE, for ui.perfetto.dev; adds a collective to the start",
    },
    "exit": {
        "default": "quick", "type": either("quick", "python"), "metavar": "quick|python",
        "help": "python tears down the modules of libraries at the end, too, which is slow (default: %(default)s)",
    },
    "traceback": {
        "default": "short", "type": either("short", "full"), "metavar": "short|full",
        "help": "what a rank that fails prints of libraries' frames: short folds them, --error-file has all (default: "
                "%(default)s)",
    },
    "pass-local-rank": {
        "default": "", "type": option_name, "nargs": "?", "const": "--local-rank", "metavar": "NAME",
        "help": "give the script --local-rank=N before its own arguments, as torch.distributed.launch does; NAME is "
                "how it spells that option (--local_rank)",
    },
    "explain": {
        "default": None, "type": whole, "nargs": "?", "const": 0, "metavar": "RANK",
        "help": "start the job, print where each variable of RANK (default: 0) comes from, and end",
    },
    "nodes": {"default": None, "type": positive, "metavar": "N", "help": "number of nodes, for --dry-run"},
    "ranks-per-node": {"default": None, "type": positive, "metavar": "M", "help": "ranks on each, for --dry-run"},
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
# The field of a LaunchConfig that an option fills, where it has another name.
FIELDS = {
    "startup-timeout": "startup_timeout_s", "exit-timeout": "exit_timeout_s", "abort-grace": "abort_grace_s",
    "stop-before": "stop_before_s", "stall": "stall_s", "fold-window": "fold_window_s", "overflow": "drops_lines",
    "show": "output_filter", "traceback": "full_traceback", "exit": "python_exit", "bind": "binding", "map": "map_file",
    "trace": "trace_file", "facts": "facts_file", "pass-local-rank": "local_rank_option",
    "allow-idle-gpus": "idle_gpus",
}


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our own options, and the command after them: a script, -m or -c, with all that follows.

    argparse has no option that takes every argument after it, a "--" among them, as it is. The options may be
    written with underscores, as torchrun's may.
    """
    ours: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "--", STANDARD_INPUT):
        name, *value = rest.pop(0).split("=", 1)
        name = dashed if (dashed := name.replace("_", "-")).removeprefix("--") in {*OPTIONS, *FLAGS} else name
        ours.append("=".join([name, *value]))
        details = OPTIONS.get(name.removeprefix("--"))
        if details and rest and not value and ("nargs" not in details or is_meant(details, rest[0])):
            ours.append(rest.pop(0))
    return ours, rest


def is_meant(details: Mapping[str, Any], word: str) -> bool:
    """Tell whether a word is the value of the option before it, which may have one, and not the script."""
    if details["type"] is check:
        return word in CHECKS
    if details["type"] is stage:
        return word == AUTO_FOLDER or (word.startswith("/") and not word.endswith(".py") and not os.path.isfile(word))
    return word.isdigit() if details["type"] is whole else details["type"] is prefix and "{" in word


def variable(option: str) -> str:
    """Return the variable that gives an option a default."""
    return "MPIDDP_" + option.upper().replace("-", "_")


def default_of(name: str, environ: Mapping[str, str]) -> Any:
    """Return an option's default: what its variable says, unless that is empty or not set.

    Raises argparse.ArgumentTypeError, which names the variable.
    """
    details, text = OPTIONS[name], environ.get(variable(name), "")
    if not text:
        return details["default"]
    try:
        value = details.get("type", str)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{variable(name)} {error}") from None
    if value not in details.get("choices", (value,)):
        raise argparse.ArgumentTypeError(
            f"{variable(name)} must be one of {', '.join(details['choices'])}, got {text!r}")
    return value


def flag_of(name: str, environ: Mapping[str, str]) -> bool:
    """Return the truth that a flag's variable says; raise argparse.ArgumentTypeError, which names the variable."""
    text = environ.get(variable(name), "").lower()
    if text not in (*TRUE, *FALSE):
        raise argparse.ArgumentTypeError(
            f"{variable(name)} must be one of {', '.join((*TRUE, *FALSE[1:]))}, got {text!r}")
    return text in TRUE


def in_variables(text: str) -> str:
    """Return a text in which our options are called by their variables: --share-gpus is MPIDDP_SHARE_GPUS=1."""
    import re

    def name(found: re.Match[str]) -> str:
        option, value = found.groups()
        if option not in {*OPTIONS, *FLAGS}:
            return found[0]
        return variable(option) + (value or "=1" * (option in FLAGS))

    return re.sub(r"(?<![\w-])--([a-z][a-z-]*)(=?)", name, text)


def unknown(environ: Mapping[str, str]) -> list[str]:
    """Return in words which ``MPIDDP_…`` variables belong to no option, and which was meant."""
    from difflib import get_close_matches

    known = {RESTART_VARIABLE, *(variable(name) for name in (*OPTIONS, *FLAGS))}
    found = []
    for name in sorted(name for name in environ if name.startswith("MPIDDP_") and name not in known):
        near = get_close_matches(name, known, 1, 0.85)
        found.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return found
