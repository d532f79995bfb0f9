"""Eleven bugs, to be planted one by one: a simulation that does not find each of them checks too little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from mpiddp.agent import coordinator, events, watcher
from mpiddp.agent.coordinator import Coordinator
from mpiddp.agent.protocol import LAUNCHER_KILL_TIMEOUT_S
from mpiddp.agent.watcher import Watcher
from mpiddp.failure import root_cause
from mpiddp.failure.root_cause import FailureContext, Report, RootCause


def nothing(*_: Any) -> None:
    """Do nothing, in the place of what should be done."""


def last_named(reports: Sequence[Report], waited_s: float, context: FailureContext) -> RootCause | None:
    """Return the verdict, but with the report that came last."""
    verdict = root_cause.select_root_cause(reports, waited_s, context)
    return verdict._replace(first=reports[-1]) if verdict else None


def hasty(reports: Sequence[Report], waited_s: float, context: FailureContext) -> RootCause | None:
    """Return the first report at once, also if it looks like a consequence."""
    return RootCause(reports[0]) if reports else None


def give_up(self: Watcher) -> None:
    """Take the death of rank 0's agent for that of rank 0."""
    self._no_coordinator = True
    self._enter(watcher.AwaitingLauncher(closed=True, report=self._undecided))
    self._do(events.SetTimer("rank 0 lost", LAUNCHER_KILL_TIMEOUT_S))


BUGS: dict[str, Callable[[], Any]] = {
    "nobody is told that the job ends": lambda: mock.patch.object(Coordinator, "_begin_end", nothing),
    "a rank whose grace is over is not killed": lambda: mock.patch.object(watcher, "FINAL_EXIT_TIMEOUT_S", 1e9),
    "a lost coordinator is not missed": lambda: mock.patch.object(Watcher, "_on_rank_0_lost", nothing),
    "what its rank cannot tell is not told": lambda: mock.patch.object(Coordinator, "_print_if_unprinted", nothing),
    "the last report is taken for the first": lambda: mock.patch.object(coordinator, "select_root_cause", last_named),
    "nobody waits for a better reason": lambda: mock.patch.object(coordinator, "select_root_cause", hasty),
    "an agent does not wait for the coordinator": lambda: mock.patch.object(watcher, "DECISION_TIMEOUT_S", 0.001),
    "a rank is given up that has lost the coordinator alone": lambda: mock.patch.object(
        Watcher, "_on_coordinator_lost", give_up),
    "a rank that speaks for itself is taken for dead": lambda: mock.patch.object(
        Coordinator, "_on_agent_lost", lambda coordinator, peer: coordinator._on_lost(peer, "")),
    "a rank that is gone is not reported": lambda: mock.patch.object(Watcher, "_on_rank_gone", nothing),
    "who failed second is not answered": lambda: mock.patch.object(Coordinator, "_decide_secondary", nothing),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a bug while this block runs."""
    with BUGS[name]():
        yield
