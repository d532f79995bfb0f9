"""The program: from a process that a launcher started to a running script, and out again. Start to read here.

`python -m mpiddp train.py` reads its options (cli.py) and calls launch(). A rank starts in nine steps:

    start()           1  fork the rank; this process stays as its parent, the agent (agent/), without MPI and torch
                      2  check that launcher and MPI library fit, and initialise MPI
      meet()          3  send what this host has to rank 0, which plans for all ranks, and receive this rank's plan
                      4  set variables, and bind this process to its cores
                      5  import torch; meanwhile the kernel tries which of rank 0's addresses this node reaches
                      6  send what torch sees to rank 0, and receive the rest of the plan
                      7  connect to rank 0's store
    connect_agents()  8  connect the agents: from here on all ranks end together
    set_up_torch()    9  choose the GPU, and create the process group

Then the script runs in the rank (runner/lifecycle.py: run_script), and Python's own exit ends it, with leave_job() as
the last of the atexit functions. A start that fails before step 8 is refused: one rank prints a named reason, and every
rank exits with status 3. Whatever fails later ends the job on all ranks, with a report of the rank that failed first
(runner/termination.py, agent/coordinator.py); then all agents exit with the same status.

A program with its own main() takes part by mpiddp.init_process_group() (api.py), which calls start_program(). It has no
agent (runner/own_main.py).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .agent.client import NoAgent
from .agent.start import fork_rank
from .base import timeline
from .base.communicator import Communicator
from .base.config import RESTART_VARIABLE, LaunchConfig
from .base.errors import LaunchError, LocalLaunchError
from .base.stderr import warn
from .base.termination import flush, flush_and_wait, needs_exit_functions, skip_exit_functions
from .bootstrap import site
from .bootstrap.mpi_init import initialise_mpi
from .bootstrap.prepare import bind_cores, collect_ready_facts, import_torch, set_torch_env
from .bootstrap.probe import AddressProber
from .bootstrap.rank0 import BootstrapHost
from .bootstrap.refusal import refuse, refuse_alone, refusing_early
from .bootstrap.rollcall import Rendezvous, await_all
from .discovery import launchers, runtime
from .discovery.host import collect_host_facts
from .discovery.mpi import identify_library
from .failure import exception
from .output.redirect import choose_output_target, enable_line_buffering
from .runner import script, signals
from .runner.exec import check_started_once
from .runner.lifecycle import RunningJob, leave_job, prepare_stop, run_script, with_local_rank
from .runner.termination import Termination
from .systems.mpi_libraries import OPEN_MPI
from .systems.statuses import EXIT_CANNOT_START, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from mpi4py import MPI

    from .agent.client import AgentClient
    from .bootstrap.membership import Membership
    from .runner.stop import Stop

Program = Callable[[RunningJob, LaunchConfig], int]  # returns the exit status of a rank
Connect = Callable[[LaunchConfig, "launchers.LaunchFacts | None", "AgentClient | NoAgent"], Communicator]
job: RunningJob | None = None  # which `launch` started in this process


def connect_by_mpi(
    config: LaunchConfig, started_by: launchers.LaunchFacts | None, agent: AgentClient | NoAgent
) -> Communicator:
    """Initialise MPI, and return the communicator of all ranks; raise LaunchError."""
    MPI = initialise_mpi(config, started_by, agent)
    from .bootstrap.mpi_communicator import MpiCommunicator  # which loads MPI

    return MpiCommunicator(MPI.COMM_WORLD)


def launch(config: LaunchConfig, program: Program = run_script, connect: Connect = connect_by_mpi) -> int:
    """Start this rank, run the script in it, or another program, and return the exit status."""
    global job
    if not config.agent:
        return run_without_agent(config)
    try:
        job = start(config, connect)
    except LaunchError:  # it is printed
        return EXIT_CANNOT_START
    assert job.termination
    leave = functools.partial(leave_job, job, config)
    atexit.register(leave)
    try:
        if config.explain is not None:
            from .reporting.map import print_explanation

            file = config.script.target if config.script and config.script.is_file else ""
            describe = functools.partial(job.membership.explain, file, config)
            job.status = print_explanation(describe, job.membership.environment, config.explain)
        else:
            job.termination.begin_script(leave)
            job.status = program(job, config)
        return job.status
    except BaseException as error:
        job.failure = error
        raise


def start(config: LaunchConfig, connect: Connect) -> RunningJob:
    """Start this rank, up to the script; raise LaunchError, which is printed already, if the job cannot start."""
    timeline.begin_stage("agent")
    prepare_process(config)
    started_by = launchers.read_launch_facts(os.environ)
    agent = fork_rank(config, started_by)  # 1
    stop = prepare_stop(config, started_by)
    with refusing_early(agent), signals.signals_held() if stop else contextlib.nullcontext():
        check_started_once()
        comm = connect(config, started_by, agent)  # 2
        signals.restore_dispositions()
    with refusing(comm, agent):
        membership = meet(comm, config, agent, stop)  # 3 to 7
    if not needs_exit_functions(os.environ):
        skip_exit_functions()
    started = connect_agents(membership, config, agent, stop, started_by)  # 8
    assert started.termination
    with reporting(started.termination):
        if config.explain is None:
            enable_line_buffering()
            if agent.is_forwarded:
                flush()
                agent.configure_output(*choose_output_target(membership, config))
        set_up_torch(started, config, agent)  # 9
        timeline.begin_stage("ready")
        if config.stage:
            from .staging.stage import update_record

            update_record()
        if membership.environment.rank == 0:
            from .reporting.map import print_start  # the other ranks need not load it

            print_start(membership.environment, membership.endpoint.run_id, membership.seats, config,
                        os.path.dirname(membership.log.path), agent.show_text)
    return started


def prepare_process(config: LaunchConfig) -> None:
    """Prepare this process for the script, as far as that precedes the fork of the rank."""
    if config.script is not None:
        script.set_path(config.script)
    runtime.drop_foreign_run_id(os.environ)
    if RESTART_VARIABLE in os.environ:  # the supervisor awaits a report on this job, and not on jobs that it submits
        os.environ.pop("MPIDDP_ERROR_FILE", None)
    signals.save_preloaded_handlers()


def meet(
    comm: Communicator, config: LaunchConfig, agent: AgentClient | None = None, stop: Stop | None = None
) -> Membership:
    """Bring the ranks of a communicator together as a job, still without a process group. Collective.

    The startup timeout counts from the fork of the rank, if it has an agent. `stop` knows when the job must stop.
    Raises LaunchError, the same on every rank, or LocalLaunchError.
    """
    began_s = agent.began_s if agent else time.monotonic()
    rendezvous = Rendezvous(comm, config.startup_timeout_s, began_s)
    rank0 = BootstrapHost(rendezvous, config, agent)  # its methods run on rank 0 only
    timeline.begin_stage("facts")
    facts = collect_host_facts(comm, config, stop.left_s() if stop else None)
    facts = facts._replace(**site.applied.list_facts())
    host, target = rendezvous.exchange("collecting host facts", facts, rank0.plan_hosts)  # 3
    timeline.begin_stage("variables and cores")
    prober = AddressProber(target, facts.interfaces) if target else None
    warn(host.warnings)
    saved_env = set_torch_env(host, config)
    cpus = bind_cores(host)  # 4
    if config.stage:
        from .staging.stage import stage

        stage(rendezvous, host.place, config)
    devices = import_torch(config, cpus)  # 5
    ready = collect_ready_facts(host, cpus, devices, prober)
    plan = rendezvous.exchange("importing torch", ready, rank0.plan_devices)  # 6
    warn(plan.warnings)
    if config.check:
        from .check.preflight import check_nodes

        check_nodes(rendezvous, host.place, plan.device, config)
    timeline.begin_stage("store")
    from .bootstrap.membership import join_job  # which imports torch

    return join_job(rendezvous, host.place, plan, config, saved_env, rank0.server)  # 7


def connect_agents(
    membership: Membership, config: LaunchConfig, agent: AgentClient, stop: Stop | None,
    started_by: launchers.LaunchFacts | None,
) -> RunningJob:
    """Make this rank's agent join the others: from now on the ranks end together."""
    timeline.begin_stage("connecting agents")
    agent.report_stage("connecting agents")
    by_open_mpi = started_by is not None and started_by.launcher.library == OPEN_MPI
    termination = Termination(agent, membership.identify(config), config, by_open_mpi)
    termination.join_agents(membership.endpoint)
    write_trace = None
    if config.trace_file:
        from .reporting import trace

        write_trace = functools.partial(trace.write_trace, config.trace_file)
    return RunningJob(membership, termination, stop, write_trace)


