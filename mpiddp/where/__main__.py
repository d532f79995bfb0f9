"""Tell where the ranks of a running job are: `python -m mpiddp.where [JOB]`."""

from __future__ import annotations

import argparse
import sys
import time

from ..base.files import open_for_writing
from ..base.stderr import print_answer, write_line
from ..base.version import __version__
from ..options.help import PlainParser
from .client import Inspecting, UnansweredError, ask, find
from .registry import Card
from .rendering import as_json, lines, threads, waits_for_lock
from .snapshot import Picture

HINT = "  a lock that another thread holds? --threads shows all threads, where py-spy is installed"


def main(arguments: list[str] | None = None) -> int:
    """Ask a job and print where its ranks are; return the exit status."""
    given = parsed(arguments)
    try:
        card = find(given.job)
        while True:
            status = show(card, given)
            if given.watch is None or status:
                return status
            time.sleep(given.watch)
    except UnansweredError as error:
        write_line(f"mpiddp.where: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = PlainParser("python -m mpiddp.where", description=(
        "Tell where the ranks of a running job stand, and which of them are odd. The job goes on."))
    parser.add_argument("job", nargs="?", default="", metavar="JOB",
                        help="number of the batch system, with Slurm's step or without, or the beginning of the job's "
                        "own name; default: the only one that runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="ask again and again")
    parser.add_argument("--threads", action="store_true", help="show all threads of the odd ranks, if py-spy is "
                        "installed in the job's environment and the site lets it look")
    parser.add_argument("--native", action="store_true", help="show the frames of C code, too; stops the ranks for it")
    parser.add_argument("--svg", metavar="FILE", help="draw the ranks' calls as a tree (needs drawsvg)")
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    given = parser.parse_args(arguments)
    if given.watch is not None and not given.watch > 0:
        parser.error(f"--watch {given.watch:g}: must be greater than 0")
    return given


def show(card: Card, given: argparse.Namespace) -> int:
    """Ask a job once, and print what it says; draw it, if that was asked for; return the exit status."""
    picture, inspected = ask(card, Inspecting(given.native) if given.threads or given.native else None)
    head = f"job {card.name}, {card.ranks:,} rank{'s' * (card.ranks != 1)}{picture.step and f', {picture.step}'}"
    hint = [] if inspected or not waits_for_lock(picture) else [HINT]
    table = [head, *lines(picture), *hint, *threads(inspected)]
    status = print_answer(as_json(picture, inspected) if given.json else "\n".join(table))
    return draw(picture, head, given.svg) or status if given.svg else status


def draw(picture: Picture, head: str, path: str) -> int:
    """Draw a picture into a file, or say why that cannot be done; return the exit status."""
    from .rendering import svg

    try:
        with open(open_for_writing(path), "w", encoding="utf-8") as drawn:
            drawn.write(svg(picture, head))
    except (ImportError, OSError) as error:
        needs = " (pip install drawsvg)" if isinstance(error, ImportError) else ""
        write_line(f"mpiddp.where: cannot draw {path}: {error}{needs}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
