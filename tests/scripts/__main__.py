"""Run all scripts in all ways and write the table of what differs: `python -m tests.scripts [--write] [NAME...]`.

Ends with status 1 where something differs that nobody has explained, or where an explanation is not needed any more.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.holds import Hold

from .catalogue import SCRIPTS, Script
from .reasons import REASONS, explain
from .ways import PLAIN, QUICK, WAYS, Result, differences, run_all

DOCUMENT = Path(__file__).with_name("README.md")
BEGIN = "| script | what it does | status |"
JOBS = 2  # at a time


def row(script: Script, results: dict[str, Result], used: set[str], unexplained: list[str]) -> str:
    """Return a script's row of the table; note the explanations it uses and what has none."""
    cells = []
    for way in WAYS[1:]:
        parts = []
        for difference in differences(results[PLAIN], results[way]):
            why = explain(script.name, way, difference)
            if not why:
                unexplained.append(f"{script.name}, {way}: {difference}")
            used.add(why)
            parts.append(f"{difference} ({why or '**not explained**'})".replace("|", "\\|"))
        cells.append("; ".join(parts) or "=")
    return f"| `{script.name}` | {script.does} | {results[PLAIN].status} | {' | '.join(cells)} |"


def main() -> int:
    """Run the scripts that are named, or all, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    scripts = [script for script in SCRIPTS if not arguments.names or script.name in arguments.names]
    used: set[str] = set()
    unexplained: list[str] = []
    rows = []
    with tempfile.TemporaryDirectory() as home, contextlib.closing(Hold(QUICK, Path(home))) as hold, \
            ThreadPoolExecutor(JOBS) as pool:
        hold.wait_until_ready()
        for script, results in zip(scripts, pool.map(partial(run_all, hold=hold), scripts), strict=True):
            rows.append(row(script, results, used, unexplained))
            print(rows[-1], flush=True)
    stale = [] if arguments.names else [reason.why for reason in REASONS if reason.why not in used]
    if arguments.write and not arguments.names:
        head = DOCUMENT.read_text().split(BEGIN)[0]
        table = [f"{BEGIN} {' | '.join(WAYS[1:])} |", f"| --- | --- | --- |{' --- |' * len(WAYS[1:])}", *rows]
        DOCUMENT.write_text(head + "\n".join(table) + "\n")
    for line in [f"not explained: {text}" for text in unexplained] + [f"explains nothing: {text}" for text in stale]:
        print(line, file=sys.stderr)
    return int(bool(unexplained or stale))


if __name__ == "__main__":
    raise SystemExit(main())
