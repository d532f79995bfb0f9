"""The command line: arguments and ``MPIDDP_…`` variables in, a `LaunchConfig` out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .config import DEFAULT_ABORT_GRACE_S, DEFAULT_STARTUP_TIMEOUT_S, LaunchConfig, Script, Shape, Shown
from .errors import EXIT_USAGE
from .show.help import Parser
from .version import __version__

USAGE = """\
mpirun python -m mpiddp [options] script.py [arguments]
       srun --mpi=pmix python -m mpiddp [options] -m package.module [arguments]"""

DESCRIPTION = """\
Start PyTorch distributed training in the processes that MPI started, one per GPU, and run a script
in each, or with -m a module, as python itself would."""

EPILOG = """\
Options come before the script; everything after it is the script's. Each option can also be given
as a variable, MPIDDP_STARTUP_TIMEOUT=60 for --startup-timeout 60; the command line wins.
Exit status: the script's own; 2 wrong usage; 3 the job could not be started; 75 all ranks agreed
to stop, and the job can go on later."""

TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be greater than 0 and finite, got {text}")
    return value


def whole(text: str) -> int:
    """Return a number that is not negative."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a rank, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Return a number greater than 0."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")
    return int(text)


def ranks(text: str) -> Shown:
    """Return the ranks that are shown."""
    words = text.split(",")
    if text in ("all", "none"):
        return Shown(everyone=text == "all")
    local = [word.removeprefix("local-") for word in words if word.startswith("local-")]
    found = [word for word in words if not word.startswith("local-")]
    if not all(word.isdigit() for word in (*local, *found)):
        raise argparse.ArgumentTypeError(f"must be all, none, or ranks as in 0,4,local-0, got {text!r}")
    return Shown(False, frozenset(map(int, found)), frozenset(map(int, local)))


def absolute(path: str) -> str:
    """Return a path that is the same from every working directory, empty for none."""
    return os.path.abspath(path) if path else ""


