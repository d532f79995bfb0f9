"""The whole plan: what rank 0 decides for every rank in the two rounds of the start, and for --dry-run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from ..base.config import DryRunShape, LaunchConfig
from ..base.errors import LaunchError
from ..base.ranks import RankPosition
from ..discovery.devices import DeviceFacts
from ..discovery.gpus import CUDA_VISIBLE, Gpu
from ..discovery.host import HostFacts
from . import cores, environment, gpus, network, problems
from .gpus import GpuChoice, RankGpus
from .problems import NO_ADVICE, Advice, choose_advice

UNKNOWN_PORT = 0  # the kernel gives it when the job starts


class Placement(NamedTuple):
    """Where a rank runs: its node (by number and by hostname), device, CPUs, threads, network interface and process.

    `gpu` is what is known of the device, None for a CPU. `numa` are the NUMA nodes of the CPUs. `interface` is empty
    if torch chooses it.
    """

    rank: int
    node: int
    host: str
    device: str
    gpu: Gpu | None
    cpus: frozenset[int]
    numa: tuple[int, ...]
    threads: int
    interface: str
    pid: int = 0


class PreTorchPlan(NamedTuple):
    """A rank's plan before torch is imported.

    `settings` are variables to set, `defaults` those to set unless they are set already. `cpus` are the CPUs to run on,
    None to keep those that the launcher gave; `numa` are their NUMA nodes. `choice` is the rank's GPU, None if only
    torch can tell. A rank that `probes` tests for its node which of rank 0's addresses are reachable. Only rank 0 has
    `warnings`, to print.
    """

    place: RankPosition
    defaults: dict[str, str]
    settings: Mapping[str, str] = {}
    cpus: frozenset[int] | None = None
    numa: tuple[int, ...] = (0,)
    choice: GpuChoice | None = None
    probes: bool = False
    warnings: tuple[str, ...] = ()


class PostTorchFacts(NamedTuple):
    """The facts of a rank after torch is imported.

    `former` holds mpiddp's variables that were set before, with their values. `placement` has no device yet, and an
    interface only if the user named one. `choice` is from the plan before torch. `probe_results` are of rank 0's
    addresses.
    """

    place: RankPosition
    devices: DeviceFacts
    former: dict[str, str]
    placement: Placement
    choice: GpuChoice | None = None
    probe_results: tuple[network.ProbeResult, ...] = ()


class PostTorchPlan(NamedTuple):
    """A rank's plan after torch is imported.

    `endpoint` is where the store is, `interface` the network interface that leads there. `sockets` is the value of
    NCCL_SOCKET_IFNAME, empty to leave it. Only rank 0 has `warnings`, and `placements` of all ranks.
    """

    device: str
    backend: str
    endpoint: environment.Endpoint
    interface: str
    sockets: str = ""
    warnings: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()


def locate_ranks(nodes: Sequence[Hashable]) -> list[RankPosition]:
    """Return each rank's place in the job from the key of its node, in rank order.

    Local ranks count the ranks of a node in rank order. Node ranks count the nodes in the order of their lowest ranks.
    So uneven, cyclic and arbitrary placements all come out right.
    """
    local_world_sizes = Counter(nodes)
    node_ranks = {node: i for i, node in enumerate(local_world_sizes)}
    world_size, num_nodes = len(nodes), len(node_ranks)
    local_ranks = dict.fromkeys(node_ranks, 0)
    places = []
    for rank, node in enumerate(nodes):
        local_rank = local_ranks[node]
        local_ranks[node] = local_rank + 1
        places.append(RankPosition(rank, world_size, local_rank, local_world_sizes[node], node_ranks[node], num_nodes))
    return places


def plan_pre_torch(facts: Sequence[HostFacts], config: LaunchConfig, final: bool = False) -> list[PreTorchPlan]:
    """Return each rank's plan before torch, in rank order, from the facts of all ranks; raise LaunchError.

    `final`: torch will not be asked, a node has only the GPUs that are in the facts.
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
    places = locate_ranks([host.node for host in facts])
    choices = assign_gpus_pre_torch(facts, places, config, final)
    near = [choice.gpu.numa if choice else -1 for choice in choices] if any(choices) else ()
    shares = cores.share_cpus(facts, config.binding, near)
    defaults = {share.threads: {"OMP_NUM_THREADS": str(share.threads)} for share in shares}
    settings: dict[tuple[str, ...] | None, dict[str, str]] = {None: {}}
    plans = []
    for place, share, choice, host in zip(places, shares, choices, facts, strict=True):
        visible = choice.visible if choice else None
        if visible not in settings:
            settings[visible] = {CUDA_VISIBLE: ",".join(visible or ())}
        plans.append(PreTorchPlan(
            place, defaults[share.threads], settings[visible], share.cpus if share.cpus != host.cpus else None,
            share.numa, choice, probes=place.local_rank == 0 < place.node_rank))
    arguments = config.script.arguments if config.script else ()
    constraint = network.NetworkConstraint(config.interface, config.master_addr)
    warnings = (*problems.warn_unknown_options(config, len(facts)), *problems.warn_idle_nodes(facts),
                *problems.warn_hosts(facts),
                *problems.warn_site(facts),
                *network.warn_unused_network(facts, constraint),
                *problems.warn_local_rank_option(facts, config.local_rank_option, arguments),
                *cores.warn_crowded_cores(facts, config.binding), *cores.warn_far_gpus(facts, shares, near))
    return [plans[0]._replace(warnings=warnings), *plans[1:]]


