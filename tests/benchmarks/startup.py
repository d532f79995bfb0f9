"""From Enter to the end of a job of one all-reduce: wall time, CPU time and memory, under every launcher.

    python -m tests.benchmarks.startup [--quick] [--json FILE] [--svg FILE]

The peers run in turn, A B C A B C, after a round that does not count; figures are medians. CPU time is
that of all processes of the job on this machine, those that outlive it for a moment among them; memory is
that of its largest process. On three nodes, under srun, only the wall time can be told.
"""

from __future__ import annotations

import argparse
import compileall
import ctypes
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import processes
from tests.cluster import Cluster, missing_components
from tests.support import MPIS, PROGRAMS, ROOT, VENVS, free_port, mpiexec_command, single_node_environ

HERE = Path(__file__).parent
SCRIPT, FLOOR = HERE / "first_step.py", HERE / "floor.py"
RUNS = {1: 13, 2: 13, 4: 9, 8: 5}  # by ranks; short ones suffer more from the machine's other guests
RUNS_THERE = 5
TIMEOUT_S = 120
BASE = VENVS / "base/bin"
OURS = "mpiddp"
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ON_THREE_NODES = 'exec "$0" --nnodes=3 --nproc-per-node=2 --node-rank=$SLURM_NODEID --master-addr=node1 "$@"'


@dataclass(frozen=True)
class Cost:
    """What a job took: seconds, seconds of CPU (of all its processes), MiB of its largest process."""

    wall_s: float
    cpu_s: float
    memory_mib: float


def commands(ranks: int) -> dict[str, list[str]]:
    """Return each launcher's command by its name, all of Open MPI 4.1 where there is an MPI."""
    mpi = MPIS["openmpi4"]
    found = {
        OURS: mpiexec_command(mpi, ranks, "-m", "mpiddp", "--quiet", SCRIPT),
        "torchrun": [str(BASE / "torchrun"), f"--nproc-per-node={ranks}", f"--master-port={free_port()}", str(SCRIPT)],
        "accelerate launch": [
            str(BASE / "accelerate"), "launch", "--cpu", f"--num_processes={ranks}", "--num_machines=1",
            "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}", str(SCRIPT)],
        "plain recipe": mpiexec_command(mpi, ranks, PROGRAMS / "plain_recipe.py", SCRIPT),
        "floor": mpiexec_command(mpi, ranks, FLOOR),
    }
    if ranks > 1:  # on CPUs alone it starts no more than one process
        del found["accelerate launch"]
    return found


def measure(command: list[str], environ: Mapping[str, str]) -> Cost:
    """Run a job on this machine and return what it took; raise RuntimeError where it fails."""
    with ProcessPoolExecutor(1) as fresh:  # a process whose children are this job alone
        return fresh.submit(measure_children, command, environ).result()


