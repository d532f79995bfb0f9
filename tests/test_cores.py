"""The cores and threads of each rank: plain functions on written-down machines, and what ranks find on this one."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mpiddp.facts.cpus import Topology, allowed, topology
from mpiddp.facts.host import HostFacts
from mpiddp.plan.cores import Share, cores_in, shares, warnings
from tests import processes
from tests.cluster import Cluster
from tests.support import DEADLINE_S, MPIS, PROGRAMS, ROOT, Mpi, check, mpiexec, need, single_node_environ, srun


def machine(cores: int, numa: int = 1, threads: int = 1) -> Topology:
    """Return a node of `cores` cores; the second hardware threads are numbered after all first ones, as Linux does."""
    return Topology(tuple(tuple(core + cores * thread for thread in range(threads)) for core in range(cores)),
                    tuple(core * numa // cores for core in range(cores)))


def ranks(topology: Topology, *masks: Collection[int], allowed: Collection[int] = (), cpus_per_task: int | None = None,
          alone: bool = False, node: int = 0) -> list[HostFacts]:
    """Return the facts of a node's ranks, each with the CPUs that its launcher gave it."""
    everything = frozenset(allowed or [cpu for core in topology.cores for cpu in core])
    return [HostFacts(f"n{node}", node, frozenset(mask), everything, topology if local == 0 else None, alone,
                      cpus_per_task, (), None, {}, "", 0, 0) for local, mask in enumerate(masks)]


def spans(found: Sequence[Share]) -> list[tuple[int, int, int]]:
    """Return of each share the first and last CPU and how many there are."""
    return [(min(one.cpus), max(one.cpus), len(one.cpus)) for one in found]


DGX_H100 = machine(112, numa=2, threads=2)
A100_NODE = machine(64, numa=4)
FRONTIER = machine(64, numa=4, threads=2)
SUPERCLOUD = machine(40, numa=2)
LAPTOP = machine(8, threads=2)


def test_ranks_that_nobody_bound_get_neighbours_of_one_socket() -> None:
    """MPICH on a DGX H100: 8 ranks of 14 cores with their second threads, the first four on the first socket."""
    found = shares(ranks(DGX_H100, *[range(224)] * 8), "auto")
    assert [one.threads for one in found] == [14] * 8
    assert found[3].cpus == {*range(42, 56), *range(154, 168)}
    assert [DGX_H100.numa[min(one.cpus)] for one in found] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_each_of_four_ranks_gets_its_numa_node() -> None:
    """Open MPI binds more than two ranks to a NUMA node each; where it does not, the plan is the same."""
    unbound = shares(ranks(A100_NODE, *[range(64)] * 4), "auto")
    bound = shares(ranks(A100_NODE, *(range(start, start + 16) for start in (0, 16, 32, 48))), "auto")
    assert unbound == bound
    assert spans(bound) == [(0, 15, 16), (16, 31, 16), (32, 47, 16), (48, 63, 16)]


def test_what_slurm_gave_each_task_is_kept() -> None:
    """Frontier: -c7, one core of each eight left to the system, and less than an even part: the user chose it."""
    masks = [range(1 + 8 * local, 8 + 8 * local) for local in range(8)]
    found = shares(ranks(FRONTIER, *masks, cpus_per_task=7), "auto")
    assert [one.cpus for one in found] == [frozenset(mask) for mask in masks]
    assert [one.threads for one in found] == [7] * 8


def test_open_mpis_single_cores_are_widened() -> None:
    """Two ranks on a V100 node, which Open MPI binds to a core each: they get a socket each."""
    assert spans(shares(ranks(SUPERCLOUD, [0], [1]), "auto")) == [(0, 19, 20), (20, 39, 20)]
    assert spans(shares(ranks(SUPERCLOUD, [0], [1], allowed=range(4)), "auto")) == [(0, 1, 2), (2, 3, 2)]
    assert spans(shares(ranks(SUPERCLOUD, [0], [1], allowed=range(2)), "auto")) == [(0, 0, 1), (1, 1, 1)]
    assert spans(shares(ranks(SUPERCLOUD, [3], [4], cpus_per_task=1), "auto")) == [(3, 3, 1), (4, 4, 1)]  # as asked


def test_a_part_of_the_node_that_all_ranks_were_given_is_shared_out() -> None:
    """As by numactl around mpirun."""
    assert spans(shares(ranks(A100_NODE, *[range(16, 32)] * 3), "auto")) == [(16, 20, 5), (21, 25, 5), (26, 31, 6)]


def test_a_single_core_that_all_ranks_were_given_is_not_enough() -> None:
    assert spans(shares(ranks(SUPERCLOUD, [0], [0]), "auto")) == [(0, 19, 20), (20, 39, 20)]


def test_uneven_nodes_are_shared_out_each_for_itself() -> None:
    facts = [*ranks(A100_NODE, *[range(64)] * 2), *ranks(A100_NODE, range(64), node=2)]
    assert [one.threads for one in shares(facts, "auto")] == [32, 32, 64]


def test_a_laptop_without_a_launcher_keeps_what_it_has() -> None:
    assert shares(ranks(LAPTOP, [5], alone=True), "auto") == [Share(frozenset({5}), 1)]
    assert shares(ranks(LAPTOP, range(16), alone=True), "auto") == [Share(frozenset(range(16)), 8)]


