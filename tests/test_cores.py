"""The cores and threads of each rank: plain functions on written-down machines, and what ranks find on this one."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpiddp.discovery import cpus
from mpiddp.discovery.cpus import CpuGrant, Topology, list_allowed_cpus, read_grant, read_topology
from mpiddp.discovery.host import HostFacts, read_host_facts
from mpiddp.planning.cores import CpuShare, count_cores, share_cpus, warn_crowded_cores
from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.messages import message
from tests.support import (
    DEADLINE_S,
    MPIS,
    PROGRAMS,
    ROOT,
    Mpi,
    check,
    first_of,
    mpiexec,
    need,
    single_node_environ,
    srun,
)


def machine(cores: int, numa: int = 1, threads: int = 1) -> Topology:
    """Return a node of `cores` cores; the second hardware threads are numbered after all first ones, as Linux does."""
    return Topology(tuple(tuple(core + cores * thread for thread in range(threads)) for core in range(cores)),
                    tuple(core * numa // cores for core in range(cores)))


def ranks(topology: Topology, *masks: Collection[int], allowed: Collection[int] = (), cpus_per_task: int | None = None,
          alone: bool = False, node: int = 0, given: CpuGrant | None = None) -> list[HostFacts]:
    """Return the facts of a node's ranks, each with the CPUs that its launcher gave it."""
    everything = frozenset(allowed or [cpu for core in topology.cores for cpu in core])
    return [HostFacts(f"n{node}", node, frozenset(mask), everything, topology if local == 0 else None, alone,
                      cpus_per_task, (), None, {}, "", 0, 0, grant=given if local == 0 else None)
            for local, mask in enumerate(masks)]


def spans(found: Sequence[CpuShare]) -> list[tuple[int, int, int]]:
    """Return of each share the first and last CPU and how many there are."""
    return [(min(one.cpus), max(one.cpus), len(one.cpus)) for one in found]


DGX_H100 = machine(112, numa=2, threads=2)
A100_NODE = machine(64, numa=4)
FRONTIER = machine(64, numa=4, threads=2)
SUPERCLOUD = machine(40, numa=2)
LAPTOP = machine(8, threads=2)


def test_ranks_that_nobody_bound_get_neighbours_of_one_socket() -> None:
    """MPICH on a DGX H100: 8 ranks of 14 cores with their second threads, the first four on the first socket."""
    found = share_cpus(ranks(DGX_H100, *[range(224)] * 8), "auto")
    assert [one.threads for one in found] == [14] * 8
    assert found[3].cpus == {*range(42, 56), *range(154, 168)}
    assert [DGX_H100.numa[min(one.cpus)] for one in found] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_each_of_four_ranks_gets_its_numa_node() -> None:
    """Open MPI binds more than two ranks to a NUMA node each; where it does not, the plan is the same."""
    unbound = share_cpus(ranks(A100_NODE, *[range(64)] * 4), "auto")
    bound = share_cpus(ranks(A100_NODE, *(range(start, start + 16) for start in (0, 16, 32, 48))), "auto")
    assert unbound == bound
    assert spans(bound) == [(0, 15, 16), (16, 31, 16), (32, 47, 16), (48, 63, 16)]


def test_a_number_of_hardware_threads_is_no_number_of_threads() -> None:
    """Srun -c 28 on a DGX H100 whose Slurm counts hardware threads, and on one that binds nobody."""
    masks = [[*range(14 * local, 14 * local + 14), *range(112 + 14 * local, 126 + 14 * local)] for local in range(8)]
    assert [one.threads for one in share_cpus(ranks(DGX_H100, *masks, cpus_per_task=28), "auto")] == [14] * 8
    assert [one.threads for one in share_cpus(ranks(DGX_H100, *[range(224)] * 8, cpus_per_task=4), "auto")] == [4] * 8


def test_what_slurm_gave_each_task_is_kept() -> None:
    """Frontier: -c7, one core of each eight left to the system, and less than an even part: the user chose it."""
    masks = [range(1 + 8 * local, 8 + 8 * local) for local in range(8)]
    found = share_cpus(ranks(FRONTIER, *masks, cpus_per_task=7), "auto")
    assert [one.cpus for one in found] == [frozenset(mask) for mask in masks]
    assert [one.threads for one in found] == [7] * 8


