"""The coordinator's own time for the end of 10,000 ranks, without messages' way in and out: should be within 0.1 s.

.venvs/mpich/bin/python -m tests.simulation.cost
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

from mpiddp.agent import events, protocol
from mpiddp.agent.coordinator import Coordinator, Over
from mpiddp.base.ranks import RankIdentity
from mpiddp.failure.root_cause import Report, ReportKind

RANKS, PER_NODE = 10_000, 8
CONFIG = protocol.AgentConfig("rank 0 on n0", True, None, list, False, 60.0)
KINDS = {  # of the reports of all ranks
    "a signal from outside": (ReportKind.PROCESS_EXIT, "SIGTERM"), "SIGKILL": (ReportKind.PROCESS_EXIT, "SIGKILL"),
    "the same error": (ReportKind.ERROR, ""), "lost connections": (ReportKind.SECONDARY, ""),
    "aborts": (ReportKind.PROCESS_EXIT, "SIGABRT"),
}


def start() -> Coordinator:
    """Return the coordinator of a job that all ranks have joined."""
    coordinator = Coordinator(CONFIG, 0.0)
    own = RankIdentity(0, RANKS, 0, "n0", "cpu", 1000, "run", 5.0, namespace="n0")
    coordinator.handle(events.OwnRankJoined(0, own), 1.0)
    for rank in range(1, RANKS):
        host = f"n{rank // PER_NODE}"
        coordinator.handle(events.PeerGreeted(rank, protocol.Hello(rank, host, 1000 + rank, host)), 1.0)
    return coordinator


def list_failures(kind: ReportKind, signal_name: str) -> Iterator[events.CoordinatorEvent]:
    """Yield the events of a job in which all ranks fail at once."""
    for rank in range(RANKS):
        if signal_name == "SIGTERM":
            yield events.FromPeer(rank, protocol.Signalled(signal.SIGTERM))
        report = Report(rank, f"n{rank // PER_NODE}", kind, "seven", 1, signal=signal_name)
        yield events.FromPeer(rank, protocol.Failed(report))
    yield events.Due("select 1.001")
    yield events.FromPeer(0, protocol.ReasonPrinted())
    yield from (events.FromPeer(rank, protocol.RankEnded(1)) for rank in range(RANKS))


def list_ends() -> Iterator[events.CoordinatorEvent]:
    """Yield the events of a job that ends in order."""
    yield from (events.FromPeer(rank, protocol.ScriptEnded()) for rank in range(RANKS))
    yield from (events.FromPeer(rank, protocol.RankEnded(0)) for rank in range(RANKS))


def main() -> None:
    """Print the cost of each kind of end."""
    ends = {name: list(list_failures(*kind)) for name, kind in KINDS.items()}
    for name, received in {**ends, "in order": list(list_ends())}.items():
        coordinator = start()
        before_s = time.process_time()
        for number, event in enumerate(received):
            coordinator.handle(event, 2.0 + 1e-4 * number)
        cost_s = time.process_time() - before_s
        assert isinstance(coordinator.phase, Over)
        print(f"{name:<24}{cost_s:.3f} s")


if __name__ == "__main__":
    main()
