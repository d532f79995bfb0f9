"""Rank 0's part in the start: it makes the plans, lets other nodes probe its addresses, and serves the store."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..base.config import LaunchConfig
from ..discovery.host import HostFacts, Interface
from ..ipc.channel import listen
from ..ipc.probe_responder import ProbeResponder
from ..planning import gpus, network
from ..planning.environment import Endpoint
from ..planning.job import PostTorchFacts, PostTorchPlan, PreTorchPlan, plan_post_torch, plan_pre_torch
from ..planning.problems import choose_advice
from .probe import ProbeTarget
from .rollcall import Rendezvous

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..agent.client import AgentClient

RESPOND_INTERVAL_S = 0.05
SCRIPT_OPEN_FILES = 512  # that the script may need


class BootstrapHost:
    """Makes rank 0's plans for the roll call.

    While rank 0 imports torch its agent answers the probes of other nodes, and then coordinates the agents.
    Without an agent a thread answers, and there is no coordinator.
    """

    def __init__(self, rendezvous: Rendezvous, config: LaunchConfig, agent: AgentClient | None) -> None:
        self.server: dist.Store | None = None
        self._rendezvous, self._config, self._agent = rendezvous, config, agent
        self._asked = network.NetworkConstraint(config.interface, config.master_addr)
        self._offered: list[Interface] = []
        self._nodes: list[HostFacts] = []  # of each node's lowest rank
        self._all_have_probed = threading.Event()

    def plan_hosts(self, facts: Sequence[HostFacts]) -> list[tuple[PreTorchPlan, ProbeTarget | None]]:
        """Return each rank's plan before torch, and for one rank of each other node the addresses to probe."""
        self._rendezvous.hosts = [fact.hostname for fact in facts]
        if self._config.facts_file:
            from ..discovery import serialization

            serialization.write_facts(self._config.facts_file, facts)
        plans = plan_pre_torch(facts, self._config)
        self._offered = network.rank_addresses(facts, self._asked)
        self._nodes = [fact for fact, plan in zip(facts, plans, strict=True) if plan.place.local_rank == 0]
        target = self._open_probe_target() if plans[0].place.num_nodes > 1 else None
        return [(plan, target if plan.probes else None) for plan in plans]

    def plan_devices(self, facts: Sequence[PostTorchFacts]) -> list[PostTorchPlan]:
        """Return each rank's plan after torch; the store listens by then."""
        self._all_have_probed.set()
        hosts = self._rendezvous.hosts
        gpus.check_torch([fact.devices for fact in facts], hosts)
        trials = {fact.place.node_rank: fact.probe_results for fact in facts if fact.probe_results}
        names = {fact.place.node_rank: hosts[fact.place.rank] for fact in facts}
        own = [node.interfaces for node in self._nodes]
        address, interfaces = network.choose_address(self._offered, trials, names, self._asked, own)
        chosen = [interfaces[node] for node in range(len(self._nodes))]
        node_interfaces = dict(enumerate(zip(chosen, self._choose_sockets(chosen, trials), strict=True)))
        endpoint = self._open_store(address)
        return plan_post_torch(facts, hosts, self._config, endpoint, node_interfaces, choose_advice(self._nodes[0]))

    @property
    def _agent_port(self) -> int:
        """The port of the agent, 0 for a free one."""
        return self._config.port and self._config.port + 1

    def _choose_sockets(self, chosen: Sequence[str], trials: Mapping[int, Sequence[network.ProbeResult]]) -> list[str]:
        """Return what NCCL_SOCKET_IFNAME should be on each node, empty if NCCL's own choice is right."""
        if len(self._nodes) == 1:
            return [""]
        reached = {node: {trial.interface for trial in tried if not trial.error} for node, tried in trials.items()}
        reached[0] = {interface.name for index, interface in enumerate(self._offered)
                      if not any(tried[index].error for tried in trials.values())}
        return network.choose_nccl_interfaces(
            [network.NodeInterfaces(facts.interfaces, name, reached[node], facts.unaddressed)
             for node, (facts, name) in enumerate(zip(self._nodes, chosen, strict=True))], self._asked.interface)

    def _open_probe_target(self) -> ProbeTarget:
        """Make the agent answer on every address of this node, until it coordinates."""
        addresses, token = tuple(interface.address for interface in self._offered), os.urandom(16).hex()
        if self._agent is not None and (port := self._agent.serve_probes(token, self._agent_port)):
            return ProbeTarget(addresses, port, token)
        with naming_port_errors(self._agent_port, self._rendezvous.hosts[0]):
            responder = ProbeResponder(token, self._agent_port)
        threading.Thread(target=self._answer_probes, args=(responder,), daemon=True).start()
        return ProbeTarget(addresses, responder.port, token)

    def _answer_probes(self, responder: ProbeResponder) -> None:
        """Answer probes until every node has tried."""
        while not self._all_have_probed.wait(RESPOND_INTERVAL_S):
            responder.respond()
        responder.close()

    def _open_store(self, address: str) -> Endpoint:
        """Serve the job's store, and make this rank's agent the coordinator."""
        from .store import serve_store

        raise_open_file_limit(self._rendezvous.size)
        host = self._rendezvous.hosts[0]
        with naming_port_errors(self._config.port, host):
            self.server, endpoint = serve_store(address, self._config.startup_timeout_s, self._config.port)
        token, port = os.urandom(16).hex(), 0
        if self._agent is not None:
            port = self._agent.start_coordinator(address, token, self._rendezvous.size, self._agent_port)
            if self._agent_port and not port:
                with naming_port_errors(self._agent_port, host):
                    listen(address, self._agent_port).close()  # no error: it is the agent that fails
        return endpoint._replace(coordinator_port=port, agent_token=token)


@contextlib.contextmanager
def naming_port_errors(port: int, host: str) -> Iterator[None]:
    """Raise LaunchError `port-taken` for an OSError in this block, if the user has named a port."""
    try:
        yield
    except OSError as error:
        if not port:
            raise
        raise network.make_port_error(port, host, error.strerror or str(error)) from None


def raise_open_file_limit(connections: int) -> None:
    """Allow this process that many open files besides the script's own, or as many as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < connections + SCRIPT_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(connections + SCRIPT_OPEN_FILES, hard), hard))
