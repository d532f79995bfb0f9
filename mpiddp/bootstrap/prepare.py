"""Make the plan before torch come true in this process: variables, cores, and torch itself."""

from __future__ import annotations

import contextlib
import os

from ..base.config import LaunchConfig
from ..base.timeline import begin
from ..discovery.devices import DeviceFacts, read_device_facts, try_import_torch
from ..discovery.runtime import hostname
from ..planning.environment import SET_BY_HAND
from ..planning.job import Placement, PostTorchFacts, PreTorchPlan
from . import variables
from .probe import Probe
from .torch_import import quick


def set_variables(host: PreTorchPlan, config: LaunchConfig) -> variables.Former:
    """Set the variables that torch must find when it is imported, and return what they were."""
    threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
    return variables.set_all({**threads, **host.settings}) | variables.set_missing(host.defaults)


def bind_cores(host: PreTorchPlan) -> frozenset[int]:
    """Run on this rank's CPUs from now on, and return them."""
    cpus = host.cpus or frozenset(os.sched_getaffinity(0))
    bind(cpus)
    return cpus


def bind(cpus: frozenset[int]) -> None:
    """Bind every thread of this process to these CPUs, and with them all that they start later."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if os.sched_getaffinity(thread) != cpus:
                os.sched_setaffinity(thread, cpus)


def import_torch(config: LaunchConfig, cpus: frozenset[int]) -> DeviceFacts:
    """Import torch on these CPUs and return which devices it finds."""
    begin("import torch")
    with quick():
        error = try_import_torch()
    bind(cpus)  # OpenMP may have moved this thread, if it was told to bind its own (OMP_PROC_BIND)
    begin("devices")
    return DeviceFacts(error=error) if error else read_device_facts(cpu_only=config.device == "cpu")


def ready_facts(host: PreTorchPlan, cpus: frozenset[int], devices: DeviceFacts, probe: Probe | None) -> PostTorchFacts:
    """Return what rank 0 is told of this rank after torch."""
    former = {name: value for name in SET_BY_HAND
              if (value := os.environ.get(name)) is not None and value != variables.ours.get(name)}
    return PostTorchFacts(host.place, devices, former, seat(host, cpus), host.choice, probe.trials() if probe else ())


def seat(host: PreTorchPlan, cpus: frozenset[int]) -> Placement:
    """Return where this rank sits, without its device; its interface only if the user has named one."""
    threads = os.environ["OMP_NUM_THREADS"]
    return Placement(host.place.rank, host.place.node_rank, hostname(), "", None, cpus, host.numa,
                int(threads) if threads.isdigit() else 0, os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
