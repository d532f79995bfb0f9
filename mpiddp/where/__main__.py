"""Prints where the ranks of a running job are: `python -m mpiddp.where [JOB]`."""

from __future__ import annotations

import argparse
import sys
import time

from ..base.stderr import print_answer, write_line
from ..base.version import __version__
from ..options.parser import Parser
from ..systems.statuses import EXIT_INTERRUPTED, EXIT_USAGE
from .client import InspectOptions, UnansweredError, describe_unseen, find_endpoint, request_snapshot
from .registry import JobEndpoint
from .snapshot import as_json, format_table, format_threads, has_lock_wait

DESCRIPTION = "Show where the ranks of a running job are, and which of them are outliers.\nThe job continues."
LOCK_HINT = "  waiting for a lock that another thread holds? --threads shows all threads (needs py-spy)"


def main(arguments: list[str] | None = None) -> int:
    """Print where a job's ranks are; return the exit status."""
    try:
        options = parse_arguments(arguments)
    except argparse.ArgumentTypeError as error:
        write_line(str(error))
        return EXIT_USAGE
    try:
        endpoint = find_endpoint(options.job)
        status = print_snapshot(endpoint, options)
        if not options.job and (unseen := describe_unseen(endpoint)):
            write_line(f"mpiddp.where: {unseen}")
        while options.watch is not None and not status:
            time.sleep(options.watch)
            status = print_snapshot(endpoint, options)
        return status
    except UnansweredError as error:
        write_line(f"mpiddp.where: {error}")
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options; raise argparse.ArgumentTypeError with the line for the user."""
    parser = Parser(prog="mpiddp.where", usage="python -m mpiddp.where [options] [JOB]", description=DESCRIPTION,
                    allow_abbrev=False)
    parser.add_argument("job", nargs="?", default="", metavar="JOB",
                        help="job ID of the batch system (under Slurm, optionally with the step: 48211.0), or "
                        "the beginning of mpiddp's own name for the job; default: the only running job")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="repeat every SECONDS")
    parser.add_argument("--threads", action="store_true", help="also show all threads of the outliers (needs py-spy in "
                        "the job's environment, and a site that allows tracing processes)")
    parser.add_argument("--native", action="store_true", help="like --threads, with the frames of C code; stops these "
                        "ranks for about a second")
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    options = parser.parse_args(arguments)
    if options.watch is not None and not options.watch > 0:
        parser.error(f"--watch {options.watch:g}: must be greater than 0")
    return options


def print_snapshot(endpoint: JobEndpoint, options: argparse.Namespace) -> int:
    """Print a snapshot of a job; return the exit status."""
    inspect = InspectOptions(options.native) if options.threads or options.native else None
    snapshot, threads = request_snapshot(endpoint, inspect)
    title = (f"job {endpoint.name}, {endpoint.ranks:,} rank{'s' * (endpoint.ranks != 1)}"
             f"{snapshot.step and f', {snapshot.step}'}")
    hint = [] if threads or not has_lock_wait(snapshot) else [LOCK_HINT]
    table = [title, *format_table(snapshot), *hint, *format_threads(threads)]
    return print_answer(as_json(snapshot, threads) if options.json else "\n".join(table))


if __name__ == "__main__":
    sys.exit(main())
