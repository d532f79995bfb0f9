"""Each rank's GPU: plain functions on written-down machines."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import networkx
import pytest

from mpiddp.base.config import LaunchConfig, Script
from mpiddp.base.errors import LaunchError
from mpiddp.base.ranks import RankPosition
from mpiddp.discovery import gpus as facts_gpus
from mpiddp.discovery import schedulers
from mpiddp.discovery.cpus import Topology
from mpiddp.discovery.devices import DeviceFacts
from mpiddp.discovery.gpus import Gpu, select_visible
from mpiddp.discovery.host import HostFacts
from mpiddp.planning import gpus, job
from mpiddp.planning.environment import Endpoint
from mpiddp.planning.gpus import GpuChoice, RankGpus, choose_gpus
from mpiddp.planning.job import Placement
from mpiddp.planning.problems import Advice
from mpiddp.systems.launchers import SRUN
from mpiddp.systems.schedulers import SLURM
from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    MPIS,
    PROGRAMS,
    ROOT,
    Mpi,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

SCRIPT = Script("train.py")
ENDPOINT = Endpoint("127.0.0.1", 4000, "token", "run")
IMAGINED = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/standins/accelerator'}"}


def board(name: str, numa: int = 0) -> Gpu:
    return Gpu(f"GPU-{name}", f"GPU-{name}", "NVIDIA H100 80GB HBM3", f"0000:{name}:00.0", numa)


def mig(name: str, parent: str) -> Gpu:
    return Gpu(f"MIG-{name}", f"GPU-{parent}", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", f"0000:{parent}:00.0", 0)


# As nvidia-smi and rocm-smi number them, with the NUMA nodes that their vendors' topology tables show.
DGX_H100 = tuple(board(f"{at}b", at // 4) for at in range(8))
A100_NODE = tuple(board(f"{at}1", 3 - at) for at in range(4))  # Perlmutter, JUWELS Booster: numbered backwards
FRONTIER = tuple(board(f"d{at}", numa) for at, numa in enumerate((3, 3, 1, 1, 0, 0, 2, 2)))
SUPERCLOUD = (board("14", 0), board("88", 1))
SLICES = tuple(mig(f"{at}", "07") for at in range(7))
LAPTOP = (board("01", -1),)


def alike(seen: tuple[Gpu, ...], ranks: int) -> list[RankGpus]:
    """Return the sights of ranks that see the same GPUs and can use no other."""
    return [RankGpus(rank, seen, seen) for rank in range(ranks)]


def own(seen: tuple[Gpu, ...], reachable: tuple[Gpu, ...] | None = None) -> list[RankGpus]:
    """Return the sights of ranks that are shown one GPU each; without `reachable` a cgroup keeps the rest away."""
    return [RankGpus(rank, (gpu,), (gpu,) if reachable is None else reachable) for rank, gpu in enumerate(seen)]


@pytest.mark.parametrize("machine", [DGX_H100, A100_NODE, FRONTIER, SUPERCLOUD, LAPTOP])
def test_where_all_see_all_the_local_rank_is_the_index(machine: tuple[Gpu, ...]) -> None:
    """What torchrun's scripts expect: nothing is to be changed."""
    assert choose_gpus(alike(machine, len(machine)), "n1") == [GpuChoice(gpu, at) for at, gpu in enumerate(machine)]


def test_fewer_ranks_than_gpus_take_the_first() -> None:
    assert [one.ordinal for one in choose_gpus(alike(DGX_H100, 2), "n1")] == [0, 1]


def test_a_gpu_of_each_tasks_own_by_variable_is_brought_to_the_index_of_the_local_rank() -> None:
    """As srun --gpus-per-task=1 without cgroups: CUDA_VISIBLE_DEVICES hides what is in reach all the same."""
    found = choose_gpus(own(A100_NODE, A100_NODE), "n1")
    everyones = tuple(gpu.uuid for gpu in A100_NODE)
    assert found == [GpuChoice(gpu, at, everyones) for at, gpu in enumerate(A100_NODE)]


def test_a_gpu_of_each_tasks_own_by_cgroup_stays_the_first() -> None:
    """As srun --gpus-per-task=1 with ConstrainDevices: no variable brings the others back, so the script is warned."""
    found = choose_gpus(own(A100_NODE), "n1")
    assert found == [GpuChoice(gpu, 0) for gpu in A100_NODE]
    lines = gpus.warn_isolated_gpus((host, one.ordinal != local) for host in ("n1", "n2")
                                    for local, one in enumerate(found))
    assert lines == [message("launch/isolated_gpus", hosts="n[1-2]")]
    assert gpus.warn_isolated_gpus([("n1", False)]) == []


