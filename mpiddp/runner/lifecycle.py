"""A job in this process: runs the script, lets the ranks agree to stop, and leaves."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ..base import timeline
from ..base.config import RESTART_VARIABLE, STEPS_SUFFIX, LaunchConfig, Script
from ..base.errors import EndTimeoutError, LocalLaunchError
from ..base.files import write_file
from ..base.stderr import STDERR, warn, write_line
from ..base.text import format_ranges
from ..bootstrap.refusal import refuse_alone
from ..discovery import schedulers
from ..discovery.launchers import LaunchFacts
from ..discovery.runtime import hostname
from ..discovery.script import has_rank_words, has_should_stop
from ..failure import exception
from ..failure.root_cause import UNKNOWN_RANKS
from ..output.redirect import make_flush_fail
from ..systems.statuses import EXIT_REQUEUE
from . import script, signals
from .exec import hook_exec, keep_connected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from ..bootstrap.membership import Membership
    from .stop import Stop
    from .termination import Termination

TRIES = (1, 2, 3)  # of reporting a failure, if signals' handlers raise meanwhile
TRAINING_S = 1.0  # a script trains if its optimizers make steps for longer than this
ACCELERATE_ADVICE = "; to train together on CPUs, set ACCELERATE_USE_CPU=true or use Accelerator(cpu=True)"
LIGHTNING_ADVICE = '; pass strategy="ddp", devices= and num_nodes= to Lightning\'s Trainer (see examples/README.md)'


class RunningJob:
    """Holds this process's part in a job.

    `termination` ends the job if this rank fails; it is None if nobody watches the rank. `stop` has noted signals
    already. `write_trace` writes the ranks' timeline when they leave: it is loaded before the script, which may unload
    modules.
    """

    def __init__(
        self, membership: Membership, termination: Termination | None = None, stop: Stop | None = None,
        write_trace: Callable[[MPI.Comm, str], None] | None = None,
    ) -> None:
        self.membership, self.termination, self._write_trace = membership, termination, write_trace
        self.has_left = False  # in order
        self.failure: BaseException | None = None  # that has left our code around the script, and is not reported
        self.replaced: list[int] = []  # the processes of this node's ranks, if a program replaces any rank's
        self.trained_s = 0.0  # how long its optimizers have made steps, as far as watched
        self.has_warned_independent = False
        self._incomplete: list[int] = []  # the ranks whose logs have lost data, on rank 0
        self._stop: Stop | None = None
        if stop is not None:
            self.join_stop(stop)

    def refuse_alone(self, error: LocalLaunchError) -> NoReturn:
        """Print on the terminal an error that only this rank knows, and end the job on all ranks."""
        refuse_alone(error, self.termination.terminal if self.termination else STDERR)

    def join_stop(self, begun: Stop | None = None) -> Stop:
        """Return the `Stop` on which all ranks agree; `begun` has noted signals already."""
        if self._stop is None:
            from .stop import Stop

            self._stop = begun or Stop()
            self._stop.join(self.membership.comm)
        return self._stop

    def is_stopping(self) -> bool:
        """Return whether all ranks have agreed to stop."""
        return self._stop is not None and self._stop.reason != 0

    def write_steps(self, report: str) -> None:
        """Write on rank 0 how many steps were made, for a supervisor, at an end in order.

        `report` is the path of the failure report that the supervisor would read. An epoch trained before the first
        should_stop() counts as one step, even if the reason to stop came meanwhile.
        """
        if self.must_write_steps(report) and self._stop is not None:
            write_file(report + STEPS_SUFFIX, str(self._stop.steps or int(self.trained_s > TRAINING_S)))

    def must_write_steps(self, report: str) -> bool:
        """Return whether this is rank 0, and a supervisor reads how many steps were made."""
        is_rank0 = self.membership.environment.rank == 0
        return is_rank0 and bool(report) and RESTART_VARIABLE in os.environ and self._stop is not None

    def leave(
        self, exit_timeout_s: float | None, at_end: Callable[[], object] = bool, frees_port: bool = False
    ) -> None:
        """Leave the job when every rank does; raise EndTimeoutError with the missing ranks after `exit_timeout_s`.

        Until then rank 0's store and the process group stay: a rank that ends early must not disturb the others.
        `at_end` is called when every rank has finished, and the group still exists. If any rank `frees_port`, all wait
        until rank 0's store is closed: a new one may listen on its port.
        """
        member = self.membership
        is_lost = self.termination is not None and self.termination.has_lost_log()
        is_nonzero = self.termination is not None and self.termination.exits_nonzero()
        most_calls, any_lost, any_frees_port, any_nonzero = self._await_all(
            "script", [is_lost, frees_port, is_nonzero], exit_timeout_s)
        if any_lost:
            self._incomplete = member.rendezvous.gather_true(is_lost)
        at_end()
        if any_nonzero and self.termination is not None:
            self._await_all("output", [], exit_timeout_s)  # at_end() may have printed something
            self.termination.flush_output()  # before MPI_Finalize: Open MPI kills the others when one exits like that
        member.destroy_group()
        if most_calls:
            self.join_stop().complete(most_calls)
        if self._write_trace is not None:
            self._write_trace(member.comm, hostname())
        member.drop_store()
        if any_frees_port:
            self.replaced = member.rendezvous.list_local_processes()
        member.rendezvous.close()

    def report_incomplete_logs(self) -> None:
        """Print on rank 0 which ranks' logs are incomplete, if any, after all other output."""
        if self._incomplete:
            words = f"rank{'s' * (len(self._incomplete) > 1)} {format_ranges(self._incomplete)}"
            index = self.membership.log.ranks_file
            where = f" (first lost byte of each in {index})" if index else ""
            write_line(f"mpiddp: logs are incomplete: {words}{where}")

    def give_up(self) -> None:
        """Leave the job without notice to the other ranks."""
        self.membership.destroy_group()
        self.membership.drop_store()
        self.restore()

    def restore(self) -> None:
        """Restore variables and signals."""
        self.membership.restore_environment()
        if self._stop is not None:
            self._stop.release()

    def _await_all(self, step: str, own: Sequence[int], timeout_s: float | None) -> Sequence[int]:
        """Wait until all ranks have come to a step of their end, even if a signal's handler calls exit(0).

        Returns the most calls of should_stop() that a rank made, and the largest of each of the ranks' `own`.
        """
        calls = self._stop.calls if self._stop else 0
        rendezvous = self.membership.rendezvous
        while True:
            try:
                return rendezvous.await_end(step, [calls, *own], timeout_s, self._name_missing, self._remind)
            except SystemExit as error:
                if exception.find_script_status(error):
                    raise

    def _remind(self, waited_s: float) -> None:
        """Print which ranks are awaited, if this rank has waited longest."""
        rank = self.membership.rendezvous.rank
        if rank == self.membership.groups.keys.elect("reminds", rank):
            names = self._name_missing()
            write_line(f"mpiddp: still waiting after {waited_s:.0f} s for other ranks to finish: {names}")

    def _name_missing(self) -> str:
        names = self.termination.describe_unfinished() if self.termination else ""
        return names or UNKNOWN_RANKS


