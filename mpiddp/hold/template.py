"""A rank's template: a process without threads that has imported torch, and forks the ranks of runs.

A rank of the hold starts it as a program of its own, so that it has nothing of MPI's. Its stdin has a line of JSON, a
`Template`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import json
import os
import random
import select
import signal
import socket
import sys
from typing import NamedTuple

from ..agent.process import PR_SET_CHILD_SUBREAPER
from ..agent.process_cleanup import end_descendants
from ..agent.start import PR_SET_PDEATHSIG
from ..base.config import LaunchConfig
from ..base.stderr import write_line
from ..bootstrap.prepare import fast_import
from ..discovery.runtime import hostname
from ..ipc.authentication import CONNECT_TIMEOUT_S, SERVER_PROOF_TIMEOUT_S, connect
from ..ipc.channel import Channel, Codec, listen
from ..systems.launchers import MPIRUN, SRUN
from ..systems.statuses import EXIT_CANNOT_START, wait_status_to_shell
from . import protocol
from .communicator import Meeting, meet

READ_BYTES = 2**16
IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
OUTPUT_GRACE_S = 0.2  # for what outlives the run's rank to be written
# What a run needs of mpiddp and torch, and would import otherwise; DistributedDataParallel imports torch._dynamo.
MODULES = ("torch", "torch.distributed", "torch._dynamo", "mpiddp.launch", "mpiddp.bootstrap.membership",
           "mpiddp.agent.process", "mpiddp.agent.connections", "mpiddp.agent.coordinator_server",
           "mpiddp.reporting.map")
SENT_CODEC: Codec[protocol.ToTemplate] = Codec(protocol.ToTemplate)


class Template(NamedTuple):
    """What a template knows: where the hold's server listens, what to import, and how the ranks of runs meet."""

    address: str
    port: int
    token: str
    preload: str  # names of packages, with commas
    rank: int
    size: int
    lowest: int
    is_one_node: bool
    library: str


def main() -> int:
    """Be a template until the hold ends; in the ranks of runs, be one, and return its exit status."""
    plan = Template(**json.loads(sys.stdin.readline()))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    error = import_all(plan.preload)
    connection = connect((plan.address, plan.port), plan.token, CONNECT_TIMEOUT_S, SERVER_PROOF_TIMEOUT_S)
    channel: Channel[protocol.FromTemplate, protocol.ToTemplate] = Channel(connection, SENT_CODEC)
    channel.send(protocol.Ready(plan.rank, error))
    keeper = Keeper(channel, plan.address)
    if (fork := keeper.run()) is None:
        os._exit(0)  # a thread of a package would be waited for
    return run(plan, fork, keeper.listener)


def import_all(preload: str) -> str:
    """Import what runs need, and the packages in `preload`; return why that is impossible, empty if it is not.

    A thread would be missing in the ranks that are forked, and a GPU's context would not work in them.
    """
    with fast_import():
        for name in MODULES:
            importlib.import_module(name)
        for name in filter(None, preload.split(",")):
            threads = len(os.listdir("/proc/self/task"))
            try:
                importlib.import_module(name)
            except Exception as error:
                return f"cannot import {name}: {type(error).__name__}: {error}"
            if len(os.listdir("/proc/self/task")) > threads:
                return f"{name} starts a thread while it is imported: leave it out of --preload"
            if sys.modules["torch"].cuda.is_initialized():
                return f"{name} uses the GPU while it is imported: leave it out of --preload"
    return ""


class NoMpi(importlib.abc.MetaPathFinder):
    """Refuses to import MPI in a run: its ranks are none of MPI's."""

    def find_spec(self, name: str, *_: object) -> None:
        """Raise ImportError for mpi4py.MPI."""
        if name == "mpi4py.MPI":
            raise ImportError("this script runs in a hold (python -m mpiddp.run), and MPI's world is the hold's; to "
                              f"use mpi4py, start the script with {MPIRUN.command} or {SRUN.command}")


