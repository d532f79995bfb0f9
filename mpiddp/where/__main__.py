"""Tell where the ranks of a running job are: `python -m mpiddp.where [JOB]`."""

from __future__ import annotations

import argparse
import sys

from ..version import __version__
from .client import UnansweredError, ask, find
from .table import as_json, lines


def main(arguments: list[str] | None = None) -> int:
    """Ask a job and print where its ranks are; return the exit status."""
    parser = argparse.ArgumentParser("python -m mpiddp.where", description=(
        "Tell where the ranks of a running job stand, and which of them are odd. The job goes on."))
    parser.add_argument("job", nargs="?", default="", metavar="JOB",
                        help="number of the batch system, or the beginning of the job's own name; "
                        "default: the only one that runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="ask again and again")
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    given = parser.parse_args(arguments)
    try:
        card = find(given.job)
        while True:
            picture = ask(card)
            head = f"job {card.name}, {card.ranks:,} rank{'s' * (card.ranks != 1)}"
            print(as_json(picture) if given.json else "\n".join([head, *lines(picture)]), flush=True)
            if not given.watch:
                return 0
            import time

            time.sleep(given.watch)
    except UnansweredError as error:
        print(f"mpiddp.where: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