def set_up_torch(started: RunningJob, config: LaunchConfig, agent: AgentClient) -> None:
    """Make this rank's device torch's current one, and create the process group unless the script does.

    Returns when all ranks are watched: if a script ended at once, its launcher might end rank 0 before that has the
    report. Raises RuntimeError if the GPU is faulty, or in use by another job. A program that is no script, such as the
    check, chooses its device itself.
    """
    if config.script is not None and started.membership.environment.device.type != "cpu":
        timeline.begin_stage("device")
        agent.report_stage("device")
        started.membership.use_device()
    if not config.init:
        agent.await_registration()
        started.membership.await_all("connecting agents", started.refuse_alone)
        return
    timeline.begin_stage("process group")
    agent.report_stage("process group")
    started.membership.create_group(config.group_timeout, started.refuse_alone)
    agent.await_registration()
    if config.trace_file:
        timeline.begin_stage("first collective")
        started.membership.groups.try_out()


@contextlib.contextmanager
def reporting(termination: Termination) -> Iterator[None]:
    """Run the start after step 8 in this block; if it raises, end the job on all ranks with a report of this one."""
    try:
        yield
    except BaseException as error:
        raise SystemExit(termination.fail_by_exception(error)) from None


@contextlib.contextmanager
def refusing(comm: Communicator, agent: AgentClient | NoAgent) -> Iterator[None]:
    """Run the start after MPI_Init in this block; if it fails, print the reason once, and end the job on all ranks."""
    try:
        yield
    except LocalLaunchError as error:
        agent.report_locally_handled()
        refuse_alone(comm, error)
    except LaunchError as error:
        agent.report_locally_handled()
        refuse(comm, error)
        comm.finalize()
        agent.close()
        raise
    except KeyboardInterrupt:  # from the user, or from an MPICH launcher that ends the ranks of a job
        agent.report_locally_handled()
        comm.abort(EXIT_INTERRUPTED, reason_printed=False)
    except Exception as error:
        agent.report_locally_handled()
        exception.print_exception(error)
        flush_and_wait()
        comm.abort(exception.find_script_status(error))


