"""The functions for programs with their own main(): notebooks, coupled codes, custom launchers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from .base.errors import LaunchError
from .base.termination import exit_status
from .systems.statuses import EXIT_REQUEUE
from .where import progress

if TYPE_CHECKING:
    from datetime import timedelta

    from mpi4py import MPI

    from .base.config import LaunchConfig
    from .base.ranks import JobEnv
    from .runner.lifecycle import RunningJob
    from .runner.own_main import ExitWatch
    from .runner.stop import Stop

_own_job: RunningJob | None = None  # which init_process_group() started in this process
_exit_watch: ExitWatch | None = None  # of that job; None for a single rank, and under `python -m mpiddp`
_stop: Stop | None = None  # of should_stop() without a job


def init_process_group(
    comm: MPI.Comm | None = None, backend: str | None = None, timeout: timedelta | None = None
) -> JobEnv:
    """Create torch's default process group of the ranks of an MPI communicator, and return this rank's environment.

    Collective over `comm`: COMM_WORLD by default, or any intra-communicator. Ranks outside it take no part, and several
    communicators get a group each. `backend` None means the device's own. `timeout` is that of the group's collectives,
    None for torch's default. MPI is initialised if it is not yet. Under `python -m mpiddp` the launcher's group is
    used, if it is what is requested.

    Until destroy_process_group() a rank whose program ends by an uncaught exception, or by sys.exit() with a status
    other than 0, ends the whole MPI job with that status, as `python -m mpi4py` does, including ranks outside of
    `comm`. A rank whose program ends in any other way waits for the others. A single rank ends alone. Everything else
    (failure reports, logs, `python -m mpiddp.where`) wants `python -m mpiddp --no-init main.py`, without a change in
    the program. The ``MPIDDP_…`` variables of the start's options apply; the default of MPIDDP_BIND is launcher here.

    Raises LaunchError, the same on every rank, if the group cannot start, and ValueError if the process has a default
    group already or a variable is wrong. Any other exception, such as of a faulty GPU, is printed, and ends the job
    at once: the other ranks would wait for this one.
    """
    launched = _find_launched()
    if launched is not None and _adopt(launched, comm, backend, timeout):
        return launched.membership.environment
    if _is_initialized():
        raise ValueError("the default process group already exists; call mpiddp.destroy_process_group() first")
    settings = _settings(os.environ, backend)
    try:
        job = _start(comm, settings, launched)
        job.membership.use_device()
        job.membership.create_group(settings.group_timeout if timeout is None else timeout, job.refuse_alone)
    except LaunchError:
        raise
    except BaseException as error:
        _fail(error)
        raise
    return job.membership.environment


def _start(comm: MPI.Comm | None, config: LaunchConfig, launched: RunningJob | None) -> RunningJob:
    """Start a job of a communicator's ranks, and MPI before; `launched` is the launcher's, whose agent watches us."""
    global _own_job, _exit_watch
    from mpi4py import MPI

    from .launch import join, start_program
    from .runner.own_main import ExitWatch, warn_unused_options
    from .runner.workers import protect_workers

    if not MPI.Is_initialized():
        MPI.Init_thread()
    comm = MPI.COMM_WORLD if comm is None else comm
    protect_workers()
    if launched is None and comm.size > 1:
        _exit_watch = ExitWatch(destroy_process_group)
        if comm.rank == 0:
            warn_unused_options(os.environ)
    try:
        _own_job = join(comm, config._replace(port=0)) if launched else start_program(comm, config)
    except LaunchError as error:  # a program sets options by variables
        _end_watch()
        from .options.table import options_to_variables

        actual, needed, do = map(options_to_variables, (error.actual, error.needed, error.do))
        raise type(error)(error.name, actual, needed, do) from None
    return _own_job


def _end_watch() -> None:
    """Stop watching how the program ends."""
    global _exit_watch
    if _exit_watch is not None:
        _exit_watch.release()
        _exit_watch = None


def destroy_process_group() -> None:
    """Destroy the default process group and undo what init_process_group() did to this process.

    Collective over its communicator: returns when all ranks have called it, because others may still need the store.
    """
    global _own_job, _stop
    if _own_job is not None:
        from mpi4py import MPI

        from .runner import signals

        job, _own_job, _stop = _own_job, None, None
        if MPI.Is_finalized():  # nobody can be waited for
            job.give_up()
        else:
            job.leave_over_mpi(exit_timeout_s=None)
            job.restore()
        _end_watch()
        if _find_launched() is None:
            signals.release_signals()
    elif _is_initialized():
        import torch.distributed as dist

        dist.destroy_process_group()


@contextmanager
def process_group(
    comm: MPI.Comm | None = None, backend: str | None = None, timeout: timedelta | None = None
) -> Iterator[JobEnv]:
    """Hold a default process group in a `with` block, as init_process_group() creates it.

    If the block raises, the exception is printed, and the whole MPI job ends at once, with sys.exit()'s status or 1:
    the program may catch the exception outside of the block, and the other ranks would wait for this one. With a single
    rank only the group ends, and under `python -m mpiddp` the job ends if the exception ends the script.
    """
    env = init_process_group(comm, backend, timeout)
    try:
        yield env
    except GeneratorExit:  # a generator around the block is not used any more
        destroy_process_group()
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and (not exit_status(error.code) or _is_agreed_stop(error)):
            destroy_process_group()
        else:
            _fail(error)
        raise
    destroy_process_group()


def _is_agreed_stop(error: SystemExit) -> bool:
    """Return whether a program ends by stop_for_requeue() because all ranks have agreed to."""
    return error.code == EXIT_REQUEUE and _own_job is not None and _own_job.is_stopping()


def _fail(error: BaseException) -> None:
    """End the job because this rank cannot go on in it; only the group ends if nobody waits, or an agent watches us."""
    global _own_job
    if _exit_watch is not None:
        _exit_watch.fail(error)
    if _own_job is not None:
        job, _own_job = _own_job, None
        job.give_up()


def _settings(environ: Mapping[str, str], backend: str | None = None) -> LaunchConfig:
    """Return the settings of a program with its own main(); raise ValueError if a variable is wrong."""
    import argparse

    from .base.config import Binding, OutputFilter
    from .cli import read_settings
    from .options.table import variable_name

    try:
        config = read_settings(environ)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None
    binding = config.binding if variable_name("bind") in environ else Binding.LAUNCHER
    return config._replace(backend=backend or config.backend, binding=binding, log_dir="", output_filter=OutputFilter())


def should_stop() -> bool:
    """Return whether a training loop should write a checkpoint and stop; the same on all ranks at each step.

    It is True once a rank has received SIGUSR1 or SIGTERM, or less than --stop-before is left of the walltime. Every
    rank of the job must call this the same number of times: a call starts a reduction over MPI and reads the result of
    the previous one, so no step waits for it. Signals are noted from the first call on; under `python -m mpiddp` from
    the start of the job on, if the script's own code has this call in it, or with --stop-before. Without a job of
    mpiddp's this process decides alone.
    """
    global _stop
    progress.count_step()
    if job := _find_launched() or _own_job:
        return job.join_stop(_stop).is_due()
    if _stop is None:
        from .runner.stop import Stop

        _stop = Stop()
    return _stop.is_due()


def stop_for_requeue() -> NoReturn:
    """End the script with status REQUEUE, 75, on which a batch script can requeue the job; see should_stop()."""
    raise SystemExit(EXIT_REQUEUE)


def _find_launched() -> RunningJob | None:
    """Return the job that `python -m mpiddp` started in this process, None if there is none or it has left."""
    launch = sys.modules.get("mpiddp.launch")
    job: RunningJob | None = launch.job if launch is not None else None
    return None if job is None or job.has_left else job


def _adopt(
    launched: RunningJob, comm: MPI.Comm | None, backend: str | None, timeout: timedelta | None
) -> bool:
    """Take the launcher's group if it is what a call requests, and return True; destroy it if not."""
    member = launched.membership
    if comm is not None and not member.has_same_ranks(comm):
        member.groups.discard()
        return False
    return member.groups.claim(backend=backend, timeout=timeout)


def _is_initialized() -> bool:
    """Return whether there is a default process group, without importing torch for it."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available() and dist.is_initialized())
