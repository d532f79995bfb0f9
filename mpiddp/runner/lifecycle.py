"""A job in this process: runs the script, lets the ranks agree to stop, and leaves."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ..base import timeline
from ..base.config import RESTART_VARIABLE, STEPS_SUFFIX, LaunchConfig, Script
from ..base.errors import LocalLaunchError
from ..base.files import read_text, write_file
from ..base.process import set_process_title
from ..base.stderr import warn, write_line
from ..base.termination import hard_exit
from ..bootstrap.refusal import format_refusal, refuse_alone
from ..discovery import schedulers
from ..discovery.launchers import LaunchFacts
from ..discovery.runtime import hostname
from ..discovery.script import has_match, has_rank_words, has_should_stop
from ..failure import exception
from ..failure.root_cause import UNKNOWN_RANKS
from ..systems.statuses import EXIT_REQUEUE, EXIT_USAGE
from . import script
from .exec import hook_exec
from .workers import protect_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from ..bootstrap.membership import Membership
    from .stop import Stop
    from .termination import Termination

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
        self.status = 0  # with which the script has ended
        self.failure: BaseException | None = None  # that has left our code around the script, and is not reported
        self.trained_s = 0.0  # how long its optimizers have made steps, as far as watched
        self.has_warned_independent = False
        self._stop: Stop | None = None
        if stop is not None:
            self.join_stop(stop)

    def refuse_alone(self, error: LocalLaunchError) -> NoReturn:
        """Print on the terminal an error that only this rank knows, and end the job on all ranks."""
        if self.termination is None:
            refuse_alone(self.membership.rendezvous.ranks, error)
        self.termination.refuse(error, format_refusal(error))

    def join_stop(self, begun: Stop | None = None) -> Stop:
        """Return the `Stop` on which all ranks agree; `begun` has noted signals already."""
        if self._stop is None:
            from .stop import Stop

            self._stop = begun or Stop()
            self._stop.join(self.membership.rendezvous.ranks)
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

    def leave(self, status: int = 0) -> None:
        """Leave the job and MPI when every rank can; until then rank 0's store and the process group stay.

        A rank that ends early must not disturb the others. If a rank has vanished, or the job ends because another one
        has failed, this one does not leave MPI, which would wait for all. `status` is the one with which it ends.
        """
        member, termination = self.membership, self.termination
        assert termination is not None
        end = termination.await_all_finished(self._stop.calls if self._stop else 0)
        if end is None:
            return
        member.destroy_group()
        has_mpi = end.complete and not member.rendezvous.ranks.is_finalized
        if has_mpi and end.most_calls:
            self.join_stop().complete(end.most_calls)
        if has_mpi and self._write_trace is not None:
            self._write_trace(member.comm, hostname())
        member.drop_store()
        if has_mpi:
            member.rendezvous.close()
            member.rendezvous.ranks.finalize()
        self.has_left = True
        termination.leave(status)

    def leave_over_mpi(self, exit_timeout_s: float | None) -> None:
        """Leave a job that has no agents when every rank does; raise EndTimeoutError after `exit_timeout_s`."""
        most_calls, = self._await_all([self._stop.calls if self._stop else 0], exit_timeout_s)
        self.membership.destroy_group()
        if most_calls:
            self.join_stop().complete(most_calls)
        self.membership.drop_store()
        self.membership.rendezvous.close()

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

    def _await_all(self, own: Sequence[int], timeout_s: float | None) -> Sequence[int]:
        """Wait until all ranks have come to their end, even if a signal's handler calls exit(0).

        Returns the largest of each of the ranks' `own`.
        """
        while True:
            try:
                return self.membership.rendezvous.await_end("script", own, timeout_s, lambda: UNKNOWN_RANKS,
                                                            self._remind)
            except SystemExit as error:
                if exception.find_script_status(error):
                    raise

    def _remind(self, waited_s: float) -> None:
        """Print that ranks are awaited, if this rank has waited longest."""
        rank = self.membership.rendezvous.rank
        if rank == self.membership.groups.keys.elect("reminds", rank):
            write_line(f"mpiddp: still waiting after {waited_s:.0f} s for other ranks to finish")


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
    """Run the script and return its exit status; end the job on all ranks if it fails."""
    assert config.script is not None
    title = f"rank {job.membership.environment.rank}: {config.script.command}"  # not longer than `python -m mpiddp` ...
    set_process_title(title.encode(errors="replace").decode(), read_text("/proc/self/comm").strip())
    job.membership.groups.adopt_calls()
    hook_exec(functools.partial(leave_before_exec, job))
    protect_workers()
    watch_training(job, config)
    try:
        timeline.begin_stage("script")
        return run_to_end(job, config.script, config.local_rank_option)
    except BaseException as error:  # of a signal's handler, before the script's own error is reported
        return conclude(job, config.script, find_failure(error))


def run_to_end(job: RunningJob, target: Script, local_rank_option: str) -> int:
    """Run the script and return its exit status; report it if it fails."""
    try:
        script.run_main(with_local_rank(target, local_rank_option))
        return 0
    except BaseException as error:
        return conclude(job, target, error)


def conclude(job: RunningJob, target: Script, error: BaseException) -> int:
    """Return the exit status of a script that has raised; report it if that is a failure.

    EXIT_REQUEUE is none if all ranks have agreed to stop.
    """
    assert job.termination
    if not isinstance(error, SystemExit):
        return job.termination.fail_by_exception(error)
    status = exception.find_script_status(error)
    if not status or (status == EXIT_REQUEUE and job.is_stopping()):
        job.status = status
        return status
    return job.termination.fail_by_exception(error, advise_on_options(target, status))


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
    write_line("\nmpiddp: warning: "  # a progress bar may have begun the line
               f"independent-ranks: {words}: the script {uses} neither the process group nor its rank{advice}")


def advise_single_process() -> str:
    """Return advice if a library that the script uses assumes that its process is alone; else an empty text.

    Accelerate's state shows that (accelerate/state.py). Lightning trains on one CPU unless its options differ.
    """
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if getattr(state, "_shared_state", {}).get("num_processes") == 1:
        return ACCELERATE_ADVICE
    return LIGHTNING_ADVICE if {"lightning", "pytorch_lightning"} & sys.modules.keys() else ""


def advise_on_options(script: Script, status: int) -> str:
    """Return advice if a script that has refused its arguments got an option of mpiddp's, of which it knows nothing."""
    from ..options.table import FLAGS, OPTIONS

    for argument in script.arguments if status == EXIT_USAGE else ():
        option = argument.partition("=")[0].replace("_", "-")
        name = option.removeprefix("--")
        if option.startswith("--") and name in {*OPTIONS, *FLAGS}:
            own = name.encode().replace(b"-", b"[-_]")
            if not has_match(script, rb"(?<!\w)(?<!\w-)" + own + rb"(?![\w-])"):
                return f"{option} is an option of mpiddp: put it before the script"
    return ""