def test_open_mpis_single_cores_are_widened() -> None:
    """Two ranks on a V100 node, which Open MPI binds to a core each: they get a socket each."""
    assert spans(share_cpus(ranks(SUPERCLOUD, [0], [1]), "auto")) == [(0, 19, 20), (20, 39, 20)]
    assert spans(share_cpus(ranks(SUPERCLOUD, [0], [1], allowed=range(4)), "auto")) == [(0, 1, 2), (2, 3, 2)]
    assert spans(share_cpus(ranks(SUPERCLOUD, [0], [1], allowed=range(2)), "auto")) == [(0, 0, 1), (1, 1, 1)]
    assert spans(share_cpus(ranks(SUPERCLOUD, [3], [4], cpus_per_task=1), "auto")) == [(3, 3, 1), (4, 4, 1)]  # as asked


def test_a_part_of_the_node_that_all_ranks_were_given_is_shared_out() -> None:
    """As by numactl around mpirun."""
    assert spans(share_cpus(ranks(A100_NODE, *[range(16, 32)] * 3), "auto")) == [(16, 20, 5), (21, 25, 5), (26, 31, 6)]


def test_a_single_core_that_all_ranks_were_given_is_not_enough() -> None:
    assert spans(share_cpus(ranks(SUPERCLOUD, [0], [0]), "auto")) == [(0, 19, 20), (20, 39, 20)]


def test_uneven_nodes_are_shared_out_each_for_itself() -> None:
    facts = [*ranks(A100_NODE, *[range(64)] * 2), *ranks(A100_NODE, range(64), node=2)]
    assert [one.threads for one in share_cpus(facts, "auto")] == [32, 32, 64]


def test_a_laptop_without_a_launcher_keeps_what_it_has() -> None:
    assert share_cpus(ranks(LAPTOP, [5], alone=True), "auto") == [CpuShare(frozenset({5}), 1)]
    assert share_cpus(ranks(LAPTOP, range(16), alone=True), "auto") == [CpuShare(frozenset(range(16)), 8)]


def test_more_ranks_than_cores_split_threads_and_then_share_all() -> None:
    found = share_cpus(ranks(LAPTOP, *[range(16)] * 16), "auto")
    assert sorted(cpu for one in found for cpu in one.cpus) == list(range(16))
    assert share_cpus(ranks(LAPTOP, *[range(16)] * 17), "auto") == [CpuShare(frozenset(range(16)), 1)] * 17


@pytest.mark.parametrize(("policy", "expected"), [
    ("launcher", [CpuShare(frozenset({0}), 1), CpuShare(frozenset({1}), 1)]),
    ("none", [CpuShare(frozenset(range(40)), 20, (0, 1))] * 2),
])
def test_other_policies(policy: str, expected: list[CpuShare]) -> None:
    assert share_cpus(ranks(SUPERCLOUD, [0], [1]), policy) == expected


def test_warnings() -> None:
    tight = machine(2)
    assert warn_crowded_cores(ranks(LAPTOP, *[range(16)] * 8), "auto") == []
    assert warn_crowded_cores([*ranks(tight, *[range(2)] * 4), *ranks(tight, *[range(2)] * 4, node=4)], "auto") == [
        message("launch/one_core", ranks=4, cores="2 cores", hosts="n[0,4]")]
    one_for_all = ranks(LAPTOP, *[[0]] * 4)
    assert warn_crowded_cores(one_for_all, "auto") == []
    assert warn_crowded_cores(one_for_all, "launcher") == [
        message("launch/shared_cores", ranks=4, cores=1, allowed=16, hosts="n0")]


SHARED = machine(112, numa=2)  # a node that its scheduler does not confine
GIVEN = CpuGrant(16, each=False, job=0)


@pytest.mark.parametrize("masks", [
    [range(112)] * 2,  # MPICH binds nobody
    [[0], [1]],  # Open MPI binds one or two ranks to a core
    [range(56), range(56, 112)],  # or to a NUMA node
    [range(28), range(28)],
])
def test_ranks_take_no_more_than_a_scheduler_has_given(masks: list[Collection[int]]) -> None:
    found = share_cpus(ranks(SHARED, *masks, given=GIVEN), "auto")
    assert spans(found) == [(0, 7, 8), (8, 15, 8)]
    assert [one.threads for one in found] == [8, 8]


