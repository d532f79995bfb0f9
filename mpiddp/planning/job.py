"""The whole plan: what rank 0 decides for every rank in the two rounds of the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..base.config import LaunchConfig
from ..base.errors import LaunchError
from ..base.ranks import Place
from ..discovery.devices import DeviceFacts
from ..discovery.gpus import CUDA_VISIBLE
from ..discovery.host import HostFacts
from . import cores, devices, environment, gpus, network, placement, problems
from .advice import NO_ADVICE, Advice, choose_advice
from .gpus import GpuChoice, RankGpus
from .placement import Placement


class PreTorchPlan(NamedTuple):
    """A rank's plan before torch is imported.

    `settings` are variables to set, `defaults` those to set unless they are set already. `cpus` are the CPUs
    to run on, None to keep those that the launcher gave; `numa` are their NUMA nodes. `choice` is the rank's GPU,
    None if only torch can tell. `tries` is true for the rank that tries for its node which of rank 0's
    addresses can be reached. `warnings` are for rank 0 to print; the other ranks have none.
    """

    place: Place
    defaults: dict[str, str]
    settings: Mapping[str, str] = {}
    cpus: frozenset[int] | None = None
    numa: tuple[int, ...] = (0,)
    choice: GpuChoice | None = None
    tries: bool = False
    warnings: tuple[str, ...] = ()


class PostTorchFacts(NamedTuple):
    """The facts of a rank after torch is imported.

    `former` holds those of mpiddp's variables that were set before, with their values. `seat` is where the
    rank sits; its device is still missing, and its interface unless the user has named one. `choice` is from the
    plan before torch. `trials` are the results of trying rank 0's addresses.
    """

    place: Place
    devices: DeviceFacts
    former: dict[str, str]
    seat: Placement
    choice: GpuChoice | None = None
    trials: tuple[network.ProbeResult, ...] = ()


class PostTorchPlan(NamedTuple):
    """A rank's plan after torch is imported.

    `endpoint` is where the store is, `interface` the network interface that leads there. `sockets` is what
    NCCL_SOCKET_IFNAME should be, empty for nothing. Only rank 0 has `warnings`, and `seats` with every rank's seat.
    """

    device: str
    backend: str
    endpoint: environment.Endpoint
    interface: str
    sockets: str = ""
    warnings: tuple[str, ...] = ()
    seats: tuple[Placement, ...] = ()


def plan_pre_torch(facts: Sequence[HostFacts], config: LaunchConfig, final: bool = False) -> list[PreTorchPlan]:
    """Return each rank's plan before torch, in rank order, from the facts of all ranks; raise LaunchError.

    `final` tells that no torch will be asked: a node's GPUs are those that the facts have.
    """
    problems.check_options(facts)
    problems.check_time_left(facts[0], config)
    problems.check_software(facts)
    problems.check_script(facts)
    problems.check_hidden_gpus(facts)
    if config.script is not None and config.device != "cpu" and not config.idle_gpus:  # other programs use them
        problems.check_idle_gpus(facts)
    if config.device != "cpu" and not config.share_gpus:
        problems.check_gpu_count(facts)
    places = placement.locate_ranks([one.node for one in facts])
    choices = assign_gpus_pre_torch(facts, places, config, final)
    near = [choice.gpu.numa if choice else -1 for choice in choices] if any(choices) else ()
    shares = cores.share_cpus(facts, config.binding, near)
    defaults = {share.threads: {"OMP_NUM_THREADS": str(share.threads)} for share in shares}
    settings: dict[tuple[str, ...] | None, dict[str, str]] = {None: {}}
    plans = []
    for place, share, choice, one in zip(places, shares, choices, facts, strict=True):
        visible = choice.visible if choice else None
        if visible not in settings:
            settings[visible] = {CUDA_VISIBLE: ",".join(visible or ())}
        plans.append(PreTorchPlan(
            place, defaults[share.threads], settings[visible], share.cpus if share.cpus != one.cpus else None,
            share.numa, choice, tries=place.local_rank == 0 < place.node_rank))
    arguments = config.script.arguments if config.script else ()
    told = (*problems.warn_unknown_options(config, len(facts)), *problems.warn_hosts(facts),
            *problems.warn_local_rank_option(facts, config.local_rank_option, arguments),
            *cores.warn_crowded_cores(facts, config.binding), *cores.warn_far_gpus(facts, shares, near))
    return [plans[0]._replace(warnings=told), *plans[1:]]


def assign_gpus_pre_torch(
    facts: Sequence[HostFacts], places: Sequence[Place], config: LaunchConfig, final: bool = False
) -> list[GpuChoice | None]:
    """Return each rank's GPU, None if only torch can tell.

    A node with too few GPUs raises no error unless this is `final`: its torch may be one without CUDA.
    """
    found: list[GpuChoice | None] = [None] * len(facts)
    if not any(one.visible_gpus for one in facts):
        return found
    for ranks in group_by_node(places):
        first = facts[ranks[0]]
        assert first.topology
        looks = any(facts[rank].visible_gpus != first.visible_gpus for rank in ranks) or (
            not config.idle_gpus and cores.is_launcher_binding_kept([facts[rank] for rank in ranks], config.binding))
        near = [cores.list_numa_nodes(facts[rank].cpus, first.topology) if looks else () for rank in ranks]
        node = [RankGpus(rank, facts[rank].visible_gpus, facts[rank].gpus, numa,
                         cores.list_far_numa_nodes(numa, first.topology) if looks else ())
                for rank, numa in zip(ranks, near, strict=True)]
        try:
            choices = gpus.choose_gpus(node, first.hostname, config.share_gpus, config.virtual_local_rank,
                                       choose_advice(first))
        except LaunchError:
            if final:
                raise
            continue
        for rank, choice in zip(ranks, choices, strict=True):
            found[rank] = choice
    return found


def group_by_node(places: Sequence[Place]) -> list[list[int]]:
    """Return the ranks of each node, in the order of local ranks."""
    nodes: list[list[int]] = [[] for _ in range(places[0].num_nodes)]
    for place in places:
        nodes[place.node_rank].append(place.rank)
    return nodes


def plan_post_torch(
    facts: Sequence[PostTorchFacts], hosts: Sequence[str], config: LaunchConfig, endpoint: environment.Endpoint,
    ways: Mapping[int, tuple[str, str]], advice: Advice = NO_ADVICE,
) -> list[PostTorchPlan]:
    """Return each rank's plan after torch, in rank order, from the facts of all ranks; raise LaunchError.

    `hosts` are the ranks' hostnames. `endpoint` is where rank 0 serves the store. `ways` holds each
    node's interface that leads there, and what NCCL_SOCKET_IFNAME should be, empty for nothing. `advice` is what
    messages may name.
    """
    found, virtual = [one.devices for one in facts], config.virtual_local_rank
    devices.check_device_kinds(config.device, found, hosts, advice)
    devices.check_unseen_gpus(found, hosts)
    kind = found[0].kind
    choices = assign_gpus_post_torch(facts, hosts, config, advice) if kind != "cpu" else [None] * len(facts)
    shared = config.share_gpus and gpus.has_shared_gpu(one for one in choices if one)
    backend = devices.choose_backend(config.backend, found, hosts, shared, advice)
    warnings = problems.warn_stale_variables(
        (one.place.rank, one.former, environment.script_env(one.place, endpoint, virtual)) for one in facts
        if one.former)
    warnings += devices.warn_unlimited_stack(found, hosts)
    warnings += gpus.warn_isolated_gpus([
        (hosts[one.place.rank], choice.ordinal != (0 if virtual else one.place.local_rank))
        for one, choice in zip(facts, choices, strict=True) if choice and not shared], advice)
    plans, seats = [], []
    alike: dict[tuple[int, str], PostTorchPlan] = {}
    for one, choice in zip(facts, choices, strict=True):
        device = f"{kind}:{choice.ordinal}" if choice else kind
        interface, sockets = ways[one.place.node_rank]
        key = (one.place.node_rank, device)
        if key not in alike:
            alike[key] = PostTorchPlan(device, backend, endpoint, interface, sockets)
        plans.append(alike[key])
        seats.append(one.seat._replace(device=device, gpu=choice.gpu if choice else None,
                             interface=one.seat.interface or interface))
    return [plans[0]._replace(warnings=tuple(warnings), seats=tuple(seats)), *plans[1:]]


def assign_gpus_post_torch(
    facts: Sequence[PostTorchFacts], hosts: Sequence[str], config: LaunchConfig, advice: Advice
) -> list[GpuChoice | None]:
    """Return each rank's GPU, one of those that torch sees.

    On a node where CUDA was told which GPUs to show, or shows MIG instances, for which some versions of torch tell
    the UUID of the whole GPU, the choice from before torch stands. On other nodes the
    GPUs are chosen again, in torch's order: CUDA puts the fastest first, NVML goes by the PCI bus.
    """
    found: dict[int, GpuChoice] = {}
    for ranks in group_by_node([one.place for one in facts]):
        early = [facts[rank].choice for rank in ranks]
        choices = [choice for choice in early if choice]
        stands = len(choices) == len(ranks) and any(choice.visible or choice.gpu.is_slice for choice in choices)
        if not stands:
            host = hosts[ranks[0]]
            apart = gpus.distinguish_gpus([facts[rank].devices.gpus for rank in ranks], host, ranks[0])
            node = [RankGpus(rank, seen, near=facts[rank].seat.numa) for rank, seen in zip(ranks, apart, strict=True)]
            choices = gpus.choose_gpus(node, host, config.share_gpus, config.virtual_local_rank, advice)
        for rank, choice in zip(ranks, choices, strict=True):
            devices.check_gpu_index(choice, facts[rank].devices, rank, hosts[rank], config.virtual_local_rank, stands,
                                advice)
            found[rank] = choice
    return [found[rank] for rank in range(len(facts))]
