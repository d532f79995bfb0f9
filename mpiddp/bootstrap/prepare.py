"""Prepare this process for torch: environment variables, CPU binding, a fast import."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..base.config import LaunchConfig
from ..base.timeline import begin_stage
from ..discovery.devices import DeviceFacts, read_device_facts, try_import_torch
from ..discovery.runtime import hostname
from ..planning.job import Placement, PostTorchFacts, PreTorchPlan
from ..systems.variables import SET_BY_HAND

if TYPE_CHECKING:
    from .probe import AddressProber

SavedEnv = dict[str, str | None]  # former values of variables; None if it was not set
values_set: dict[str, str] = {}  # the variables that this process has set


def set_env(new: Mapping[str, str]) -> SavedEnv:
    """Set variables and return their former values."""
    saved = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    values_set.update(new)
    return saved


def set_missing_env(new: Mapping[str, str]) -> SavedEnv:
    """Set those variables that are not set yet, and return their former values."""
    return set_env({name: value for name, value in new.items() if name not in os.environ})


def hide_env(prefixes: tuple[str, ...]) -> SavedEnv:
    """Remove the variables whose names begin with one of the prefixes, and return their former values."""
    return {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(prefixes)}


def restore_env(saved: Mapping[str, str | None]) -> None:
    """Give variables their former values, except those that somebody else has changed since then."""
    for name, value in saved.items():
        if os.environ.get(name) != values_set.get(name):
            continue
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def set_torch_env(host: PreTorchPlan, config: LaunchConfig) -> SavedEnv:
    """Set the variables that torch reads when it is imported, and return their former values."""
    threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
    return set_env({**threads, **host.settings}) | set_missing_env(host.defaults)


def bind_cores(host: PreTorchPlan) -> frozenset[int]:
    """Bind this process to its rank's CPUs, and return them."""
    cpus = host.cpus or frozenset(os.sched_getaffinity(0))
    bind_threads(cpus)
    return cpus


def bind_threads(cpus: frozenset[int]) -> None:
    """Bind every thread of this process to these CPUs; the threads that they start inherit that."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if os.sched_getaffinity(thread) != cpus:
                os.sched_setaffinity(thread, cpus)


def import_torch(config: LaunchConfig, cpus: frozenset[int]) -> DeviceFacts:
    """Import torch, bound to these CPUs, and return the devices that it finds."""
    begin_stage("import torch")
    with fast_import():
        error = try_import_torch()
    bind_threads(cpus)  # with OMP_PROC_BIND, OpenMP may have moved this thread
    begin_stage("devices")
    if error:
        return DeviceFacts(error=f"{error} ({sys.executable})")
    return read_device_facts(cpu_only=config.device == "cpu")


@contextlib.contextmanager
def fast_import() -> Iterator[None]:
    """Import torch in this block without garbage collections, and without reading torch's source.

    The objects that an import makes stay, so a collection finds nothing. At the end gc.freeze() and gc.unfreeze() move
    them to the oldest generation at once (CPython, Modules/gcmodule.c); otherwise the next collection would look at all
    of them. torch also asks inspect.getframeinfo() for the line number of each of its operators
    (torch/_library/utils.py). By default Python also reads the text of the line, and looks for the file of every
    module to do so.
    """
    from inspect import getframeinfo

    was_enabled, defaults = gc.isenabled(), getframeinfo.__defaults__
    gc.disable()
    if defaults == (1,):  # lines of context
        getframeinfo.__defaults__ = (0,)
    try:
        yield
    finally:
        getframeinfo.__defaults__ = defaults
        if gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect_ready_facts(
    host: PreTorchPlan, cpus: frozenset[int], devices: DeviceFacts, prober: AddressProber | None
) -> PostTorchFacts:
    """Return what rank 0 needs to know of this rank once torch is imported."""
    set_by_user = {name: value for name in SET_BY_HAND
                   if (value := os.environ.get(name)) is not None and value != values_set.get(name)}
    return PostTorchFacts(host.place, devices, set_by_user, find_seat(host, cpus), host.choice,
                          prober.await_trials() if prober else ())


def find_seat(host: PreTorchPlan, cpus: frozenset[int]) -> Placement:
    """Return this rank's placement, without its device; its interface only if the user has named one."""
    threads = os.environ["OMP_NUM_THREADS"]
    return Placement(host.place.rank, host.place.node_rank, hostname(), "", None, cpus, host.numa,
                     int(threads) if threads.isdigit() else 0, os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