def test_each_gets_the_gpu_near_its_cores() -> None:
    """As srun --gpu-bind=closest, with two GPUs near each pair of four tasks, which are bound crosswise."""
    near, far = DGX_H100[:2], DGX_H100[4:6]
    sights = [RankGpus(0, far, DGX_H100, (1,)), RankGpus(1, near, DGX_H100, (0,)), RankGpus(2, near, DGX_H100, (0,)),
              RankGpus(3, far, DGX_H100, (1,))]
    taken = [far[0], near[0], near[1], far[1]]
    assert [(one.gpu, one.ordinal) for one in choose_gpus(sights, "n1")] == [(gpu, at) for at, gpu in enumerate(taken)]


def test_the_assignment_of_least_cost() -> None:
    for seed in range(500):
        chance = random.Random(seed)
        rows = chance.randint(1, 7)
        columns = rows + chance.randint(0, 4)
        costs = [[chance.choice([0, 1, 1000, 10**12, chance.randint(0, 50)]) for _ in range(columns)]
                 for _ in range(rows)]
        chosen = gpus.solve_assignment(costs)
        assert len(set(chosen)) == rows
        graph = networkx.Graph([(("row", row), column, {"weight": 10**13 - costs[row][column]})
                                for row in range(rows) for column in range(columns)])
        pairs = networkx.max_weight_matching(graph, maxcardinality=True)
        most = sum(graph.edges[pair]["weight"] for pair in pairs)
        assert sum(10**13 - costs[row][column] for row, column in enumerate(chosen)) == most, seed


def test_a_rank_with_less_choice_goes_first_and_nearness_second() -> None:
    """Rank 0 sees both, rank 1 only the one that is near rank 0: it must have it."""
    first, second = SUPERCLOUD
    sights = [RankGpus(0, (first, second), SUPERCLOUD, (0,)), RankGpus(1, (first,), SUPERCLOUD, (0,))]
    assert [one.gpu for one in choose_gpus(sights, "n1")] == [second, first]


def test_uneven_nodes_choose_each_for_itself() -> None:
    found = choose_gpus(alike(DGX_H100, 8), "n1") + choose_gpus(alike(SUPERCLOUD, 1), "n2")
    assert [one.ordinal for one in found] == [*range(8), 0]


def test_mig_slices_are_shown_one_to_each_rank() -> None:
    """CUDA lets a process see one instance, so LOCAL_RANK cannot be its index."""
    found = choose_gpus(alike(SLICES, 7), "n1")
    assert found == [GpuChoice(one, 0, (one.uuid,)) for one in SLICES]
    assert choose_gpus(own(SLICES[:2]), "n1") == [GpuChoice(one, 0) for one in SLICES[:2]]


def test_a_virtual_local_rank_shows_each_rank_its_own_alone() -> None:
    found = choose_gpus(alike(DGX_H100, 8), "n1", virtual=True)
    assert found == [GpuChoice(gpu, 0, (gpu.uuid,)) for gpu in DGX_H100]
    assert choose_gpus(own(SUPERCLOUD), "n1", virtual=True) == [GpuChoice(gpu, 0) for gpu in SUPERCLOUD]


def test_too_few_gpus() -> None:
    with pytest.raises(LaunchError) as caught:
        choose_gpus(alike(SUPERCLOUD, 3), "n1", advice=Advice(SRUN, SLURM))
    assert (caught.value.name, caught.value.actual) == (
        "too-few-gpus", message("launch/too_few_gpus", ranks=3, gpus="2 GPUs", host="n1"))
    assert "--ntasks-per-node=2" in caught.value.do
    assert "--gpus-per-node=3" in caught.value.do


def test_two_ranks_with_one_gpu() -> None:
    sights = [one._replace(rank=one.rank + 8) for one in alike(LAPTOP, 2)]
    with pytest.raises(LaunchError) as caught:
        choose_gpus(sights, "n2", advice=Advice(SRUN, SLURM))
    assert (caught.value.name, caught.value.actual) == (
        "duplicate-gpu", message("launch/duplicate_gpu", rank=8, other=9, host="n2", gpu="GPU-01"))
    assert "--gpus-per-task=1" in caught.value.do


def test_ranks_share_gpus_where_that_is_asked_for() -> None:
    assert [one.ordinal for one in choose_gpus(alike(LAPTOP, 2), "n1", share=True)] == [0, 0]
    shared = choose_gpus(alike(SUPERCLOUD, 5), "n1", share=True)
    assert [one.ordinal for one in shared] == [0, 1, 0, 1, 0]
    assert gpus.has_shared_gpu(shared)
    assert not gpus.has_shared_gpu(choose_gpus(alike(SUPERCLOUD, 2), "n1", share=True))
    with pytest.raises(LaunchError):
        choose_gpus(alike((), 2), "n1", share=True)


