"""Run a job and restart it after a fault: `python -m mpiddp.supervise [options] srun … python -m mpiddp …`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..base.stderr import write_line
from ..base.version import __version__
from ..bootstrap.refusal import refuse_early
from ..discovery import launchers, runtime
from ..options.parser import Parser, parse_positive_int, parse_seconds
from ..options.site import read_site_defaults
from ..options.table import read_default
from ..systems.launchers import MPIRUN, NO_LAUNCHER, SRUN_PMIX, describe_steppers
from ..systems.statuses import EXIT_REQUEUE, EXIT_USAGE, describe_statuses
from .allocation import Allocation, exclude_nodes, find_allocation
from .command import Command, CommandError, identify_launcher, parse_command
from .supervisor import SupervisePlan, Supervisor

VERSION_TIMEOUT_S = 10.0  # for a launcher's --version
USAGE = "python -m mpiddp.supervise [options] COMMAND…"
DESCRIPTION = f"""\
Run an mpiddp job, and restart it in the same allocation after a fault, without the node that caused
the fault: python -m mpiddp.supervise {SRUN_PMIX} python -m mpiddp train.py"""
EPILOG = f"Exit status: that of the last attempt; {describe_statuses(EXIT_USAGE, EXIT_REQUEUE)}."


def main() -> int:
    """Run the command until it succeeds or a restart makes no sense; return the exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the job's status is lost
    try:
        options = parse_arguments()
        runtime.drop_foreign_run_id(os.environ)
        if around := describe_surrounding_launcher(os.environ):
            refuse_early(f"mpiddp.supervise: {around}")
            return EXIT_USAGE
        path = os.path.realpath(shutil.which(options.command[0]) or options.command[0])
        command = parse_command(options.command, read_launcher_version(options.command[0], path), path=path)
        allocation = find_allocation(os.environ, options.hostfile or "")
        if command.launcher is NO_LAUNCHER:  # it runs on this machine
            allocation = allocation._replace(nodes=())
        plan = make_plan(options, command, apply_exclude(allocation, options.exclude))
    except argparse.ArgumentTypeError as error:
        write_line(str(error))
        return EXIT_USAGE
    except (CommandError, OSError) as error:
        words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        write_line(f"mpiddp.supervise: {words}")
        return EXIT_USAGE
    try:
        return Supervisor(plan).run()
    except OSError as error:
        write_line(f"mpiddp.supervise: cannot run {options.command[0]}: {error.strerror}; begin the command with "
                   f"{describe_steppers()}, or with python")
        return EXIT_USAGE
    finally:
        shutil.rmtree(plan.folder, ignore_errors=True)


def describe_surrounding_launcher(environ: Mapping[str, str]) -> str:
    """Return why this process must not run a job: a launcher has started several like it; empty if none has.

    srun --pty gives the terminal to its first task; the others have no standard input, and their shells end at once.
    """
    around = launchers.read_launch_facts(environ)
    if around is None or max(around.size or 0, around.rank + 1, around.tasks) == 1:
        return ""
    if around.by_srun and around.rank == 0 and around.launcher.terminal in environ:
        return ""
    command = around.launcher.command or MPIRUN.command
    return (f"this process is already a rank of {around.launcher.name}, and each rank would run the whole job; start "
            f"it once, before the launcher: python -m mpiddp.supervise {command} -n 2 python -m mpiddp train.py")


def non_negative_int(text: str) -> int:
    """Parse a number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return int(text)


def path_in_folder(text: str) -> str:
    """Return the path of a folder, or of a file whose folder exists."""
    if not os.path.isdir(text) and not os.path.isdir(os.path.dirname(text) or "."):
        raise argparse.ArgumentTypeError(f"folder {os.path.dirname(text)} does not exist")
    return text


def existing_path(text: str) -> str:
    """Return a path that exists."""
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return text


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise argparse.ArgumentTypeError with the line for the user."""
    parser = Parser(prog="mpiddp.supervise", usage=USAGE, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--nodes", type=parse_positive_int, metavar="N", help="number of nodes for the job; the other "
                        "nodes of the allocation are spares (default: all nodes)")
    parser.add_argument("--min-nodes", type=parse_positive_int, metavar="N", help="if no spare node is left, continue "
                        "with N nodes or more; the script then sees a smaller WORLD_SIZE (default: --nodes)")
    parser.add_argument("--max-restarts", type=non_negative_int, default=3, metavar="R",
                        help="maximum number of restarts (default: 3)")
    parser.add_argument("--progress-file", default="", metavar="PATH", help="the script's checkpoint, or its folder of "
                        "checkpoints; give up if two attempts in a row fail in the same way without changing it")
    parser.add_argument("--stop-before", type=parse_seconds, metavar="SECONDS", help="passed to the job, see python -m "
                        "mpiddp --help; also, start no attempt within this time of the walltime")
    parser.add_argument("--history", type=path_in_folder, default="", metavar="FILE",
                        help="write all attempts to FILE as JSON")
    parser.add_argument("--suspects", type=path_in_folder, default="", metavar="FILE",
                        help="append a line for each node that was left out: time, host, evidence")
    parser.add_argument("--exclude", default="", metavar="NODES", help="nodes not to use: a list such as n[017,023], "
                        "or a file written by --suspects, here or in mpiddp.check")
    parser.add_argument("--hostfile", type=existing_path, metavar="FILE",
                        help="file that lists the nodes (default: ask the batch system)")
    parser.add_argument("--dir", type=existing_path, default=".", metavar="DIR", help="folder for the reports of the "
                        "attempts; all nodes must see it (default: the current folder)")
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND…",
                        help=f"the job's command, beginning with {describe_steppers()}")
    options = parser.parse_args(arguments)
    options.command = options.command[options.command[:1] == ["--"]:]
    if not options.command:
        parser.error(f"no command given; an example: {SRUN_PMIX} python -m mpiddp train.py")
    return options


