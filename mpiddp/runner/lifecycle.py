"""A job that runs in this process: its script, how its ranks agree to stop, how this rank leaves."""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ..base import timeline
from ..base.config import RESTARTS, STOPPED, LaunchConfig, Script
from ..base.errors import EXIT_REQUEUE, EndTimeoutError, LonelyLaunchError
from ..base.files import write
from ..base.stderr import STDERR, say, warn
from ..base.text import ranges
from ..bootstrap.refusal import refuse_alone
from ..discovery.runtime import hostname
from ..discovery.script import has_rank_words
from ..failure import exception
from ..output.redirect import let_flush_fail
from . import script, signals
from .exec import keep_connected, note_exec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from ..bootstrap.membership import Membership
    from .ending import Ending
    from .exit_hooks import Guard
    from .stop import Stop

MOST_ERRORS = 3  # one after another, before a failure is reported
TRAINED_S = 1.0  # between the first step of an optimizer and one by which a script is said to train
ACCELERATE = "; Accelerate"


class RunningJob:
    """Holds this process's part in a job.

    `ending` ends the job if this rank fails; it is None if nobody watches the rank. `stop` has noted signals
    already. `write_trace` writes the ranks' timeline when they leave, None for none: it is loaded before the
    script, which may unload modules. `guard` notices how a program with its own main() ends.
    """

    def __init__(
        self, membership: Membership, ending: Ending | None = None, stop: Stop | None = None,
        write_trace: Callable[[MPI.Comm, str], None] | None = None,
    ) -> None:
        self.membership, self.ending, self._write_trace = membership, ending, write_trace
        self.guard: Guard | None = None
        self.left = False  # in order
        self.replaced: list[int] = []  # the processes of this node's ranks, if a program takes the place of any rank's
        self._incomplete: list[int] = []  # the ranks whose logs have lost something, on rank 0
        self._stop: Stop | None = None
        self.trained_s = 0.0  # how long its optimizers have made steps, as far as that was looked at
        self.independent = False  # it was said that each rank works for itself
        if stop is not None:
            self.stop(stop)

    def refuse_alone(self, error: LonelyLaunchError) -> NoReturn:
        """Print on the terminal a reason that only this rank knows, and end the job on all ranks."""
        refuse_alone(error, self.ending.terminal if self.ending else STDERR)

    def stop(self, begun: Stop | None = None) -> Stop:
        """Return what says when all ranks stop; `begun` has noted signals already."""
        if self._stop is None:
            from .stop import Stop

            self._stop = begun or Stop()
            self._stop.join(self.membership.comm)
        return self._stop

    def stops(self) -> bool:
        """Tell whether all ranks have agreed to stop."""
        return self._stop is not None and self._stop.reason != 0

    def note_steps(self, report: str) -> None:
        """Let rank 0 tell a supervisor how many steps were made, if all ranks have agreed to stop.

        An epoch that was trained before the first should_stop() is one, also where the reason came meanwhile.
        """
        if self.tells_steps(report) and self._stop is not None and self._stop.reason:
            write(report + STOPPED, str(self._stop.steps or int(self.trained_s > TRAINED_S)))

    def tells_steps(self, report: str) -> bool:
        """Tell whether this is rank 0 and a supervisor wants to know how many steps were made before a stop.

        `report` is the path of the report that the supervisor would read of a failure.
        """
        is_told = self.membership.environment.rank == 0 and bool(report) and RESTARTS in os.environ
        return is_told and self._stop is not None

    def leave(
        self, exit_timeout_s: float | None, at_end: Callable[[], object] = bool, frees_port: bool = False
    ) -> None:
        """Leave the job when every rank wants to; after `exit_timeout_s` raise EndTimeoutError: who is missing.

        Until then rank 0's store and the process group stay: a rank that ends early takes nothing from the
        others. `at_end` is called when every rank has come to its end, and the group is still there. If any rank wants
        that with `frees_port`, all wait until rank 0's store is gone: another one may listen at its port.
        """
        member = self.membership
        lost = self.ending is not None and self.ending.has_lost_log()
        most_calls, some_lost, some_replaced = self._await_all([lost, frees_port], exit_timeout_s)
        if some_lost:
            self._incomplete = member.roll.those(lost)
        at_end()
        member.destroy_group()
        if most_calls:
            self.stop().complete(most_calls)
        if self._write_trace is not None:
            self._write_trace(member.comm, hostname())
        member.drop_store()
        if some_replaced:
            self.replaced = member.roll.processes_here()
        member.roll.close()

    def tell_incomplete(self) -> None:
        """Say on rank 0 which ranks' logs are incomplete, after all else; nothing if none is."""
        if self._incomplete:
            words = f"rank{'s' * (len(self._incomplete) > 1)} {ranges(self._incomplete)}"
            index = self.membership.log.ranks_file
            where = f" (first lost byte of each in {index})" if index else ""
            say(f"mpiddp: logs are incomplete: {words}{where}")

    def give_up(self) -> None:
        """Leave the job without telling the other ranks."""
        self.membership.destroy_group()
        self.membership.drop_store()
        self.restore()

    def restore(self) -> None:
        """Give variables their former values, and signals their former effect."""
        self.membership.restore_environment()
        if self._stop is not None:
            self._stop.release()

    def _await_all(self, own: Sequence[int], timeout_s: float | None) -> Sequence[int]:
        """Wait for all ranks, also in a handler's exit(0).

        Return the most calls of should_stop() that one made, and the largest of each of the ranks' `own`.
        """
        calls = self._stop.calls if self._stop else 0
        while True:
            try:
                return self.membership.roll.await_end([calls, *own], timeout_s, self._missing, self._remind)
            except SystemExit as error:
                if exception.find_script_status(error):
                    raise

    def _remind(self, waited_s: float) -> None:
        """Say whom the job waits for, if this rank has waited longest."""
        member = self.membership
        if member.roll.rank == member.groups.keys.first("reminds", member.roll.rank):
            say(f"mpiddp: waiting {waited_s:.0f} s for the end of {self._missing()}")

    def _missing(self) -> str:
        return (self.ending.missing() if self.ending else "") or "ranks whose names nobody knows"