def run_without_agent(config: LaunchConfig) -> int:
    """Run the script in this process, which has no agent (--no-agent), and return the exit status.

    An exception passes through, so that a debugger sees it; then it ends the job by MPI_Abort.
    """
    assert config.script is not None
    prepare_process(config)
    started_by = launchers.read_launch_facts(os.environ)
    agent, stop = NoAgent(), prepare_stop(config, started_by)
    try:
        with refusing_early(agent):
            comm = connect_by_mpi(config, started_by, agent)
        with refusing(comm, agent):
            started = RunningJob(meet(comm, config, stop=stop), stop=stop)
            started.membership.use_device()
            if config.init:
                started.membership.create_group(config.group_timeout, started.refuse_alone)
    except LaunchError:  # it is printed
        return EXIT_CANNOT_START
    signals.restore_dispositions()

    def end() -> None:
        """Leave the job as the last of the atexit functions, or abort it."""
        if started.failure is not None and (status := exception.find_script_status(started.failure)):
            flush_and_wait()
            comm.abort(status)
        started.leave_over_mpi(config.exit_timeout_s)
        comm.finalize()

    atexit.register(end)
    started.membership.groups.adopt_calls()
    try:
        script.run_main(with_local_rank(config.script, config.local_rank_option))
    except BaseException as error:
        started.failure = error
        raise
    return 0


def start_program(comm: MPI.Comm, config: LaunchConfig) -> RunningJob:
    """Start this rank of a program with its own main(), up to the process group. Collective; raises LaunchError.

    If only this rank knows the reason, the job ends, unless this rank is alone in it.
    """
    check_whole_world(comm)
    site.apply_site(config)  # what MPI reads comes too late
    try:
        return join(comm, config, prepare_stop(config, launchers.read_launch_facts(os.environ)))
    except LocalLaunchError as error:
        if comm.size == 1:
            raise
        from .bootstrap.mpi_communicator import MpiCommunicator

        refuse_alone(MpiCommunicator(comm), error)


def join(comm: MPI.Comm, config: LaunchConfig, stop: Stop | None = None) -> RunningJob:
    """Bring the ranks of a communicator together as a job that has no agents of its own. Collective.

    Raises LaunchError, the same on every rank, or LocalLaunchError.
    """
    from .bootstrap.mpi_communicator import MpiCommunicator

    ranks = MpiCommunicator(comm)
    await_all(ranks, config.startup_timeout_s, time.monotonic())
    return RunningJob(meet(ranks, config, stop=stop), stop=stop)


def check_whole_world(comm: MPI.Comm) -> None:
    """Raise LaunchError `split-world` if MPI has made several worlds of a launcher's processes, as under srun alone.

    A process may rightly be a world of its own: if a rank has started it, if it asks for COMM_SELF, or if somebody has
    removed the variables by which MPI finds mpirun or mpiexec, which always set some.
    """
    from mpi4py import MPI

    from .planning.compatibility import check_world_size

    runtime.drop_foreign_run_id(os.environ)
    started_by = launchers.read_launch_facts(os.environ)
    is_detached = started_by is not None and not started_by.offers and started_by.launcher.library is not None
    if comm != MPI.COMM_SELF and not is_detached and runtime.find_outer_launcher(os.environ) is None:
        check_world_size(started_by, MPI.COMM_WORLD.size, identify_library())
