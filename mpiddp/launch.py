"""The program: from a process that MPI started to a running script, and out again."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .base import timeline
from .base.config import RESTARTS, LaunchConfig
from .base.errors import EXIT_CANNOT_START, LaunchError, LonelyLaunchError
from .base.stderr import warn
from .base.termination import abort, let_through, skip_exit_functions
from .bootstrap.mpi_init import initialise_mpi
from .bootstrap.prepare import bind_cores, import_torch, ready_facts, set_variables
from .bootstrap.probe import Probe
from .bootstrap.rank0 import Hosting
from .bootstrap.refusal import refuse, refuse_alone, refusing_early
from .bootstrap.rollcall import RollCall, await_all
from .discovery import launchers, runtime
from .discovery.host import collect_host_facts
from .discovery.mpi import identify_library, needs_exit_functions
from .failure import exception
from .output.redirect import Output, buffer_by_lines, is_relayed, outlet_of
from .runner import embedding, script, signals
from .runner.ending import Ending
from .runner.exec import refuse_again
from .runner.lifecycle import RunningJob, leave_job, run_script
from .runner.signal_dispositions import give_signals_back, note_preloaded
from .runner.walltime import prepare_stop
from .sentinel.fork import fork_sentinel

if TYPE_CHECKING:
    from mpi4py import MPI

    from .bootstrap.membership import Membership
    from .runner.stop import Stop
    from .sentinel.client import SentinelHandle

Program = Callable[[RunningJob, LaunchConfig], int]  # returns the exit status of a rank
job: RunningJob | None = None  # which `launch` started in this process


def launch(config: LaunchConfig, program: Program = run_script) -> int:
    """Start this rank, run the script in it, or another program, and return the exit status.

    The rank leaves the job after the script's threads and atexit functions. A script that fails ends
    the job on all ranks. If another program runs ours, such as a profiler, it has work to do when we return:
    then the process ends by Python's own exit.
    """
    frame = sys._getframe()
    if embedding.is_python(frame):
        return start_and_run(config, program)
    status = embedding.Status(frame)
    status.number = start_and_run(config._replace(python_exit=True), program)
    return status.number


def start_and_run(config: LaunchConfig, program: Program) -> int:
    """Start this rank and run a program in it; end the process as `config` says."""
    global job
    try:
        job = start(config)
    except LaunchError:  # which has been told
        return EXIT_CANNOT_START
    assert job.ending
    leaving = functools.partial(leave_job, job, config)
    atexit.register(leaving)
    if config.explain is not None:
        from .reporting.map import print_explanation

        file = config.script.target if config.script and config.script.is_file else ""
        return print_explanation(functools.partial(job.membership.explain, file), job.membership.environment,
                                 config.explain)
    job.ending.watch_script(leaving)
    return program(job, config)


def start(config: LaunchConfig) -> RunningJob:
    """Start this rank, up to the script, in nine steps; the steps 3 to 7 are those of meet().

    Raises LaunchError, which has been told, where the job cannot start.
    """
    timeline.begin("sentinel")
    if config.script is not None:
        script.set_path(config.script)
    runtime.drop_foreign_run_id(os.environ)
    if RESTARTS in os.environ:  # the supervisor awaits a report on this job, not on those that its script submits
        os.environ.pop("MPIDDP_ERROR_FILE", None)
    started_by = launchers.read_launch_facts(os.environ)
    note_preloaded()
    output = Output(is_relayed(config))
    sentinel = fork_sentinel(config, started_by)  # 1
    stop = prepare_stop(config, started_by)
    with refusing_early(sentinel), signals.held() if stop else contextlib.nullcontext():
        refuse_again()
        MPI = initialise_mpi(config, started_by, sentinel)  # 2
        give_signals_back()
    with refusing(MPI, sentinel):
        if config.script is not None and config.script.is_input:
            from .runner import stdin_script as standard_input

            standard_input.share(MPI.COMM_WORLD, config.startup_timeout_s, sentinel.start)
        membership = meet(MPI.COMM_WORLD, config, sentinel, stop)  # 3 to 7
    if not config.python_exit and not needs_exit_functions(os.environ):
        skip_exit_functions()
    started = watch(membership, config, sentinel, output, stop)  # 8
    assert started.ending
    if config.explain is None:
        buffer_by_lines()
        started.ending.direct(outlet_of(membership, config))
    if config.init:
        sentinel.stage("process group")
        create_group(started, config)  # 9
    timeline.begin("ready")
    if config.stage:
        from .staging.stage import remember

        remember()
    if membership.environment.rank == 0:
        from .reporting.map import print_start  # the other ranks need not load it

        print_start(membership.environment, membership.seats, config, os.path.dirname(membership.log.path),
                 started.ending.terminal)
    return started


def meet(
    comm: MPI.Comm, config: LaunchConfig, sentinel: SentinelHandle | None = None, stop: Stop | None = None
) -> Membership:
    """Bring the ranks of a communicator together as a job, still without a process group; return this rank's part.

    The start began when this rank's sentinel did, if it has one. `stop` says when the job stops. Collective. Raises
    LaunchError, the same on every rank, or LonelyLaunchError.
    """
    roll = RollCall(comm, config.startup_timeout_s, sentinel.start if sentinel else time.monotonic())
    timeline.begin("facts")
    hosting = Hosting(roll, config, sentinel)  # rank 0's part
    found = collect_host_facts(comm, config, stop.left_s() if stop else None)
    host, door = roll.agree("MPI ready", found, hosting.plan_hosts)  # 3
    timeline.begin("variables and cores")
    probe = Probe(door, found.interfaces) if door else None
    warn(host.warnings)
    former = set_variables(host, config)
    cpus = bind_cores(host)  # 4
    if config.stage:
        from .staging.stage import stage

        stage(roll, host.place, config)
    devices = import_torch(config, cpus)  # 5
    plan = roll.agree("importing torch", ready_facts(host, cpus, devices, probe), hosting.plan_devices)  # 6
    warn(plan.warnings)
    if config.check:
        from .check.preflight import check_nodes

        check_nodes(roll, host.place, plan.device, config)
    timeline.begin("store")
    from .bootstrap.membership import enter

    return enter(roll, host.place, plan, config, former, hosting.server)  # 7


def watch(
    membership: Membership, config: LaunchConfig, sentinel: SentinelHandle, output: Output, stop: Stop | None
) -> RunningJob:
    """Let this rank's sentinel meet the others': from now on the ranks end together."""
    from mpi4py import MPI

    timeline.begin("sentinels meet")
    sentinel.stage("sentinels meet")
    ending = Ending(MPI, sentinel, membership.describe(config), output, config)
    ending.join(membership.endpoint)
    write_trace = None
    if config.trace_file:
        from .reporting import trace

        write_trace = functools.partial(trace.write_trace, config.trace_file)
    return RunningJob(membership, ending, stop, write_trace)


def create_group(started: RunningJob, config: LaunchConfig) -> None:
    """Create the process group; end the job on all ranks if that fails."""
    assert started.ending
    try:
        timeline.begin("process group")
        started.membership.create_group(config.group_timeout, started.refuse_alone)
        if config.trace_file:
            timeline.begin("first collective")
            started.membership.groups.try_out()
    except BaseException as error:
        started.ending.fail_by(error)
        started.ending.end_failed()


@contextlib.contextmanager
def refusing(MPI: Any, sentinel: SentinelHandle) -> Iterator[None]:
    """Run the start after MPI_Init in this block; if it fails, say why, once, and end the job on all ranks."""
    try:
        yield
    except LonelyLaunchError as error:
        sentinel.settle()
        refuse_alone(error)
    except LaunchError as error:
        refuse(MPI.COMM_WORLD, error)
        MPI.Finalize()
        sentinel.dismiss()
        raise
    except KeyboardInterrupt:  # from the user, or from an MPICH launcher that ends the ranks of a job
        sentinel.settle()
        abort(MPI, exception.INTERRUPTED_STATUS, told=False)
    except Exception as error:
        sentinel.settle()
        exception.print_exception(error)
        let_through()
        abort(MPI, exception.find_script_status(error))


def start_within(comm: MPI.Comm, config: LaunchConfig, leave: Callable[[], None]) -> RunningJob:
    """Start this rank of a program with its own main(), up to the process group, and watch it like a script.

    `leave` is called if the program ends without having left the job. A single rank is not watched, because nobody
    waits for it; nor is a rank outside of the main thread, where signals can't be handled. Raises LaunchError; for a
    reason that only this rank knows the job ends.
    """
    from .runner.exit_hooks import Guard

    refuse_split_world(comm)
    if comm.size == 1 or threading.current_thread() is not threading.main_thread():
        return join(comm, config)
    started_by = launchers.read_launch_facts(os.environ)
    sentinel = fork_sentinel(config, started_by)
    sentinel.stage("the start after MPI_Init")
    stop = prepare_stop(config, started_by)
    try:
        await_all(comm, config.startup_timeout_s, sentinel.start)
        membership = meet(comm, config, sentinel, stop)
    except LonelyLaunchError as error:
        sentinel.settle()
        refuse_alone(error)
    except BaseException:
        sentinel.settle()
        sentinel.dismiss()
        raise
    started = watch(membership, config, sentinel, Output(is_relayed(config)), stop)
    assert started.ending
    started.ending.direct(outlet_of(membership, config))
    started.ending.watch(leave)
    started.guard = Guard(started.ending, leave)
    return started


def refuse_split_world(comm: MPI.Comm) -> None:
    """Raise LaunchError `split-world` where MPI has made several worlds of a launcher's processes, as under srun alone.

    A process may be a world of its own if a rank has started it, if it asks for COMM_SELF, and if the variables were
    taken away by which MPI meets mpirun or mpiexec, which always set some.
    """
    from mpi4py import MPI

    from .planning.compatibility import check_world_size

    runtime.drop_foreign_run_id(os.environ)
    started_by = launchers.read_launch_facts(os.environ)
    cut_off = started_by is not None and not started_by.offers and started_by.launcher in (
        launchers.OPEN_MPI, launchers.HYDRA)
    if comm != MPI.COMM_SELF and not cut_off and runtime.find_outer_launcher(os.environ) is None:
        check_world_size(started_by, MPI.COMM_WORLD.size, identify_library())


def join(comm: MPI.Comm, config: LaunchConfig) -> RunningJob:
    """Start this rank of a program that need not be watched, or is watched already. Collective; raises LaunchError."""
    return RunningJob(meet(comm, config))
