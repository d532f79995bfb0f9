"""Start a job, and start it again after a fault: `python -m mpiddp.supervise [options] srun … python -m mpiddp …`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ..base.errors import EXIT_USAGE
from ..base.stderr import write_line
from ..base.version import __version__
from ..options.help import PlainParser
from ..options.table import read_default
from ..options.values import parse_positive_int, parse_seconds
from .allocation import Allocation, exclude_nodes, find_allocation
from .command import HYDRA, NONE, SLURM, STARTERS, Command, CommandError, find_launcher, parse_command
from .supervisor import SupervisePlan, Supervisor

VERSION_TIMEOUT_S = 10.0  # for a launcher's --version


def main() -> int:
    """Run the command until it succeeds, or another attempt makes no sense; return the exit status."""
    options = parse_arguments()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the job's status is lost
    try:
        path = os.path.realpath(shutil.which(options.command[0]) or options.command[0])
        command = parse_command(options.command, read_launcher_version(options.command[0], path), path=path)
        allocation = find_allocation(os.environ, options.hostfile or "")
        if command.launcher is NONE:  # it runs on this machine
            allocation = allocation._replace(nodes=())
        allocation = apply_exclude(allocation, options.exclude)
        folder = Path(tempfile.mkdtemp(prefix=".mpiddp-supervise-", dir=options.dir))
        plan = make_plan(options, command, allocation, folder)
    except (CommandError, OSError) as error:
        words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        write_line(f"mpiddp.supervise: {words}")
        return EXIT_USAGE
    try:
        return Supervisor(plan).run()
    except OSError as error:
        reason = f"{options.command[0]} cannot be started: {error.strerror}"
        write_line(f"mpiddp.supervise: {reason}; a launcher, or python, comes first")
        return EXIT_USAGE
    finally:
        shutil.rmtree(plan.folder, ignore_errors=True)


def non_negative_int(text: str) -> int:
    """Return a number that is not negative."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more, got {text!r}")
    return int(text)


def path_in_folder(text: str) -> str:
    """Return the path of a file whose folder exists, or that of a folder."""
    if not os.path.isdir(text) and not os.path.isdir(os.path.dirname(text) or "."):
        raise argparse.ArgumentTypeError(f"there is no folder {os.path.dirname(text)}")
    return text


def existing_path(text: str) -> str:
    """Return a path that exists."""
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return text


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = PlainParser("python -m mpiddp.supervise", allow_abbrev=False, description=(
        "Start a job of mpiddp, and start it again in the same allocation after a fault: on all nodes but the one "
        "at fault."), epilog=(
        "Exit status: that of the last attempt; 75 where the job can be queued again; 2 for wrong usage."))
    parser.add_argument("--nodes", type=parse_positive_int, metavar="N",
                        help="nodes for the job; the allocation's others are "
                        "spares (default: all)")
    parser.add_argument("--min-nodes", type=parse_positive_int, metavar="N",
                        help="go on with so few nodes when no spare is "
                        "left: the script finds a smaller WORLD_SIZE then (default: --nodes)")
    parser.add_argument("--max-restarts", type=non_negative_int, default=3, metavar="R",
                        help="how often to start the job again (default: 3)")
    parser.add_argument("--progress-file", default="", metavar="PATH", help="the script's checkpoint, or the folder of "
                        "these: after two attempts that ended alike, and did not change it, give up")
    parser.add_argument("--stop-before", type=parse_seconds, metavar="SECONDS", help="like mpiddp's "
                        "--stop-before; also, no attempt starts within this time of the walltime")
    parser.add_argument("--history", type=path_in_folder, default="", metavar="FILE", help="write the attempts as JSON")
    parser.add_argument("--suspects", type=path_in_folder, default="", metavar="FILE",
                        help="append the nodes that were left out, and why")
    parser.add_argument("--exclude", default="", metavar="NODES", help="nodes not to use, as in n[017,023], or a file "
                        "written by --suspects, here or in mpiddp.check")
    parser.add_argument("--hostfile", type=existing_path, metavar="FILE",
                        help="the nodes, where no batch system tells them")
    parser.add_argument("--dir", type=existing_path, default=".", metavar="DIR",
                        help="a folder that all nodes share, for "
                        "the reports of the attempts (default: this one)")
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND…", help=f"{STARTERS}, and the rest")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("a command is needed: srun --mpi=pmix python -m mpiddp train.py")
    return options


