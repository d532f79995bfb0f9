"""The loop: try, see how it ended, decide, try again."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

from ..config import RESTARTS
from ..errors import EXIT_REQUEUE
from ..facts import runtime
from ..plan.words import folded
from ..say import say
from .allocation import Allocation, cancel, is_running, left_s, silent
from .command import Command, Launcher, on_nodes
from .decision import Action, Attempt, Decision, Limits, decide
from .history import Record, note_suspects, table, write
from .running import Running

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
CRUMBS_S = 0.1  # between two SIGINTs, of which srun needs two


class Plan(NamedTuple):
    """What the user wants: see __main__.py. `folder` is where reports lie while the job runs."""

    command: Command
    given: Allocation
    nodes: int
    min_nodes: int
    tasks_per_node: int
    restarts: int
    stop_before_s: float | None
    progress_file: str
    history: str
    suspects: str
    folder: Path


class Supervisor:
    """Starts a job, and starts it again as long as that makes sense."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._attempts: list[Attempt] = []
        self._records: list[Record] = []
        self._running: Running | None = None
        self._signal = 0  # the first one that came
        for number in SIGNALS:
            signal.signal(number, self._forward)

    def run(self) -> int:
        """Try until it succeeds, or makes no sense any more; return the exit status."""
        plan = self._plan
        nodes = plan.given.nodes[:plan.nodes]
        while True:
            number, began = len(self._attempts), time.time()
            attempt = self._try(number, nodes)
            self._attempts.append(attempt)
            decision = self._decide(attempt)
            self._records.append(Record(began, attempt, decision))
            if plan.history:
                write(plan.history, self._records)
            if plan.suspects and decision.without:
                note_suspects(plan.suspects, self._attempts, plan.given.nodes, decision.without)
            if decision.action is not Action.AGAIN:
                return self._end(decision)
            on = f" on {folded(decision.nodes)}" if decision.nodes else ""
            without = f", without {folded(decision.without)}" if decision.without else ""
            say(f"mpiddp.supervise: attempt {number} ended: {attempt.reason}\n"
                f"mpiddp.supervise: again{on}{without}: {decision.why}")
            nodes = decision.nodes

    def _try(self, number: int, nodes: tuple[str, ...]) -> Attempt:
        """Run the job once."""
        plan, step = self._plan, f"mpiddp-{secrets.token_hex(4)}"
        report = plan.command.error_file or str(plan.folder / f"attempt-{number}.json")
        variables = {RESTARTS: str(runtime.restart_count(os.environ) + number), "MPIDDP_ERROR_FILE": report,
                     "SLURM_OVERLAP": "1"}  # for the daemons of an mpirun, as --overlap
        if plan.stop_before_s is not None:
            variables["MPIDDP_STOP_BEFORE"] = str(plan.stop_before_s)
        words = on_nodes(plan.command, nodes, plan.tasks_per_node, step, [*variables])
        before = state_of(plan.progress_file)
        self._running = Running(words, {**os.environ, **variables}, report)
        if self._signal:  # it came while the launcher was started
            self._running.forward(self._signal)
        attempt = self._running.wait(nodes, lambda: silent(plan.given, nodes), lambda: cancel(plan.given, step))
        self._running = None
        changed = state_of(plan.progress_file) != before if plan.progress_file else None
        return attempt._replace(has_progressed=changed)

    def _decide(self, attempt: Attempt) -> Decision:
        plan = self._plan
        left = left_s(plan.given) - (plan.stop_before_s or 0.0) if attempt.status else 0.0
        pool = plan.given.nodes or (socket.gethostname(),)
        found = decide(self._attempts, pool, Limits(max(plan.nodes, 1), plan.min_nodes, plan.restarts, left))
        if found.action is Action.AGAIN and self._signal:
            return Decision(Action.STOP, f"{signal.Signals(self._signal).name} came", without=found.without)
        if found.action is Action.AGAIN and not is_running(plan.given):
            return Decision(Action.STOP, "the batch system ends this job", without=found.without)
        return found._replace(nodes=found.nodes if plan.given.nodes else ())

    def _end(self, decision: Decision) -> int:
        """Say how it ended, and return the exit status."""
        last = self._attempts[-1]
        if len(self._records) > 1:
            say("\n".join(table(self._records)))
        if decision.why and not (last.status == 0 or self._signal):
            words = {Action.STOP: "stops", Action.REQUEUE: "can be queued again (status 75)"}[decision.action]
            say(f"mpiddp.supervise: {words}: {decision.why}")
        if decision.action is Action.REQUEUE:
            return EXIT_REQUEUE
        return last.status

    def _forward(self, number: int, _: object) -> None:
        """Hand a signal on to the job, and start nothing after it."""
        self._signal = self._signal or number
        if self._running is not None:
            self._running.forward(number)
            if number == signal.SIGINT and self._plan.command.launcher is Launcher.SRUN:
                time.sleep(CRUMBS_S)
                self._running.forward(number)


def state_of(path: str) -> tuple[tuple[str, int, int], ...]:
    """Return what tells whether checkpoints were written: name, time in ns, size of a file, or of all in a folder."""
    found = []
    try:
        for one in (sorted(os.scandir(path), key=lambda entry: entry.name) if os.path.isdir(path) else [Path(path)]):
            facts = one.stat()
            found.append((str(one), facts.st_mtime_ns, facts.st_size))
    except OSError:
        return ()
    return tuple(found)
