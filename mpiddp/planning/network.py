"""The address where the ranks meet, and the interface that leads there from each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..base.errors import LaunchError
from ..base.text import folded
from ..discovery.host import HostFacts, Interface
from .environment import Endpoint

LOOPBACK = Interface("lo", "127.0.0.1", "127.0.0.0/8", loopback=True, speed_mbps=0)
VIRTUAL_PREFIXES = ("docker", "br-", "cni", "flannel", "lxc", "lxdbr", "podman", "tap", "tun", "veth", "virbr", "vmnet",
                    "wg")
LINK_LOCAL_PREFIX = "169.254."  # how the addresses of RFC 3927 begin, which routers do not pass on
MAX_ADDRESSES = 16  # the most of rank 0's addresses that are tried: eight rails, and what a node may have besides


class NetworkConstraint(NamedTuple):
    """The network that the user named: an interface that all nodes have, an address of rank 0's; None for any."""

    interface: str | None = None
    address: str | None = None


ANY_NETWORK = NetworkConstraint()


class ProbeResult(NamedTuple):
    """The result of trying one of rank 0's addresses from another node: the interface that led there, or the error."""

    interface: str = ""
    error: str = ""


def rank_addresses(facts: Sequence[HostFacts], asked: NetworkConstraint = ANY_NETWORK) -> list[Interface]:
    """Return the interfaces of rank 0's node at which the job could meet, the best first.

    On one node that is loopback. Across nodes, interfaces whose subnet every node is on come before others.
    Among these, bridges of containers and virtual machines come last, then IPv4 comes before IPv6, then the
    faster interface comes first. Of interfaces that are alike, such as eight rails which may lead to their like alone,
    the second comes after the first of every other kind. Raises LaunchError `no-network`.
    """
    nodes: dict[int, HostFacts] = {}
    for one in facts:
        nodes.setdefault(one.node, one)
    if len(nodes) == 1:
        return [LOOPBACK]
    master, *others = nodes.values()

    def preference(interface: Interface) -> tuple[bool, bool, bool, int]:
        return (not all(is_subnet_shared(interface, other) for other in others),
                interface.name.startswith(VIRTUAL_PREFIXES),
                ":" in interface.address, -interface.speed_mbps)

    found = sorted(apply_constraint(asked, master, others), key=preference)
    if not found:
        raise LaunchError(
            "no-network",
            found=f"rank 0's node {master.hostname} has no network address besides loopback",
            needed="an interface that is up, with an address that the other nodes can reach",
            do="look at `ip address` on that node",
        )
    seen: dict[object, int] = {}

    def turn(interface: Interface) -> tuple[bool, int]:
        like = (*preference(interface), classify_interface(interface))
        seen[like] = seen.get(like, -1) + 1
        return preference(interface)[0], seen[like]

    return sorted(found, key=turn)[:MAX_ADDRESSES]


def classify_interface(interface: Interface) -> tuple[str, int]:
    """Return what interfaces of one kind have in common: the name without its numbers, and the speed."""
    return "".join(letter for letter in interface.name if not letter.isdigit()), interface.speed_mbps


class NodeInterfaces(NamedTuple):
    """A node's ways to the others: its interfaces, and the one that the job goes by.

    `unaddressed` are as in HostFacts. Over the interfaces in `reached` an address of rank 0's was reached, or on its
    own node by all others.
    """

    interfaces: Sequence[Interface]
    chosen: str
    reached: Collection[str] = ()
    unaddressed: Collection[str] = ()


def choose_nccl_interfaces(ways: Sequence[NodeInterfaces], asked: str | None = None) -> list[str]:
    """Return what NCCL_SOCKET_IFNAME should be on each node; all are empty if NCCL's own choice is right on all.

    It is right if every interface that NCCL takes leads to the others, and is of the same kind as the one that the job
    goes by: that leads there, and so does one by which an address was reached, or whose network another node is on. If
    it is wrong on one node, all are told what to take. `asked` is what the user has named: all that fits leads.
    """
    shared = Counter(network for way in ways for network in {one.network for one in list_external(way.interfaces)})
    found, right = [], asked is None
    for way in ways:
        own = list_external(way.interfaces)
        kinds = {classify_interface(one) for one in own if one.name == way.chosen}
        fit = match_interfaces(asked, own) if asked else [one for one in own if classify_interface(one) in kinds]
        leading = {one.name for one in fit if one.name in way.reached or shared[one.network] > 1} - {way.chosen}
        right = right and list_nccl_defaults(way) <= {way.chosen, *leading}
        found.append("=" + ",".join([way.chosen, *sorted(leading)]))
    right = right or not all(way.chosen for way in ways)  # a way that has no name is no name for NCCL
    return [""] * len(ways) if right else found


def list_nccl_defaults(way: NodeInterfaces) -> set[str]:
    """Return the interfaces that NCCL takes by itself on a node.

    They are those whose names begin with "ib", or else all but docker's and loopback, also those that have no address
    but a link-local one (NCCL's manual, "NCCL_SOCKET_IFNAME").
    """
    names = {one.name for one in list_external(way.interfaces)} | set(way.unaddressed)
    return {name for name in names if name.startswith("ib")} or {
        name for name in names if not name.startswith(("docker", "lo"))}


