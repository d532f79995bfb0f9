"""Run CPython's tests in plain Python and in a rank, and print what differs: `python -m tests.cpython [MODULE...]`.

Ends with status 1 where something differs that nobody has explained, or where an explanation is not needed any more.
"""

from __future__ import annotations

import argparse
import sys

from .comparison import MODULES, compare


def main() -> int:
    """Compare the modules that are named, or all, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cpython", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(MODULES))
    modules = parser.parse_args().modules or MODULES
    if unknown := set(modules) - set(MODULES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    is_wrong = False
    for module in modules:
        found = compare(module)
        print(f"{module}: {found.tests} tests, {len(found.explained) + len(found.unexplained)} differ", flush=True)
        for test, reason in found.explained.items():
            print(f"  {test}: {reason.why}")
        for test, (plain, rank) in found.unexplained.items():
            print(f"  {test}: not explained: {rank.outcome}, not {plain.outcome}\n{rank.reason or plain.reason}")
        for reason in found.stale:
            print(f"  explains nothing: {reason.tests}: {reason.why}")
        is_wrong = is_wrong or bool(found.unexplained or found.stale)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
