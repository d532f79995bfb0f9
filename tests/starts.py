"""Start jobs again and again with stdout and stderr in one pipe, and look whether each line is whole.

    python -m tests.starts 1000

The four MPIs take turns, with two ranks; two jobs run at a time. What is printed is that every line of every job was
one that mpiddp or the script had printed as such, or the lines that were not.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests import processes
from tests.support import EXAMPLES, HELLO, MPIS, OURS, ROOT, mpiexec_command, single_node_environ

WHOLE = [HELLO, OURS, *map(re.compile, (
    r"  host +ranks +device +cores +numa +threads +interface",
    r"  \S+ +[\d-]+ +cpu +(core \d+|\d+-\d+|\d+ each) +\d+ +\d+ +\w+",
    r"mpiddp: warning: [a-z-]+: \S.*[^\d:]"))]
EXPECTED = 2 + 1  # the hellos and the start line, besides the map


def odd_lines(number: int) -> list[str]:
    """Return the lines of one job that are not whole, or what is missing."""
    mpi = list(MPIS.values())[number % len(MPIS)]
    job = mpiexec_command(mpi, 2, "-m", "mpiddp", EXAMPLES / "hello_world.py")
    done = processes.run("sh", "-c", '"$@" 2>&1 | cat', "sh", *job, timeout=120, env=single_node_environ(mpi), cwd=ROOT)
    lines = done.stdout.splitlines()
    found = [f"{mpi.name}: {line!r}" for line in lines if not any(one.fullmatch(line) for one in WHOLE)]
    if sum(bool(HELLO.fullmatch(line) or OURS.fullmatch(line)) for line in lines) != EXPECTED:
        found.append(f"{mpi.name}: {done.stdout!r}")
    return found


def look(starts: int) -> Iterator[str]:
    """Yield the lines of so many jobs that are not whole."""
    with ThreadPoolExecutor(2) as pool:
        yield from itertools.chain.from_iterable(pool.map(odd_lines, range(starts)))


def main() -> int:
    """Start as many jobs as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", type=int)
    starts = parser.parse_args().starts
    odd = list(look(starts))
    print(*odd, f"{starts} starts, {len(odd)} lines or jobs that are not whole", sep="\n")
    return bool(odd)


if __name__ == "__main__":
    raise SystemExit(main())