def with_local_rank(script: Script, option: str) -> Script:
    """Return a script with its local rank before its own arguments, if it has an option for that."""
    arguments = (f"{option}={os.environ['LOCAL_RANK']}",) if option else ()
    return script._replace(arguments=(*arguments, *script.arguments))


def leave_job(job: RunningJob, config: LaunchConfig) -> None:
    """Leave the job in order, as the last of the atexit functions. Do nothing in a process that the rank has forked.

    If an exception has left our code around the script, the rank has failed instead: a signal's handler may raise
    anywhere.
    """
    termination = job.termination
    assert termination
    if not termination.is_own_process() or job.has_left:
        return
    if job.failure is not None and not termination.has_failed:
        termination.fail_by_exception(find_failure(job.failure))
    if termination.has_failed:
        termination.abort()
        return
    try:
        if config.explain is None:
            warn_independent_ranks(job, config)
        job.write_steps(config.error_file)
        timeline.begin_stage("exit")
        job.leave(job.status)
    except BaseException as error:  # a signal's handler may raise here, too
        termination.fail_by_exception(error)


def find_failure(error: BaseException) -> BaseException:
    """Return the error that a signal's handler has interrupted by SystemExit(0), or the first of several MemoryErrors.

    Else the error itself.
    """
    while (former := error.__context__) is not None and (
            (isinstance(error, MemoryError) and isinstance(former, MemoryError))
            or (isinstance(error, SystemExit) and not exception.find_script_status(error))):
        error = former
    return error


def leave_before_exec(job: RunningJob, call: str) -> None:
    """Leave the job before a `call` replaces this rank's program, when all ranks do so or have come to their end.

    The program finds the rank's variables, and MASTER_PORT free, as under torchrun. It is no rank any more.
    """
    termination = job.termination
    assert termination
    if not termination.is_own_process() or job.has_left:
        return
    try:
        job.leave()
    except BaseException as error:
        termination.fail_by_exception(error)
    if not job.has_left:  # the job ends
        hard_exit(1)
    if job.membership.environment.rank == 0:
        write_line(f"mpiddp: {call}() replaces the script: the new program must call init_process_group() itself")
