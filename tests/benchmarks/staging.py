"""A job's start where the environment lies on a shared file system: python -m tests.benchmarks.staging [RUNS] [MS ...].

Three nodes with one rank each; a FUSE file system on each shows the environments, and one server does 20,000 operations
and 500 MB per second for all of them, each operation after a latency of 0.1, 1 and 4 ms, or of those that are given.
Nothing is in any cache before a run; --kept tells for how many seconds names and attributes are kept then. The peers
run in turn; seconds are medians, from srun's start to its end. A rank has one of the machine's two cores, which is the
same on all nodes, as Slurm gives it; with --cores 2 it has both.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.cluster import Cluster
from tests.cluster.cluster import NODES, RUN
from tests.cluster.shared import KEPT_S, OPERATIONS, Server, Speed, environment, shared
from tests.support import MPIS, PROGRAMS, ROOT, VENVS

SCRIPT = Path(__file__).parent / "first_step.py"
OPERATIONS_PER_S, BYTES_PER_S = 20_000, 500_000_000
LATENCIES_MS = (0.1, 1.0, 4.0)
CUT_OFF_S = 300
LOCAL, WITHOUT, FIRST = "mpiddp, local disk", "mpiddp", "mpiddp --stage"
KEPT, SECOND = "mpiddp --stage --stage-keep, first", "mpiddp --stage --stage-keep, again"
TORCHRUN, PLAIN, UNPACKED = "torchrun", "plain recipe", "sbcast and tar"
UNPACK = """\
set -e
sbcast {archive} /dev/shm/environment.tar
srun sh -c 'mkdir /dev/shm/copied && tar -C /dev/shm/copied -xf /dev/shm/environment.tar'
srun --mpi=pmix --cpus-per-task={cores} /dev/shm/copied/{name}/bin/python -m mpiddp --quiet {script}
"""


class Took(NamedTuple):
    """Seconds of a job, and the operations and bytes that the server did for it."""

    seconds: float
    operations: int
    read: int


class Bench:
    """Runs jobs in an environment that a server shows to the nodes."""

    def __init__(self, cluster: Cluster, server: Server, python: Path, cores: int = 1) -> None:
        self._cluster, self._server, self._python, self._cores = cluster, server, python, cores
        self._environ = {**MPIS["openmpi4"].environ(), "XDG_CACHE_HOME": str(python.parents[1] / "cache")}
        self.speed = Speed()
        self.said = ""  # by the last job

    def peers(self) -> dict[str, Callable[[], Took]]:
        """Return the jobs by their names, in the order in which they run."""
        ours = ("-m", "mpiddp", "--quiet")
        torchrun = ("-m", "torch.distributed.run", f"--nnodes={len(NODES)}", "--nproc-per-node=1",
                    "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29511", "--rdzv-id=22")
        return {
            LOCAL: lambda: self.here(*ours, SCRIPT),
            WITHOUT: lambda: self.there(*ours, SCRIPT),
            FIRST: lambda: self.there(*ours, "--stage", SCRIPT, cold=True),
            KEPT: lambda: self.there(*ours, "--stage", "--stage-keep", SCRIPT, cold=True),
            SECOND: lambda: self.there(*ours, "--stage", "--stage-keep", SCRIPT),
            PLAIN: lambda: self.there(PROGRAMS / "plain_recipe.py", SCRIPT),
            TORCHRUN: lambda: self.there(*torchrun, SCRIPT),
            UNPACKED: self.unpacked,
        }

    def here(self, *arguments: object) -> Took:
        """Run a job from the nodes' own disk, where nothing is cold."""
        self._server.unmount()
        return self._run(self._srun(*arguments))

    def there(self, *arguments: object, cold: bool = False, nodes: int = len(NODES)) -> Took:
        """Run a job from the shared file system; `cold` removes before what is on the nodes."""
        if cold:
            self.clear()
        self._server.mount()
        return self._run(self._srun(*arguments, nodes=nodes))

    def unpacked(self) -> Took:
        """Copy an archive of the environment to each node, unpack it and run the job there."""
        folder = self._python.parents[1]
        archive = folder / "environment.tar"
        if not archive.exists():
            subprocess.run(["tar", "-C", str(folder.parent), "-cf", str(archive), "base/lib", f"{folder.name}/bin",
                            f"{folder.name}/lib", f"{folder.name}/pyvenv.cfg"], check=True, timeout=CUT_OFF_S)
        self._server.mount()
        script = UNPACK.format(archive=archive, name=folder.name, script=SCRIPT, cores=self._cores)
        try:
            return self._run(["sbatch", f"-N{len(NODES)}", "--ntasks-per-node=1", f"--cpus-per-task={self._cores}",
                              f"--output={RUN}/unpack.out", f"--wrap={script}"])
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove what jobs have left in the nodes' memory, of which their /tmp is a part, too."""
        for node in NODES:
            subprocess.run([*self._cluster.at(node, Path("/")), "sh", "-c", "rm -rf /dev/shm/* /tmp/mpiddp-stage-*"],
                           check=True, timeout=CUT_OFF_S)

    def _srun(self, *arguments: object, nodes: int = len(NODES)) -> list[str]:
        return ["srun", "--mpi=pmix", f"-N{nodes}", "--ntasks-per-node=1", f"--cpus-per-task={self._cores}",
                str(self._python), *map(str, arguments)]

    def _run(self, command: list[str]) -> Took:
        self._server.serve(self.speed)
        begun = time.monotonic()
        done = self._cluster.run(*command, timeout=CUT_OFF_S, env=self._environ, cwd=Path("/"))
        if command[0] == "sbatch":
            facts = self._cluster.wait_for_job(done.stdout.split()[-1], CUT_OFF_S)
            done.returncode += facts["JobState"] != "COMPLETED"
        seconds = time.monotonic() - begun
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        self.said, counts = done.stdout + done.stderr, self._server.state.counts()
        return Took(seconds, sum(counts[kind] for kind in OPERATIONS), counts["bytes"])