def apply_exclude(allocation: Allocation, excluded: str) -> Allocation:
    """Return an allocation without nodes that the user excludes; raise CommandError if none is left."""
    if not excluded:
        return allocation
    try:
        nodes = exclude_nodes(allocation.nodes, excluded)
    except ValueError as error:
        raise CommandError(f"--exclude {excluded}: {error}") from None
    if allocation.nodes and not nodes:
        raise CommandError(f"--exclude {excluded}: leaves none of the {len(allocation.nodes)} nodes")
    return allocation._replace(nodes=nodes)


def make_plan(options: argparse.Namespace, command: Command, allocation: Allocation, folder: Path) -> SupervisePlan:
    """Return the plan of the supervisor; raise CommandError if the options contradict each other."""
    available = len(allocation.nodes) or 1
    nodes = wanted = options.nodes or available
    min_nodes = options.min_nodes or nodes
    if options.min_nodes and options.min_nodes <= available < nodes:  # as when some are excluded
        nodes = available
    try:
        grace_s = parse_seconds(command.abort_grace or str(read_default("abort-grace", os.environ)))
        launcher = command.launcher
        if launcher.system not in ("", allocation.system):
            raise CommandError(f"{launcher.name}: start it in an allocation of {launcher.system}: {launcher.begin}")
        if nodes > available:
            needs = "" if launcher is not NONE else f"; for more, begin with {STARTERS}"
            has = "is 1 node" if available == 1 else f"are {available} nodes"
            raise CommandError(f"--nodes {nodes}: there {has}{needs}")
        if min_nodes > nodes:
            raise CommandError(f"--min-nodes {min_nodes}: must be at most --nodes {nodes}")
        tasks_per_node = count_ranks_per_node(command, wanted) or allocation.tasks_per_node
        if not tasks_per_node and launcher is not NONE:
            besides = ", or --ntasks-per-node to sbatch" if allocation.system == SLURM else ""
            raise CommandError(f"how many ranks? say -n N after {' '.join(command.program)}{besides}")
    except (CommandError, argparse.ArgumentTypeError) as error:
        folder.rmdir()
        raise CommandError(error) from None
    error_file = next(filter(None, (command.error_file, os.environ.get("MPIDDP_ERROR_FILE"),
                                    os.environ.get("TORCHELASTIC_ERROR_FILE"))), "")
    return SupervisePlan(
        command, allocation, nodes, min_nodes, tasks_per_node, options.max_restarts, options.stop_before, grace_s,
        error_file, options.progress_file, options.history, options.suspects, folder.resolve())


def count_ranks_per_node(command: Command, nodes: int) -> int:
    """Return how many ranks a command starts on each of so many nodes, 0 if it does not say; raise CommandError."""
    tasks, per_node = command.tasks, command.tasks_per_node
    if tasks and per_node and tasks != per_node * nodes:
        raise CommandError(f"-n {tasks}: is not {per_node} ranks on each of {nodes} nodes")
    if tasks and tasks % nodes:
        raise CommandError(f"-n {tasks}: is not a multiple of {nodes} nodes")
    return per_node or (tasks or 0) // nodes


def read_launcher_version(program: str, path: str) -> str:
    """Return the output of an mpiexec for --version, empty if it is not needed; raise CommandError if it hangs."""
    if find_launcher(program, path, "") is not HYDRA:
        return ""
    try:
        done = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=VERSION_TIMEOUT_S)
    except subprocess.SubprocessError:
        raise CommandError(f"{program} --version: says nothing within {VERSION_TIMEOUT_S:.0f} s") from None
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
