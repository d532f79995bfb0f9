"""A hold for tests; `python -m tests.holds [--runs N]` gives one N runs, and tells what is left of them."""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil

from tests import processes
from tests.faults.matrix import FAULT, MOMENTS, STATUSES
from tests.support import DEADLINE_S, MPIS, ROOT, Done, Mpi, check, mpiexec_command, need, on_path, single_node_environ

ALL_REDUCE = """
import os, torch, torch.distributed as dist
one = torch.ones(1)
dist.all_reduce(one)
print(f"{os.environ['RANK']} of {one.item():g}\\n", end="")
"""
KINDS = sorted(STATUSES.keys() - {"SIGSTOP", "atexit"})  # which ends after minutes, and which is no failure
LATEST = 50  # runs whose seconds are compared with those of the first ones
class Hold:
    """A hold of two ranks, whose user has a home of his own."""

    def __init__(self, mpi: Mpi, home: Path, *options: object, path: Path = ROOT) -> None:
        """Start it; modules are found in the folder `path`, too."""
        need(mpi.missing())
        self.mpi, self.home, self.lock = mpi, home, threading.Lock()
        self.environ = processes.marked({**single_node_environ(mpi), **on_path(ROOT, path),
                                         "XDG_STATE_HOME": str(home)})
        self.log = home / "hold.log"
        with self.log.open("w") as log:
            self.process = processes.start(mpiexec_command(mpi, 2, "-m", "mpiddp.hold", *options), self.environ, ROOT,
                                           stdout=log, stderr=subprocess.STDOUT)
        self.wait_for("mpiddp: a hold of 2 ranks is ready after")

    def wait_for(self, words: str) -> None:
        """Return when the hold has printed some words."""
        deadline = time.monotonic() + DEADLINE_S
        while words not in self.log.read_text():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(self.log.read_text())
            time.sleep(0.05)

    def command(self, *arguments: object) -> list[str]:
        """Return the command of a run."""
        return [str(self.mpi.python), "-m", "mpiddp.run", *map(str, arguments)]

    def run(self, *arguments: object, cwd: Path = ROOT) -> Done:
        """Run a script."""
        return processes.run(*self.command(*arguments), timeout=DEADLINE_S, cwd=cwd, env=self.environ)

    def type(self, lines: str) -> Done:
        """Give a prompt some lines, and its end."""
        with tempfile.TemporaryFile("w+") as stdin:
            stdin.write(lines)
            stdin.seek(0)
            return processes.run(*self.command("--quiet", "-i"), timeout=DEADLINE_S, cwd=ROOT, env=self.environ,
                                 stdin=stdin)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a script; its stdout is a pipe."""
        return processes.start(self.command(*arguments), self.environ, ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)

    def templates(self) -> list[psutil.Process]:
        """Return the template processes."""
        return [process for process, words in processes.with_mark(self.environ[processes.MARK]).items()
                if "mpiddp.hold.template" in words]

    def close(self) -> None:
        """End the hold, if it has not ended; no process is left."""
        processes.end_tree(self.process.pid)
        assert processes.leftovers(self.environ) == []


class Remains:
    """What a hold has: descriptors of each process, files in /dev/shm, and the templates' bytes of memory."""

    def __init__(self, hold: Hold) -> None:
        running = processes.with_mark(hold.environ[processes.MARK])
        self.descriptors = sorted(process.num_fds() for process in running)
        self.segments = sorted(path.name for path in Path("/dev/shm").iterdir())
        self.rss = [process.memory_info().rss for process in hold.templates()]


def run_many(hold: Hold, count: int, seed: int) -> list[float]:
    """Give a hold so many runs, of which one in ten fails as tests/faults has it; return the others' seconds."""
    choose = random.Random(seed)
    seconds = []
    for number in range(count):
        if number % 10 == 9:
            kind = choose.choice(KINDS)
            fault = hold.run("--quiet", FAULT, kind, choose.choice(MOMENTS), choose.randrange(2))
            check(fault, STATUSES[kind])
        else:
            began_s = time.monotonic()
            check(hold.run("--quiet", "-c", ALL_REDUCE))
            seconds.append(time.monotonic() - began_s)
    return seconds


def main() -> None:
    """Print what a hold has before and after many runs, and how long the first and the last ones took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        hold = Hold(MPIS["mpich"], Path(home))
        try:
            check(hold.run("-c", ALL_REDUCE))
            before = Remains(hold)
            seconds = run_many(hold, options.runs, options.seed)
            after = Remains(hold)
            print(f"descriptors {before.descriptors} -> {after.descriptors}, /dev/shm {before.segments} -> "
                  f"{after.segments}, MB {[rss >> 20 for rss in before.rss]} -> {[rss >> 20 for rss in after.rss]}")
            for name, part in (("first", seconds[:LATEST]), ("last", seconds[-LATEST:])):
                print(f"{name} {len(part)} runs: median {statistics.median(part):.3f} s")
            check(hold.run("--end"))
            hold.process.wait(DEADLINE_S)
        finally:
            hold.close()


if __name__ == "__main__":
    main()