def apply_constraint(asked: NetworkConstraint, master: HostFacts, others: Sequence[HostFacts]) -> list[Interface]:
    """Return the interfaces of rank 0's node that fit what the user named; raise LaunchError `no-network`."""
    found = [
        one for one in match_interfaces(asked.interface, list_external(master.interfaces))
        if (asked.address is None or is_same_address(asked.address, one.address))
        and (asked != ANY_NETWORK or not one.address.startswith(LINK_LOCAL_PREFIX))
    ]
    lacking = [one.hostname for one in others if asked.interface
               and not match_interfaces(asked.interface, list_external(one.interfaces))]
    if (asked.interface or asked.address) and (not found or lacking):
        has = ", ".join(f"{one.name} {one.address}" for one in list_external(master.interfaces)) or "none"
        words = [f"--{option}={value}" for option, value in
                 (("interface", asked.interface), ("master-addr", asked.address)) if value]
        where = f"{folded(lacking)} has no such interface" if found else f"rank 0's node {master.hostname} has {has}"
        raise LaunchError(
            "no-network",
            found=f"{' '.join(words)}, but {where}",
            needed="an interface that every node has, and an address of rank 0's node",
            do="leave the option away to let mpiddp choose, or look at `ip address` on the nodes",
        )
    return found


def is_same_address(address: str, other: str) -> bool:
    """Tell whether two texts are the same address; those of IPv6 have several forms."""
    if ":" not in address:
        return address == other
    import ipaddress  # seldom needed

    try:
        return ipaddress.ip_address(address) == ipaddress.ip_address(other)
    except ValueError:
        return False


def match_interfaces(asked: str | None, interfaces: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces of a node that the user has named; all if `asked` is None.

    `asked` is a name, the beginning of names, or a network in CIDR form; or several with commas between. The
    beginning counts where no interface has that very name.
    """
    if asked is None:
        return list(interfaces)
    found: list[Interface] = []
    for part in asked.split(","):
        if "/" in part:
            import ipaddress  # seldom needed

            network = ipaddress.ip_network(part, strict=False)
            here = [one for one in interfaces if ipaddress.ip_address(one.address) in network]
        else:
            here = [one for one in interfaces if one.name == part] or [
                one for one in interfaces if part and one.name.startswith(part)]
        found += [one for one in here if one not in found]
    return found


def choose_address(
    offered: Sequence[Interface], trials: Mapping[int, Sequence[ProbeResult]], hosts: Mapping[int, str],
    asked: NetworkConstraint = ANY_NETWORK,
    nodes: Sequence[Sequence[Interface]] = (),
) -> tuple[str, dict[int, str]]:
    """Return the first address that every node has reached, and each node's interface towards it.

    `offered` are the candidates. `trials` holds, for every node but rank 0's (node 0), the result of trying
    each candidate. `hosts` are the nodes' names, `nodes` their interfaces. One that the user called by its name is used
    on all nodes that have it. Raises LaunchError `address-unreachable`.
    """
    for at, one in enumerate(offered):
        if not any(tried[at].error for tried in trials.values()):
            have = [one.name == asked.interface in {each.name for each in list_external(own)} for own in nodes]
            return one.address, {0: one.name} | {
                node: one.name if node < len(have) and have[node] else tried[at].interface
                for node, tried in trials.items()}
    lines = []
    for at, one in enumerate(offered):
        failed = [node for node, tried in trials.items() if tried[at].error]
        reasons = ", ".join(dict.fromkeys(trials[node][at].error for node in failed))
        lines.append(f"{one.address} ({one.name}) from {folded(hosts[node] for node in failed)}: {reasons}")
    raise LaunchError(
        "address-unreachable",
        found=f"no address of rank 0's node {hosts[0]} is reached by all nodes; tried\n" + "\n".join(lines),
        needed="a network on which every node reaches rank 0's",
        do="look at firewalls and at `ip address` on these nodes; --interface names the network to use",
    )


def check_store_reached(errors: Sequence[str | None], hosts: Sequence[str], endpoint: Endpoint) -> list[None]:
    """Raise LaunchError `address-unreachable` if a rank could not connect to rank 0's store.

    `errors` holds for each rank why it could not, None if it could.
    """
    failed = [rank for rank, error in enumerate(errors) if error]
    if failed:
        raise LaunchError(
            "address-unreachable",
            found=f"no connection from {folded(hosts[rank] for rank in failed)} "
            f"to rank 0 on {hosts[0]} at {endpoint.address} port {endpoint.port}: {errors[failed[0]]}",
            needed="a network on which every node reaches rank 0's",
            do="look at firewalls and at `ip address` on both nodes",
        )
    return [None] * len(errors)


def make_port_error(port: int, host: str, error: str) -> LaunchError:
    """Return the LaunchError `port-taken`."""
    return LaunchError(
        "port-taken",
        found=f"port {port} of rank 0's node {host} cannot be listened on: {error}",
        needed="two free ports, that of --port and the next one",
        do=f"name another one, or leave --port away; `ss -ltnp` on {host} shows who has it",
    )


def list_external(interfaces: Iterable[Interface]) -> list[Interface]:
    """Return the interfaces that lead out of the node."""
    return [one for one in interfaces if not one.loopback]


def is_subnet_shared(interface: Interface, other: HostFacts) -> bool:
    """Tell whether another node is on an interface's subnet, with an address of its own.

    An address that both nodes have (each one's docker0, say) is no way from one to the other.
    """
    on_subnet = [one.address for one in list_external(other.interfaces) if one.network == interface.network]
    return bool(on_subnet) and interface.address not in on_subnet
