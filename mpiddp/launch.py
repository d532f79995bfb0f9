"""The program: from a process that MPI started to a running script, and out again."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from .act import cores, failure, importing, script, signals, trace, variables
from .act.ending import Ending, abort, c_exit, give_signals_back, let_through, skip_exit_functions
from .act.hosting import Hosting
from .act.output import Output, let_flush_fail
from .act.probe import Probe
from .act.rollcall import REMIND_AFTER_S, TURNS, RollCall
from .act.say import say
from .act.sentinel import Sentinel
from .act.waiting import wait_for
from .config import LaunchConfig, Shown
from .environment import Environment
from .errors import EXIT_CANNOT_START, EXIT_REQUEUE, EXIT_USAGE, LaunchError, LonelyLaunchError
from .facts import fabric, mpi, runtime
from .facts.devices import DeviceFacts, device_facts, torch_error
from .facts.host import HostFacts, host_facts
from .facts.library import Library, library
from .facts.script import asks_to_stop, script_facts
from .plan.environment import SET_BY_HAND, exports, ways
from .plan.fit import check_fit, check_nested, check_tasks, check_whole, hidden, unlaunched
from .plan.job import HostPlan, ReadyFacts
from .plan.map import Seat, lines, records
from .plan.network import check_reached
from .plan.problems import check_logs
from .plan.transports import left_out
from .version import __version__

if TYPE_CHECKING:
    from types import FrameType

    import torch.distributed as dist
    from mpi4py import MPI

    from .act.guard import Guard
    from .act.membership import Membership
    from .act.stop import Stop
    from .plan.environment import Endpoint

membership: Membership | None = None  # of the job that `launch` started in this process


def launch(config: LaunchConfig) -> int:
    """Start this rank, run the script in it, and return the exit status.

    The rank leaves the job after the script's threads and atexit functions. A script that fails ends
    the job on all ranks. Where another program runs ours, a profiler, say, it does its work when we return:
    the process is left by Python's own exit.
    """
    callers = [frame.f_globals for frame in outer_frames(sys._getframe())]
    if all(names.get("__name__") == "runpy" for names in callers[1:]):  # Python itself runs our __main__, or another
        return start_and_run(config)
    status = Status()
    if getattr(callers[0].get("__spec__"), "name", "") == f"{__package__}.__main__":
        atexit.register(status.insist)  # which comes after all that is registered from now on
    status.number = start_and_run(config._replace(python_exit=True))
    return status.number


class Status:
    """Our exit status, which a program that runs ours may swallow, as Python's profilers do."""

    number = 0

    def insist(self) -> None:
        """End this process with it."""
        if self.number:
            c_exit(self.number)


def outer_frames(frame: FrameType) -> list[FrameType]:
    """Return the frames of those that have called this package, innermost first."""
    outer = []
    while frame.f_back is not None:
        frame = frame.f_back
        outer.append(frame)
    own = f"{__package__}."
    return list(itertools.dropwhile(lambda one: str(one.f_globals.get("__name__")).startswith(own), outer))


def start_and_run(config: LaunchConfig) -> int:
    """Do what launch() does, and leave the process as `config` says."""
    ending = begin(config)
    if ending is None:
        return EXIT_CANNOT_START
    assert membership is not None
    leaving = functools.partial(leave, config, ending)
    atexit.register(leaving)
    if config.explain is not None:
        return explain(membership, config.explain)
    place = membership.environment
    ending.watch_script(leaving, config.shown.has(place.rank, place.local_rank), config.prefix)
    return run(membership, config, ending)


