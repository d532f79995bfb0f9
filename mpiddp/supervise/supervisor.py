"""The loop of attempts: run the job, decide, run it again."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from ..base import files
from ..base.config import RESTART_VARIABLE
from ..base.errors import EXIT_REQUEUE
from ..base.files import list_names
from ..base.stderr import write_line
from ..base.text import fold_hosts
from ..discovery.schedulers import count_slurm_restarts
from .allocation import Allocation, cancel_step, find_silent_nodes, find_time_left_s, is_running
from .attempt import AttemptProcess
from .command import Command, JobStep, make_command
from .decision import Action, Attempt, Decision, Limits, decide, decide_after_signal, find_suspects, is_fruitless
from .history import AttemptCounter, AttemptRecord, format_table, write_history

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # no attempt is started after these
SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR2, signal.SIGQUIT)
SIGINT_REPEAT_GAP_S = 0.1  # between two SIGINTs, which some launchers need


class SupervisePlan(NamedTuple):
    """The options of __main__.py; `folder` holds the reports of the attempts while the job runs.

    `abort_grace_s` and `error_file` are mpiddp's options; the last failure's report is copied to the file.
    """

    command: Command
    allocation: Allocation
    nodes: int
    min_nodes: int
    tasks_per_node: int
    restarts: int
    stop_before_s: float | None
    abort_grace_s: float
    error_file: str
    progress_file: str
    history: str
    suspects: str
    folder: Path


class Supervisor:
    """Runs a job, and restarts it as long as that makes sense."""

    def __init__(self, plan: SupervisePlan) -> None:
        self._plan = plan
        self._attempts: list[Attempt] = []
        self._records: list[AttemptRecord] = []
        self._running: AttemptProcess | None = None
        self._counter = AttemptCounter(os.fspath(plan.folder.parent), os.environ)
        self._signal = 0  # the first of ENDING_SIGNALS received
        self._mute: tuple[str, ...] = ()  # nodes that never answer, for example because of a firewall
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it for SIGHUP
                signal.signal(number, self._forward)
        if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, self._suspend)

    def run(self) -> int:
        """Run attempts until one succeeds or a restart makes no sense; return the exit status."""
        plan = self._plan
        nodes = plan.allocation.nodes[:plan.nodes]
        if not plan.allocation.system:  # a batch system reports which nodes answer
            Thread(target=self._find_mute, daemon=True).start()
        while True:
            number, began = self._counter.take(), time.time()
            attempt = self._try(number, nodes)
            self._attempts.append(attempt)
            decision = self._decide(attempt)
            self._records.append(AttemptRecord(began, attempt, decision, number))
            if plan.history:
                write_history(plan.history, self._records)
            if plan.suspects and decision.without:
                suspects = find_suspects(self._attempts, plan.allocation.nodes)
                files.append_suspects(plan.suspects, [(suspect.host, suspect.evidence) for suspect in suspects
                                                      if suspect.host in decision.without])
            if decision.action is not Action.AGAIN:
                return self._end(decision)
            on = f" on {fold_hosts(decision.nodes)}" if decision.nodes else ""
            without = f" without {fold_hosts(decision.without)}" if decision.without else ""
            why = f": {decision.why}" if decision.why else ""
            write_line(f"mpiddp.supervise: attempt {number} ended: {attempt.reason}\n"
                       f"mpiddp.supervise: restart {len(self._attempts)} of {plan.restarts}{on}{without}{why}")
            nodes = decision.nodes

    def _try(self, number: int, nodes: tuple[str, ...]) -> Attempt:
        """Run the job once."""
        plan, step = self._plan, f"mpiddp-{secrets.token_hex(4)}"
        report = str(plan.folder / f"attempt-{number}.json")
        variables = {RESTART_VARIABLE: str(number), "MPIDDP_ERROR_FILE": report,
                     "SLURM_OVERLAP": "1"}  # like --overlap, for the daemons of an mpirun
        if plan.stop_before_s is not None:
            variables["MPIDDP_STOP_BEFORE"] = str(plan.stop_before_s)
        words = make_command(plan.command, JobStep(nodes, plan.tasks_per_node, step, [*variables]))
        before = read_checkpoint_state(plan.progress_file)
        self._running = AttemptProcess(words, {**os.environ, **variables}, report, plan.command.launcher,
                                       plan.abort_grace_s)
        if self._signal:  # received while the launcher was started
            self._running.forward(self._signal)
        attempt = self._running.wait(nodes, lambda: self._ask(nodes), lambda: cancel_step(plan.allocation, step))
        self._running = None
        if attempt.status and plan.error_file and os.path.exists(report):
            files.write_file(plan.error_file, Path(report).read_text())
        after = read_checkpoint_state(plan.progress_file)
        return attempt._replace(has_progressed=after != before if after else None)

    def _ask(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return those of `nodes` that have stopped answering."""
        return tuple(node for node in find_silent_nodes(self._plan.allocation, nodes) if node not in self._mute)

    def _find_mute(self) -> None:
        nodes = self._plan.allocation.nodes
        silent = find_silent_nodes(self._plan.allocation, nodes)
        self._mute = silent if len(silent) >= len(nodes) - 1 else ()  # all but this one; fewer are lost

    def _decide(self, attempt: Attempt) -> Decision:
        plan = self._plan
        left = find_time_left_s() - (plan.stop_before_s or 0.0) if attempt.status else 0.0
        pool = plan.allocation.nodes or (socket.gethostname(),)
        decision = decide(self._attempts, pool, Limits(
            max(plan.nodes, 1), plan.min_nodes, plan.restarts, left, count_slurm_restarts(os.environ),
            self._counter.fruitless))
        if decision.action is Action.AGAIN and not is_running(plan.allocation):
            return Decision(Action.STOP, "the batch system is ending this job", without=decision.without)
        if self._signal:
            decision = decide_after_signal(decision, signal.Signals(self._signal).name, self._attempts)
        return decision._replace(nodes=decision.nodes if plan.allocation.nodes else ())

    def _end(self, decision: Decision) -> int:
        """Print how the job ended, and return the exit status."""
        last = self._attempts[-1]
        self._counter.end(is_fruitless(self._attempts))
        if last.status and decision.action is not Action.REQUEUE:
            write_line(f"mpiddp.supervise: attempt {self._records[-1].number} ended: {last.reason}")
        if len(self._records) > 1:
            write_line("\n".join(format_table(self._records)))
        if decision.why:
            ends = f"exit status {EXIT_REQUEUE} (requeue)" if decision.action is Action.REQUEUE else "no restart"
            write_line(f"mpiddp.supervise: {ends}: {decision.why}")
        if decision.action is Action.STOP and last.status and not (last.kind or last.has_stopped or self._signal):
            write_line("mpiddp.supervise: no failure report was written. Does the command run the script through "
                       "`python -m mpiddp`?")
        if last.status and self._plan.progress_file and not read_checkpoint_state(self._plan.progress_file):
            write_line(f"mpiddp.supervise: no checkpoint found at --progress-file {self._plan.progress_file}")
        if decision.action is Action.REQUEUE:
            return EXIT_REQUEUE
        if decision.action is Action.DONE:
            self._counter.forget()
        if self._signal and last.status == self._signal:  # as MPICH's launcher exits
            return 128 + last.status
        return last.status if last.status != EXIT_REQUEUE else 1  # at status 75 a batch script would requeue it

    def _forward(self, number: int, _: object) -> None:
        """Forward a signal to the job; no attempt is started after one of ENDING_SIGNALS."""
        launcher = self._plan.command.launcher
        if number in ENDING_SIGNALS or (number == signal.SIGQUIT and launcher.ends_by_quit):
            self._signal = self._signal or number
        if self._running is not None:
            self._running.forward(number)
            for _ in range(1, launcher.interrupts if number == signal.SIGINT else 1):
                time.sleep(SIGINT_REPEAT_GAP_S)
                self._running.forward(number)

    def _suspend(self, *_: object) -> None:
        """Stop the job and this process; continue both after SIGCONT."""
        if self._running is not None:
            self._running.suspend()
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._running is not None:
            self._running.resume()