def assign_gpus_pre_torch(
    facts: Sequence[HostFacts], places: Sequence[RankPosition], config: LaunchConfig, final: bool = False
) -> list[GpuChoice | None]:
    """Return each rank's GPU, None if only torch can tell.

    A node with too few GPUs raises no error unless this is `final`: its torch may be one without CUDA.
    """
    assigned: list[GpuChoice | None] = [None] * len(facts)
    if not any(host.visible_gpus for host in facts):
        return assigned
    for ranks in group_by_node(places):
        first = facts[ranks[0]]
        topology = first.topology
        assert topology
        uses_numa = any(facts[rank].visible_gpus != first.visible_gpus for rank in ranks) or (
            not config.idle_gpus and cores.is_launcher_binding_kept([facts[rank] for rank in ranks], config.binding))
        near = [cores.list_numa_nodes(facts[rank].cpus, topology) if uses_numa else () for rank in ranks]
        node = [RankGpus(rank, facts[rank].visible_gpus, facts[rank].gpus, numa,
                         cores.list_far_numa_nodes(numa, topology) if uses_numa else ())
                for rank, numa in zip(ranks, near, strict=True)]
        try:
            choices = gpus.choose_gpus(node, first.hostname, config.share_gpus, config.virtual_local_rank,
                                       choose_advice(first))
        except LaunchError:
            if final:
                raise
            continue
        for rank, choice in zip(ranks, choices, strict=True):
            assigned[rank] = choice
    return assigned


def group_by_node(places: Sequence[RankPosition]) -> list[list[int]]:
    """Return the ranks of each node, in the order of local ranks."""
    nodes: list[list[int]] = [[] for _ in range(places[0].num_nodes)]
    for place in places:
        nodes[place.node_rank].append(place.rank)
    return nodes


def plan_post_torch(
    facts: Sequence[PostTorchFacts], hosts: Sequence[str], config: LaunchConfig, endpoint: environment.Endpoint,
    interfaces: Mapping[int, tuple[str, str]], advice: Advice = NO_ADVICE,
) -> list[PostTorchPlan]:
    """Return each rank's plan after torch, in rank order, from the facts of all ranks; raise LaunchError.

    `hosts` are the ranks' hostnames. `endpoint` is where rank 0 serves the store. `interfaces` holds each node's
    interface that leads there, and its value of NCCL_SOCKET_IFNAME, empty for none. `advice` is for messages.
    """
    devices, virtual = [rank.devices for rank in facts], config.virtual_local_rank
    gpus.check_device_kinds(config.device, devices, hosts, advice)
    gpus.check_unseen_gpus(devices, hosts)
    kind = devices[0].kind
    choices = assign_gpus_post_torch(facts, hosts, config, advice) if kind != "cpu" else [None] * len(facts)
    shared = config.share_gpus and gpus.has_shared_gpu(choice for choice in choices if choice)
    backend = gpus.choose_backend(config.backend, devices, hosts, shared, advice)
    warnings = problems.warn_stale_variables(
        (rank.place.rank, rank.former, environment.script_env(rank.place, endpoint, virtual))
        for rank in facts if rank.former)
    warnings += gpus.warn_unlimited_stack(devices, hosts)
    warnings += gpus.warn_isolated_gpus([
        (hosts[rank.place.rank], choice.ordinal != (0 if virtual else rank.place.local_rank))
        for rank, choice in zip(facts, choices, strict=True) if choice and not shared], advice)
    plans, placements = [], []
    known: dict[tuple[int, str], PostTorchPlan] = {}
    for rank, choice in zip(facts, choices, strict=True):
        device = f"{kind}:{choice.ordinal}" if choice else kind
        interface, sockets = interfaces[rank.place.node_rank]
        key = (rank.place.node_rank, device)
        if key not in known:
            known[key] = PostTorchPlan(device, backend, endpoint, interface, sockets)
        plans.append(known[key])
        placements.append(rank.placement._replace(device=device, gpu=choice.gpu if choice else None,
                                                  interface=rank.placement.interface or interface))
    return [plans[0]._replace(warnings=tuple(warnings), placements=tuple(placements)), *plans[1:]]