def begin(config: LaunchConfig) -> Ending | None:
    """Start this rank, up to the script, and return how it ends; say why and return None where the job cannot start."""
    global membership
    trace.begin("sentinel")
    if config.script is not None:
        script.set_path(config.script)
    started_by = runtime.detect(os.environ)
    output = Output(is_relayed(config))
    watched = sentinel(config, started_by)
    stop = prepare_stop(config, started_by)
    try:
        with signals.held() if stop else contextlib.nullcontext():
            MPI = initialise_mpi(config, started_by, watched)
            give_signals_back()
    except LaunchError as error:
        watched.settle()
        failure.refuse(str(error))
        return None
    membership = start(MPI, config, watched)
    if membership is None:
        MPI.Finalize()
        watched.dismiss()
        return None
    if stop is not None:
        membership.stop(stop)
    if not config.python_exit and not needs_exit_functions():
        skip_exit_functions()
    trace.begin("sentinels meet")
    ending = end_of(membership, config, watched, output)
    if config.init:
        try:
            trace.begin("process group")
            membership.create_group(config.group_timeout, give_up)
            if config.trace_file:
                trace.begin("first collective")
                membership.groups.try_out()
        except BaseException as error:
            ending.fail_by(error)
            ending.end_failed()
    trace.begin("ready")
    if membership.environment.rank == 0:
        announce(membership, config)
    return ending


def begin_within(
    comm: MPI.Comm, config: LaunchConfig, leave: Callable[[], None]
) -> tuple[Membership, Guard | None]:
    """Start this rank of a program that has its own main(), up to the process group, and watch it as a script.

    `leave` is called where the program ends without having left the job. A single rank, for which nobody waits, is
    not watched, nor one that is not in the main thread, where signals can't be handled. Raises LaunchError; what only
    this rank knows ends the job.
    """
    if comm.size == 1 or threading.current_thread() is not threading.main_thread():
        return meet(comm, config), None
    from .act.guard import Guard

    started_by = runtime.detect(os.environ)
    watched = sentinel(config, started_by)
    watched.stage("the start after MPI_Init")
    try:
        await_all(comm, config.startup_timeout_s)
        member = meet(comm, config, watched.serve)
    except LonelyLaunchError as error:
        watched.settle()
        give_up(error)
    except BaseException:
        watched.settle()
        watched.dismiss()
        raise
    if stop := prepare_stop(config, started_by):
        member.stop(stop)
    place = member.environment
    ending = end_of(member, config, watched, Output(is_relayed(config)))
    ending.direct_output(config.shown.has(place.rank, place.local_rank), config.prefix)
    ending.watch(leave)
    return member, Guard(ending, leave)


def await_all(comm: MPI.Comm, timeout_s: float) -> None:
    """Return when all ranks have come to init_process_group(); raise LonelyLaunchError where one has not, in time."""
    barrier = comm.Ibarrier()
    rank = f"rank {comm.rank} of {comm.size}"
    late = LonelyLaunchError(
        "startup-timeout",
        found=f"not all ranks had called init_process_group() {timeout_s:g} s after {rank}",
        needed="the same call by every rank of the communicator",
        do="look for a rank that failed before, or that takes another way; more time: MPIDDP_STARTUP_TIMEOUT",
    )

    def remind(waited_s: float) -> None:
        if comm.rank == 0:
            say(f"mpiddp: {rank} has waited {waited_s:.0f} s in init_process_group() for others")

    deadline = time.monotonic() + timeout_s + min(comm.rank, TURNS)
    wait_for(lambda: barrier.Test() or None, deadline, lambda: late, remind, REMIND_AFTER_S)


def end_of(member: Membership, config: LaunchConfig, watched: Sentinel, output: Output) -> Ending:
    """Return how this rank ends, from now on together with the others."""
    from mpi4py import MPI

    aborts_badly = runtime.kills_aborted(runtime.detect(os.environ))
    description = member.describe(config.abort_grace_s, aborts_badly, config.error_file)
    ending = Ending(MPI, watched, description, output, config.python_exit)
    ending.join(member.endpoint)
    return ending


def is_relayed(config: LaunchConfig) -> bool:
    """Tell whether output may have to go two ways, or to get a prefix."""
    return config.prefix or (bool(config.log_dir) and config.shown != Shown(everyone=False))


def sentinel(config: LaunchConfig, started_by: runtime.Runtime | None) -> Sentinel:
    """Fork this rank's sentinel; that of rank 0 can ask other hosts whether they are there."""
    rank = started_by.rank if started_by else 0
    return Sentinel(
        f"rank {rank} on {socket.gethostname()}", runtime.is_first_on_node(os.environ),
        runtime.slurm_step(os.environ, started_by),
        lambda: runtime.slurm_hosts(os.environ) if rank == 0 else [], config.startup_timeout_s)


