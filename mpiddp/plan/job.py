"""The whole plan: what rank 0 decides for every rank in the two rounds of the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..environment import Place
from ..facts.devices import DeviceFacts
from ..facts.host import HostFacts
from . import cores, devices, environment, network, problems, topology


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A rank's plan before torch: its place, rank 0's address for the job, variables to default.

    `warnings` are for rank 0 to print, and empty on the others.
    """

    place: Place
    master_addr: str
    defaults: dict[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
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
    """A rank's plan after torch: device, backend, where the store is, warnings for rank 0 to print."""

    device: str
    backend: str
    endpoint: environment.Endpoint
    warnings: tuple[str, ...] = ()


def plan_hosts(facts: Sequence[HostFacts]) -> list[HostPlan]:
    """Return each rank's plan from the hosts of all, in rank order; raise LaunchError."""
    problems.check_software(facts)
    problems.check_script(facts)
    address, ways = network.meeting_point(facts)
    places = topology.places([one.node for one in facts])
    needs = list(zip(cores.threads(facts), ways, strict=True))
    defaults = {need: environment.defaults(*need) for need in set(needs)}
    plans = [HostPlan(place, address, defaults[need]) for place, need in zip(places, needs, strict=True)]
    return [replace(plans[0], warnings=tuple(problems.warnings(facts))), *plans[1:]]


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
    stale = tuple(problems.stale_variables(
        (one.place.rank, one.former, environment.exports(one.place, endpoint)) for one in facts if one.former))
    chosen = devices.devices(found, places, hosts)
    alike = {device: DevicePlan(device, backend, endpoint) for device in set(chosen)}
    return [DevicePlan(chosen[0], backend, endpoint, stale), *(alike[device] for device in chosen[1:])]