def read_checkpoint_state(path: str) -> tuple[tuple[str, int, int], ...]:
    """Return the names, times (ns) and sizes of a checkpoint, or of a folder's files: they change with each checkpoint.

    The files of the newest subfolder count too: FSDP's checkpoints are folders, and may be overwritten in place. Files
    that cannot be inspected, such as a dangling link, are left out.
    """
    if not path:
        return ()
    stats = stat_files([path])
    if path in stats and stat.S_ISDIR(stats[path].st_mode):
        stats = stat_folder(path)
        below = [file for file, facts in stats.items() if stat.S_ISDIR(facts.st_mode)]
        if below:
            stats |= stat_folder(max(below, key=lambda file: stats[file].st_mtime_ns))
    return tuple(sorted((file, facts.st_mtime_ns, facts.st_size) for file, facts in stats.items()))


def stat_folder(folder: str) -> dict[str, os.stat_result]:
    """Return stat_files() of all files in a folder."""
    return stat_files(os.path.join(folder, name) for name in list_names(folder))


def stat_files(paths: Iterable[str]) -> dict[str, os.stat_result]:
    """Return the os.stat() of files, without those that cannot be inspected."""
    stats = {}
    for path in paths:
        with contextlib.suppress(OSError):
            stats[path] = os.stat(path)
    return stats
