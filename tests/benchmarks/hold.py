"""Seconds from Enter to the end of hello and an all-reduce: in a hold, by `python -m mpiddp`, and by torchrun.

    python -m tests.benchmarks.hold [--quick]

Two ranks on this machine, in turn; the medians, and their ratio to torchrun's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests import processes
from tests.support import MPIS, ROOT, VENVS, check, free_port, mpiexec_command, on_path, single_node_environ

RANKS = 2
RUNS = 9
SCRIPT = Path(__file__).parent / "reducing.py"
CUT_OFF_S = 120


def seconds(command: list[str], environ: Mapping[str, str]) -> float:
    """Return how long a job takes that ends in order."""
    began = time.monotonic()
    check(processes.run(*command, timeout=CUT_OFF_S, env=environ, cwd=ROOT))
    return time.monotonic() - began


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="each once, to see that it works")
    runs = 1 if parser.parse_args().quick else RUNS
    mpi = MPIS["mpich"]
    with tempfile.TemporaryDirectory() as home:
        environ = {**single_node_environ(mpi), **on_path(ROOT), "XDG_STATE_HOME": home, "OMP_NUM_THREADS": "1"}
        python = str(mpi.python)
        hold = processes.start(mpiexec_command(mpi, RANKS, "-m", "mpiddp.hold"), environ, ROOT)
        try:
            deadline = time.monotonic() + CUT_OFF_S
            while not list(Path(home).glob("mpiddp/*.hold")):
                if time.monotonic() > deadline or hold.poll() is not None:
                    raise TimeoutError("the hold is not ready")
                time.sleep(0.05)
            commands = {
                "mpiddp.run": [python, "-m", "mpiddp.run", "--quiet", str(SCRIPT)],
                "mpiddp": mpiexec_command(mpi, RANKS, "-m", "mpiddp", "--quiet", SCRIPT),
                "torchrun": [str(VENVS / "base/bin/torchrun"), f"--nproc-per-node={RANKS}",
                             f"--master-port={free_port()}", str(SCRIPT)],
            }
            taken: dict[str, list[float]] = {name: [] for name in commands}
            for _ in range(runs):
                for name, command in commands.items():
                    taken[name].append(seconds(command, environ))
            for name, times in taken.items():
                median_s = statistics.median(times)
                ratio = median_s / statistics.median(taken["torchrun"])
                print(f"{name:12} {median_s:6.3f} s   {ratio:5.3f} of torchrun's", flush=True)
            check(processes.run(python, "-m", "mpiddp.run", "--end", timeout=CUT_OFF_S, env=environ, cwd=ROOT))
            hold.wait(CUT_OFF_S)
        finally:
            processes.end_tree(hold.pid)


if __name__ == "__main__":
    main()