def compare(bench: Bench, latency_ms: float, runs: int) -> None:
    """Print what each peer takes at a latency."""
    bench.speed = Speed(latency_ms / 1e3, OPERATIONS_PER_S, BYTES_PER_S)
    found: dict[str, list[Took]] = {}
    for number in range(runs):
        for name, run in bench.peers().items():
            if name != UNPACKED or number == 0:  # which takes longest
                found.setdefault(name, []).append(run())
    medians = {name: statistics.median([one.seconds for one in some]) for name, some in found.items()}
    for name, some in found.items():
        seconds = medians[name]
        print(f"| {latency_ms:g} ms | {name} | {seconds:.1f} | {seconds / medians[WITHOUT]:.2f} | "
              f"{seconds / medians[TORCHRUN]:.2f} | {seconds / medians[LOCAL]:.2f} | "
              f"{statistics.median([one.operations for one in some]):,.0f} | "
              f"{statistics.median([one.read for one in some]) / 1e6:,.0f} |", flush=True)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="?", type=int, default=3)
    parser.add_argument("latencies", nargs="*", type=float, default=LATENCIES_MS)
    parser.add_argument("--kept", type=float, default=KEPT_S)
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    with environment(MPIS["openmpi4"]) as python, Cluster(visible=[ROOT]) as cluster, \
            shared(cluster, VENVS.resolve(), Speed(), kept_s=options.kept) as server:
        bench = Bench(cluster, server, python, options.cores)
        for _ in range(2):  # what the first one records, the second one stages, and records what that opens
            bench.there("-m", "mpiddp", "--quiet", "--stage", SCRIPT)
        titles = ("latency", "job", "s", "of mpiddp", "of torchrun", "of local", "operations", "MB read")
        print(f"| {' | '.join(titles)} |\n{'| --- ' * len(titles)}|")
        for latency_ms in options.latencies:
            compare(bench, latency_ms, options.runs)


if __name__ == "__main__":
    main()
