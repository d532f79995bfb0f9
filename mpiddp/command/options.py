"""The options of a job: how each is written, what it means, and the ``MPIDDP_…`` variable that gives it a default."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from ..config import DEFAULT_ABORT_GRACE_S, DEFAULT_STARTUP_TIMEOUT_S, RESTARTS, Shown

LONGEST_S = 10**9  # of 31 years
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 < value <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be greater than 0 and at most {LONGEST_S:,}, got {text}")
    return value


def whole(text: str) -> int:
    """Return a number that is not negative."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a rank, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Return a number greater than 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")
    return int(text)


def port(text: str) -> int:
    """Return a port after which there is another one."""
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65534, got {text!r}")
    return int(text)


def ranks(text: str) -> Shown:
    """Return the ranks that are shown."""
    words = text.split(",")
    if text in ("all", "none"):
        return Shown(everyone=text == "all")
    local = [word.removeprefix("local-") for word in words if word.startswith("local-")]
    found = [word for word in words if not word.startswith("local-")]
    if not all(word.isdecimal() for word in (*local, *found)):
        raise argparse.ArgumentTypeError(f"must be all, none, or ranks as in 0,4,local-0, got {text!r}")
    return Shown(False, frozenset(map(int, found)), frozenset(map(int, local)))


def interface(text: str) -> str | None:
    """Return a description of network interfaces, None for none; networks among them are checked."""
    for part in text.split(","):
        if "/" in part:
            import ipaddress  # seldom needed

            try:
                ipaddress.ip_network(part, strict=False)
            except ValueError:
                raise argparse.ArgumentTypeError(
                    f"must be names of interfaces, or networks such as 10.1.0.0/16, got {part!r}") from None
    return text or None


def absolute(path: str) -> str:
    """Return a path that is the same from every working directory, empty for none."""
    return os.path.abspath(path) if path else ""


def map_file(text: str) -> str:
    """Return the path of a file of a kind that a map can be."""
    if text and not text.endswith((".json", ".svg")):
        raise argparse.ArgumentTypeError(f"must end in .json or .svg, got {text!r}")
    return absolute(text)


def option_name(text: str) -> str:
    """Return the name of an option of the script's own."""
    if text and not text.startswith("--"):
        raise argparse.ArgumentTypeError(f"must be an option's name such as --local-rank, got {text!r}")
    return text


def way_out(text: str) -> bool:
    """Return whether the interpreter's own exit is asked for."""
    if text not in ("quick", "python"):
        raise argparse.ArgumentTypeError(f"must be quick or python, got {text!r}")
    return text == "python"


OPTIONS: dict[str, dict[str, Any]] = {
    "backend": {
        "default": None,
        "help": "backend of the process group (default: the accelerator's own, gloo without one)",
    },
    "device": {
        "default": "auto", "metavar": "TYPE",
        "help": "what the ranks compute on: cpu, or a device type that torch knows, such as cuda or xpu (default: the "
                "accelerator that all of them see, or else the CPU)",
    },
    "interface": {
        "default": None, "type": interface, "metavar": "NAME",
        "help": "network interface on which nodes meet: a name, the beginning of one, a network such as 10.1.0.0/16, "
                "or several with commas between (default: the fastest whose network all of them are on)",
    },
    "master-addr": {
        "default": None, "metavar": "ADDRESS",
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
        "default": None, "type": seconds, "metavar": "SECONDS",
        "help": "how long a collective of the process group may take (default: torch's own)",
    },
    "startup-timeout": {
        "default": str(DEFAULT_STARTUP_TIMEOUT_S), "type": seconds, "metavar": "SECONDS",
        "help": "give up when not all ranks are ready by then (default: %(default)s)",
    },
    "exit-timeout": {
        "default": None, "type": seconds, "metavar": "SECONDS",
        "help": "give up when a rank has not ended this long after another did (default: wait for it)",
    },
    "stall": {
        "default": None, "type": seconds, "metavar": "SECONDS",
        "help": "say where the ranks are when none of them has moved for so long (default: never)",
    },
    "abort-grace": {
        "default": str(DEFAULT_ABORT_GRACE_S), "type": seconds, "metavar": "SECONDS",
        "help": "when a rank fails, kill it and the others where they have not ended by then (default: %(default)s)",
    },
    "stop-before": {
        "default": None, "type": seconds, "metavar": "SECONDS",
        "help": "let mpiddp.should_stop() be true so long before the walltime",
    },
    "error-file": {
        "default": None, "metavar": "FILE",
        "help": "write why the job failed to FILE, as torchelastic does (default: TORCHELASTIC_ERROR_FILE)",
    },
    "log-dir": {
        "default": "", "metavar": "DIR",
        "help": "write each rank's output to a file, too: DIR/JOB/rank-00013.HOST.log, where JOB is Slurm's job "
                "number, or a random name that the report of a failure tells",
    },
    "show": {
        "default": "all", "type": ranks, "metavar": "RANKS",
        "help": "whose output to show: all, none, or ranks as in 0,4,local-0 (default: %(default)s)",
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
    "trace": {
        "default": "", "type": absolute, "metavar": "FILE",
        "help": "write when each rank began which stage to FILE, for ui.perfetto.dev; adds a collective to the start",
    },
    "exit": {
        "default": "quick", "type": way_out, "metavar": "quick|python",
        "help": "python tears the interpreter down at the end, for module-level destructors (default: %(default)s)",
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
    "prefix": "put rank and host before each line of output",
    "stall-abort": "end the job when no rank has moved for --stall seconds; --error-file has status 124",
    "quiet": "print no start line and no map",
    "allow-idle-gpus": "let the only rank of a node have several GPUs: the script uses more than its own",
    "share-gpus": "let several ranks have one GPU, with gloo",
    "virtual-local-rank": "show each rank its own GPU alone and set LOCAL_RANK=0, as torchrun's option does",
}


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

    known = {RESTARTS, *(variable(name) for name in (*OPTIONS, *FLAGS))}
    found = []
    for name in sorted(name for name in environ if name.startswith("MPIDDP_") and name not in known):
        near = get_close_matches(name, known, 1, 0.85)
        found.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return found