def map_file(text: str) -> str:
    """Return the path of a file of a kind that a map can be."""
    if text and not text.endswith((".json", ".svg")):
        raise argparse.ArgumentTypeError(f"must end in .json or .svg, got {text!r}")
    return absolute(text)


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
        "default": "auto", "choices": ("auto", "cpu", "cuda", "xpu"),
        "help": "what the ranks compute on (default: the accelerator that all of them see, or else the CPU)",
    },
    "interface": {
        "default": None, "metavar": "NAME",
        "help": "network interface on which nodes meet (default: the fastest whose network all of them are on)",
    },
    "master-addr": {
        "default": None, "metavar": "ADDRESS",
        "help": "address of rank 0's node at which nodes meet (default: that of the interface)",
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
    "startup-timeout": {
        "default": str(DEFAULT_STARTUP_TIMEOUT_S), "type": seconds, "metavar": "SECONDS",
        "help": "give up when not all ranks are ready by then (default: %(default)s)",
    },
    "exit-timeout": {
        "default": None, "type": seconds, "metavar": "SECONDS",
        "help": "give up when a rank has not ended this long after another did (default: wait for it)",
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
    "trace": {
        "default": "", "type": absolute, "metavar": "FILE",
        "help": "write when each rank began which stage to FILE, for ui.perfetto.dev; adds a collective to the start",
    },
    "exit": {
        "default": "quick", "type": way_out, "metavar": "quick|python",
        "help": "python tears the interpreter down at the end, for module-level destructors (default: %(default)s)",
    },
    "explain": {
        "default": None, "type": whole, "nargs": "?", "const": 0, "metavar": "RANK",
        "help": "start the job, print where each variable of RANK (default: 0) comes from, and end",
    },
    "nodes": {"default": None, "type": positive, "metavar": "N", "help": "number of nodes, for --dry-run"},
    "ranks-per-node": {"default": None, "type": positive, "metavar": "M", "help": "ranks on each, for --dry-run"},
}
FLAGS = {
    "dry-run": "print the ranks and variables that a job of --nodes and --ranks-per-node would get; start nothing",
    "no-init": "leave init_process_group() to the script; the environment is set all the same",
    "prefix": "put rank and host before each line of output",
    "quiet": "print no start line and no map",
    "allow-idle-gpus": "let the only rank of a node have several GPUs: the script uses more than its own",
    "share-gpus": "let several ranks have one GPU, with gloo",
    "virtual-local-rank": "show each rank its own GPU alone and set LOCAL_RANK=0, as torchrun's option does",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of a job from the command line and return its exit status."""
    try:
        job = read_config(sys.argv[1:] if arguments is None else arguments, os.environ)
    except argparse.ArgumentTypeError as error:
        from .join.refusal import refuse_early

        refuse_early(str(error))
        return EXIT_USAGE
    if isinstance(job, Shape):
        from .facts.runtime import slurm_hosts
        from .plan.dry_run import describe

        print(describe(job, slurm_hosts(os.environ)))
        return 0
    from .launch import launch

    return launch(job)


def read_config(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchConfig | Shape:
    """Return the configuration of a job, or the shape of the one that --dry-run asks about.

    Raises argparse.ArgumentTypeError with one line for the user where they are wrong.
    """
    parser = build_parser(environ)
    ours, command = split(arguments)
    options = parser.parse_args(ours)
    if options.dry_run:
        if options.nodes is None or options.ranks_per_node is None:
            parser.error("--dry-run needs --nodes and --ranks-per-node")
        return Shape(options.nodes, options.ranks_per_node)
    is_module = command[:1] == ["-m"]
    words = command[1:] if command[:1] in (["-m"], ["--"]) else command
    if not words and (is_module or options.explain is None):
        parser.error("a module is needed after -m" if is_module else "a script is needed, or -m and a module")
    return configuration(options, Script(words[0], tuple(words[1:]), is_module) if words else None, environ)


def read_settings(environ: Mapping[str, str]) -> LaunchConfig:
    """Return what the ``MPIDDP_…`` variables say for a program with its own main().

    Raises argparse.ArgumentTypeError with one line for the user where they are wrong.
    """
    return configuration(build_parser(environ).parse_args([]), None, environ)


def configuration(options: argparse.Namespace, script: Script | None, environ: Mapping[str, str]) -> LaunchConfig:
    """Return the configuration that options, a script and torchelastic's variable in `environ` make."""
    return LaunchConfig(
        script=script,
        backend=options.backend,
        device=None if options.device == "auto" else options.device,
        init=not options.no_init,
        startup_timeout_s=options.startup_timeout,
        exit_timeout_s=options.exit_timeout,
        quiet=options.quiet,
        explain=options.explain,
        abort_grace_s=options.abort_grace,
        error_file=absolute(options.error_file or environ.get("TORCHELASTIC_ERROR_FILE", "")),
        log_dir=absolute(options.log_dir),
        shown=options.show,
        prefix=options.prefix,
        python_exit=options.exit,
        binding=options.bind,
        threads=options.threads,
        map_file=options.map,
        trace_file=options.trace,
        stop_before_s=options.stop_before,
        idle_gpus=options.allow_idle_gpus,
        share_gpus=options.share_gpus,
        virtual_local_rank=options.virtual_local_rank,
        interface=options.interface,
        master_addr=options.master_addr,
    )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our own options, and the command after them: a script or -m, with all that follows.

    argparse has no option that takes every argument after it, a "--" among them, as it is.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("-m", "--"):
        details = OPTIONS.get(arguments[at].removeprefix("--"), {"nargs": "?"})
        at += 1 if "nargs" in details else 2
    return list(arguments[:at]), list(arguments[at:])


def build_parser(environ: Mapping[str, str]) -> Parser:
    """Return the parser of our own options, with the ``MPIDDP_…`` variables of `environ` as defaults."""
    parser = Parser(prog="mpiddp", usage=USAGE, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    for name, details in OPTIONS.items():
        default = environ.get(variable(name), details["default"])
        parser.add_argument(f"--{name}", **{**details, "default": default})
    for name, text in FLAGS.items():
        default = read_flag(parser, variable(name), environ.get(variable(name), ""))
        parser.add_argument(f"--{name}", action="store_true", default=default, help=text)
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    return parser


def variable(option: str) -> str:
    """Return the variable that gives an option a default."""
    return "MPIDDP_" + option.upper().replace("-", "_")


def read_flag(parser: Parser, variable: str, text: str) -> bool:
    """Return the truth that a variable's text says."""
    if text.lower() not in (*TRUE, *FALSE):
        parser.error(f"{variable} must be one of {', '.join((*TRUE, *FALSE[1:]))}, got {text!r}")
    return text.lower() in TRUE
