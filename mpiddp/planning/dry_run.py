"""What a job would be like, of a given shape or on nodes whose facts are known, without MPI and without torch."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.config import LaunchConfig, Shape
from ..discovery.host import HostFacts
from . import environment, network, placement
from .job import plan_pre_torch
from .placement import Placement

UNKNOWN_PORT = 0  # the kernel gives it when the job starts


def describe_dry_run(shape: Shape, hosts: Sequence[str]) -> str:
    """Return in words the ranks, hosts, address and variables of a job; `hosts` are the known names of its nodes."""
    names = [hosts[i] if i < len(hosts) else f"node {i}" for i in range(shape.nodes)]
    places = placement.locate_ranks([node for node in range(shape.nodes) for _ in range(shape.ranks_per_node)])
    address = "127.0.0.1" if shape.nodes == 1 else f"<address of {names[0]}>"
    endpoint = environment.Endpoint(address, UNKNOWN_PORT, token="", run_id="mpiddp-<random>")
    lines = [f"{len(places)} ranks on {shape.nodes} nodes, if they are placed node by node:"]
    for node, name in enumerate(names):
        first = node * shape.ranks_per_node
        lines.append(f"  {name}: ranks {first} to {first + shape.ranks_per_node - 1}, device cuda:LOCAL_RANK or cpu")
    for place in dict.fromkeys((places[0], places[-1])):
        exports = {**environment.script_env(place, endpoint), "MASTER_PORT": str(shape.port or "<free port of rank 0>"),
                   "OMP_NUM_THREADS": "<share of the cores, or --cpus-per-task>",
                   "GLOO_SOCKET_IFNAME": "lo" if shape.nodes == 1 else "<interface towards MASTER_ADDR>"}
        lines.append(f"rank {place.rank}:")
        lines += [f"  {name}={value}" for name, value in exports.items()]
    return "\n".join(lines)


def plan_dry_run(facts: Sequence[HostFacts], config: LaunchConfig) -> tuple[list[Placement], tuple[str, ...]]:
    """Return where each rank would sit, and the warnings; raise LaunchError as the job would before torch.

    The devices are those that NVML or the kernel tell of: a torch may see others. The interface is the best one. Where
    the user asks for a device of which they tell nothing, it has no number.
    """
    sees = config.device in (None, "cuda")
    facts = [one._replace(options={}, gpus=one.gpus * sees, visible_gpus=one.visible_gpus * sees, hidden=one.hidden * sees)
             for one in facts]
    plans = plan_pre_torch(facts, config, final=True)
    best = network.rank_addresses(facts, network.NetworkConstraint(config.interface, config.master_addr))[0]
    own = {one.node: one.interfaces for one in facts if one.interfaces}
    found = []
    for plan, one in zip(plans, facts, strict=True):
        towards = next((each.name for each in own.get(one.node, ()) if each.network == best.network), best.name)
        device = f"cuda:{plan.choice.ordinal}" if plan.choice else config.device or "cpu"
        found.append(Placement(
            plan.place.rank, plan.place.node_rank, one.hostname, device,
            plan.choice.gpu if plan.choice else None, plan.cpus or one.cpus, plan.numa,
            config.threads or int(plan.defaults["OMP_NUM_THREADS"]),
            best.name if best.name == config.interface else towards))
    return found, plans[0].warnings
