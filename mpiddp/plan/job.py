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
    """A rank's plan before torch: its place, rank 0's address for the job, variables to default."""

    place: Place
    master_addr: str
    defaults: dict[str, str]


@dataclass(frozen=True)
class DevicePlan:
    """A rank's plan after torch: device, backend, where the store is, variables to set."""

    device: str
    backend: str
    endpoint: environment.Endpoint
    exports: dict[str, str]


def plan_hosts(facts: Sequence[HostFacts]) -> list[HostPlan]:
    """Return each rank's plan from the hosts of all, in rank order; raise LaunchError."""
    problems.check_script(facts)
    address, ways = network.meeting_point(facts)
    return [
        HostPlan(place, address, environment.defaults(threads, way))
        for place, threads, way in zip(
            topology.places([one.node for one in facts]), cores.threads(facts), ways, strict=True)
    ]


def plan_devices(
    facts: Sequence[tuple[Place, DeviceFacts, environment.Endpoint | None]],
    hosts: Sequence[str],
    asked: str | None,
) -> list[DevicePlan]:
    """Return each rank's plan from the devices of all, in rank order; raise LaunchError.

    `facts` holds each rank's place and devices and, from rank 0, its store's endpoint. `hosts` are the
    hostnames. `asked` is the backend that the user named, None for the devices' own.
    """
    places, found, endpoints = zip(*facts, strict=True)
    devices.check_torch(found, hosts)
    backend, endpoint = devices.backend(asked, found, hosts), endpoints[0]
    return [
        DevicePlan(device, backend, endpoint, environment.exports(place, endpoint))
        for device, place in zip(devices.devices(found, places, hosts), places, strict=True)
    ]
