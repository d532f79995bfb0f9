"""Delay of a line, and throughput of output, from the first line that arrives to the last.

    python -m tests.benchmarks.output [--quick] [--delays]

Delay: two ranks print a line every second, without a flush, under each MPI's launcher and srun; the longest time until
the line is on stdout and in the logs.

Throughput: mpiddp without an option, with --prefix, with --log-dir and with --show fold, compared with torchrun --tee 3
--log-dir, mpirun --tag-output and, if a cluster is available, srun --label; in turn, with the CPU time they take. A
reader takes all output. mpiddp's ranks are line-buffered; two jobs whose scripts are block-buffered show what that
costs. Lines are equal on all ranks, or have each rank's own numbers. MB are what ranks print, whatever is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tests import processes
from tests.cluster import Cluster, missing_components
from tests.cluster.cluster import LOGIN, RUN
from tests.support import MPIS, ROOT, VENVS, Mpi, mpiexec_command, scratch, single_node_environ

SCRIPT = Path(__file__).parent / "talking.py"
SLOW_SCRIPT = SCRIPT.with_name("each_second.py")
WAYS = ("plain", "--prefix", "--log-dir", "--show fold")
LINE = "epoch 3 step {step} loss 0.250000 learning rate 0.000300 and so on\n"
LOOKING_S = 0.1
CUT_OFF_S = 300
CONFIG = f"{RUN}/slurm.conf"

Started = tuple[list[str], dict[str, str]]


class Passed(NamedTuple):
    """What a job printed, in MB a second, and the CPU time that passed meanwhile, in seconds for each MB."""

    rate: float
    cpu: float


class Watch:
    """Adds up the CPU time of a job's processes, those that have ended included."""

    def __init__(self, mark: str) -> None:
        self._mark, self._seen, self._over = mark, dict[int, float](), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def total(self) -> float:
        """Return the CPU time so far, in seconds."""
        for process in processes.with_mark(self._mark):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._seen[process.pid] = times.user + times.system
        return sum(self._seen.values())

    def end(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOKING_S):
            self.total()


def measure(command: list[str], environ: dict[str, str], megabytes: float) -> Passed:
    """Run a job, and read all that it prints."""
    environ = processes.marked({**environ, "OMP_NUM_THREADS": "1"})
    watch = Watch(environ[processes.MARK])
    with tempfile.TemporaryFile() as errors:
        job = processes.start(command, environ, ROOT, stdout=subprocess.PIPE, stderr=errors)
        try:
            assert job.stdout is not None
            source = job.stdout.buffer  # type: ignore[attr-defined]
            source.read1(1)
            began, cpu, last = time.monotonic(), watch.total(), 0.0
            while source.read1(2**20):
                last = time.monotonic()
            cpu = watch.total() - cpu
            if job.wait(CUT_OFF_S):
                errors.seek(0)
                raise RuntimeError(errors.read().decode())
        finally:
            watch.end()
            processes.end_tree(job.pid)
            processes.leftovers(environ)
    return Passed(megabytes / (last - began), cpu / megabytes)


def latest_s(start: Callable[[list[str]], Started], way: str, steps: int, parent: str | None) -> float:
    """Return the longest time, in seconds, from when both ranks have printed a line until it is seen, in logs too."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        options = [] if way == "plain" else [*way.split(), *([f"{folder}/logs"] if way == "--log-dir" else [])]
        command, environ = start(["-m", "mpiddp", "--quiet", *options, str(SLOW_SCRIPT), folder, str(steps)])
        environ = processes.marked({**environ, "OMP_NUM_THREADS": "1"})
        seen_s: dict[str, float] = {}
        deadline = time.monotonic() + CUT_OFF_S
        with tempfile.TemporaryFile() as errors:
            job = processes.start(command, environ, ROOT, stdout=subprocess.PIPE, stderr=errors)
            try:
                assert job.stdout is not None
                for line in job.stdout:
                    step = line[line.index("step "):].strip()
                    while not is_logged(Path(folder), step) and time.monotonic() < deadline:
                        time.sleep(0.002)
                    seen_s[step] = time.time()
                if job.wait(CUT_OFF_S):
                    errors.seek(0)
                    raise RuntimeError(errors.read().decode())
            finally:
                processes.end_tree(job.pid)
                processes.leftovers(environ)
        printed_s: dict[str, float] = {}
        for rank in "01":
            for line in Path(folder, rank).read_text().splitlines():
                step, _, when = line.rpartition(" ")
                printed_s[step] = max(printed_s.get(step, 0.0), float(when))
    return max(seen_s[step] - when for step, when in printed_s.items())


def is_logged(folder: Path, step: str) -> bool:
    """Tell whether a step's line is in all logs that there are."""
    return all(f"{step}\n" in log.read_text() for log in folder.glob("logs/*/*.log"))


