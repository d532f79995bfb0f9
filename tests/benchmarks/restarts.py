"""Seconds from a rank's exception to the first step of the next attempt.

    python -m tests.benchmarks.restarts [--quick]

Two ranks on this machine, and where a cluster can be had two ranks on each of three nodes: mpiddp.supervise under
mpiexec and srun, and torchrun --max-restarts. They run in turn; a job that has not come back after two minutes is
ended, and no more run when that was so twice. Medians are of the runs that came back.
"""

from __future__ import annotations

import argparse
import re
import secrets
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests import processes
from tests.cluster import Cluster, missing_components
from tests.cluster.cluster import RUN
from tests.support import MPIS, ROOT, VENVS, mpiexec_command, scratch, single_node_environ

SCRIPT = Path(__file__).parent / "again.py"
CUT_OFF_S = 120
RUNS, MOST_CUT_OFF = 5, 2
TORCHRUN = [str(VENVS / "base/bin/torchrun"), "--max-restarts=3"]

Run = Callable[[], subprocess.CompletedProcess[str]]


def jobs_here() -> dict[str, Run]:
    """Return the jobs on this machine by their names."""
    mpi = MPIS["mpich"]
    supervise = [str(mpi.python), "-m", "mpiddp.supervise", "--dir", scratch()]
    ours = [*supervise, *mpiexec_command(mpi, 2, "-m", "mpiddp", SCRIPT)]

    def here(command: list[str]) -> subprocess.CompletedProcess[str]:
        return processes.run(*command, timeout=CUT_OFF_S, env=single_node_environ(mpi), cwd=ROOT)

    return {"mpiddp.supervise, MPICH": lambda: here(ours), "torchrun": lambda: here(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(SCRIPT)])}


def jobs_there(cluster: Cluster) -> dict[str, Run]:
    """Return the jobs of three nodes by their names."""
    def sbatch(mpi: str, tasks: int, command: str) -> subprocess.CompletedProcess[str]:
        environ, out = MPIS[mpi].environ(), RUN / f"{secrets.token_hex(4)}.out"
        done = cluster.run("sbatch", "-N3", f"--ntasks-per-node={tasks}", f"--output={out}", f"--chdir={ROOT}",
                           f"--wrap={command}", timeout=30, env=environ)
        number = done.stdout.split()[-1]
        try:
            cluster.wait_for_job(number, CUT_OFF_S)
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, CUT_OFF_S, stderr=out.read_text()) from None
        return subprocess.CompletedProcess(command, 0, "", out.read_text())

    found = {}
    for name, pmi in (("openmpi4", "pmix"), ("mpich", "pmi2")):
        python = MPIS[name].python
        ours = f"{python} -m mpiddp.supervise --dir {RUN} srun --mpi={pmi} {python} -m mpiddp --bind none {SCRIPT}"
        found[f"mpiddp.supervise, srun {pmi}, 3 nodes"] = lambda name=name, ours=ours: sbatch(name, 2, ours)
    torchrun = (f"srun {' '.join(TORCHRUN)} --nnodes=3 --nproc-per-node=2 --rdzv-backend=c10d "
                f"--rdzv-endpoint=node1:29511 --rdzv-id=7 {SCRIPT}")
    found["torchrun under srun, 3 nodes"] = lambda: sbatch("openmpi4", 1, torchrun)
    return found


def measure(run: Run) -> float | None:
    """Return the seconds from the exception to the next attempt's first step, None where it was cut off."""
    try:
        said = run().stderr
    except subprocess.TimeoutExpired as late:
        said = str(late.stderr)
    fault, again = re.search(r"FAULT ([\d.]+)", said), re.search(r"AGAIN ([\d.]+)", said)
    if fault is None:
        raise RuntimeError(f"the job did not come to its exception:\n{said}")
    return float(again[1]) - float(fault[1]) if again is not None else None


def compare(jobs: dict[str, Run], runs: int) -> None:
    """Run the jobs in turn and print their medians, and ratios to torchrun's."""
    found: dict[str, list[float | None]] = {name: [] for name in jobs}
    for _ in range(runs):
        for name, run in jobs.items():
            if found[name].count(None) < MOST_CUT_OFF:
                found[name].append(measure(run))
    medians = {name: statistics.median([one for one in results if one] or [CUT_OFF_S])
               for name, results in found.items()}
    torchrun_s = next(seconds for name, seconds in medians.items() if name.startswith("torchrun"))
    for name, seconds in medians.items():
        came, runs = len([one for one in found[name] if one]), len(found[name])
        print(f"{name:36} {seconds:6.2f} s   {seconds / torchrun_s:5.2f} of torchrun's   back in {came} of {runs} runs",
              flush=True)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one run on this machine, to see that it works")
    quick = parser.parse_args().quick
    compare(jobs_here(), 1 if quick else RUNS)
    if not quick and not missing_components():
        with Cluster(visible=[ROOT]) as cluster:
            compare(jobs_there(cluster), RUNS)


if __name__ == "__main__":
    main()