def run_script(job: RunningJob, config: LaunchConfig) -> int:
    """Run the script and return its exit status; end the job on all ranks if it fails.

    EXIT_REQUEUE is no failure where all ranks have agreed to stop.
    """
    assert config.script is not None
    assert job.ending
    job.membership.groups.adopt_calls()
    note_exec(functools.partial(give_way, job, config))
    signals.protect_workers()
    warn_of_late(job.membership, config)
    look_at_training(job, config)
    status, failed = 0, None
    try:
        try:
            timeline.begin("script")
            script.run(with_local_rank(config.script, config.local_rank_option))
        except SystemExit as error:
            status = exception.find_script_status(error)
            if status and not (status == EXIT_REQUEUE and job.stops()):
                raise
        job.ending.status = status
        if not config.python_exit:
            job.ending.finish(status, functools.partial(warn_of_independent, job, config))
    except BaseException as error:
        failed = error  # nothing but this holds it when this block has ended
    for _ in range(MOST_ERRORS):
        if failed is None:
            return status
        try:
            return job.ending.fail_by(failed)
        except BaseException as error:  # of a signal's handler, as torch's when a worker has died, before it is told
            failed = error
    raise RuntimeError("the failure cannot be reported") from failed


def look_at_training(job: RunningJob, config: LaunchConfig) -> None:
    """Note how long rank 0 trains, by steps of torch's optimizers; after TRAINED_S warn `independent-ranks`.

    What torch compiles, or captures in a graph, tells nothing; then the warning comes at the end.
    """
    if not can_be_independent(job.membership, config) and not job.tells_steps(config.error_file):
        return
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    began_s = 0.0

    def note(*_: object) -> None:
        nonlocal began_s
        if torch.compiler.is_compiling() or job.trained_s > TRAINED_S or job.left:
            return
        now = time.monotonic()
        began_s = began_s or now
        job.trained_s = now - began_s
        if job.trained_s > TRAINED_S and job.ending is not None and job.ending.is_ours():
            warn_of_independent(job, config)

    register_optimizer_step_post_hook(note)  # it stays: torch goes through its hooks while it calls this one


def can_be_independent(member: Membership, config: LaunchConfig) -> bool:
    """Tell whether this is rank 0 of several, whose script nobody has told its local rank."""
    env = member.environment
    return config.script is not None and env.world_size > 1 and env.rank == 0 and not config.local_rank_option