def measure_children(command: list[str], environ: Mapping[str, str]) -> Cost:
    """Run a job as the first and only child of this process, and return what it took."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    start = time.perf_counter()
    done = processes.run(*command, timeout=TIMEOUT_S, env=environ, cwd=ROOT)
    wall_s = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    try:
        while True:  # orphans of the job, which this process has been made to adopt
            os.waitpid(-1, 0)
    except ChildProcessError:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def in_turn(jobs: dict[str, Callable[[], Cost]], runs: int) -> dict[str, Cost]:
    """Run jobs in turn and return the medians of each; of several rounds the first does not count."""
    found: dict[str, list[Cost]] = {name: [] for name in jobs}
    for turn in range(runs + (runs > 1)):
        for name, job in jobs.items():
            cost = job()
            if turn or runs == 1:
                found[name].append(cost)
    return {name: Cost(*(statistics.median(values) for values in zip(*(tuple(asdict(cost).values()) for cost in costs),
                                                                     strict=True))) for name, costs in found.items()}


def jobs_here(ranks: int) -> dict[str, Callable[[], Cost]]:
    """Return the jobs on this machine."""
    environ = {**single_node_environ(MPIS["openmpi4"]), "PATH": f"{BASE}:/usr/bin:/bin"}
    return {name: lambda command=command: measure(command, environ)  # type: ignore[misc]
            for name, command in commands(ranks).items()}


def jobs_there(cluster: Cluster) -> dict[str, Callable[[], Cost]]:
    """Return the jobs of six ranks on three nodes."""
    mpi = MPIS["openmpi4"]

    def srun(*command: object) -> Cost:
        start = time.perf_counter()
        done = cluster.run("srun", "-N3", *map(str, command), timeout=TIMEOUT_S, env=mpi.environ(), cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stderr}")
        return Cost(time.perf_counter() - start, 0, 0)

    two = ("--mpi=pmix", "--ntasks-per-node=2", mpi.python)
    one = ("--ntasks-per-node=1", "--cpus-per-task=2")  # as many cores
    return {
        OURS: lambda: srun(*two, "-m", "mpiddp", "--quiet", SCRIPT),
        "torchrun": lambda: srun(*one, "sh", "-c", ON_THREE_NODES, BASE / "torchrun", SCRIPT),
        "plain recipe": lambda: srun(*two, PROGRAMS / "plain_recipe.py", SCRIPT),
        "floor": lambda: srun(*two, FLOOR),
    }


def show(title: str, costs: dict[str, Cost]) -> None:
    """Print a table of costs, and ours as shares of the others'."""
    print(f"{title}\n  {'':18}{'wall':>9}{'ours of it':>12}{'CPU':>9}{'ours of it':>12}{'memory':>10}")
    ours = costs[OURS]
    for name, cost in costs.items():
        rest = (f"{cost.cpu_s:7.2f} s{ours.cpu_s / cost.cpu_s:12.2f}{cost.memory_mib:6.0f} MiB" if cost.cpu_s
                else f"{'-':>9}{'-':>12}{'-':>10}")
        print(f"  {name:18}{cost.wall_s:7.2f} s{ours.wall_s / cost.wall_s:12.2f}{rest}", flush=True)


def draw(file: Path, found: dict[str, dict[str, Cost]]) -> None:
    """Draw the wall times as bars, each job's longest in full, with ours as shares of the others'."""
    import drawsvg

    rows = sum(len(costs) + 1 for costs in found.values())
    picture = drawsvg.Drawing(640, 18 * rows + 16, font_family="sans-serif")
    picture.append(drawsvg.Rectangle(0, 0, picture.width, picture.height, fill="white"))
    y = 20
    for title, costs in found.items():
        longest = max(cost.wall_s for cost in costs.values())
        picture.append(drawsvg.Text(title, 13, 10, y, fill="#333", font_weight="bold"))
        for name, cost in costs.items():
            y += 18
            share = costs[OURS].wall_s / cost.wall_s
            text = f"{cost.wall_s:.2f} s" + (f", mpiddp {share:.2f} of it" if name != OURS else "")
            picture.append(drawsvg.Text(name, 12, 20, y, fill="#333"))
            picture.append(drawsvg.Rectangle(150, y - 11, 320 * cost.wall_s / longest, 13,
                                             fill="#27c" if name == OURS else "#bbb"))
            picture.append(drawsvg.Text(text, 12, 156 + 320 * cost.wall_s / longest, y, fill="#333"))
        y += 18
    picture.save_svg(str(file))


def main() -> None:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one run of two ranks, to see that it works")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    compileall.compile_dir(ROOT / "mpiddp", quiet=1)  # as pip does
    found: dict[str, dict[str, Cost]] = {}
    for ranks in (2,) if options.quick else RUNS:
        title = f"{ranks} rank{'s' * (ranks > 1)}"
        found[title] = in_turn(jobs_here(ranks), 1 if options.quick else RUNS[ranks])
        show(title, found[title])
    if not options.quick and not missing_components():
        with Cluster([ROOT]) as cluster:
            found["6 ranks on 3 nodes, srun"] = in_turn(jobs_there(cluster), RUNS_THERE)
        show("6 ranks on 3 nodes, srun", found["6 ranks on 3 nodes, srun"])
    if options.json:
        options.json.write_text(json.dumps(
            {title: {name: asdict(cost) for name, cost in costs.items()} for title, costs in found.items()}, indent=1))
    if options.svg:
        draw(options.svg, found)


if __name__ == "__main__":
    main()
