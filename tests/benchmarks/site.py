"""What the site profile costs a start: the search for one, and reading and applying one.

    python -m tests.benchmarks.site [--quick] [FILE]

Each figure is the best of fresh interpreters, which load modules from their compiled files. `import` is that of the
module that looks for a profile; the other figures come after it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

RUNS, QUICK_RUNS = 15, 2
CODE = """
import json, os, sys, time
import argparse, re, typing, mpiddp.base.config, mpiddp.options.table, mpiddp.bootstrap.prepare  # a start has them
import mpiddp.discovery.launchers
start = time.perf_counter()
from mpiddp.discovery.site_profile import load_site
imported = time.perf_counter()
site = load_site(os.environ)
read = time.perf_counter()
from mpiddp.base.config import LaunchConfig
from mpiddp.bootstrap.site import apply_site
apply_site(LaunchConfig())
applied = time.perf_counter()
assert not site.problem, site.problem
print(json.dumps([(end - begin) * 1000 for begin, end in ((start, imported), (imported, read), (read, applied))]))
"""


def measure(file: str, runs: int) -> list[float]:
    """Return the best times in ms: import, find and read, apply; with the profile of a path, empty for none."""
    env = {name: value for name, value in os.environ.items() if name not in ("MPIDDP_SITE", "PYTHONDONTWRITEBYTECODE")}
    env |= {"MPIDDP_SITE": file} if file else {}
    times = [json.loads(subprocess.run([sys.executable, "-c", CODE], env=env, cwd=ROOT, check=True, text=True,
                                      capture_output=True).stdout) for _ in range(runs)]
    return [min(column) for column in zip(*times, strict=True)]


def main() -> None:
    """Print a line without a profile, and one with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "batch/sites/frontier.toml")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    file = options.file.resolve()
    print(f"{'ms':<14}{'import':>8}{'read':>8}{'apply':>8}{'all':>8}")
    for title, path in (("no profile", ""), (file.name, str(file))):
        columns = measure(path, QUICK_RUNS if options.quick else RUNS)
        print(f"{title:<14}" + "".join(f"{value:8.2f}" for value in (*columns, sum(columns))))


if __name__ == "__main__":
    main()