def test_a_launchers_binding_is_kept_where_it_is_no_wider_than_what_was_given() -> None:
    assert spans(share_cpus(ranks(SHARED, range(40, 48), range(48, 56), given=GIVEN), "auto")) == [
        (40, 47, 8), (48, 55, 8)]
    assert spans(share_cpus(ranks(SHARED, *[range(40, 48)] * 2, given=GIVEN), "auto")) == [(40, 43, 4), (44, 47, 4)]
    assert spans(share_cpus(ranks(SHARED, [7], [9], given=CpuGrant(2, False, 0)), "auto")) == [(7, 7, 1), (9, 9, 1)]
    wide = ranks(SHARED, range(56), range(56, 112), given=GIVEN)
    assert spans(share_cpus(wide, "launcher")) == [(0, 55, 56), (56, 111, 56)]
    assert spans(share_cpus(wide, "none")) == [(0, 111, 112)] * 2


def test_fewer_cpus_given_than_ranks_are_shared_by_them() -> None:
    facts = ranks(SHARED, *[range(112)] * 2, given=CpuGrant(1, False, 0))
    assert share_cpus(facts, "auto") == [CpuShare(frozenset({0}), 1)] * 2
    assert warn_crowded_cores(facts, "auto") == [message("launch/one_core", ranks=2, cores="1 core", hosts="n0")]


def test_a_process_that_nobody_launched_takes_no_more_either() -> None:
    assert spans(share_cpus(ranks(SHARED, range(112), alone=True, given=GIVEN), "auto")) == [(0, 15, 16)]
    assert spans(share_cpus(ranks(SHARED, [5], alone=True, given=GIVEN), "auto")) == [(5, 5, 1)]


def test_a_given_cpu_is_a_core_as_long_as_there_are_some() -> None:
    """Whether Slurm counts cores or hardware threads: no more of either."""
    found = share_cpus(ranks(DGX_H100, *[range(224)] * 2, given=GIVEN), "auto")
    assert spans(found) == [(0, 7, 8), (8, 15, 8)]
    found = share_cpus(ranks(DGX_H100, *[range(224)] * 2, given=CpuGrant(112, False, 0)), "auto")
    assert spans(found) == [(0, 55, 56), (56, 111, 56)]


def test_jobs_that_follow_each_other_keep_apart() -> None:
    taken = [share_cpus(ranks(SHARED, range(112), given=CpuGrant(16, False, job)), "auto")[0].cpus
             for job in range(40, 47)]
    assert sorted(cpu for one in taken for cpu in one) == list(range(112))


@pytest.mark.parametrize("given", [CpuGrant(112, False, 9), CpuGrant(5000, False, 9), CpuGrant(56, True, 9)])
def test_what_is_no_limit_changes_nothing(given: CpuGrant) -> None:
    masks = [range(112)] * 2
    assert share_cpus(ranks(SHARED, *masks, given=given), "auto") == share_cpus(ranks(SHARED, *masks), "auto")


SLURM, PBS, LSF = {"SLURM_JOB_ID": "8"}, {"PBS_JOBID": "9[3].server"}, {"LSB_JOBID": "7"}


@pytest.mark.parametrize(("environ", "found"), [
    ({**SLURM, "SLURM_CPUS_ON_NODE": "3", "SLURM_JOB_CPUS_PER_NODE": "4"}, CpuGrant(3, False, 8)),
    ({**SLURM, "SLURM_JOB_CPUS_PER_NODE": "16(x3)"}, CpuGrant(16, False, 8)),
    ({**SLURM, "SLURM_JOB_CPUS_PER_NODE": "8(x2),4"}, None),  # which of them is this node's?
    ({**PBS, "NCPUS": "4"}, CpuGrant(4, True, 9)),
    ({**LSF, "LSB_MCPU_HOSTS": "n1 16 n2.site 8"}, CpuGrant(8, False, 7)),
    ({**LSF, "LSB_MCPU_HOSTS": "n1 16 n3 8"}, None),
    ({"NCPUS": "4"}, None), ({**SLURM, "SLURM_CPUS_ON_NODE": "0"}, None), ({**SLURM, "SLURM_CPUS_ON_NODE": "-4"}, None),
    ({**SLURM, "SLURM_CPUS_ON_NODE": "all"}, None), ({**LSF, "LSB_MCPU_HOSTS": "n2 all n1"}, None), ({}, None),
])
def test_what_a_scheduler_says_that_it_has_given(environ: dict[str, str], found: CpuGrant | None) -> None:
    assert read_grant(environ, "n2", by_mpirun=False) == found