def assign_gpus_post_torch(
    facts: Sequence[PostTorchFacts], hosts: Sequence[str], config: LaunchConfig, advice: Advice
) -> list[GpuChoice | None]:
    """Return each rank's GPU, one of those that torch sees.

    The choice from before torch stays on a node where CUDA_VISIBLE_DEVICES was set for it, or that has MIG instances,
    for which some versions of torch report the UUID of the whole GPU. On other nodes GPUs are chosen again, in torch's
    order: CUDA puts the fastest first, NVML orders by the PCI bus.
    """
    assigned: dict[int, GpuChoice] = {}
    for ranks in group_by_node([rank_facts.place for rank_facts in facts]):
        host = hosts[ranks[0]]
        choices = [choice for rank in ranks if (choice := facts[rank].choice)]
        is_kept = len(choices) == len(ranks) and any(choice.visible or choice.gpu.is_slice for choice in choices)
        if not is_kept:
            distinct = gpus.distinguish_gpus([facts[rank].devices.gpus for rank in ranks], host, ranks[0])
            node = [RankGpus(rank, visible, near=facts[rank].placement.numa)
                    for rank, visible in zip(ranks, distinct, strict=True)]
            choices = gpus.choose_gpus(node, host, config.share_gpus, config.virtual_local_rank, advice)
        for rank, choice in zip(ranks, choices, strict=True):
            gpus.check_gpu_index(choice, facts[rank].devices, rank, hosts[rank], config.virtual_local_rank, is_kept,
                                 advice)
            assigned[rank] = choice
    return [assigned[rank] for rank in range(len(facts))]


def describe_dry_run(shape: DryRunShape, hosts: Sequence[str]) -> str:
    """Describe the ranks, hosts, address and variables of a job; `hosts` are the known names of its nodes."""
    names = [hosts[node] if node < len(hosts) else f"node {node}" for node in range(shape.nodes)]
    places = locate_ranks([node for node in range(shape.nodes) for _ in range(shape.ranks_per_node)])
    address = "127.0.0.1" if shape.nodes == 1 else f"<address of {names[0]}>"
    endpoint = environment.Endpoint(address, UNKNOWN_PORT, token="", run_id="mpiddp-<random>")
    lines = [f"{len(places)} ranks on {shape.nodes} nodes, if they are placed node by node:"]
    for node, name in enumerate(names):
        first = node * shape.ranks_per_node
        lines.append(f"  {name}: ranks {first} to {first + shape.ranks_per_node - 1}, device cuda:LOCAL_RANK or cpu")
    for place in dict.fromkeys((places[0], places[-1])):
        env = {**environment.script_env(place, endpoint), "MASTER_PORT": str(shape.port or "<free port of rank 0>"),
               "OMP_NUM_THREADS": "<share of the cores, or --cpus-per-task>",
               "GLOO_SOCKET_IFNAME": "lo" if shape.nodes == 1 else "<interface towards MASTER_ADDR>"}
        lines += [f"rank {place.rank}:", *(f"  {name}={value}" for name, value in env.items())]
    return "\n".join(lines)


def plan_dry_run(facts: Sequence[HostFacts], config: LaunchConfig) -> tuple[list[Placement], tuple[str, ...]]:
    """Return where each rank would run, and the warnings; raise LaunchError as the job would before torch.

    The devices are those that NVML or the kernel list: a torch may see others. The interface is the best one. If the
    user asks for a device that they do not list, it has no number.
    """
    with_gpus = config.device in (None, "cuda")
    facts = [host._replace(options={}) if with_gpus
             else host._replace(options={}, gpus=(), visible_gpus=(), hidden="") for host in facts]
    plans = plan_pre_torch(facts, config, final=True)
    best = network.rank_addresses(facts, network.NetworkConstraint(config.interface, config.master_addr))[0]
    own = {host.node: host.interfaces for host in facts if host.interfaces}
    placements = []
    for plan, host in zip(plans, facts, strict=True):
        towards = [interface.name for interface in own.get(host.node, ()) if interface.network == best.network]
        device = f"cuda:{plan.choice.ordinal}" if plan.choice else config.device or "cpu"
        placements.append(Placement(
            plan.place.rank, plan.place.node_rank, host.hostname, device,
            plan.choice.gpu if plan.choice else None, plan.cpus or host.cpus, plan.numa,
            config.threads or int(plan.defaults["OMP_NUM_THREADS"]),
            best.name if best.name == config.interface else (*towards, best.name)[0]))
    return placements, plans[0].warnings