def prepare_stop(config: LaunchConfig, started_by: runtime.Runtime | None) -> Stop | None:
    """Return what says when the job stops where somebody asks: the script in its code, or --stop-before."""
    if config.stop_before_s is None and not (config.script and asks_to_stop(config.script)):
        return None
    from .act.stop import Stop

    stop = Stop()
    if config.stop_before_s is not None:
        set_walltime(stop, config.stop_before_s, started_by)
    return stop


def set_walltime(stop: Stop, before_s: float, started_by: runtime.Runtime | None) -> None:
    """Let it be time to stop `before_s` seconds before Slurm ends the job, and warn where nobody tells when that is."""
    is_first = started_by is None or started_by.rank == 0
    end = runtime.job_end(os.environ, is_first)
    if end is not None:
        stop.stop_at(end - before_s)
    elif is_first and runtime.slurm_job(os.environ):
        warn(["walltime-unknown: squeue does not say here when the job ends, so that only a signal stops it in time"])


def needs_exit_functions() -> bool:
    """Tell whether somebody needs the exit functions that C libraries have registered up to now.

    MPICH and its like tell their launcher in one of them that the rank is through: without, it ends the other
    ranks. Profilers that were put into the process write their results in one.
    """
    tools = ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH")
    return library().name != "Open MPI" or any(os.environ.get(name) for name in tools)


def explain(member: Membership, rank: int) -> int:
    """Print on one rank where its variables come from, and return the exit status."""
    env = member.environment
    if rank >= env.world_size:
        if env.rank == 0:
            say(f"mpiddp: --explain {rank}: the job has ranks 0 to {env.world_size - 1}")
        return EXIT_USAGE
    if env.rank == rank:
        print(member.explain(), flush=True)
    return 0


def run(member: Membership, config: LaunchConfig, ending: Ending) -> int:
    """Run the script and return its exit status, or end the job on all ranks where it fails.

    EXIT_REQUEUE is no failure where all ranks have agreed to stop.
    """
    assert config.script is not None
    member.groups.adopt_calls()
    signals.protect_workers()
    status = 0
    try:
        try:
            trace.begin("script")
            script.run(config.script)
        except SystemExit as error:
            status = failure.status_of(error)
            if status and not (status == EXIT_REQUEUE and member.stops()):
                raise
        if not config.python_exit:
            ending.finish(status)
    except BaseException as error:
        status = ending.fail_by(error)
    return status


def initialise_mpi(config: LaunchConfig, started_by: runtime.Runtime | None, watched: Sentinel) -> Any:
    """Initialise MPI and return `mpi4py.MPI`; raise LaunchError, on every rank, where it can't be whole.

    Where launcher and library don't fit, MPI_Init ends the process or makes each a world of its own:
    so the fit is checked before, and the number of ranks after.
    """
    check_nested(runtime.outer_launcher(os.environ), config.script)
    check_tasks(started_by)
    trace.begin("import mpi4py")
    MPI = mpi.load()
    trace.begin("check launcher")
    loaded = library()
    try:
        check_fit(started_by, loaded)
    except LaunchError:  # only now, and on the rank that speaks, is the time well spent to ask srun
        check_fit(started_by, loaded, runtime.srun_mpi_types() if started_by and started_by.rank == 0 else ())
    watched.stage("MPI_Init")
    warn(unlaunched(started_by, loaded, runtime.slurm_tasks(os.environ)))
    settings = variables.set_all(transports(loaded)) | variables.hide(hidden(started_by, loaded))
    trace.begin("MPI_Init")
    mpi.initialise(MPI)
    variables.restore(settings)
    watched.stage("the start after MPI_Init")
    try:
        check_whole(started_by, MPI.COMM_WORLD.size, loaded)
    except LaunchError:
        MPI.Finalize()
        raise
    return MPI


def transports(loaded: Library) -> dict[str, str]:
    """Return the variables that spare MPI_Init the search for networks that this node does not have."""
    if loaded.name != "Open MPI" or "FI_PROVIDER" in os.environ or fabric.has_fabric():
        return {}
    chosen = fabric.chosen_components(os.environ, loaded.path)
    return {fabric.PREFIX + name: value for name, value in left_out(chosen).items()}