def warn_of_independent(job: RunningJob, config: LaunchConfig) -> None:
    """Warn `independent-ranks`, once, where rank 0's script neither uses the group nor can know of its rank."""
    if job.left or job.independent or not can_be_independent(job.membership, config):
        return
    if not job.membership.groups.is_idle():
        return
    assert config.script is not None
    cure = lonely_library()
    has_trained = job.trained_s > TRAINED_S
    if not cure.startswith(ACCELERATE) and has_rank_words(config.script, has_trained):
        return
    job.independent = True
    runs, uses = ("trains", "uses") if has_trained else ("ran", "used")
    words = f"the script {runs} {job.membership.environment.world_size} times, each for itself"
    warn([f"independent-ranks: {words}: it {uses} neither the process group nor its rank{cure}"])


def lonely_library() -> str:
    """Return what to do where a library that the script uses takes its process for the only one; else nothing.

    Accelerate says so itself (accelerate/state.py). Lightning trains on one CPU unless it is told otherwise.
    """
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if getattr(state, "_shared_state", {}).get("num_processes") == 1:
        return f"{ACCELERATE} trains with others on the CPU by ACCELERATE_USE_CPU=true or Accelerator(cpu=True)"
    if "lightning" in sys.modules or "pytorch_lightning" in sys.modules:
        return '; Lightning has to be told of them: strategy="ddp", devices= and num_nodes=, as examples/README.md says'
    return ""


def warn_of_late(member: Membership, config: LaunchConfig) -> None:
    """Warn `late-variable` where rank 0's script sets variables that have been read already."""
    env = member.environment
    if env.rank == 0 and config.script is not None:
        from . import late_variables  # the other ranks need not load it

        warn(late_variables.warning(config.script, os.environ, env.device.type, env.backend if config.init else ""))


def with_local_rank(script: Script, option: str) -> Script:
    """Return a script with its local rank before its own arguments, if it has an option for that."""
    told = (f"{option}={os.environ['LOCAL_RANK']}",) if option else ()
    return script._replace(arguments=(*told, *script.arguments))


def leave_job(job: RunningJob, config: LaunchConfig) -> None:
    """Leave the job and finalise MPI. Do nothing in a process that the rank has forked."""
    ending = job.ending
    assert ending
    if not ending.is_ours() or job.left:
        return
    if ending.failed:
        if config.python_exit:
            ending.end_failed()
        return
    from mpi4py import MPI

    try:
        if not MPI.Is_finalized():
            if config.python_exit and config.explain is None:
                warn_of_independent(job, config)
            job.note_steps(config.error_file)
            ending.left()
            timeline.begin("exit")
            job.leave(config.exit_timeout_s, bool if config.python_exit else ending.drop_script)
            MPI.Finalize()
        job.left = True
        lost = ending.close()
        job.tell_incomplete()
        keep_connected(job.replaced)
    except BaseException as error:  # a signal's handler may raise here, too
        ending.fail_leaving(error)
    if lost and config.python_exit:
        let_flush_fail()


def give_way(job: RunningJob, config: LaunchConfig, call: str) -> None:
    """Leave the job before a `call` replaces this rank's program, when all ranks do so or have come to their end.

    The program finds the rank's variables, and the port of MASTER_PORT free, as under torchrun. Nobody watches it.
    """
    ending = job.ending
    assert ending
    if not ending.is_ours() or job.left:
        return
    from mpi4py import MPI

    limit_s = config.startup_timeout_s if config.exit_timeout_s is None else config.exit_timeout_s
    try:
        if not MPI.Is_finalized():
            ending.left()
            job.leave(limit_s, frees_port=True)
            MPI.Finalize()
        job.left = True
        ending.close()
        job.tell_incomplete()
        keep_connected(job.replaced)
    except EndTimeoutError as error:
        ending.fail_leaving(EndTimeoutError(f"{error}, before {call}()"))
    except BaseException as error:
        ending.fail_leaving(error)
    if job.membership.environment.rank == 0:
        say(f"mpiddp: {call}() replaces the script: the new program has to call init_process_group(), and mpiddp "
            "neither watches it nor keeps its output")
