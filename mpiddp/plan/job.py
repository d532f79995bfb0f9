"""The whole plan: what rank 0 decides for every rank in the two rounds of the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..environment import Place
from ..facts.devices import DeviceFacts
from ..facts.host import HostFacts
from . import cores, devices, environment, network, problems, topology


@dataclass(frozen=True)
class HostPlan:
    """A rank's plan before torch: its place, rank 0's address for the job, variables to default.

    `warnings` are for rank 0 to print, and empty on the others.
    """

    place: Place
    master_addr: str
    defaults: dict[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReadyFacts:
    """What is known of a rank after torch: its place, its devices, from rank 0 its store's endpoint.

    `former` holds the variables that this rank's environment has set, of those that mpiddp sets.
    """

    place: Place
    devices: DeviceFacts
    endpoint: environment.Endpoint | None
    former: dict[str, str]


@dataclass(frozen=True)
class DevicePlan:
    """A rank's plan after torch: device, backend, where the store is, variables to set, warnings to print."""

    device: str
    backend: str
    endpoint: environment.Endpoint
    exports: dict[str, str]
    warnings: tuple[str, ...] = ()


def plan_hosts(facts: Sequence[HostFacts]) -> list[HostPlan]:
    """Return each rank's plan from the hosts of all, in rank order; raise LaunchError."""
    problems.check_software(facts)
    problems.check_script(facts)
    address, ways = network.meeting_point(facts)
    warnings = tuple(problems.warnings(facts))
    return [
        HostPlan(place, address, environment.defaults(threads, way), () if place.rank else warnings)
        for place, threads, way in zip(
            topology.places([one.node for one in facts]), cores.threads(facts), ways, strict=True)
    ]


def plan_devices(
    facts: Sequence[ReadyFacts], hosts: Sequence[str], asked: str | None
) -> list[DevicePlan]:
    """Return each rank's plan from the devices of all, in rank order; raise LaunchError.

    `hosts` are the hostnames. `asked` is the backend that the user named, None for the devices' own.
    """
    places, found = [one.place for one in facts], [one.devices for one in facts]
    devices.check_torch(found, hosts)
    backend, endpoint = devices.backend(asked, found, hosts), facts[0].endpoint
    assert endpoint is not None
    exports = [environment.exports(place, endpoint) for place in places]
    stale = tuple(problems.stale_variables([one.former for one in facts], exports))
    return [
        DevicePlan(device, backend, endpoint, variables, () if place.rank else stale)
        for device, place, variables in zip(devices.devices(found, places, hosts), places, exports, strict=True)
    ]