def start(MPI: Any, config: LaunchConfig, watched: Sentinel) -> Membership | None:
    """Join the job of all MPI ranks; say why and return None where it cannot start, on every rank."""
    try:
        return meet(MPI.COMM_WORLD, config, watched.serve)
    except LonelyLaunchError as error:
        watched.settle()
        give_up(error)
    except LaunchError as error:
        refuse(MPI.COMM_WORLD, error)
        return None
    except KeyboardInterrupt:  # from the user, or from an MPICH launcher that ends the ranks of a job
        watched.settle()
        abort(MPI, failure.INTERRUPTED)
    except Exception as error:
        watched.settle()
        failure.show(error)
        let_through()
        abort(MPI, failure.status_of(error))


def refuse(comm: MPI.Comm, error: LaunchError) -> None:
    """Print on rank 0 why the job cannot start, and return on every rank when that has got through. Collective."""
    if comm.rank == 0:
        say(str(error))
        time.sleep(failure.FORWARDING_S)
    said = comm.Ibarrier()
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: said.Test() or None, time.monotonic() + failure.PATIENCE_S, TimeoutError,
                 lambda _: None, failure.PATIENCE_S)


def give_up(error: LonelyLaunchError) -> NoReturn:
    """End the job on all ranks for a reason that only this one knows."""
    from mpi4py import MPI

    say(str(error))
    let_through()
    abort(MPI, EXIT_CANNOT_START)


def meet(
    comm: MPI.Comm, config: LaunchConfig, serve_sentinels: Callable[[str, str], int] = lambda *_: 0
) -> Membership:
    """Bring the ranks of a communicator together as a job, which has no process group yet; return this rank's part.

    `serve_sentinels` lets the ranks' sentinels meet, and returns where: as Sentinel.serve() does.
    Collective. Raises LaunchError, the same on every rank, or LonelyLaunchError.
    """
    roll = RollCall(comm, config.startup_timeout_s)
    hosting = Hosting(config, serve_sentinels)  # for rank 0
    trace.begin("facts")
    found = look_at_host(comm, config)
    host, door = roll.agree("MPI ready", found, hosting.plan_hosts)
    roll.hosts = hosting.hosts
    trace.begin("variables and cores")
    probe = Probe(door, found.interfaces) if door else None
    warn(host.warnings)
    replaced = apply(host, config)
    own = host.cpus or frozenset(os.sched_getaffinity(0))
    cores.bind(own)
    seen = look_at_devices(config, own)
    former = {name: os.environ[name] for name in SET_BY_HAND if name in os.environ}
    ready = ReadyFacts(host.place, seen, former, seat(host, own), host.choice, probe.trials() if probe else ())
    plan = roll.agree("importing torch", ready, hosting.plan_devices)
    warn(plan.warnings)
    trace.begin("store")
    replaced |= variables.set_missing(ways(plan.interface, host.place.num_nodes))
    replaced |= variables.set_all(exports(
        host.place, plan.endpoint, config.virtual_local_rank, runtime.restart_count(os.environ)))

    from .act import device
    from .act.membership import Membership
    from .act.process_group import GroupMaker
    from .act.rendezvous import KeySpaces

    environment = Environment(
        *host.place, master_addr=plan.endpoint.address, master_port=plan.endpoint.port,
        backend=plan.backend, device=device.use(plan.device),
    )
    log = open_logs(roll, config, plan.endpoint)
    groups = GroupMaker(environment, KeySpaces(connect(roll, plan.endpoint), plan.endpoint.token))
    return Membership(environment, roll, groups, hosting.server, replaced, plan.endpoint, log, plan.seats)


def look_at_host(comm: MPI.Comm, config: LaunchConfig) -> HostFacts:
    """Return the facts of this rank before torch. Collective."""
    node, whole = mpi.node_key(comm)
    found = script_facts(config.script) if config.script else None
    fresh = "torch" not in sys.modules and config.device in (None, "cuda")  # CUDA cannot have started
    return host_facts(os.environ, comm.rank, node, whole, found, library().title, look_at_gpus=fresh)


