"""The address where the ranks meet, and the interface that leads there from each node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import LaunchError
from ..facts.host import HostFacts, Interface
from .environment import Endpoint
from .words import folded

LOOPBACK_ADDRESS, LOOPBACK_INTERFACE = "127.0.0.1", "lo"


@dataclass(frozen=True)
class Asked:
    """The network that the user named: an interface that all nodes have, an address of rank 0's; None for any."""

    interface: str | None = None
    address: str | None = None


ANY = Asked()


def meeting_point(facts: Sequence[HostFacts], asked: Asked = ANY) -> tuple[str, list[str | None]]:
    """Return rank 0's address for the job and each rank's interface towards it, in rank order.

    On one node that is the loopback interface. Across nodes it is the fastest interface of rank 0
    whose subnet every node is on; where there is none (routed networks), rank 0's fastest, and the
    other nodes' interfaces stay open (None). What the user asked for goes before that. Raises
    LaunchError `no-network`.
    """
    nodes = {one.node: one for one in facts}
    if len(nodes) == 1:
        return LOOPBACK_ADDRESS, [LOOPBACK_INTERFACE] * len(facts)
    master = facts[0]
    others = [one for key, one in nodes.items() if key != master.node]
    candidates = sorted(asked_for(asked, master, others), key=preference)
    for candidate in candidates:
        ways = {one.node: asked.interface or way_to(candidate, one.interfaces) for one in others}
        if all(ways.values()):
            ways[master.node] = candidate.name
            return candidate.address, [ways[one.node] for one in facts]
    unique = [one for one in candidates if all(one.address not in addresses(other) for other in others)]
    if not unique:
        raise LaunchError(
            "no-network",
            found=f"rank 0's node {master.hostname} has no network address of its own besides loopback",
            needed="an interface that is up, with an address that the other nodes can reach",
            do="look at `ip address` on that node",
        )
    return unique[0].address, [unique[0].name if one.node == master.node else None for one in facts]


def asked_for(asked: Asked, master: HostFacts, others: Sequence[HostFacts]) -> list[Interface]:
    """Return the interfaces of rank 0's node that may lead to the others; raise LaunchError `no-network`."""
    found = [
        one for one in usable(master.interfaces)
        if asked.interface in (None, one.name) and asked.address in (None, one.address)
    ]
    lacking = [one.hostname for one in others if asked.interface and asked.interface not in names(one)]
    if (asked.interface or asked.address) and (not found or lacking):
        has = ", ".join(f"{one.name} {one.address}" for one in usable(master.interfaces)) or "none"
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


def check_reached(errors: Sequence[str | None], hosts: Sequence[str], endpoint: Endpoint) -> list[None]:
    """Raise LaunchError `address-unreachable` where a rank could not connect to rank 0's store.

    `errors` says of each rank why not, None where it could.
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


def preference(interface: Interface) -> tuple[bool, int]:
    """Order interfaces: IPv4 before IPv6, then the fastest first."""
    return ":" in interface.address, -interface.speed_mbps


def usable(interfaces: Iterable[Interface]) -> list[Interface]:
    """Return the interfaces that lead out of the node."""
    return [one for one in interfaces if not one.loopback]


def way_to(candidate: Interface, interfaces: Iterable[Interface]) -> str | None:
    """Return the interface of another node on the candidate's subnet, None where there is none.

    An address that both nodes have (each one's docker0, say) is no way from one to the other.
    """
    on_subnet = [one for one in usable(interfaces) if one.network == candidate.network]
    if not on_subnet or any(one.address == candidate.address for one in on_subnet):
        return None
    return on_subnet[0].name


def addresses(host: HostFacts) -> set[str]:
    """Return all addresses of a host."""
    return {one.address for one in host.interfaces}


def names(host: HostFacts) -> set[str]:
    """Return the names of a host's interfaces."""
    return {one.name for one in host.interfaces}