def prepare_stop(config: LaunchConfig, started_by: LaunchFacts | None) -> Stop | None:
    """Return the `Stop` of this rank if the script's code or --stop-before asks for it."""
    if config.stop_before_s is None and not (config.script and has_should_stop(config.script)):
        return None
    from .stop import Stop

    stop = Stop()
    if config.stop_before_s is not None:
        is_first = started_by is None or started_by.rank == 0
        end = schedulers.find_end(os.environ, is_first)
        if end is not None:
            stop.stop_at(end - config.stop_before_s)
        elif is_first:
            reason = schedulers.describe_unknown_end(os.environ)
            warn([f"walltime-unknown: {reason}, so only a signal can stop the job in time"])
    return stop


def run_script(job: RunningJob, config: LaunchConfig) -> int:
    """Run the script and return its exit status; end the job on all ranks if it fails.

    EXIT_REQUEUE is no failure if all ranks have agreed to stop.
    """
    assert config.script is not None
    assert job.termination
    job.membership.groups.adopt_calls()
    hook_exec(functools.partial(leave_before_exec, job, config))
    signals.protect_workers()
    watch_training(job, config)
    at_end = functools.partial(warn_independent_ranks, job, config)
    status, failure = 0, None
    try:
        try:
            timeline.begin_stage("script")
            script.run_main(with_local_rank(config.script, config.local_rank_option))
        except SystemExit as error:
            status = exception.find_script_status(error)
            if status and not (status == EXIT_REQUEUE and job.is_stopping()):
                raise
        job.termination.status = status
        if not config.python_exit:
            job.termination.finish(status, at_end)
    except BaseException as error:
        failure = error  # nothing else references it when this block has ended
    for _ in TRIES:  # no call outside of the two blocks: after each, a signal's handler may raise
        if failure is None:
            return status
        try:
            if exception.find_script_status(failure):
                return job.termination.fail_by_exception(failure)
            if not config.python_exit:  # a signal's handler has called sys.exit(0) after the script's end
                job.termination.finish(status, at_end)
            return status
        except SystemExit:  # of a signal's handler: the script has failed before
            continue
        except BaseException as error:  # as torch's handler raises when a worker has died, before the report
            failure = error
    raise RuntimeError("the failure cannot be reported") from failure


