"""Seconds from a rank's exception to the end of its job, while the other ranks sleep.

    python -m tests.benchmarks.failure [--quick]

Four ranks on this machine, and where a cluster can be had six on three nodes under srun: mpiddp under
each launcher, torchrun, and the plain recipe (mpi4py, environment variables, init_process_group()).
They run in turn; a job that is still there after a minute is ended, counted so and not run again.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests import processes
from tests.cluster import Cluster, missing_components
from tests.faults.matrix import LAUNCHERS, Launcher
from tests.support import MPIS, PROGRAMS, ROOT, VENVS, free_port, mpiexec_command, single_node_environ

SCRIPT = Path(__file__).parent / "raises.py"
CUT_OFF_S = 60
RUNS = 5
TORCHRUN = str(VENVS / "base/bin/torchrun")
ON_THREE_NODES = 'exec "$0" --nnodes=3 --nproc-per-node=2 --node-rank=$SLURM_NODEID --master-addr=node1 "$@"'

Run = Callable[[], subprocess.CompletedProcess[str]]


def here(command: list[str], environ: Mapping[str, str]) -> Run:
    """Return a run on this machine."""
    return lambda: processes.run(*command, timeout=CUT_OFF_S, env=environ, cwd=ROOT)


def jobs_here(launchers: list[Launcher]) -> dict[str, Run]:
    """Return the jobs on this machine by their names."""
    mpi = MPIS["openmpi4"]
    environ = single_node_environ(mpi)
    jobs = {f"mpiddp, {one.name}": here(mpiexec_command(one.mpi, 4, "-m", "mpiddp", SCRIPT),
                                        single_node_environ(one.mpi)) for one in launchers}
    jobs["torchrun"] = here([TORCHRUN, "--nproc-per-node=4", f"--master-port={free_port()}", str(SCRIPT)], environ)
    jobs["plain recipe, Open MPI 4.1 mpirun"] = here(
        mpiexec_command(mpi, 4, PROGRAMS / "plain_recipe.py", SCRIPT), environ)
    return jobs


def jobs_there(cluster: Cluster) -> dict[str, Run]:
    """Return the jobs on the cluster by their names."""
    def srun(mpi: str, options: list[str], *command: object) -> Run:
        return lambda: cluster.run("srun", *options, *map(str, command), timeout=CUT_OFF_S,
                                   env=MPIS[mpi].environ(), cwd=ROOT)

    jobs = {}
    for one in LAUNCHERS:
        if one.srun:
            options = [f"--mpi={one.mpi.pmi}", "-N3", "--ntasks-per-node=2"]
            jobs[f"mpiddp, {one.name}, 3 nodes"] = srun(
                one.mpi.name, options, one.mpi.python, "-m", "mpiddp", SCRIPT)
    mpi = MPIS["openmpi4"]
    jobs["torchrun under srun, 3 nodes"] = srun(
        mpi.name, ["-N3", "--ntasks-per-node=1"], "sh", "-c", ON_THREE_NODES, TORCHRUN, SCRIPT)
    jobs["plain recipe, srun pmix, 3 nodes"] = srun(
        mpi.name, ["--mpi=pmix", "-N3", "--ntasks-per-node=2"], mpi.python, PROGRAMS / "plain_recipe.py", SCRIPT)
    return jobs


def measure(run: Run) -> tuple[float, int | None]:
    """Return the seconds from the exception to the end of a job and its exit status, None where it was cut off."""
    try:
        done = run()
    except subprocess.TimeoutExpired as late:
        if "FAULT" not in str(late.stderr):
            raise
        return CUT_OFF_S, None
    ended = time.time()
    said = re.search(r"FAULT ([\d.]+)", done.stderr)
    if said is None:
        raise RuntimeError(f"the job did not come to its exception:\n{done.stderr}")
    return ended - float(said[1]), done.returncode


def compare(jobs: dict[str, Run], runs: int) -> None:
    """Run the jobs in turn and print their medians, and ratios to torchrun's."""
    found: dict[str, list[tuple[float, int | None]]] = {name: [] for name in jobs}
    for _ in range(runs):
        for name, run in jobs.items():
            if not found[name] or found[name][-1][1] is not None:
                found[name].append(measure(run))
    torchrun_s = next(statistics.median(one[0] for one in found[name]) for name in jobs if name.startswith("torchrun"))
    for name, results in found.items():
        median_s = statistics.median(seconds for seconds, _ in results)
        status = results[-1][1]
        end = "cut off" if status is None else f"exit status {status}"
        print(f"{name:36} {median_s:6.2f} s   {median_s / torchrun_s:5.2f} of torchrun's   {end}", flush=True)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one run of two jobs, to see that it works")
    quick = parser.parse_args().quick
    if quick:
        jobs = jobs_here([one for one in LAUNCHERS if one.mpi.name == "mpich" and not one.srun])
        compare({name: run for name, run in jobs.items() if not name.startswith("plain")}, 1)
        return
    compare(jobs_here([one for one in LAUNCHERS if not one.srun]), RUNS)
    if not missing_components():
        with Cluster(visible=[ROOT]) as cluster:
            compare(jobs_there(cluster), RUNS)


if __name__ == "__main__":
    main()