def test_more_ranks_than_cores_split_threads_and_then_share_all() -> None:
    found = shares(ranks(LAPTOP, *[range(16)] * 16), "auto")
    assert sorted(cpu for one in found for cpu in one.cpus) == list(range(16))
    assert shares(ranks(LAPTOP, *[range(16)] * 17), "auto") == [Share(frozenset(range(16)), 1)] * 17


@pytest.mark.parametrize(("policy", "expected"), [
    ("launcher", [Share(frozenset({0}), 1), Share(frozenset({1}), 1)]),
    ("none", [Share(frozenset(range(40)), 20, (0, 1))] * 2),
])
def test_other_policies(policy: str, expected: list[Share]) -> None:
    assert shares(ranks(SUPERCLOUD, [0], [1]), policy) == expected


def test_warnings() -> None:
    tight = machine(2)
    assert warnings(ranks(LAPTOP, *[range(16)] * 8), "auto") == []
    assert warnings([*ranks(tight, *[range(2)] * 4), *ranks(tight, *[range(2)] * 4, node=4)], "auto") == [
        "one-core: 4 ranks have 2 cores on n[0,4]; ask for more (--cpus-per-task), or start fewer ranks"]
    one_for_all = ranks(LAPTOP, *[[0]] * 4)
    assert warnings(one_for_all, "auto") == []
    assert [line.split(" on ")[0] for line in warnings(one_for_all, "launcher")] == [
        "shared-cores: 4 ranks were given 1 of 16 CPUs"]


HERE = sorted(allowed())
CORES = cores_in(frozenset(HERE), topology(HERE))


def found_by(mpi: Mpi, ranks: int, *options: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return what each rank finds, in rank order."""
    need([] if CORES > 1 else ["a second core"])
    done = check(mpiexec(mpi, ranks, *options, PROGRAMS / "cores.py", env=env))
    return sorted(map(json.loads, done.stdout.splitlines()), key=lambda one: int(one["rank"]))


def test_open_mpis_binding_of_one_rank_is_widened() -> None:
    bound, = found_by(MPIS["openmpi4"], 1, "--bind", "launcher")
    assert (len(bound["cpus"]), bound["threads"]) == (1, 1)
    wide, = found_by(MPIS["openmpi4"], 1)
    assert (wide["cpus"], wide["child"], wide["threads"]) == (HERE, HERE, CORES)


@pytest.mark.parametrize("name", ["openmpi4", "mpich", "impi"])
def test_two_ranks_have_cores_of_their_own(name: str) -> None:
    first, second = found_by(MPIS[name], 2)
    assert sorted(first["cpus"] + second["cpus"]) == HERE
    assert abs(first["threads"] - second["threads"]) <= CORES % 2
    assert first["child"] == first["cpus"]


@pytest.mark.parametrize("binding", ["core", "none"])
def test_mpirun_that_binds_and_that_does_not(binding: str) -> None:
    mpi = replace(MPIS["openmpi4"], options=("--oversubscribe", "--bind-to", binding))
    first, second = found_by(mpi, 2)
    assert sorted(first["cpus"] + second["cpus"]) == HERE


@pytest.mark.parametrize(("options", "threads"), [
    (f"--cpu-bind=map_cpu:{HERE[0]},{HERE[-1]}", None),
    (f"--cpu-bind=map_cpu:{HERE[0]},{HERE[0]}", None),  # both on one
    ("--cpu-bind=none --cpus-per-task=3", 3),  # as many threads as were asked for
])
def test_what_slurm_binds(cluster: Cluster, options: str, threads: int | None) -> None:
    need([] if CORES > 1 else ["a second core"])
    done = check(srun(cluster, MPIS["openmpi4"], f"-N1 -n2 {options}", PROGRAMS / "cores.py"))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(cpu for one in found for cpu in one["cpus"]) == HERE
    assert threads is None or [one["asked"] for one in found] == [str(threads)] * 2


def test_an_openmp_that_binds_the_importing_thread_takes_nothing_away(quick: Mpi) -> None:
    env = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    one, = found_by(quick, 1, env=env)
    assert (one["cpus"], one["child"]) == (HERE, HERE)


def test_the_users_number_of_threads_wins(quick: Mpi) -> None:
    assert [one["threads"] for one in found_by(quick, 1, env={"OMP_NUM_THREADS": "1"})] == [1]
    assert [one["threads"] for one in found_by(quick, 1, "--threads", "2", env={"OMP_NUM_THREADS": "1"})] == [2]
    assert found_by(quick, 2, "--bind", "none")[1]["cpus"] == HERE


def test_a_rank_that_nobody_launched_keeps_its_cores(quick: Mpi) -> None:
    need(quick.missing()[:1])
    command = ["taskset", "-c", str(HERE[0]), str(quick.python), "-m", "mpiddp", str(PROGRAMS / "cores.py")]
    done = check(processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(quick), cwd=ROOT))
    assert json.loads(done.stdout)["cpus"] == HERE[:1]


def test_a_warning_for_more_ranks_than_cores(quick: Mpi) -> None:
    done = check(mpiexec(quick, CORES + 1, PROGRAMS / "cores.py"))
    warning = f"mpiddp: warning: one-core: {CORES + 1} ranks have {CORES} cores on {os.uname().nodename};"
    assert done.stderr.count(warning) == 1, done.stderr
