"""Rank 0's part in the start: it makes the plans, lets other nodes try its addresses, and serves the store at one."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..base.config import LaunchConfig
from ..discovery.host import HostFacts, Interface
from ..ipc.channel import listen
from ..planning import gpus, network
from ..planning.environment import Endpoint
from ..planning.job import PostTorchFacts, PostTorchPlan, PreTorchPlan, plan_post_torch, plan_pre_torch
from ..planning.problems import choose_advice
from .probe import Door, Listener
from .rollcall import RollCall

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..sentinel.client import SentinelHandle

OF_SCRIPTS = 512  # open files for the script


class Hosting:
    """Makes rank 0's plans for a roll call.

    Its sentinel answers for it while it imports torch, and lets the other sentinels meet. Without a sentinel a thread
    answers, and nobody meets.
    """

    def __init__(self, roll: RollCall, config: LaunchConfig, sentinel: SentinelHandle | None) -> None:
        self.server: dist.Store | None = None
        self._roll, self._config = roll, config
        self._asked = network.NetworkConstraint(config.interface, config.master_addr)
        self._sentinel = sentinel
        self._offered: list[Interface] = []
        self._nodes: list[HostFacts] = []  # those of each node's lowest rank
        self._listener: Listener | None = None

    def plan_hosts(self, facts: Sequence[HostFacts]) -> list[tuple[PreTorchPlan, Door | None]]:
        """Return each rank's plan before torch, and with it, for one rank a node, where to try rank 0's addresses."""
        self._roll.hosts = [one.hostname for one in facts]
        if self._config.facts_file:
            from ..discovery import serialization

            serialization.write_facts(self._config.facts_file, facts)
        plans = plan_pre_torch(facts, self._config)
        self._offered = network.rank_addresses(facts, self._asked)
        self._nodes = [one for one, plan in zip(facts, plans, strict=True) if plan.place.local_rank == 0]
        door = self._open_door() if plans[0].place.num_nodes > 1 else None
        return [(plan, door if plan.probes else None) for plan in plans]

    def plan_devices(self, facts: Sequence[PostTorchFacts]) -> list[PostTorchPlan]:
        """Return each rank's plan after torch; the store listens by then."""
        if self._listener is not None:
            self._listener.close()  # by now every node has tried
        hosts = self._roll.hosts
        gpus.check_torch([one.devices for one in facts], hosts)
        trials = {one.place.node_rank: one.probe_results for one in facts if one.probe_results}
        names = {one.place.node_rank: hosts[one.place.rank] for one in facts}
        own = [one.interfaces for one in self._nodes]
        address, interfaces = network.choose_address(self._offered, trials, names, self._asked, own)
        chosen = [interfaces[node] for node in range(len(self._nodes))]
        ways = dict(enumerate(zip(chosen, self._sockets(chosen, trials), strict=True)))
        return plan_post_torch(facts, hosts, self._config, self._open_store(address), ways,
                               choose_advice(self._nodes[0]))

    @property
    def _second_port(self) -> int:
        """The port of the sentinel, 0 for a free one."""
        return self._config.port and self._config.port + 1

    def _sockets(self, chosen: Sequence[str], trials: Mapping[int, Sequence[network.ProbeResult]]) -> list[str]:
        """Return what NCCL_SOCKET_IFNAME should be on each node, empty if NCCL's own choice is right."""
        if len(self._nodes) == 1:
            return [""]
        reached = {node: {one.interface for one in tried if not one.error} for node, tried in trials.items()}
        reached[0] = {one.name for at, one in enumerate(self._offered)
                      if not any(tried[at].error for tried in trials.values())}
        return network.choose_nccl_interfaces(
            [network.NodeInterfaces(one.interfaces, name, reached[node], one.unaddressed)
             for node, (one, name) in enumerate(zip(self._nodes, chosen, strict=True))], self._asked.interface)

    def _open_door(self) -> Door:
        """Let the sentinel answer on every address of this node, until it coordinates."""
        addresses, token, second = tuple(one.address for one in self._offered), os.urandom(16).hex(), self._second_port
        if self._sentinel is not None and (port := self._sentinel.answer(token, second)):
            return Door(addresses, port, token)
        with listening_on(second, self._roll.hosts[0]):
            self._listener = Listener(addresses, second)
        return self._listener.door

    def _open_store(self, address: str) -> Endpoint:
        """Start the job's store, and let this rank's sentinel listen."""
        from .store import serve_store

        allow_connections(self._roll.size)
        host, second = self._roll.hosts[0], self._second_port
        with listening_on(self._config.port, host):
            self.server, endpoint = serve_store(address, self._config.startup_timeout_s, self._config.port)
        token, port = os.urandom(16).hex(), 0
        if self._sentinel is not None:
            port = self._sentinel.coordinate(address, token, self._roll.size, second)
            if second and not port:
                with listening_on(second, host):
                    listen(address, second).close()  # else it is the sentinel that cannot
        return endpoint._replace(watch_port=port, watch_token=token)


@contextlib.contextmanager
def listening_on(port: int, host: str) -> Iterator[None]:
    """Raise LaunchError `port-taken` for an OSError, if the user has named a port."""
    try:
        yield
    except OSError as error:
        if not port:
            raise
        raise network.make_port_error(port, host, error.strerror or str(error)) from None


def allow_connections(number: int) -> None:
    """Allow this process `number` open files besides a script's own, or as many as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number + OF_SCRIPTS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number + OF_SCRIPTS, hard), hard))