@pytest.mark.parametrize(("masks", "wanted"), [
    ([{17}], [{17}]), ([{0, 1}, {0, 1}], [{0}, {1}]), ([{4}, {5}], [{4}, {5}]), ([range(64)], [range(64)])])
def test_what_flux_gave_a_job_is_all_there_is(masks: list[Collection[int]], wanted: list[Collection[int]]) -> None:
    """Flux binds tasks, without a cgroup: what a rank is allowed is what it was given, the topology is the node's."""
    node = [one._replace(allowed=one.cpus) for one in ranks(A100_NODE, *masks)]
    assert [share.cpus for share in share_cpus(node, "auto")] == [frozenset(cpus) for cpus in wanted]
    few = [one._replace(allowed=one.cpus) for one in ranks(A100_NODE, {3}, {3})]
    assert warn_crowded_cores(few, "auto") == [message("launch/one_core", ranks=2, cores="1 core", hosts="n0")]


def test_a_rank_of_flux_keeps_to_its_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {cpu})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    flux = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_JOB_ID_PATH": "/f1"}
    facts = read_host_facts(flux, 0, 0, True, None, "", False)
    assert (facts.cpus, facts.allowed, facts.launcher, facts.scheduler) == ({cpu}, {cpu}, "flux run", "Flux")


