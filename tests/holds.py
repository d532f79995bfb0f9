"""A hold for tests; `python -m tests.holds [--runs N]` gives one N runs, and tells what is left of them."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil

from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import LOGIN, RUN
from tests.faults.matrix import FAULT, MOMENTS, STATUSES
from tests.support import DEADLINE_S, MPIS, ROOT, Done, Mpi, check, mpiexec_command, need, on_path, single_node_environ

ALL_REDUCE = """
import os, torch, torch.distributed as dist
one = torch.ones(1)
dist.all_reduce(one)
print(f"{os.environ['RANK']} of {one.item():g}\\n", end="")
"""
KINDS = sorted(STATUSES.keys() - {"SIGSTOP", "atexit"})  # which ends after minutes, and which is no failure
PAIRS = 30  # runs in the hold that had many, and in a new one


class Hold:
    """A hold of two ranks, or of six on a cluster's three nodes, whose user has a home of his own."""

    def __init__(self, mpi: Mpi, home: Path, *options: object, path: Path = ROOT, cluster: Cluster | None = None,
                 pmi: str = "") -> None:
        """Start it; modules are found in the folder `path`, too. On a cluster the clients are on the login node."""
        need(mpi.missing())
        self.mpi, self.home, self.lock = mpi, home, threading.Lock()
        self.ranks, self._at = 2, list[str]()
        start, environ = mpiexec_command(mpi, 2, "-m", "mpiddp.hold", *options), single_node_environ(mpi)
        if cluster is not None:
            self.ranks, self._at = 6, cluster.at(LOGIN, ROOT)
            start = ["srun", f"--mpi={pmi}", "-N3", "--ntasks-per-node=2", str(mpi.python), "-m", "mpiddp.hold",
                     *map(str, options)]
            environ = {**mpi.environ(), "SLURM_CONF": f"{RUN}/slurm.conf"}
        self.environ = processes.marked({**environ, **on_path(ROOT, path), "XDG_STATE_HOME": str(home)})
        self.log = home / "hold.log"
        with self.log.open("w") as log:
            self.process = processes.start([*self._at, *start], self.environ, ROOT, stdout=log,
                                           stderr=subprocess.STDOUT)

    def wait_for(self, words: str) -> None:
        """Return when the hold has printed some words."""
        deadline = time.monotonic() + DEADLINE_S
        while words not in self.log.read_text():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(self.log.read_text())
            time.sleep(0.05)

    def wait_until_ready(self) -> Hold:
        """Return it when it is ready."""
        self.wait_for(f"mpiddp: a hold of {self.ranks} ranks is ready after")
        return self

    def command(self, *arguments: object) -> list[str]:
        """Return the command of a run."""
        return [*self._at, str(self.mpi.python), "-m", "mpiddp.run", *map(str, arguments)]

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

    def end(self) -> None:
        """End it in order."""
        check(self.run("--end"))
        assert self.process.wait(DEADLINE_S) == 0
        assert list(self.home.glob("mpiddp/*.hold")) == []

    def templates(self) -> list[psutil.Process]:
        """Return the template processes."""
        return [process for process, words in processes.with_mark(self.environ[processes.MARK]).items()
                if "mpiddp.hold.template" in words]

    def close(self) -> None:
        """End it if it has not ended; no process is left."""
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
    """Print what a hold has before and after many runs, and how long one takes then, and in a new hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        def start(name: str) -> Hold:
            (home := Path(folder) / name).mkdir()
            return stack.enter_context(contextlib.closing(Hold(MPIS["mpich"], home))).wait_until_ready()

        old = start("old")
        check(old.run("-c", ALL_REDUCE))
        before = Remains(old)
        run_many(old, options.runs, options.seed)
        after = Remains(old)
        print(f"descriptors {before.descriptors} -> {after.descriptors}, "
              f"new in /dev/shm {sorted({*after.segments} - {*before.segments})}, "
              f"MB {[rss >> 20 for rss in before.rss]} -> {[rss >> 20 for rss in after.rss]}")
        new = start("new")
        pairs = [(run_many(old, 1, 0)[0], run_many(new, 1, 0)[0]) for _ in range(PAIRS)]
        for name, seconds in zip(("after them", "a new hold"), zip(*pairs, strict=True), strict=True):
            print(f"{name}: median {statistics.median(seconds):.3f} s of {PAIRS}")
        old.end()
        new.end()


if __name__ == "__main__":
    main()
