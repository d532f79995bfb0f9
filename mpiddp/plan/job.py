"""The whole plan: what rank 0 decides for every rank in the two rounds of the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..environment import Place
from ..facts.devices import DeviceFacts
from ..facts.host import HostFacts
from . import cores, devices, environment, network, problems, topology
from .map import Seat


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A rank's plan before torch: its place, rank 0's address for the job, variables to default.

    `cpus` are those to run on, None for what the launcher gave; `numa` their NUMA nodes. `warnings` are
    for rank 0 to print, and empty on the others.
    """

    place: Place
    master_addr: str
    defaults: dict[str, str]
    cpus: frozenset[int] | None = None
    numa: tuple[int, ...] = (0,)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadyFacts:
    """What is known of a rank after torch: its place, its devices, from rank 0 its store's endpoint.

    `former` holds the variables that this rank's environment has set, of those that mpiddp sets.
    `seat` is where it sits, but for the device.
    """

    place: Place
    devices: DeviceFacts
    endpoint: environment.Endpoint | None
    former: dict[str, str]
    seat: Seat


@dataclass(frozen=True)
class DevicePlan:
    """A rank's plan after torch: device, backend, where the store is; for rank 0 warnings and every rank's seat."""

    device: str
    backend: str
    endpoint: environment.Endpoint
    warnings: tuple[str, ...] = ()
    seats: tuple[Seat, ...] = ()


def plan_hosts(
    facts: Sequence[HostFacts], binding: str = cores.LAUNCHER, way: network.Asked = network.ANY
) -> list[HostPlan]:
    """Return each rank's plan from the hosts of all, in rank order; raise LaunchError.

    `binding` is one of the policies of `cores.shares`, `way` the network that the user named.
    """
    problems.check_software(facts)
    problems.check_script(facts)
    address, ways = network.meeting_point(facts, way)
    places = topology.places([one.node for one in facts])
    shares = cores.shares(facts, binding)
    needs = [(share.threads, interface) for share, interface in zip(shares, ways, strict=True)]
    defaults = {need: environment.defaults(*need) for need in set(needs)}
    plans = [
        HostPlan(place, address, defaults[need], share.cpus if share.cpus != one.cpus else None, share.numa)
        for place, need, share, one in zip(places, needs, shares, facts, strict=True)
    ]
    warnings = (*problems.warnings(facts), *cores.warnings(facts, binding))
    return [replace(plans[0], warnings=warnings), *plans[1:]]


def plan_devices(
    facts: Sequence[ReadyFacts], hosts: Sequence[str], asked: str | None, kind: str | None = None
) -> list[DevicePlan]:
    """Return each rank's plan from the devices of all, in rank order; raise LaunchError.

    `hosts` are the hostnames. `asked` is the backend that the user named, None for the devices' own, and
    `kind` the device type.
    """
    places, found = [one.place for one in facts], [one.devices for one in facts]
    devices.check_torch(found, hosts)
    devices.check_kinds(kind, found, hosts)
    backend, endpoint = devices.backend(asked, found, hosts), facts[0].endpoint
    assert endpoint is not None
    stale = tuple(problems.stale_variables(
        (one.place.rank, one.former, environment.exports(one.place, endpoint)) for one in facts if one.former))
    chosen = devices.devices(found, places, hosts)
    alike = {device: DevicePlan(device, backend, endpoint) for device in set(chosen)}
    seats = tuple(replace(one.seat, device=device) for one, device in zip(facts, chosen, strict=True))
    return [DevicePlan(chosen[0], backend, endpoint, stale, seats), *(alike[device] for device in chosen[1:])]
