"""The address at which the job's nodes connect to rank 0, and the interface that leads there from each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..base.errors import LaunchError
from ..base.text import fold_hosts
from ..discovery.host import HostFacts, Interface
from .environment import Endpoint

LOOPBACK = Interface("lo", "127.0.0.1", "127.0.0.0/8", loopback=True, speed_mbps=0)
VIRTUAL_PREFIXES = ("docker", "br-", "cni", "flannel", "lxc", "lxdbr", "podman", "tap", "tun", "veth", "virbr", "vmnet",
                    "wg")
LINK_LOCAL_PREFIX = "169.254."  # RFC 3927: routers do not forward these addresses
MAX_ADDRESSES = 16  # of rank 0's that are probed: eight rails, and what a node may have besides


class NetworkConstraint(NamedTuple):
    """The network that the user named: an interface that all nodes have, an address of rank 0's; None for any."""

    interface: str | None = None
    address: str | None = None

    @property
    def options(self) -> str:
        """The options that name it."""
        named = (("interface", self.interface), ("master-addr", self.address))
        return " ".join(f"--{option}={value}" for option, value in named if value)


ANY_NETWORK = NetworkConstraint()


class ProbeResult(NamedTuple):
    """The result of probing an address of rank 0's from another node: the interface that led there, or the error."""

    interface: str = ""
    error: str = ""


def rank_addresses(facts: Sequence[HostFacts], constraint: NetworkConstraint = ANY_NETWORK) -> list[Interface]:
    """Return the interfaces of rank 0's node at which the job could meet, the best first.

    On one node that is loopback. Across nodes, interfaces whose subnet every node is on come before others. Among
    these, bridges of containers and virtual machines come last, then IPv4 comes before IPv6, then the faster interface
    comes first. Of several interfaces of a kind, such as eight rails that may each reach only their own kind, the
    second comes after the first of every other kind. Raises LaunchError `no-network`.
    """
    nodes: dict[int, HostFacts] = {}
    for host in facts:
        nodes.setdefault(host.node, host)
    if len(nodes) == 1:
        return [LOOPBACK]
    master, *others = nodes.values()

    def preference(interface: Interface) -> tuple[bool, bool, bool, int]:
        return (not all(is_subnet_shared(interface, other) for other in others),
                interface.name.startswith(VIRTUAL_PREFIXES), ":" in interface.address, -interface.speed_mbps)

    allowed = sorted(apply_constraint(constraint, master, others), key=preference)
    if not allowed:
        raise LaunchError(
            "no-network",
            actual=f"rank 0's node {master.hostname} has no network address besides loopback",
            needed="an interface that is up, with an address that the other nodes can reach",
            do="check `ip address` on that node",
        )
    counts: Counter[object] = Counter()

    def position(interface: Interface) -> tuple[bool, int]:
        kind = (*preference(interface), classify_interface(interface))
        counts[kind] += 1
        return preference(interface)[0], counts[kind]

    return sorted(allowed, key=position)[:MAX_ADDRESSES]


def classify_interface(interface: Interface) -> tuple[str, int]:
    """Return what interfaces of one kind have in common: the name without its numbers, and the speed."""
    return "".join(letter for letter in interface.name if not letter.isdigit()), interface.speed_mbps


class NodeInterfaces(NamedTuple):
    """A node's interfaces, and the name of the one that the job uses.

    `unaddressed` are as in HostFacts. Over the interfaces in `reached` an address of rank 0's was reached, or on rank
    0's own node by all others.
    """

    interfaces: Sequence[Interface]
    chosen: str
    reached: Collection[str] = ()
    unaddressed: Collection[str] = ()