def watch_training(job: RunningJob, config: LaunchConfig) -> None:
    """Measure how long rank 0 trains, by steps of torch's optimizers; after TRAINING_S warn `independent-ranks`.

    Steps that torch compiles, or captures in a graph, do not count; then the warning comes at the end.
    """
    if not can_be_independent(job.membership, config) and not job.must_write_steps(config.error_file):
        return
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    began_s = 0.0

    def on_step(*_: object) -> None:
        nonlocal began_s
        if torch.compiler.is_compiling() or job.trained_s > TRAINING_S or job.has_left:
            return
        now = time.monotonic()
        began_s = began_s or now
        job.trained_s = now - began_s
        if job.trained_s > TRAINING_S and job.termination is not None and job.termination.is_own_process():
            warn_independent_ranks(job, config)

    register_optimizer_step_post_hook(on_step)  # it stays: torch iterates over its hooks while it calls this one


def can_be_independent(member: Membership, config: LaunchConfig) -> bool:
    """Return whether this is rank 0 of several, and its script does not get its local rank as an option."""
    env = member.environment
    return config.script is not None and env.world_size > 1 and env.rank == 0 and not config.local_rank_option


def warn_independent_ranks(job: RunningJob, config: LaunchConfig) -> None:
    """Warn `independent-ranks`, once, if rank 0's script neither uses the group nor can know its rank."""
    if job.has_left or job.has_warned_independent or not can_be_independent(job.membership, config):
        return
    if not job.membership.groups.is_idle():
        return
    assert config.script is not None
    advice = advise_single_process()
    if advice != ACCELERATE_ADVICE and has_rank_words(config.script, has_trained=job.trained_s > 0):
        return
    job.has_warned_independent = True
    runs, uses = ("trains", "uses") if job.trained_s > TRAINING_S else ("ran", "used")
    words = f"each of the {job.membership.environment.world_size} ranks {runs} on its own"
    warn([f"independent-ranks: {words}: the script {uses} neither the process group nor its rank{advice}"])


def advise_single_process() -> str:
    """Return advice if a library that the script uses assumes that its process is alone; else an empty text.

    Accelerate's state shows that (accelerate/state.py). Lightning trains on one CPU unless its options differ.
    """
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if getattr(state, "_shared_state", {}).get("num_processes") == 1:
        return ACCELERATE_ADVICE
    return LIGHTNING_ADVICE if {"lightning", "pytorch_lightning"} & sys.modules.keys() else ""


def with_local_rank(script: Script, option: str) -> Script:
    """Return a script with its local rank before its own arguments, if it has an option for that."""
    arguments = (f"{option}={os.environ['LOCAL_RANK']}",) if option else ()
    return script._replace(arguments=(*arguments, *script.arguments))


def leave_job(job: RunningJob, config: LaunchConfig) -> None:
    """Leave the job in order and finalise MPI. Do nothing in a process that the rank has forked.

    If an exception has left our code around the script, the rank has failed instead: a signal's handler may raise
    anywhere.
    """
    termination = job.termination
    assert termination
    if not termination.is_own_process() or job.has_left:
        return
    if termination.has_failed:
        if config.python_exit:
            termination.end_after_failure()
        return
    if job.failure is not None:
        termination.fail_at_end(job.failure, is_printed=True)
    signals.ignore_clean_exits()
    from mpi4py import MPI

    try:
        if not MPI.Is_finalized():
            if config.python_exit and config.explain is None:
                warn_independent_ranks(job, config)
            job.write_steps(config.error_file)
            termination.announce_script_end()
            timeline.begin_stage("exit")
            job.leave(config.exit_timeout_s, bool if config.python_exit else termination.drop_script)
            MPI.Finalize()
        is_lost = close_job(job, termination)
    except BaseException as error:  # a signal's handler may raise here, too
        termination.fail_at_end(error)
    if is_lost and config.python_exit:
        make_flush_fail()


def leave_before_exec(job: RunningJob, config: LaunchConfig, call: str) -> None:
    """Leave the job before a `call` replaces this rank's program, when all ranks do so or have come to their end.

    The program finds the rank's variables, and MASTER_PORT free, as under torchrun. It is not watched.
    """
    termination = job.termination
    assert termination
    if not termination.is_own_process() or job.has_left:
        return
    from mpi4py import MPI

    limit_s = config.startup_timeout_s if config.exit_timeout_s is None else config.exit_timeout_s
    try:
        if not MPI.Is_finalized():
            termination.announce_script_end()
            job.leave(limit_s, frees_port=True)
            MPI.Finalize()
        close_job(job, termination)
    except EndTimeoutError as error:
        termination.fail_at_end(EndTimeoutError(f"before {call}(), {error}"))
    except BaseException as error:
        termination.fail_at_end(error)
    if job.membership.environment.rank == 0:
        write_line(f"mpiddp: {call}() replaces the script: the new program must call init_process_group(); mpiddp "
                   "does not watch it, and does not prefix or log its output")


def close_job(job: RunningJob, termination: Termination) -> bool:
    """End this rank's helper processes once it has left the job; return whether output was lost."""
    job.has_left = True
    is_lost = termination.close()
    job.report_incomplete_logs()
    keep_connected(job.replaced)
    return is_lost