def apply_exclude(allocation: Allocation, excluded: str) -> Allocation:
    """Return an allocation without the nodes in `excluded`; raise CommandError if none is left."""
    if not excluded:
        return allocation
    try:
        nodes = exclude_nodes(allocation.nodes, excluded)
    except ValueError as error:
        raise CommandError(f"--exclude {excluded}: {error}") from None
    if allocation.nodes and not nodes:
        raise CommandError(f"--exclude {excluded}: none of the {len(allocation.nodes)} nodes is left")
    return allocation._replace(nodes=nodes)


def make_plan(options: argparse.Namespace, command: Command, allocation: Allocation) -> SupervisePlan:
    """Return the plan, with a new folder; raise CommandError if the options contradict each other."""
    available = len(allocation.nodes) or 1
    nodes = wanted = options.nodes or available
    min_nodes = options.min_nodes or nodes
    if options.min_nodes and options.min_nodes <= available < nodes:  # as when some are excluded
        nodes = available
    launcher = command.launcher
    try:
        defaults = {**read_site_defaults(os.environ), **os.environ}
        grace_s = parse_seconds(command.abort_grace or str(read_default("abort-grace", defaults)))
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"--abort-grace: {error}") from None
    system = launcher.system
    if system not in (None, allocation.scheduler):
        raise CommandError(f"{launcher.name} needs a {system.name} allocation; use {system.begin}")
    if nodes > available:
        needs = "" if launcher is not NO_LAUNCHER else f"; to use more, begin the command with {describe_steppers()}"
        has = "1 node is" if available == 1 else f"{available} nodes are"
        raise CommandError(f"--nodes {nodes}: only {has} available{needs}")
    if min_nodes > nodes:
        raise CommandError(f"--min-nodes {min_nodes} is more than --nodes {nodes}")
    tasks_per_node = count_ranks_per_node(command, wanted) or allocation.tasks_per_node
    if not tasks_per_node and launcher is not NO_LAUNCHER:
        scheduler = allocation.scheduler
        sbatch = f", or {scheduler.tasks_option} to {scheduler.submit}" if scheduler.tasks_option else ""
        raise CommandError(f"the number of ranks is unknown; give -n N to {' '.join(command.program)}{sbatch}")
    error_file = next(filter(None, (command.error_file, os.environ.get("MPIDDP_ERROR_FILE"),
                                    os.environ.get("TORCHELASTIC_ERROR_FILE"))), "")
    folder = Path(tempfile.mkdtemp(prefix=".mpiddp-supervise-", dir=options.dir)).resolve()
    return SupervisePlan(
        command, allocation, nodes, min_nodes, tasks_per_node, options.max_restarts, options.stop_before, grace_s,
        error_file, options.progress_file, options.history, options.suspects, folder)


def count_ranks_per_node(command: Command, nodes: int) -> int:
    """Return the ranks that a command starts on each of `nodes` nodes, 0 if it sets no number; raise CommandError."""
    tasks, per_node = command.tasks, command.tasks_per_node
    if tasks and per_node and tasks != per_node * nodes:
        raise CommandError(f"-n {tasks} contradicts {per_node} ranks per node on {nodes} nodes")
    if tasks and tasks % nodes:
        raise CommandError(f"-n {tasks} is not a multiple of the number of nodes, {nodes}")
    return per_node or (tasks or 0) // nodes


def read_launcher_version(program: str, path: str) -> str:
    """Return the output of an mpiexec's --version, empty if it is not needed; raise CommandError if it hangs."""
    launcher = identify_launcher(program, path, "")
    if not launcher.is_mpiexec or launcher.path:
        return ""
    try:
        done = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True,
                              encoding="utf-8", errors="replace", timeout=VERSION_TIMEOUT_S)
    except subprocess.SubprocessError:
        raise CommandError(f"{program} --version did not finish within {VERSION_TIMEOUT_S:.0f} s") from None
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