def test_what_slurm_has_given_the_job_counts_for_mpirun_not_its_daemons_step() -> None:
    """As with SRUN_CPUS_PER_TASK=2 in the environment of mpirun, in an allocation of two tasks a node."""
    environ = {**SLURM, "SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    assert read_grant(environ, "n2", by_mpirun=True) == CpuGrant(4, False, 8)
    assert read_grant({**environ, "SLURM_JOB_CPUS_PER_NODE": "4,2"}, "n2", by_mpirun=True) == CpuGrant(2, False, 8)


def test_a_python_that_was_told_of_fewer_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By PYTHON_CPU_COUNT, say; and numbers of CPUs may have holes, so that their count is not the highest one."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert list_allowed_cpus() == os.sched_getaffinity(0)
    assert cpus.is_whole_node(list_allowed_cpus())
    for name, numbers in (("possible", "0-3,8-11"), ("online", "0-3,8-9")):
        (tmp_path / name).write_text(f"{numbers}\n")
    monkeypatch.setattr(cpus, "CPUS", str(tmp_path))
    assert cpus.is_whole_node({0, 1, 2, 3, 8, 9})
    assert not cpus.is_whole_node(range(5))


def test_ranks_whose_gpus_hang_on_one_socket_split_its_cores() -> None:
    """Four ranks on a DGX H100 have its first four GPUs."""
    found = share_cpus(ranks(DGX_H100, *[range(224)] * 4), "auto", near=[0] * 4)
    assert [one.numa for one in found] == [(0,)] * 4
    assert [one.threads for one in found] == [14] * 4
    found = share_cpus(ranks(DGX_H100, *[range(224)] * 4), "auto", near=[1, 0, 0, 0])
    assert [(one.numa, one.threads) for one in found] == [((1,), 56), ((0,), 18), ((0,), 19), ((0,), 19)]


def test_a_socket_is_more_than_a_numa_node() -> None:
    """A DGX A100 has its GPUs on every other of eight NUMA nodes: nobody else needs the cores between."""
    topology = machine(128, numa=8)._replace(sockets=tuple(core // 64 for core in range(128)))
    found = share_cpus(ranks(topology, *[range(128)] * 8), "auto", near=[3, 3, 1, 1, 7, 7, 5, 5])
    assert [one.threads for one in found] == [16] * 8
    assert [topology.sockets[min(one.cpus)] for one in found] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("packages", "sockets"), [("0 0 1 1", (0, 0, 1, 1)), ("-1 -1 -1 -1", ()), ("", ())])
def test_sockets_as_the_kernel_tells_them(
    packages: str, sockets: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "CPUS", str(tmp_path))
    monkeypatch.setattr(cpus, "read_numa_nodes", lambda: {0: 0, 1: 0, 2: 1, 3: 1})
    for cpu, package in enumerate(packages.split()):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/physical_package_id").write_text(f"{package}\n")
    nodes = ((0, 0), (1, 1)) if sockets else ()
    assert read_topology(range(4)) == Topology(((0,), (1,), (2,), (3,)), (0, 0, 1, 1), sockets, nodes)
    assert read_topology(range(2)).nodes == nodes  # the whole machine's


def test_gpus_do_not_crowd_ranks_on_a_socket_that_is_too_small() -> None:
    small = machine(8, numa=4)
    for near in ([0] * 4, [0, 0, 1, -1], [9] * 4):
        assert [one.threads for one in share_cpus(ranks(small, *[range(8)] * 4), "auto", near=near)] == [2] * 4


def test_what_was_given_is_taken_near_the_gpus() -> None:
    found = share_cpus(ranks(SHARED, *[range(112)] * 2, given=GIVEN), "auto", near=[1, 1])
    assert spans(found) == [(56, 63, 8), (64, 71, 8)]
    found = share_cpus(ranks(SHARED, *[range(112)] * 2, given=GIVEN), "auto", near=[1, 0])
    assert spans(found) == [(56, 63, 8), (0, 7, 8)]


HERE = sorted(list_allowed_cpus())
CORES = count_cores(frozenset(HERE), read_topology(HERE))


def found_by(mpi: Mpi, ranks: int, *options: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return what each rank finds, in rank order."""
    need([] if CORES > 1 else ["a second core"])
    done = check(mpiexec(mpi, ranks, *options, PROGRAMS / "cores.py", env=env))
    return sorted(map(json.loads, done.stdout.splitlines()), key=lambda one: int(one["rank"]))


@pytest.mark.light
@pytest.mark.mpi
def test_open_mpis_binding_of_one_rank_may_be_kept() -> None:
    bound, = found_by(MPIS["openmpi4"], 1, "--bind", "launcher")
    assert (len(bound["cpus"]), bound["threads"]) == (1, 1)


@pytest.mark.mpi
def test_open_mpis_binding_of_one_rank_is_widened() -> None:
    wide, = found_by(MPIS["openmpi4"], 1)
    assert (wide["cpus"], wide["child"], wide["threads"]) == (HERE, HERE, CORES)


@pytest.mark.light
@pytest.mark.mpi
@pytest.mark.parametrize("name", first_of(["openmpi4", "mpich", "impi"]))
def test_two_ranks_have_cores_of_their_own(name: str) -> None:
    first, second = found_by(MPIS[name], 2)
    assert sorted(first["cpus"] + second["cpus"]) == HERE
    assert abs(first["threads"] - second["threads"]) <= CORES % 2
    assert first["child"] == first["cpus"]


@pytest.mark.light
@pytest.mark.mpi
@pytest.mark.parametrize("binding", first_of(["core", "none"]))
def test_mpirun_that_binds_and_that_does_not(binding: str) -> None:
    mpi = replace(MPIS["openmpi4"], options=("--oversubscribe", "--bind-to", binding))
    first, second = found_by(mpi, 2)
    assert sorted(first["cpus"] + second["cpus"]) == HERE


@pytest.mark.light
@pytest.mark.parametrize(("options", "threads"), first_of([
    (f"--cpu-bind=map_cpu:{HERE[0]},{HERE[0]}", None),  # both on one
    (f"--cpu-bind=map_cpu:{HERE[0]},{HERE[-1]}", None),
    ("--cpu-bind=none --cpus-per-task=3", 3),  # as many threads as were asked for
]))
def test_what_slurm_binds(cluster: Cluster, options: str, threads: int | None) -> None:
    need([] if CORES > 1 else ["a second core"])
    done = check(srun(cluster, MPIS["openmpi4"], f"-N1 -n2 {options}", PROGRAMS / "cores.py"))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(cpu for one in found for cpu in one["cpus"]) == HERE
    assert threads is None or [one["asked"] for one in found] == [str(threads)] * 2


def test_what_slurm_has_given_is_not_exceeded(cluster: Cluster) -> None:
    need([] if CORES > 1 else ["a second core"])
    done = check(srun(cluster, MPIS["openmpi4"], "-wnode1 -n1 --cpu-bind=none", PROGRAMS / "cores.py"))
    one = json.loads(done.stdout)
    assert (len(one["cpus"]), one["threads"]) == (1, 1)
    assert re.search(rf"^  node1 +0 +cpu +core {one['cpus'][0]} +0 +1 ", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize("threads", [(), pytest.param(("--threads",), marks=pytest.mark.thorough)])
def test_four_of_eight_cpus_that_slurm_has_given(cluster: Cluster, threads: tuple[str, ...]) -> None:
    """Two jobs at a time on one node: each rank has its part of its job's four, and the jobs keep apart."""
    mpi = MPIS["openmpi4"]
    batch = f"srun --mpi=pmix -c2 {mpi.python} {PROGRAMS / 'eight_cores.py'} {' '.join(threads)}"
    env = {**mpi.environ(), "PYTHONPATH": str(ROOT), "STAYS_S": "3"}
    (folder := RUN / f"cores-{time.monotonic_ns()}").mkdir()
    jobs = [check(cluster.run("sbatch", "--parsable", "-N1", "-n2", "-c2", "-wnode1", f"--wrap={batch}", timeout=30,
                              env=env, cwd=folder)).stdout.strip() for _ in range(2)]
    ended = [cluster.wait_for_job(job, timeout=DEADLINE_S)["JobState"] for job in jobs]
    text = "".join(file.read_text() for file in folder.iterdir())
    assert ended == ["COMPLETED"] * 2, text
    found = re.findall(r"^job (\d+) rank (\d) (\S+) threads (\d)$", text, re.MULTILINE)
    parts = {(job, rank): set(cpus.split(",")) for job, rank, cpus, _ in found}
    assert sorted(parts) == sorted((job, rank) for job in jobs for rank in "01"), text
    assert [len(one) for one in parts.values()] == [2] * 4
    assert len(set().union(*parts.values())) == 8


def test_an_openmp_that_binds_the_importing_thread_takes_nothing_away(quick: Mpi) -> None:
    env = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    one, = found_by(quick, 1, env=env)
    assert (one["cpus"], one["child"]) == (HERE, HERE)


@pytest.mark.thorough("test_an_openmp_that_binds_the_importing_thread_takes_nothing_away")
def test_the_users_number_of_threads_wins(quick: Mpi) -> None:
    assert [one["threads"] for one in found_by(quick, 1, env={"OMP_NUM_THREADS": "1"})] == [1]
    assert [one["threads"] for one in found_by(quick, 1, "--threads", "2", env={"OMP_NUM_THREADS": "1"})] == [2]


@pytest.mark.light
def test_no_rank_need_be_bound(quick: Mpi) -> None:
    assert found_by(quick, 2, "--bind", "none")[1]["cpus"] == HERE


@pytest.mark.light
def test_a_rank_that_nobody_launched_keeps_its_cores(quick: Mpi) -> None:
    need(quick.missing()[:1])
    command = ["taskset", "-c", str(HERE[0]), str(quick.python), "-m", "mpiddp", str(PROGRAMS / "cores.py")]
    done = check(processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(quick), cwd=ROOT))
    assert json.loads(done.stdout)["cpus"] == HERE[:1]


@pytest.mark.light
def test_a_warning_for_more_ranks_than_cores(quick: Mpi) -> None:
    done = check(mpiexec(quick, CORES + 1, PROGRAMS / "cores.py"))
    warning = message("launch/one_core", ranks=CORES + 1, cores=f"{CORES} cores", hosts=os.uname().nodename)
    assert done.stderr.count(warning) == 1, done.stderr