@pytest.mark.parametrize(("value", "names"), [
    (None, "0b 1b 2b 3b 4b 5b 6b 7b"), ("", ""), ("2,1", "2b 1b"), ("0,2,-1,1", "0b 2b"), ("1,99,2", "1b"),
    ("GPU-4b,0", "4b 0b"), ("3,3", ""), ("nonsense", ""), ("MIG-4b", ""),
])
def test_cuda_visible_devices(value: str | None, names: str) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [gpu.uuid.removeprefix("GPU-") for gpu in select_visible(DGX_H100, environ)] == names.split()


def test_a_number_names_the_first_slice_of_a_gpu_in_mig_mode() -> None:
    assert select_visible((*SLICES, DGX_H100[1]), {"CUDA_VISIBLE_DEVICES": "0,1"}) == (SLICES[0], DGX_H100[1])
    assert select_visible(SLICES, {"CUDA_VISIBLE_DEVICES": "MIG-4,MIG-2"}) == (SLICES[4], SLICES[2])


CORES = Topology(tuple((core,) for core in range(64)), tuple(core // 16 for core in range(64)))


def hosts(*sights: RankGpus, cpus: frozenset[int] = frozenset(range(64))) -> list[HostFacts]:
    """Return the facts of the ranks of one node with 64 cores."""
    return [HostFacts("n1", 0, cpus, frozenset(range(64)), CORES if rank == 0 else None, False, None, (), None, {}, "",
                      2**34, 4096, sight.reachable, sight.visible) for rank, sight in enumerate(sights)]


def test_cores_are_near_the_gpu() -> None:
    """Frontier's GCDs 0 and 1 hang on its last NUMA node, 4 and 5 on its first."""
    plans = job.plan_pre_torch(hosts(*alike(FRONTIER, 8)), LaunchConfig())
    assert [one.numa for one in plans] == [(gpu.numa,) for gpu in FRONTIER]
    assert sorted(cpu for one in plans for cpu in one.cpus or ()) == list(range(64))


def test_the_plan_before_torch_sets_what_cuda_shall_see() -> None:
    plans = job.plan_pre_torch(hosts(*own(SUPERCLOUD, SUPERCLOUD)), LaunchConfig())
    assert [one.settings for one in plans] == [{"CUDA_VISIBLE_DEVICES": "GPU-14,GPU-88"}] * 2
    assert [one.settings for one in job.plan_pre_torch(hosts(*alike(SUPERCLOUD, 2)), LaunchConfig())] == [{}, {}]


def test_more_ranks_than_gpus_are_not_refused_before_torch_has_seen_them() -> None:
    """They may compute on the CPU: a torch without CUDA, or --device=cpu."""
    plans = job.plan_pre_torch(hosts(*alike(LAPTOP, 4)), LaunchConfig())
    assert [one.choice for one in plans] == [None] * 4
    assert [one.device for one in after(plans, ())] == ["cpu"] * 4


@pytest.mark.parametrize(("ranks", "given", "problem"), [
    (1, 4, "idle-gpus"), (4, 2, "too-few-gpus"), (2, 4, ""), (4, 4, ""), (4, 0, ""), (1, 1, ""),
])
def test_ranks_and_the_gpus_that_slurm_has_given(ranks: int, given: int, problem: str) -> None:
    facts = [one._replace(given_gpus=given) for one in hosts(*alike((), ranks))]
    with pytest.raises(LaunchError) if problem else contextlib.nullcontext() as caught:
        job.plan_pre_torch(facts, LaunchConfig(SCRIPT))
    assert not problem or (caught and caught.value.name == problem)
    for config in (LaunchConfig(SCRIPT, device="cpu"), LaunchConfig(SCRIPT, share_gpus=True, idle_gpus=True)):
        assert len(job.plan_pre_torch(facts, config)) == ranks


@pytest.mark.parametrize(("environ", "given"), [
    ({"SLURM_GPUS_ON_NODE": "4"}, 4), ({}, 0), ({"SLURM_GPUS_ON_NODE": "1", "SLURM_GPUS_PER_TASK": "1"}, 0),
    ({"SLURM_GPUS_ON_NODE": "4", "SLURM_TRES_PER_TASK": "cpu=8"}, 4),  # as --cpus-per-task sets it since Slurm 23.11
])
def test_what_slurm_says_it_has_given(environ: dict[str, str], given: int) -> None:
    assert schedulers.count_slurm_gpus_on_node(environ) == given


@pytest.mark.parametrize(("value", "given"), [("8", 8), ("a100:4", 4), ("a100:1,v100:2", 3), ("a100", 1), ("", 0)])
def test_what_slurm_says_it_gives_each_task(value: str, given: int) -> None:
    assert schedulers.count_slurm_gpus_of_task({"SLURM_GPUS_PER_TASK": value}) == given
    assert schedulers.count_slurm_gpus_of_task({}) == 0


@pytest.mark.parametrize(("value", "given"), [
    ("cpu:4,gres/gpu:2", 2), ("cpu=4,gres/gpu:a100=2", 2), ("gres/gpu:a100:2", 2), ("cpu=4", 0), ("gres/gpu", 1),
    ("gres:gpu:2", 2), ("gres/gpumem=8,gres/gpu=1", 1)])
def test_what_slurm_says_of_each_tasks_resources(value: str, given: int) -> None:
    assert schedulers.count_slurm_gpus_of_task({"SLURM_TRES_PER_TASK": value}) == given


ON_NODE, SHOWN = "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(("options", "told", "node", "each"), first_of([
    ("--gres=gpu:h100:2 -N1 -n2", {ON_NODE: "2", SHOWN: "0,1"}, 2, 0),
    ("--gpus=4 -N2 -n4", {"SLURM_GPUS": "4", ON_NODE: "3", SHOWN: "0,1,2"}, 3, 0),  # and 1 on the other node
    ("--gpus-per-task=1 -N1 -n4", {"SLURM_GPUS_PER_TASK": "1", ON_NODE: "4", SHOWN: "0"}, 0, 1),
    ("--gpus-per-task=h100:2 -N1 -n2", {"SLURM_GPUS_PER_TASK": "h100:2", ON_NODE: "4"}, 0, 2),
    ("--gpus-per-socket=2 --sockets-per-node=1 -N1 -n1",
     {"SLURM_GPUS_PER_SOCKET": "2", ON_NODE: "2", SHOWN: "0,1"}, 2, 0),
    ("--exclusive -N1 -n4", {}, 0, 0),  # nobody asked for GPUs
    ("--exclusive --gres=gpu:4 -N1 -n4", {ON_NODE: "4", SHOWN: "0,1,2,3"}, 4, 0),
], 3))
def test_what_slurm_tells_of_gpus(
    cluster: Cluster, options: str, told: dict[str, str], node: int, each: int
) -> None:
    """In the first task of a step in an allocation that was asked for so; Slurm 22.05."""
    mpi = MPIS["openmpi4"]
    done = check(cluster.run("salloc", "--quiet", *options.split(), "srun", str(mpi.python),
                             str(PROGRAMS / "gpu_variables.py"), timeout=DEADLINE_S,
                             env={**mpi.environ(), "PYTHONPATH": str(ROOT)}, cwd=ROOT))
    tasks = {one["task"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert tasks["0"] == {"task": "0", "told": told, "node": node, "each": each}


def test_several_gpus_of_a_nodes_only_task_are_idle() -> None:
    facts = [one._replace(task_gpus=8) for one in hosts(*alike((), 1))]
    with pytest.raises(LaunchError, match="idle-gpus") as caught:
        job.plan_pre_torch(facts, LaunchConfig(SCRIPT))
    assert caught.value.actual == message("launch/idle_gpus", gpus=8, hosts="n1")
    assert job.plan_pre_torch(facts, LaunchConfig(SCRIPT, idle_gpus=True))
    assert job.plan_pre_torch(facts, LaunchConfig())  # a notebook, or a simulation that uses the others
    assert job.plan_pre_torch([one._replace(task_gpus=1) for one in hosts(*alike((), 4))], LaunchConfig())


def test_slurm_gives_its_only_task_all_gpus(cluster: Cluster) -> None:
    mpi = MPIS["openmpi4"]
    done = cluster.run("salloc", "--quiet", "-wnode[1-2]", "--ntasks-per-node=1", "--gpus-per-task=4", "srun",
                       "--mpi=pmix", str(mpi.python), "-m", "mpiddp", str(PROGRAMS / "cores.py"), timeout=DEADLINE_S,
                       env=mpi.environ(), cwd=ROOT)
    assert done.returncode == 3, done.stdout
    assert "mpiddp: cannot start: idle-gpus" in done.stderr
    assert message("launch/idle_gpus", gpus=4, hosts="node[1-2]") in done.stderr


def after(plans: list[job.PreTorchPlan], seen: tuple[Gpu, ...], config: LaunchConfig = LaunchConfig(),  # noqa: B008
          shown: bool = True) -> list[job.PostTorchPlan]:
    """Return the plan after a torch that sees some GPUs, or where `shown` those that each rank shall see."""
    by_uuid = {gpu.uuid: gpu for gpu in seen}
    facts = []
    for one in plans:
        names = one.settings.get("CUDA_VISIBLE_DEVICES", "")
        mine = tuple(by_uuid[name] for name in names.split(",")) if names and shown else seen
        bare = tuple(gpu._replace(uuid=gpu.uuid.partition("-")[2]) for gpu in mine)
        devices = DeviceFacts("2.13.0", "2.27.3", "cuda" if seen else "cpu", bare, {"cpu": "gloo", "cuda": "nccl"})
        seat = Placement(one.place.rank, 0, "n1", "", None, frozenset(), (0,), 1, "")
        facts.append(job.PostTorchFacts(one.place, devices, {}, seat, one.choice))
    return job.plan_post_torch(facts, ["n1"] * len(plans), config, ENDPOINT, {0: ("lo", "")})


def test_after_torch_the_devices_are_as_planned() -> None:
    plans = job.plan_pre_torch(hosts(*own(SUPERCLOUD, SUPERCLOUD)), LaunchConfig())
    found = after(plans, SUPERCLOUD)
    assert [one.device for one in found] == ["cuda:0", "cuda:1"]
    assert [(one.device, one.gpu) for one in found[0].placements] == [
        ("cuda:0", SUPERCLOUD[0]), ("cuda:1", SUPERCLOUD[1])]
    assert (found[0].backend, found[0].warnings) == ("nccl", ())


def test_a_torch_that_sees_other_gpus_than_planned_is_refused() -> None:
    plans = job.plan_pre_torch(hosts(*own(SUPERCLOUD, SUPERCLOUD)), LaunchConfig())
    with pytest.raises(LaunchError) as caught:
        after(plans, (board("99"), board("98")), shown=False)
    assert (caught.value.name, caught.value.actual) == ("device-unavailable", message(
        "launch/other_gpu_than_planned", gpu="GPU-14", rank=0, host="n1", actual=99, device="cuda:0"))


def test_a_cuda_that_orders_gpus_in_its_own_way_is_followed() -> None:
    """CUDA_DEVICE_ORDER=FASTEST_FIRST, its default, on a workstation with two kinds of GPUs."""
    plans = job.plan_pre_torch(hosts(*alike(SUPERCLOUD, 2)), LaunchConfig())
    found = after(plans, SUPERCLOUD[::-1])
    assert [(one.device, one.gpu.uuid) for one in found[0].placements if one.gpu] == [
        ("cuda:0", "88"), ("cuda:1", "14")]


def test_without_nvml_torch_tells_the_gpus_apart() -> None:
    blind = job.plan_pre_torch(hosts(*[RankGpus(rank, ()) for rank in range(2)]), LaunchConfig())
    assert [one.device for one in after(blind, SUPERCLOUD)] == ["cuda:0", "cuda:1"]
    with pytest.raises(LaunchError, match="duplicate-gpu"):
        after(blind, LAPTOP)
    shared = after(blind, LAPTOP, LaunchConfig(share_gpus=True))
    assert [(one.device, one.backend, one.warnings) for one in shared] == [("cuda:0", "gloo", ())] * 2
    with pytest.raises(LaunchError, match="pip install nvidia-ml-py"):
        after(blind, SUPERCLOUD, LaunchConfig(virtual_local_rank=True))


def test_gpus_that_nothing_tells_apart_go_by_their_number() -> None:
    unnamed = Gpu("", "", "Intel(R) Data Center GPU Max 1550")
    both = (unnamed,) * 2
    found = gpus.distinguish_gpus([both, both], "n1", 3)
    assert [[one.uuid for one in seen] for seen in found] == [["n1, number 0", "n1, number 1"]] * 2
    found = gpus.distinguish_gpus([(unnamed,), (unnamed,)], "n1", 3)
    assert [[one.uuid for one in seen] for seen in found] == [["n1, rank 3's"], ["n1, rank 4's"]]


def test_gpus_of_one_uuid_go_by_their_pci_addresses() -> None:
    """As some releases of ROCm tell it: each rank would have cuda:0, and gloo."""
    same = tuple(one._replace(uuid="0", board="0") for one in FRONTIER)
    blind = job.plan_pre_torch(hosts(*[RankGpus(rank, ()) for rank in range(8)]), LaunchConfig())
    found = after_torch(blind, [same] * 8)
    assert [one.device for one in found] == [f"cuda:{rank}" for rank in range(8)]
    assert {one.backend for one in found} == {"nccl"}
    found = after_torch(blind, [(one,) for one in same])  # each is shown its own
    assert [one.device for one in found] == ["cuda:0"] * 8
    assert {one.backend for one in found} == {"nccl"}
    bare = tuple(one._replace(pci="") for one in same)
    assert [one.device for one in after_torch(blind, [bare] * 8)] == [f"cuda:{rank}" for rank in range(8)]


def after_torch(plans: list[job.PreTorchPlan], seen: list[tuple[Gpu, ...]]) -> list[job.PostTorchPlan]:
    """Return the plan after a torch that sees these GPUs on each rank of a node."""
    facts = [job.PostTorchFacts(one.place, DeviceFacts("2.13.0", "", "cuda", mine, {"cuda": "nccl"}), {},
                                Placement(one.place.rank, 0, "n1", "", None, frozenset(), (0,), 1, ""), one.choice)
             for one, mine in zip(plans, seen, strict=True)]
    return job.plan_post_torch(facts, ["n1"] * len(plans), LaunchConfig(), ENDPOINT, {0: ("lo", "")})


def bound(machine: tuple[Gpu, ...], *numa: int) -> list[HostFacts]:
    """Return the facts of ranks that see all GPUs, each bound by its launcher to the 16 cores of a NUMA node."""
    facts = hosts(*alike(machine, len(numa)))
    cores = [frozenset(range(16 * node, 16 * node + 16)) for node in numa]
    return [one._replace(cpus=mine) for one, mine in zip(facts, cores, strict=True)]


def test_kept_cores_choose_the_gpus_that_are_near() -> None:
    """Perlmutter numbers its GPUs backwards: with a NUMA node for each rank, each would be far from its GPU."""
    plans = job.plan_pre_torch(bound(A100_NODE, 0, 1, 2, 3), LaunchConfig())
    assert [one.choice and one.choice.gpu.numa for one in plans] == [0, 1, 2, 3]
    assert [one.choice and one.choice.ordinal for one in plans] == [0, 1, 2, 3]
    uuids = ",".join(one.uuid for one in A100_NODE[::-1])
    assert [one.settings for one in plans] == [{"CUDA_VISIBLE_DEVICES": uuids}] * 4
    assert [one.cpus for one in plans] == [None] * 4
    assert plans[0].warnings == ()
    two = job.plan_pre_torch(bound(A100_NODE, 3, 0), LaunchConfig())  # of four GPUs
    assert [one.choice and one.choice.gpu.numa for one in two] == [3, 0]


def test_kept_cores_that_no_order_of_gpus_is_near_to_are_told() -> None:
    plans = job.plan_pre_torch(bound(A100_NODE, 0, 0), LaunchConfig(binding="launcher"))
    assert [one.choice and one.choice.gpu.numa for one in plans] == [3, 0]  # the first of two that are equally far
    assert [line for line in plans[0].warnings if line.startswith("far")] == [
        message("launch/far_gpus", hosts="n1")]


NPS4 = Topology(tuple((cpu,) for cpu in range(8)), tuple(range(8)), (0, 0, 0, 0, 1, 1, 1, 1))  # a NUMA node a core


@pytest.mark.parametrize(("gpus_numa", "far"), [
    ((3, 3, 1, 1, 7, 7, 5, 5), 4), ((7, 7, 5, 5, 3, 3, 1, 1), 4), ((7, 6, 5, 4, 3, 2, 1, 0), 0),
    ((0, 1, 2, 3, 4, 5, 6, 7), 0),
])
def test_near_is_the_socket_and_then_the_numa_node(gpus_numa: tuple[int, ...], far: int) -> None:
    """`far` is the number of ranks for which there is no GPU on their NUMA node."""
    seen = tuple(board(f"{at}b", numa) for at, numa in enumerate(gpus_numa))
    facts = [one._replace(cpus=frozenset({rank}), topology=NPS4, allowed=frozenset(range(8)))
             for rank, one in enumerate(hosts(*alike(seen, 8)))]
    plans = job.plan_pre_torch(facts, LaunchConfig(binding="launcher"))
    assert not any("far-gpus" in line for line in plans[0].warnings)
    sockets = [one.choice and one.choice.gpu.numa // 4 for one in plans]
    assert sockets == [0, 0, 0, 0, 1, 1, 1, 1]
    assert sum(one.choice is not None and one.choice.gpu.numa != rank for rank, one in enumerate(plans)) == far
    assert ([one.settings for one in plans] == [{}] * 8) == (gpus_numa == tuple(range(8)))


@pytest.mark.parametrize(("nodes", "warned"), [
    (((0, 0), (1, 0), (2, 0), (3, 0)), False),  # all of one socket
    (((0, 0), (1, 0), (2, 1), (3, 1)), True), ((), False)])
def test_a_gpu_on_a_numa_node_that_the_job_has_no_core_of(nodes: tuple[tuple[int, int], ...], warned: bool) -> None:
    (facts,) = hosts(*alike((board("01", 3),), 1))
    slice_of_node = Topology(((0,), (1,)), (0, 0), (0, 0), nodes)
    facts = facts._replace(topology=slice_of_node, cpus=frozenset({0, 1}), allowed=frozenset({0, 1}))
    assert any("far-gpus" in line for line in job.plan_pre_torch([facts], LaunchConfig(SCRIPT))[0].warnings) == warned


def test_a_job_that_is_confined_to_a_socket_takes_its_gpus() -> None:
    """By a cgroup, for the cores; it sees all GPUs."""
    seen = tuple(board(f"{at}b", at // 2) for at in range(4))
    confined = Topology(((8,), (9,), (10,), (11,)), (1,) * 4, (1,) * 4, ((0, 0), (1, 1)))
    facts = [one._replace(topology=confined if rank == 0 else None, cpus=frozenset({8 + 2 * rank, 9 + 2 * rank}),
                          allowed=frozenset(range(8, 12))) for rank, one in enumerate(hosts(*alike(seen, 2)))]
    assert [one.choice and one.choice.gpu.numa for one in job.plan_pre_torch(facts, LaunchConfig())] == [1, 1]


def test_slices_of_a_board_stay_apart_where_torch_tells_the_boards_uuid() -> None:
    plans = job.plan_pre_torch(hosts(*own(SLICES[:2], SLICES[:2])), LaunchConfig())
    whole = Gpu("GPU-07", "GPU-07", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    facts = [job.PostTorchFacts(one.place, DeviceFacts("2.13.0", "2.27.3", "cuda", (whole,), {"cuda": "nccl"}), {},
                                Placement(one.place.rank, 0, "n1", "", None, frozenset(), (0,), 1, ""), one.choice)
             for one in plans]
    assert [one.device
            for one in job.plan_post_torch(facts, ["n1"] * 2, LaunchConfig(), ENDPOINT, {0: ("lo", "")})] == [
        "cuda:0"] * 2


def test_a_script_that_uses_several_gpus_itself_sees_them_all() -> None:
    plans = job.plan_pre_torch(bound(A100_NODE, 0), LaunchConfig(idle_gpus=True))
    assert [(one.settings, one.choice and one.choice.ordinal) for one in plans] == [({}, 0)]


@pytest.mark.parametrize(("environ", "shown"), [
    ({}, range(8)), ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "1"}, [5]),
    ({"ROCR_VISIBLE_DEVICES": "GPU-00000003"}, [3])])
def test_amds_gpus_as_the_kernel_tells_of_them(
    environ: dict[str, str], shown: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frontier's eight, the display of its board's controller, and one that a scheduler keeps away."""
    drm, dri, pci = tmp_path / "drm", tmp_path / "dri", tmp_path / "pci"
    monkeypatch.setattr(facts_gpus, "DRM", str(drm))
    monkeypatch.setattr(facts_gpus, "DRI", str(dri))
    dri.mkdir()
    cards = [("ast", "0000:01:00.0", 0), *(("amdgpu", gpu.pci, gpu.numa) for gpu in FRONTIER),
             ("amdgpu", "0000:ff:00.0", 0)]
    for at, (driver, address, numa) in enumerate(cards):
        device = pci / address
        (device / f"drm/renderD{128 + at}").mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        (device / "unique_id").write_text(f"{at - 1:08x}\n")
        (tmp_path / driver).mkdir(exist_ok=True)
        (device / "driver").symlink_to(tmp_path / driver)
        (drm / f"card{at}").mkdir(parents=True)
        (drm / f"card{at}/device").symlink_to(device)
        if at < len(cards) - 1:
            (dri / f"renderD{128 + at}").touch()
    found = facts_gpus.list_amd_gpus(environ)
    assert [one.pci for one in found] == [FRONTIER[at].pci for at in shown]
    assert [one.numa for one in found] == [FRONTIER[at].numa for at in shown]
    assert [one.uuid for one in found] == [f"GPU-{at:08x}" for at in shown]


def test_amds_gpus_choose_the_cores_and_torch_the_gpus() -> None:
    """Nothing that ROCm would not understand is set."""
    facts = [one._replace(gpus=(), visible_gpus=FRONTIER) for one in hosts(*alike((), 8))]
    plans = job.plan_pre_torch(facts, LaunchConfig())
    assert [one.numa for one in plans] == [(gpu.numa,) for gpu in FRONTIER]
    assert [one.settings for one in plans] == [{}] * 8
    bare = tuple(one._replace(uuid=one.uuid.removeprefix("GPU-")) for one in FRONTIER)
    assert [one.device for one in after_torch(plans, [bare] * 8)] == [f"cuda:{rank}" for rank in range(8)]


class Nvml:
    """NVML of a board in MIG mode whose instances have the numbers 0, 2 and 5, as after some were destroyed."""

    NVMLError = RuntimeError
    NVML_DEVICE_MIG_ENABLE = 1

    def nvmlDeviceGetMigMode(self, _: object) -> tuple[int, int]:  # noqa: N802
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, _: object) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _: object, index: int) -> str:  # noqa: N802
        if index not in (0, 2, 5):
            raise self.NVMLError
        return f"instance {index}"


def test_a_hole_in_the_numbers_of_mig_instances() -> None:
    assert facts_gpus.list_mig_handles(Nvml(), None) == ["instance 0", "instance 2", "instance 5"]


def test_local_ranks_are_in_the_order_of_ranks() -> None:
    places: list[RankPosition] = job.locate_ranks([0, 4, 0, 4])
    assert job.group_by_node(places) == [[0, 2], [1, 3]]


@pytest.mark.thorough("the unit tests of the choice of a device")
def test_an_accelerator_that_torch_learns_of_from_a_package(quick: Mpi) -> None:
    """Nothing of ours knows its name: torch.accelerator tells its type and number, torch.distributed its backend."""
    done = check(mpiexec(quick, 2, PROGRAMS / "which_device.py", env=IMAGINED))
    assert sorted(done.stdout.splitlines()) == [f"{at}: imagined:{at} imagiccl imagined:{at}" for at in range(2)]
    assert "2 ranks on 1 node, imagiccl on imagined, " in done.stderr
    done = mpiexec(quick, 3, PROGRAMS / "which_device.py", env=IMAGINED)
    assert done.returncode == 3
    assert "mpiddp: cannot start: too-few-gpus" in done.stderr
    assert find("launch/too_few_gpus", done.stderr, gpus="2 GPUs")


@pytest.mark.parametrize("how", [
    "-m mpiddp", pytest.param("-m mpiddp --no-init", marks=pytest.mark.thorough),
])
def test_a_device_that_fails_when_it_is_first_used_is_reported(quick: Mpi, tmp_path: Path, how: str) -> None:
    """It may be faulty, or in use by another job: the report names the rank, for the user and the supervisor."""
    need(quick.missing())
    program = tmp_path / "own_main.py"
    program.write_text("import mpiddp\ntry:\n    mpiddp.init_process_group()\n    print('runs')\n"
                       "finally:\n    mpiddp.destroy_process_group()\n")
    done = processes.run(*mpiexec_command(quick, 2, *how.split(), program), timeout=DEADLINE_S,
                         env={**single_node_environ(quick), **IMAGINED, "IMAGINED_BUSY": "1"})
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1, done.stderr
    assert "busy or unavailable" in done.stderr
    assert "abort-grace" not in done.stderr
    assert "runs" not in done.stdout


@pytest.mark.thorough("test_a_device_that_does_not_compute_or_answer_is_told")
def test_a_check_goes_on_without_a_device_that_fails_when_it_is_first_used(quick: Mpi) -> None:
    done = mpiexec(quick, 2, "--quick", "--nodes-only", env={**IMAGINED, "IMAGINED_BUSY": "1"}, module="mpiddp.check")
    told = check(done, 1).stdout
    (fault,) = find("check/device_broken", told, device=f"{os.uname().nodename}: imagined:1")
    assert "busy or unavailable" in fault["error"]


@pytest.mark.parametrize(("options", "cgroup", "devices", "uuids"), first_of([
    ("--gpus-per-task=1", False, "cuda:0-1", ["0", "1"]),  # each is shown one, and both are brought into sight
    ("--gpus-per-task=1", True, "cuda:0", ["0", "1"]),
    ("--gres=gpu:2", False, "cuda:0-1", ["0", "1"]),  # both tasks are shown both
    ("--gpus-per-node=4", False, "cuda:0-1", ["0", "1"]),
    ("--gres=gpu:4 --gpu-bind=map_gpu:3,1", False, "cuda:0-1", ["3", "1"]),
    ("--gres=gpu:4 --gpu-bind=map_gpu:3,1", True, "cuda:0", ["3", "1"]),
    ("--gres=gpu:4 --gpu-bind=mask_gpu:0x6,0x2", False, "cuda:0-1", ["2", "1"]),  # the second has no choice
], 3))
def test_what_slurm_shows_each_task(
    cluster: Cluster, options: str, cgroup: bool, devices: str, uuids: list[str]
) -> None:
    """The devices are files of no use, so torch's part is written down in the program; Slurm's part is real."""
    mpi = MPIS["openmpi4"]
    done = check(cluster.run("srun", "--mpi=pmix", "-wnode[1-2]", "--ntasks-per-node=2", *options.split(),
                             str(mpi.python), str(PROGRAMS / "gpus.py"), *["--cgroup"] * cgroup, timeout=DEADLINE_S,
                             env=mpi.environ(), cwd=ROOT))
    table = done.stdout.splitlines()
    row = next(line.split() for line in table if line.startswith("  node[1-2]"))
    assert row[:4] == ["node[1-2]", "0-3", devices, "H100"], done.stdout
    for rank in range(4):
        uuid = f"GPU-{uuids[rank % 2]}node{rank // 2 + 1}"
        assert any(line.startswith(f"rank {rank} ") and f" is {uuid} " in line for line in table), done.stdout
    assert ("isolated-gpus: on node[1-2]" in done.stdout) == (devices == "cuda:0")
