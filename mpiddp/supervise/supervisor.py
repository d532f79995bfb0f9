"""The loop of attempts: run the job, decide, run it again; the attempts' numbers, and their history."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import stat
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from ..base.config import RESTART_VARIABLE
from ..base.files import append_suspects, claim_free_folder, list_names, read_number, write_file, write_json
from ..base.stderr import write_line
from ..base.text import fold_hosts, format_columns, format_duration, truncate_middle
from ..discovery import runtime
from ..discovery.schedulers import count_requeues
from ..failure.root_cause import ReportKind
from ..systems.launchers import JobStep
from ..systems.schedulers import NO_SCHEDULER
from ..systems.statuses import EXIT_REQUEUE, signal_status
from .allocation import (
    Allocation,
    find_drained_nodes,
    find_silent_nodes,
    find_time_left_s,
    has_controller,
    is_running,
    kill_step,
)
from .attempt import TERMINATION_SIGNALS, AttemptProcess
from .command import Command, make_command, runs_job
from .decision import (
    Action,
    Attempt,
    Decision,
    Limits,
    decide,
    decide_after_signal,
    find_suspects,
    has_got_further,
    is_fruitless,
)

ENDING_SIGNALS = (*TERMINATION_SIGNALS, signal.SIGUSR1)  # no attempt is started after these
SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR2, signal.SIGQUIT)
PATHS = ("PATH", "LD_LIBRARY_PATH")  # which ssh does not pass to other nodes
FRUITLESS_FILE, REQUEUES_FILE = "fruitless", "requeues"  # names of files
CONTROLLER_TIMEOUT_S = 300.0  # for Slurm's controller to answer; another one takes over after 120 s (SlurmctldTimeout)
CONTROLLER_INTERVAL_S = 1.0
MAX_REASON_CHARS = 80  # of a reason in the table


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
        self._counter = AttemptCounter(os.fspath(plan.folder.parent), os.environ)
        self._signal = 0  # the first of ENDING_SIGNALS received
        self._signals: deque[int] = deque()  # to forward to the job
        self._unreachable: tuple[str, ...] = ()  # nodes that never answer, for example because of a firewall
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it for SIGHUP
                signal.signal(number, self._receive)

    def run(self) -> int:
        """Run attempts until one succeeds or a restart makes no sense; return the exit status."""
        plan = self._plan
        drained = find_drained_nodes(plan.allocation)
        chosen = sorted(plan.allocation.nodes, key=drained.__contains__)[:plan.nodes]
        nodes = tuple(node for node in plan.allocation.nodes if node in chosen)
        if plan.allocation.scheduler is NO_SCHEDULER:  # a scheduler reports which nodes answer
            Thread(target=self._find_unreachable, daemon=True).start()
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
                append_suspects(plan.suspects, [(suspect.host, suspect.evidence) for suspect in suspects
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
        passed = [*(name for name in PATHS if name in os.environ), *variables]
        words = make_command(plan.command, JobStep(nodes, plan.tasks_per_node, step, passed))
        before = read_checkpoint_state(plan.progress_file)
        self._signals.clear()  # those between two attempts
        process = AttemptProcess(words, {**os.environ, **variables}, report, plan.command.launcher, plan.abort_grace_s,
                                 plan.command.launcher.is_step and runs_job(plan.command.rest))
        if self._signal and self._signal not in self._signals:  # received since the decision to start
            self._signals.extendleft(self._repeat(self._signal))
        attempt = process.wait(
            nodes, self._signals, lambda: self._find_silent(nodes), lambda: kill_step(plan.allocation, step))
        may_start_again = attempt.status and not (attempt.has_stopped or attempt.is_explained)
        if may_start_again and self._wait_for_controller() and attempt.kind != ReportKind.ERROR:
            attempt = attempt._replace(silent=tuple(dict.fromkeys((*attempt.silent, *self._find_silent(nodes)))))
        drained = find_drained_nodes(plan.allocation) if may_start_again else ()
        if len(drained) + plan.nodes <= len(plan.allocation.nodes):  # else they are better than none
            attempt = attempt._replace(drained=drained)
        if attempt.status and plan.error_file and os.path.exists(report):
            write_file(plan.error_file, Path(report).read_text(encoding="utf-8"))
        after = read_checkpoint_state(plan.progress_file)
        return attempt._replace(has_progressed=after != before if after else None)

    def _wait_for_controller(self) -> bool:
        """Wait while Slurm's controller does not answer: no step would start. Return whether it did not."""
        deadline, waited = time.monotonic() + CONTROLLER_TIMEOUT_S, False
        while not self._signal and time.monotonic() < deadline and not has_controller(self._plan.allocation):
            if not waited:
                write_line("mpiddp.supervise: Slurm's controller does not answer; waiting for at most "
                           f"{format_duration(CONTROLLER_TIMEOUT_S)}")
            waited = True
            time.sleep(CONTROLLER_INTERVAL_S)
        return waited

    def _find_silent(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return those of `nodes` that have stopped answering."""
        return tuple(node for node in find_silent_nodes(self._plan.allocation, nodes) if node not in self._unreachable)

    def _find_unreachable(self) -> None:
        nodes = self._plan.allocation.nodes
        silent = find_silent_nodes(self._plan.allocation, nodes)
        self._unreachable = silent if len(silent) >= len(nodes) - 1 else ()  # all but this one; fewer are lost

    def _decide(self, attempt: Attempt) -> Decision:
        plan = self._plan
        left = find_time_left_s() - (plan.stop_before_s or 0.0) if attempt.status else 0.0
        pool = plan.allocation.nodes or (socket.gethostname(),)
        decision = decide(self._attempts, pool, Limits(
            max(plan.nodes, 1), plan.min_nodes, plan.restarts, left, self._counter.requeues, self._counter.fruitless))
        if decision.action is Action.AGAIN and not is_running(plan.allocation):
            return Decision(Action.STOP, "the batch system is ending this job", without=decision.without)
        if self._signal:
            decision = decide_after_signal(decision, signal.Signals(self._signal).name, self._attempts)
        return decision._replace(nodes=decision.nodes if plan.allocation.nodes else ())

    def _end(self, decision: Decision) -> int:
        """Print how the job ended, and return the exit status."""
        last = self._attempts[-1]
        self._counter.end(is_fruitless(self._attempts), any(map(has_got_further, self._attempts)))
        if last.status and decision.action is not Action.REQUEUE:
            write_line(f"mpiddp.supervise: attempt {self._records[-1].number} ended: {last.reason}")
        if len(self._records) > 1:
            write_line("\n".join(format_table(self._records)))
        if decision.why:
            ends = f"exit status {EXIT_REQUEUE} (requeue)" if decision.action is Action.REQUEUE else "no restart"
            write_line(f"mpiddp.supervise: {ends}: {decision.why}")
        if last.status and not last.is_explained:
            self._advise(decision)
        if decision.action is Action.REQUEUE:
            return EXIT_REQUEUE
        if decision.action is Action.DONE:
            self._counter.forget()
        if self._signal and last.status == self._signal:  # as MPICH's launcher exits
            return signal_status(last.status)
        return last.status if last.status != EXIT_REQUEUE else 1  # at status 75 a batch script would requeue it

    def _advise(self, decision: Decision) -> None:
        """Print what may be wrong with the command, after an attempt that has failed."""
        last, path = self._attempts[-1], self._plan.progress_file
        if decision.action is Action.STOP and not (last.kind or last.has_stopped or self._signal):
            write_line("mpiddp.supervise: no failure report was written. Does the command run the script through "
                       "`python -m mpiddp`?")
        if path and not read_checkpoint_state(path):
            write_line(f"mpiddp.supervise: no checkpoint found at --progress-file {path}")

    def _receive(self, number: int, _: object) -> None:
        """Note a signal for the job; no attempt is started after one of ENDING_SIGNALS."""
        if number in ENDING_SIGNALS or (number == signal.SIGQUIT and self._plan.command.launcher.ends_by_quit):
            self._signal = self._signal or number
        self._signals.extend(self._repeat(number))

    def _repeat(self, number: int) -> list[int]:
        """Return a signal as often as the launcher needs it."""
        return [number] * (self._plan.command.launcher.interrupts if number == signal.SIGINT else 1)


class AttemptCounter:
    """Numbers the attempts: from 0, or after a requeue from the next number on.

    In a Slurm job, a hidden folder below `folder` has a file for each number. Each supervisor of the job has its own
    folder. If none can be written, the first number is the number of Slurm's restarts. `requeues` counts the last
    starts in a row without progress; if nothing is stored, it is the number of Slurm's restarts. `fruitless` counts
    the last starts in a row that had to stop before their first step; it is 0 if nothing is stored.
    """

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        self._next, self._folder, self.fruitless = runtime.count_restarts(environ), "", 0
        self.requeues = count_requeues(environ)
        if job := environ.get("SLURM_JOB_ID"):
            wanted = os.path.join(folder, f".mpiddp-attempts-{job}")
            restarts, own = count_requeues(environ), secrets.token_hex(4)
            self._folder = claim_free_folder(wanted, restarts, own, itertools.count(1)).folder
            if self._folder:
                self.fruitless = max(0, read_number(os.path.join(self._folder, FRUITLESS_FILE)))
                stored = read_number(os.path.join(self._folder, REQUEUES_FILE))
                self.requeues = stored if stored >= 0 else restarts
            self._next = max([self._next, *(int(name) + 1 for name in list_names(self._folder) if name.isdecimal())])

    def take(self) -> int:
        """Return the number of the next attempt."""
        taken, self._next = self._next, self._next + 1
        if self._folder:
            try:
                os.close(os.open(os.path.join(self._folder, str(taken)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            except OSError:  # the numbers may repeat after a requeue
                self._folder = ""
        return taken

    def end(self, is_fruitless: bool, has_progressed: bool) -> None:
        """Record how a start of the job ended."""
        self.fruitless = self.fruitless + 1 if is_fruitless else 0
        self.requeues = 0 if has_progressed else self.requeues + 1
        if self._folder:
            with contextlib.suppress(OSError):
                Path(self._folder, FRUITLESS_FILE).write_text(str(self.fruitless), encoding="utf-8")
                Path(self._folder, REQUEUES_FILE).write_text(str(self.requeues), encoding="utf-8")

    def forget(self) -> None:
        """Remove the numbers: a job that succeeded is not requeued."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


class AttemptRecord(NamedTuple):
    """An attempt, its start (seconds since the epoch), the decision after it, and its number in the job."""

    began: float
    attempt: Attempt
    decision: Decision
    number: int


def format_table(records: Sequence[AttemptRecord]) -> list[str]:
    """Return the lines of the table of attempts."""
    header = ("attempt", "nodes", "time", "steps", "reason", "action")
    return ["mpiddp.supervise: attempts", *format_columns([header, *map(format_row, records)])]


def format_row(record: AttemptRecord) -> tuple[str, ...]:
    """Return the cells of an attempt."""
    _, attempt, decision, number = record
    out = f" without {fold_hosts(decision.without)}" if decision.without else ""
    steps = f"{attempt.steps:,}" if attempt.steps else ""
    return (str(number), fold_hosts(attempt.nodes) if attempt.nodes else "this node", format_duration(attempt.seconds),
            steps, truncate_middle(attempt.reason, MAX_REASON_CHARS), f"{decision.action.value}{out}")


def write_history(path: str, records: Sequence[AttemptRecord]) -> None:
    """Write all attempts as JSON: the fields of Attempt, `number`, `began`, `action`, `why` and `without`."""
    write_json(path, {"attempts": [
        {"number": record.number, "began": round(record.began, 3), **record.attempt._asdict(),
         "action": record.decision.action.value, "why": record.decision.why, "without": record.decision.without}
        for record in records]})


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