def choose_nccl_interfaces(nodes: Sequence[NodeInterfaces], pattern: str | None = None) -> list[str]:
    """Return the value of NCCL_SOCKET_IFNAME for each node; all are empty if NCCL's own choice is right on all nodes.

    It is right if every interface that NCCL takes leads to the others, and is of the same kind as the one that the job
    uses. An interface leads there if the job uses it, if an address was reached by it, or if another node is on its
    network. If the choice is wrong on one node, all nodes get a value. `pattern` is what the user has named: all that
    matches is of the right kind.
    """
    networks = Counter(
        network for node in nodes for network in {interface.network for interface in list_external(node.interfaces)})
    values, is_right = [], pattern is None
    for node in nodes:
        external = list_external(node.interfaces)
        kinds = {classify_interface(interface) for interface in external if interface.name == node.chosen}
        fitting = match_interfaces(pattern, external) if pattern else [
            interface for interface in external if classify_interface(interface) in kinds]
        leading = {interface.name for interface in fitting
                   if interface.name in node.reached or networks[interface.network] > 1} - {node.chosen}
        is_right = is_right and list_nccl_defaults(node) <= {node.chosen, *leading}
        values.append("=" + ",".join([node.chosen, *sorted(leading)]))
    is_right = is_right or not all(node.chosen for node in nodes)  # without a name NCCL cannot be given one
    return [""] * len(nodes) if is_right else values


def list_nccl_defaults(node: NodeInterfaces) -> set[str]:
    """Return the interfaces that NCCL takes by itself on a node.

    They are those whose names begin with "ib", or else all but docker's and loopback, even if they have only a
    link-local address (NCCL's manual, "NCCL_SOCKET_IFNAME").
    """
    names = {interface.name for interface in list_external(node.interfaces)} | set(node.unaddressed)
    return {name for name in names if name.startswith("ib")} or {
        name for name in names if not name.startswith(("docker", "lo"))}


def apply_constraint(constraint: NetworkConstraint, master: HostFacts, others: Sequence[HostFacts]) -> list[Interface]:
    """Return the interfaces of rank 0's node that fit what the user named; raise LaunchError `no-network`."""
    pattern, address = constraint
    external = list_external(master.interfaces)
    matching = [interface for interface in match_interfaces(pattern, external)
                if (address is None or is_same_address(address, interface.address))
                and (constraint != ANY_NETWORK or not interface.address.startswith(LINK_LOCAL_PREFIX))]
    lacking = [host.hostname for host in others
               if pattern and not match_interfaces(pattern, list_external(host.interfaces))]
    if (pattern or address) and (not matching or lacking):
        reason = (f"{fold_hosts(lacking)} has no such interface" if matching
                  else f"rank 0's node {master.hostname} has {list_addresses(external)}")
        raise LaunchError(
            "no-network",
            actual=f"{constraint.options}, but {reason}",
            needed="an interface that every node has, and an address of rank 0's node",
            do="omit the option to let mpiddp choose, or check `ip address` on the nodes",
        )
    return matching


def warn_unused_network(facts: Sequence[HostFacts], constraint: NetworkConstraint) -> list[str]:
    """Return the warning `no-interface` if the node of a job of one node lacks the network that the user named.

    A name given as the address is not resolved here. Nothing is known of interfaces that were not read.
    """
    interfaces = facts[0].interfaces
    if not constraint.options or not interfaces or any(host.node != facts[0].node for host in facts):
        return []
    matching = match_interfaces(constraint.interface, interfaces)
    if matching and (constraint.address is None or can_be_own_address(constraint.address, matching)):
        return []
    has = f"{facts[0].hostname} has {list_addresses(interfaces)}"
    return [f"no-interface: {constraint.options}, but {has}; the job runs on this node alone, over loopback"]


def can_be_own_address(address: str, interfaces: Iterable[Interface]) -> bool:
    """Return whether an address leads to its own node over these interfaces or loopback, or is a name, which may."""
    import ipaddress  # seldom needed

    try:
        is_loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True
    return is_loopback or any(is_same_address(address, interface.address) for interface in interfaces)


def list_addresses(interfaces: Iterable[Interface]) -> str:
    """Return interfaces with their addresses, as part of a message."""
    return ", ".join(f"{interface.name} {interface.address}" for interface in interfaces) or "none"


def is_same_address(address: str, other: str) -> bool:
    """Return whether two texts are the same address; those of IPv6 have several forms."""
    if ":" not in address:
        return address == other
    import ipaddress  # seldom needed

    try:
        return ipaddress.ip_address(address) == ipaddress.ip_address(other)
    except ValueError:
        return False