class Keeper:
    """Waits for the server's orders, and for the run's rank: its output, and its end."""

    def __init__(self, channel: Channel[protocol.FromTemplate, protocol.ToTemplate], address: str) -> None:
        self.listener: socket.socket | None = None  # on rank 0, for the next run
        self._channel, self._address = channel, address
        self._child = 0  # the agent of the run's rank, 0 for none
        self._pidfd = -1
        self._pipes: dict[int, int] = {}  # streams by descriptors
        self._is_full = False  # the server takes no output
        for number in IGNORED:  # which a launcher or a terminal may send to all processes of the hold's ranks
            signal.signal(number, signal.SIG_IGN)

    def run(self) -> protocol.Fork | None:
        """Return at the end of the hold, and what to run in the child that is forked for a run."""
        while True:
            waiting = select.poll()
            waiting.register(self._channel, select.POLLIN | (select.POLLOUT if self._is_full else 0))
            for descriptor in (self._pidfd, *(() if self._is_full else self._pipes)):
                if descriptor >= 0:
                    waiting.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in waiting.poll()]
            self._is_full = self._is_full and not self._channel.flush()
            for descriptor in ready:
                if descriptor in self._pipes:
                    self._forward(descriptor)
            if self._pidfd in ready:
                self._reap()
            if self._channel.fileno() in ready:
                try:
                    messages = self._channel.receive(0)
                except (EOFError, OSError):  # the hold ends
                    messages = [protocol.EndHold()]
                for message in messages:
                    match message:
                        case protocol.OpenPort():
                            if self.listener is not None:  # of a run that was not started
                                self.listener.close()
                            self.listener = listen(self._address, 0)
                            self._channel.send(protocol.PortOpened(int(self.listener.getsockname()[1])))
                        case protocol.Fork():
                            if self._fork():
                                return message
                        case protocol.Signal(number) if self._child:
                            os.kill(self._child, number)
                        case protocol.EndHold():
                            self._end_run()
                            return None

    def _fork(self) -> bool:
        """Fork the agent of a run's rank; return whether this is the child, whose stdout and stderr are pipes."""
        pipes = {stream: os.pipe() for stream in (1, 2)}
        template = os.getpid()
        self._child = os.fork()
        if self._child:
            self._pidfd = os.pidfd_open(self._child)
            for stream, (reading, writing) in pipes.items():
                os.close(writing)
                self._pipes[reading] = stream
            if self.listener is not None:
                self.listener.close()
                self.listener = None
            return False
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != template:
            os._exit(1)
        os.setpgid(0, 0)
        for number in IGNORED:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._channel.close()
        for stream, (reading, writing) in pipes.items():
            os.dup2(writing, stream)
            os.close(reading)
            os.close(writing)
        return True

    def _end_run(self) -> None:
        """End the run, if there is one, with all that it has started."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            end_descendants(0)

    def _forward(self, descriptor: int) -> None:
        """Send what a pipe holds, and close it if it has no writer any more."""
        if data := os.read(descriptor, READ_BYTES):
            self._is_full = not self._channel.enqueue(protocol.Output(self._pipes[descriptor], data))
        else:
            os.close(descriptor)
            del self._pipes[descriptor]

    def _reap(self) -> None:
        """Report the end of the run's rank, when all that it has written is sent."""
        _, status = os.waitpid(self._child, 0)
        os.close(self._pidfd)
        self._child, self._pidfd = 0, -1
        end_descendants(0)  # of an agent that was killed
        while self._pipes:
            waiting = select.poll()
            for descriptor in self._pipes:
                waiting.register(descriptor, select.POLLIN)
            if not (ready := waiting.poll(1000 * OUTPUT_GRACE_S)):
                break
            for descriptor, _ in ready:
                self._forward(descriptor)
            self._await_room()
        for descriptor in list(self._pipes):
            os.close(descriptor)
        self._pipes.clear()
        self._channel.enqueue(protocol.RankOver(wait_status_to_shell(status)))
        self._await_room()

    def _await_room(self) -> None:
        """Return when the server has taken all; the client may take its time."""
        while not self._channel.flush():
            waiting = select.poll()
            waiting.register(self._channel, select.POLLOUT)
            waiting.poll()
        self._is_full = False


def run(plan: Template, fork: protocol.Fork, listener: socket.socket | None) -> int:
    """Run a script in this process and the rank that it forks, as `python -m mpiddp` does; return the exit status."""
    from ..cli import read_config
    from ..launch import launch

    os.environ.update(json.loads(fork.run.variables))
    try:
        os.chdir(fork.run.folder)
    except OSError as error:
        write_line(f"mpiddp.run: rank {plan.rank} on {hostname()}: cannot enter {fork.run.folder}: {error.strerror}")
        return EXIT_CANNOT_START
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    sys.modules["torch"].default_generator.seed()
    sys.meta_path.insert(0, NoMpi())
    sys.argv[1:] = json.loads(fork.run.arguments)
    config = read_config(sys.argv[1:], os.environ)
    assert isinstance(config, LaunchConfig)  # as the client has read it
    meeting = Meeting(plan.rank, plan.size, plan.lowest, plan.is_one_node, plan.library, plan.address, fork.port,
                      fork.token)
    return launch(config, connect=lambda config, *_: meet(meeting, listener, config.startup_timeout_s))


if __name__ == "__main__":
    sys.exit(main())
