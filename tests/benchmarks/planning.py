"""Time and memory of the plan on rank 0, and time of a rank's own look at its host.

    python -m tests.benchmarks.planning [--quick]

The facts are generated: alike nodes of eight ranks, as a real job has them. Memory is what the plan
and its answers add to the process at their peak.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from mpiddp.base.config import LaunchConfig
from mpiddp.discovery.cpus import Topology
from mpiddp.discovery.devices import DeviceFacts
from mpiddp.discovery.gpus import Gpu
from mpiddp.discovery.host import HostFacts, Interface
from mpiddp.discovery.script import ScriptFacts
from mpiddp.planning.environment import Endpoint
from mpiddp.planning.job import Placement, PostTorchFacts, PreTorchPlan, plan_post_torch, plan_pre_torch
from mpiddp.planning.network import NodeInterfaces, ProbeResult, choose_address, choose_nccl_interfaces, rank_addresses

RANKS_PER_NODE = 8
CPUS = frozenset(range(64))
TOPOLOGY = Topology(tuple((cpu,) for cpu in range(64)), (0,) * 32 + (1,) * 32)
VERSIONS = {"Python": "3.11.7", "mpi4py": "4.1.2", "mpiddp": "0.1.0", "MPI library": "MPICH 5.0.2"}
GPUS = tuple(Gpu(f"GPU-{at}", f"GPU-{at}", "NVIDIA H100 80GB HBM3", "0000:1b:00.0", at // 4)
             for at in range(RANKS_PER_NODE))
TORCH = DeviceFacts("2.13.0", "2.27.3", "cuda", GPUS, {"cpu": "gloo", "cuda": "nccl"},
                    {"gloo": ("cpu", "cuda"), "nccl": ("cuda",)})


def host(rank: int) -> HostFacts:
    """Return the facts of a rank on its node."""
    node = rank // RANKS_PER_NODE
    address = f"10.{node // 65536}.{node // 256 % 256}.{node % 256}"
    return HostFacts(
        hostname=f"n{node:05}", node=node * RANKS_PER_NODE, cpus=CPUS, allowed=CPUS,
        topology=TOPOLOGY if rank % RANKS_PER_NODE == 0 else None, alone=False, cpus_per_task=None,
        interfaces=(Interface("ib0", address, "10.0.0.0/8", False, 200_000),), script=ScriptFacts("train.py", "cafe"),
        versions=dict(VERSIONS), prefix="/env", shm_bytes=2**38, open_files=65536,
        gpus=GPUS, visible_gpus=GPUS,
    )


def ready(plans: Sequence[PreTorchPlan], tried: int = 1) -> list[PostTorchFacts]:
    """Return the facts of ranks that have imported torch, and tried so many addresses."""
    trials = tuple(ProbeResult("ib0") for _ in range(tried))
    return [PostTorchFacts(one.place, TORCH, {},
                           Placement(one.place.rank, one.place.node_rank, "n", "", None, CPUS, (0, 1), 8, ""),
                           one.choice, trials if one.probes else ()) for one in plans]


def plan(ranks: int) -> tuple[float, float]:
    """Return the seconds and the MiB that planning a job takes."""
    facts = [host(rank) for rank in range(ranks)]
    before = peak_mib()
    start = time.perf_counter()
    plans = plan_pre_torch(facts, LaunchConfig())
    offered = rank_addresses(facts)
    hosts_s = time.perf_counter() - start
    found = ready(plans, len(offered))
    hosts = [one.hostname for one in facts]
    start = time.perf_counter()
    results = {one.place.node_rank: one.probe_results for one in found if one.probe_results}
    names = {one.place.node_rank: hosts[one.place.rank] for one in found}
    address, interfaces = choose_address(offered, results, names)
    nodes = {plan.place.node_rank: one for plan, one in zip(plans, facts, strict=True) if plan.place.local_rank == 0}
    told = choose_nccl_interfaces([NodeInterfaces(nodes[node].interfaces, name, [name])
                                   for node, name in sorted(interfaces.items())])
    ways = {node: (name, told[node]) for node, name in interfaces.items()}
    answers = plan_post_torch(found, hosts, LaunchConfig(), Endpoint(address, 40000, "token", "run"), ways)
    devices_s = time.perf_counter() - start
    assert len(answers) == ranks
    return hosts_s + devices_s, peak_mib() - before


def peak_mib() -> float:
    """Return the largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def checks_ms(times: int) -> float:
    """Return the milliseconds of the checks that a rank makes before torch, median of fresh processes.

    They are: which launcher, which library, do they fit, which versions, the script's hash and
    syntax; what they import is counted, what a start without them would import too is not.
    """
    code = ("import time, os, socket, mpi4py.MPI, mpiddp.base.config; start = time.perf_counter(); "
            "from mpiddp.discovery import host, launchers, mpi, runtime, script; "
            "from mpiddp.planning import compatibility, problems; "
            "found = mpi.identify_library(); "
            "compatibility.check_nested(runtime.find_outer_launcher(os.environ), None); "
            "compatibility.check_compatibility(launchers.read_launch_facts(os.environ), found); "
            "host.read_versions(found.title); "
            f"script.read_script_facts(mpiddp.base.config.Script({__file__!r})); "
            "print(time.perf_counter() - start)")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    taken = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                                  env=environ).stdout) for _ in range(times + 1)]
    return statistics.median(taken[1:]) * 1000


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    quick = parser.parse_args().quick
    print("   ranks  plan (s)  memory (MiB)")
    for ranks in (10, 1000) if quick else (10, 1000, 100_000):
        seconds, mib = plan(ranks)
        print(f"{ranks:8,}  {seconds:8.4f}  {mib:12.1f}")
    print(f"a rank's checks before torch: {checks_ms(1 if quick else 15):.1f} ms")


if __name__ == "__main__":
    main()