def match_interfaces(pattern: str | None, interfaces: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces of a node that match the user's pattern; all if it is None.

    The pattern is a name, the beginning of names, or a network in CIDR form; or several of these with commas between.
    The beginning counts only if no interface has that very name.
    """
    if pattern is None:
        return list(interfaces)
    matching: dict[Interface, None] = {}
    for part in pattern.split(","):
        if "/" in part:
            import ipaddress  # seldom needed

            network = ipaddress.ip_network(part, strict=False)
            matching |= dict.fromkeys(
                interface for interface in interfaces if ipaddress.ip_address(interface.address) in network)
        else:
            matching |= dict.fromkeys(
                [interface for interface in interfaces if interface.name == part]
                or [interface for interface in interfaces if part and interface.name.startswith(part)])
    return list(matching)


def choose_address(
    candidates: Sequence[Interface], results: Mapping[int, Sequence[ProbeResult]], hosts: Mapping[int, str],
    constraint: NetworkConstraint = ANY_NETWORK, nodes: Sequence[Sequence[Interface]] = (),
) -> tuple[str, dict[int, str]]:
    """Return the first address that every node has reached, and each node's interface towards it.

    `results` holds, for every node but rank 0's (node 0), the result of probing each candidate. `hosts` are the nodes'
    names, `nodes` their interfaces. An interface that the user named in full is used on all nodes that have it. Raises
    LaunchError `address-unreachable`.
    """
    for index, candidate in enumerate(candidates):
        if not any(node_results[index].error for node_results in results.values()):
            is_named = candidate.name == constraint.interface
            have = [is_named and candidate.name in {interface.name for interface in list_external(own)}
                    for own in nodes]
            return candidate.address, {0: candidate.name} | {
                node: candidate.name if node < len(have) and have[node] else node_results[index].interface
                for node, node_results in results.items()}
    lines = []
    for index, candidate in enumerate(candidates):
        failed = [node for node, node_results in results.items() if node_results[index].error]
        reasons = ", ".join(dict.fromkeys(results[node][index].error for node in failed))
        names = fold_hosts(hosts[node] for node in failed)
        lines.append(f"{candidate.address} ({candidate.name}) from {names}: {reasons}")
    raise LaunchError(
        "address-unreachable",
        actual=f"no address of rank 0's node {hosts[0]} is reachable from all nodes; tried:\n" + "\n".join(lines),
        needed="a network on which every node can reach rank 0's node",
        do="check firewalls and `ip address` on these nodes; --interface selects the network to use",
    )


def check_store_reached(errors: Sequence[str | None], hosts: Sequence[str], endpoint: Endpoint) -> list[None]:
    """Raise LaunchError `address-unreachable` if a rank could not connect to rank 0's store.

    `errors` holds each rank's reason, None if it is connected.
    """
    failed = [rank for rank, error in enumerate(errors) if error]
    if failed:
        raise LaunchError(
            "address-unreachable",
            actual=f"cannot connect from {fold_hosts(hosts[rank] for rank in failed)} "
            f"to rank 0 on {hosts[0]} at {endpoint.address} port {endpoint.port}: {errors[failed[0]]}",
            needed="a network on which every node can reach rank 0's node",
            do="check firewalls and `ip address` on both nodes",
        )
    return [None] * len(errors)


def make_port_error(port: int, host: str, error: str) -> LaunchError:
    """Return the LaunchError `port-taken`."""
    return LaunchError(
        "port-taken",
        actual=f"cannot listen on port {port} of rank 0's node {host}: {error}",
        needed="two free ports: that of --port and the next one",
        do=f"choose another port, or omit --port; `ss -ltnp` on {host} shows which process uses it",
    )


def list_external(interfaces: Iterable[Interface]) -> list[Interface]:
    """Return the interfaces that lead out of the node."""
    return [interface for interface in interfaces if not interface.loopback]


def is_subnet_shared(interface: Interface, other: HostFacts) -> bool:
    """Return whether another node is on an interface's subnet, with a different address.

    An address that both nodes have (as docker0 often does) does not connect them.
    """
    addresses = [peer.address for peer in list_external(other.interfaces) if peer.network == interface.network]
    return bool(addresses) and interface.address not in addresses