def delays(mpis: Sequence[Mpi], steps: int, cluster: Cluster | None) -> None:
    """Print how soon a line is seen, a row for each MPI's launcher, and for srun from two nodes."""
    def under_mpiexec(mpi: Mpi) -> Callable[[list[str]], Started]:
        return lambda words: (mpiexec_command(mpi, 2, *words), single_node_environ(mpi))

    def under_srun(mpi: Mpi, plugin: str) -> Callable[[list[str]], Started]:
        command = ["srun", f"--mpi={plugin}", "-N2", "-n2", str(mpi.python)]
        return lambda words: ([*of_cluster.at(LOGIN), *command, *words], {**mpi.environ(), "SLURM_CONF": CONFIG})

    starts = {mpi.name: under_mpiexec(mpi) for mpi in mpis if not mpi.missing()}
    if cluster is not None:
        of_cluster = cluster
        starts |= {"srun, pmi2": under_srun(MPIS["mpich"], "pmi2"), "srun, pmix": under_srun(MPIS["openmpi4"], "pmix")}
    print("maximum delay of a line that is printed every second")
    for name, start in starts.items():
        parent = str(RUN) if name.startswith("srun") else None
        rows = [f"{way} {latest_s(start, way, steps, parent):.3f} s" for way in WAYS]
        print(f"  {name:<10}", *rows, sep="  ", flush=True)


def jobs(ranks: int, kind: str, lines: int, cluster: Cluster | None) -> dict[str, Callable[[], Started]]:
    """Return the commands of the jobs by their names, and their environments."""
    mpich, open_mpi, logs = MPIS["mpich"], MPIS["openmpi4"], f"--log-dir={scratch()}/logs"
    words = [SCRIPT, kind, lines]

    def ours(*options: str) -> Started:
        return mpiexec_command(mpich, ranks, "-m", "mpiddp", "--quiet", *options, *words), single_node_environ(mpich)

    def blocks(*options: str) -> Started:
        command, environ = ours(*options)
        return [*command, "blocks"], environ

    torchrun = [str(VENVS / "base/bin/torchrun"), "--standalone", f"--nproc-per-node={ranks}", "--tee=3", logs]
    tagged = mpiexec_command(open_mpi, ranks, "-m", "mpiddp", "--quiet", *words)
    found = {
        "mpiddp": ours, "mpiddp --prefix": lambda: ours("--prefix"), "mpiddp --log-dir": lambda: ours(logs),
        "mpiddp --show fold": lambda: ours("--show=fold"),
        "mpiddp, blocks": blocks, "mpiddp --prefix, blocks": lambda: blocks("--prefix"),
        "torchrun --tee 3 --log-dir": lambda: ([*torchrun, *map(str, words)], single_node_environ(mpich)),
        "mpirun --tag-output": lambda: ([tagged[0], "--tag-output", *tagged[1:]], single_node_environ(open_mpi)),
    }
    if cluster is not None:
        command = ["srun", "--label", "--mpi=pmi2", f"-n{ranks}", "-N1", str(mpich.python), "-m", "mpiddp", "--quiet"]
        found["srun --label"] = lambda: (
            [*cluster.at(LOGIN), *command, *map(str, words)],
            {**mpich.environ(), "SLURM_CONF": CONFIG})
    return found


def table(ranks: int, kind: str, lines: int, runs: int, cluster: Cluster | None) -> None:
    """Print a row for each job."""
    megabytes = ranks * sum(len(LINE.format(step=step)) for step in range(lines)) / 1e6
    passed: dict[str, list[Passed]] = {}
    for _ in range(runs):
        for name, job in jobs(ranks, kind, lines, cluster).items():
            passed.setdefault(name, []).append(measure(*job(), megabytes))
    rates = {name: statistics.median(one.rate for one in found) for name, found in passed.items()}
    print(f"{ranks} ranks, lines {kind}, {megabytes:.0f} MB", flush=True)
    for name, found in passed.items():
        cpu = statistics.median(one.cpu for one in found)
        print(f"  {name:<27} {rates[name]:6.1f} MB/s  {1000 * cpu:5.0f} ms of CPU per MB  "
              f"{rates[name] / rates['torchrun --tee 3 --log-dir']:5.2f} of torchrun's  "
              f"{rates[name] / rates['mpiddp --prefix']:5.2f} of --prefix's", flush=True)
    for name in ("mpiddp", "mpiddp --prefix"):
        print(f"  {name}: line-buffered {rates[name] / rates[f'{name}, blocks']:.2f} of block-buffered", flush=True)


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ranks, once, without a cluster")
    parser.add_argument("--delays", action="store_true", help="measure only the delay of lines")
    options = parser.parse_args()
    quick: bool = options.quick
    with contextlib.ExitStack() as stack:
        cluster = None
        if not quick and not missing_components():
            cluster = stack.enter_context(Cluster(visible=[ROOT]))
        delays([MPIS["mpich"]] if quick else list(MPIS.values()), 4 if quick else 10, cluster)
        for ranks in () if options.delays else (2,) if quick else (1, 2, 8):
            for kind in ("alike", "numbers"):
                table(ranks, kind, 20_000 if quick else 400_000 // ranks, 1 if quick else 3, cluster)


if __name__ == "__main__":
    main()
