"""Seconds from Enter to the end of hello and an all-reduce: in a hold, by `python -m mpiddp`, and by torchrun.

    python -m tests.benchmarks.hold [--quick]

Two ranks on this machine, and where a cluster can be had six on three nodes under srun, in turn; the medians, and their
ratio to torchrun's.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests import processes
from tests.cluster import Cluster, missing_components
from tests.cluster.cluster import LOGIN, RUN
from tests.holds import Hold
from tests.support import MPIS, ROOT, VENVS, check, free_port, mpiexec_command

from .failure import ON_THREE_NODES

RUNS = 9
SCRIPT = Path(__file__).parent / "reducing.py"
TORCHRUN = VENVS / "base/bin/torchrun"
CUT_OFF_S = 120


def seconds(command: list[str], environ: Mapping[str, str]) -> float:
    """Return how long a job takes that ends in order."""
    began = time.monotonic()
    check(processes.run(*command, timeout=CUT_OFF_S, env=environ, cwd=ROOT))
    return time.monotonic() - began


def compare(title: str, hold: Hold, commands: dict[str, list[str]], runs: int) -> None:
    """Run the commands in turn, and print their medians."""
    hold.wait_until_ready()
    environ = {**hold.environ, "OMP_NUM_THREADS": "1"}
    commands = {"mpiddp.run": hold.command("--quiet", SCRIPT), **commands}
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            taken[name].append(seconds(command, environ))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    print(title)
    for name, median_s in medians.items():
        print(f"{name:12} {median_s:6.3f} s   {median_s / medians['torchrun']:5.3f} of torchrun's", flush=True)
    hold.end()


def compare_here(runs: int) -> None:
    """Compare with two ranks on this machine."""
    mpi = MPIS["mpich"]
    with tempfile.TemporaryDirectory() as home, contextlib.closing(Hold(mpi, Path(home))) as hold:
        compare("two ranks", hold, {
            "mpiddp": mpiexec_command(mpi, 2, "-m", "mpiddp", "--quiet", SCRIPT),
            "torchrun": [str(TORCHRUN), "--nproc-per-node=2", f"--master-port={free_port()}", str(SCRIPT)],
        }, runs)


def compare_there(runs: int) -> None:
    """Compare with six ranks on three nodes."""
    mpi = MPIS["openmpi4"]
    with Cluster(visible=[ROOT]) as cluster:
        (home := RUN / "hold").mkdir()
        with contextlib.closing(Hold(mpi, home, cluster=cluster, pmi="pmix")) as hold:
            srun = [*cluster.at(LOGIN, ROOT), "srun", "-N3", "--overlap"]
            compare("six ranks on three nodes", hold, {
                "mpiddp": [*srun, "--mpi=pmix", "--ntasks-per-node=2", str(mpi.python), "-m", "mpiddp", "--quiet",
                           str(SCRIPT)],
                "torchrun": [*srun, "--ntasks-per-node=1", "sh", "-c", ON_THREE_NODES, str(TORCHRUN), str(SCRIPT)],
            }, runs)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="each once, on this machine, to see that it works")
    if parser.parse_args().quick:
        compare_here(1)
        return
    compare_here(RUNS)
    if not missing_components():
        compare_there(RUNS)


if __name__ == "__main__":
    main()
