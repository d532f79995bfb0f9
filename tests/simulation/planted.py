"""Bugs to be planted one by one: a simulation that does not find each of them checks too little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from mpiddp.agent import coordinator, timeouts
from mpiddp.agent.coordinator import Coordinator
from mpiddp.agent.watcher import Watcher
from mpiddp.failure import root_cause
from mpiddp.failure.root_cause import FailureContext, Reports, RootCause


def nothing(*_: Any) -> None:
    """Do nothing, in the place of what should be done."""


def last_named(reports: Reports, waited_s: float, context: FailureContext) -> RootCause | None:
    """Return the root cause, but with the report that came last."""
    found = root_cause.select_root_cause(reports, waited_s, context)
    return found._replace(first=reports.all[-1]) if found else None


def hasty(reports: Reports, waited_s: float, context: FailureContext) -> RootCause | None:
    """Return the first report at once, also if it looks like a consequence."""
    return RootCause(reports.all[0])


def never_outside(case: root_cause.Case) -> None:
    """Take no signal for one from outside."""


def end_alone(self: Watcher, status: int) -> None:
    """End this agent with its rank's own status, and before the others."""
    self._exit(status)


def patch_rules() -> Any:
    """Plant `never_outside`."""
    rules = [rule._replace(conclude=never_outside) if rule.conclude is root_cause.conclude_outside else rule
             for rule in root_cause.RULES]
    return mock.patch.object(root_cause, "RULES", rules)


BUGS: dict[str, Callable[[], Any]] = {
    "no rank is ended": lambda: mock.patch.object(Coordinator, "_end_ranks", nothing),
    "no agent is ended": lambda: mock.patch.object(Coordinator, "_end_agents_if_ended", nothing),
    "a rank whose grace is over is not killed": lambda: mock.patch.object(Watcher, "_end_rank", nothing),
    "a lost coordinator is not missed": lambda: mock.patch.object(Watcher, "_on_coordinator_lost", nothing),
    "what its agent cannot print is not printed": lambda: mock.patch.object(Coordinator, "_print_here", nothing),
    "the last report is taken for the first": lambda: mock.patch.object(coordinator, "select_root_cause", last_named),
    "nobody waits for a better reason": lambda: mock.patch.object(coordinator, "select_root_cause", hasty),
    "a signal from outside is a rank's own": patch_rules,
    "an agent does not wait for the coordinator": lambda: mock.patch.object(timeouts, "DECISION_TIMEOUT_S", 0.001),
    "an agent does not wait for the others": lambda: mock.patch.object(Watcher, "_finish_output", end_alone),
    "nobody reports for a lost coordinator": lambda: mock.patch.object(Coordinator, "_appoint_deputy", nothing),
    "late agents are not awaited": lambda: mock.patch.object(Coordinator, "_has_late_agents", False),
    "a lost agent is not reported": lambda: mock.patch.object(Coordinator, "_on_lost", nothing),
    "a rank that is gone is not reported": lambda: mock.patch.object(Watcher, "_on_rank_gone", nothing),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a bug while this block runs."""
    with BUGS[name]():
        yield
