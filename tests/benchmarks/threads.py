"""Steps per second of the same training under each launcher's own choice of cores and threads.

    python -m tests.benchmarks.threads [--quick]

One rank and two, in turn: mpiddp under Open MPI and MPICH, torchrun, the plain recipe under Open MPI with its
default binding, and for one rank python itself and accelerate launch (it starts no more without a GPU).
"""

from __future__ import annotations

import argparse
import re
import statistics

from tests import processes
from tests.support import MPIS, PROGRAMS, ROOT, VENVS, free_port, mpiexec_command, single_node_environ

SCRIPT = ROOT / "tests/benchmarks/training.py"
RUNS = 5
TIMEOUT_S = 300
BASE = VENVS / "base/bin"


def commands(ranks: int, arguments: list[str]) -> dict[str, list[str]]:
    """Return the command of each peer by its name."""
    script = [str(SCRIPT), *arguments]
    found = {f"mpiddp, {MPIS[name].title}": mpiexec_command(MPIS[name], ranks, "-m", "mpiddp", *script)
             for name in ("openmpi4", "mpich")}
    found["torchrun"] = [str(BASE / "torchrun"), f"--nproc-per-node={ranks}", f"--master-port={free_port()}", *script]
    if ranks == 1:
        found["python"] = [str(BASE / "python"), *script]
        found["accelerate launch"] = [str(BASE / "accelerate"), "launch", "--cpu", "--num_processes=1",
                                      "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", *script]
    found["plain recipe, Open MPI 4.1"] = mpiexec_command(
        MPIS["openmpi4"], ranks, PROGRAMS / "plain_recipe.py", *script)
    return found


def steps_per_s(name: str, command: list[str]) -> float:
    """Run a training and return its speed."""
    mpi = MPIS["mpich" if "MPICH" in name else "openmpi4"]
    environ = {**single_node_environ(mpi), "PATH": f"{BASE}:/usr/bin:/bin"}
    done = processes.run(*command, timeout=TIMEOUT_S, env=environ, cwd=ROOT)
    found = re.search(r"^([\d.]+) steps per second$", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{name} did not train:\n{done.stderr}")
    return float(found[1])


def compare(ranks: int, arguments: list[str], runs: int) -> None:
    """Run the peers in turn and print their medians, and ratios to torchrun's."""
    peers = commands(ranks, arguments)
    found: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(runs):
        for name, command in peers.items():
            found[name].append(steps_per_s(name, command))
    torchrun = statistics.median(found["torchrun"])
    for name, speeds in found.items():
        median = statistics.median(speeds)
        print(f"{ranks} rank{'s' * (ranks > 1):1} {name:32} {median:7.1f} steps/s   "
              f"{median / torchrun:5.2f} of torchrun's", flush=True)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a small training on one rank, to see that it works")
    quick = parser.parse_args().quick
    if quick:
        compare(1, ["--epochs=1"], 1)
        return
    for ranks in (1, 2):
        compare(ranks, ["--epochs=3", "--width=128"], RUNS)


if __name__ == "__main__":
    main()