def look_at_devices(config: LaunchConfig, own: frozenset[int]) -> DeviceFacts:
    """Import torch and return what it finds for this rank, whose cores are `own`."""
    trace.begin("import torch")
    with importing.quick():
        error = torch_error()
    cores.bind(own)  # an OpenMP that was told to bind its threads has taken them from this one
    trace.begin("devices")
    return DeviceFacts(error=error) if error else device_facts(cpu_only=config.device == "cpu")


def apply(host: HostPlan, config: LaunchConfig) -> dict[str, str | None]:
    """Set the variables that torch must find when it is imported, and return what they were."""
    threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
    return variables.set_all({**threads, **host.settings}) | variables.set_missing(host.defaults)


def seat(host: HostPlan, cpus: frozenset[int]) -> Seat:
    """Return where this rank sits, but for its device, and its interface where the user has named none."""
    threads = os.environ["OMP_NUM_THREADS"]
    return Seat(host.place.rank, host.place.node_rank, socket.gethostname(), "", None, cpus, host.numa,
                int(threads) if threads.isdigit() else 0, os.environ.get("GLOO_SOCKET_IFNAME", ""))


def open_logs(roll: RollCall, config: LaunchConfig, endpoint: Endpoint) -> str:
    """Return this rank's log, empty where none is wanted; raise LaunchError `log-unwritable` on every rank."""
    if not config.log_dir:
        return ""
    from .act.output import create

    job = runtime.slurm_job(os.environ) or endpoint.run_id
    log = f"{config.log_dir}/{job}/rank-{roll.rank:05d}.{socket.gethostname().split('.')[0]}.log"
    roll.agree("opening logs", create(log), lambda errors: check_logs(errors, roll.hosts))
    return log


def connect(roll: RollCall, endpoint: Endpoint) -> dist.Store:
    """Connect to rank 0's store; raise LaunchError `address-unreachable` where some rank can't.

    This is the last point at which rank 0 can name a rank that is late: what follows waits in torch.
    """
    from .act import rendezvous

    store, error = rendezvous.connect(endpoint, roll.remaining_s)
    roll.agree("devices and store", error, lambda errors: check_reached(errors, roll.hosts, endpoint))
    assert store is not None
    return store


def warn(warnings: Sequence[str]) -> None:
    """Print warnings, which only rank 0's plan has."""
    for warning in warnings:
        say(f"mpiddp: warning: {warning}")


def announce(member: Membership, config: LaunchConfig) -> None:
    """Print the start line and the map, and write the map to a file, where they are wanted."""
    env = member.environment
    nodes = "1 node" if env.num_nodes == 1 else f"{env.num_nodes} nodes"
    ranks = "1 rank" if env.world_size == 1 else f"{env.world_size} ranks"
    if not config.quiet:
        start = (f"mpiddp {__version__}: {ranks} on {nodes}, {env.backend} on {env.device.type}, "
                 f"tcp://{env.master_addr}:{env.master_port}")
        say("\n".join([start, *lines(member.seats)]))
    if config.map_file.endswith(".json"):
        failure.write_json(config.map_file, records(member.seats))
    elif config.map_file:
        from .act.picture import svg

        try:
            failure.write(config.map_file, svg(member.seats))
        except ImportError as error:
            say(f"mpiddp: cannot draw {config.map_file}: {error} (pip install drawsvg)")


def leave(config: LaunchConfig, ending: Ending) -> None:
    """Leave the job and finalise MPI, in the rank's own process and in none that it forked."""
    global membership
    if not ending.is_ours() or membership is None:
        return
    if ending.failed:
        if config.python_exit:
            ending.end_failed()
        return
    from mpi4py import MPI

    try:
        if not MPI.Is_finalized():
            ending.left()
            trace.begin("exit")
            membership.leave(config.exit_timeout_s, config.trace_file)
            MPI.Finalize()
        membership = None
        lost = ending.close()
    except BaseException as error:  # a signal's handler may raise here, too
        ending.fail_leaving(error)
    if lost and config.python_exit:
        let_flush_fail()
