"""A rank's template: a process without threads that has imported torch, and forks the ranks of runs.

A rank of the hold starts it as a program of its own, so that it has nothing of MPI's. Its stdin has a line of JSON, a
`Template`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import random
import select
import signal
import socket
import stat
import sys
import weakref
from types import ModuleType
from typing import NamedTuple, NoReturn

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
from .communicator import Meeting, SocketCommunicator, meet

READ_BYTES = 2**16
IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
INTERPRETER = {"sys", "builtins", "__main__"}  # modules that are the interpreter's and the script's
FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
OUTPUT_GRACE_S = 0.2  # for what outlives the run's rank to be written
# What a run needs of mpiddp and torch, and would import otherwise; DistributedDataParallel imports torch._dynamo.
MODULES = ("code", "torch", "torch.distributed", "torch._dynamo", "mpiddp.launch", "mpiddp.bootstrap.membership",
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
    environ = dict(os.environ)
    packages = Packages()
    error = packages.import_all(plan.preload)
    packages.note_imported()
    try:
        connection = connect((plan.address, plan.port), plan.token, CONNECT_TIMEOUT_S, SERVER_PROOF_TIMEOUT_S)
    except (OSError, EOFError):  # the hold ends
        os._exit(0)
    channel: Channel[protocol.FromTemplate, protocol.ToTemplate] = Channel(connection, SENT_CODEC)
    channel.send(protocol.Ready(plan.rank, error))
    keeper = Keeper(channel, plan)
    order = keeper.run()
    if isinstance(order, protocol.Fork):
        return run(plan, order, packages, keeper.listener)
    if isinstance(order, protocol.Renew):
        begin_anew(plan, environ)
    os._exit(0)  # a thread of a package would be waited for


def begin_anew(plan: Template, environ: dict[str, str]) -> NoReturn:
    """Become a new template with the same plan."""
    descriptor = os.memfd_create("plan")
    os.write(descriptor, json.dumps(plan._asdict()).encode() + b"\n")
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.execve(sys.executable, sys.orig_argv, environ)  # noqa: S606 (our own program)


class Packages:
    """What a template has imported."""

    def __init__(self) -> None:
        """Begin before anything is imported: what is registered for Python's end first comes last then."""
        atexit.register(self._outlive_python)
        self._is_of_a_rank = False
        self._imported: dict[str, ModuleType] = {}  # all modules, by name
        self._names: set[str] = set()  # modules that came with the preloaded packages
        self._times: dict[str, float] = {}  # of their files

    def import_all(self, preload: str) -> str:
        """Import what runs need, and the packages in `preload`; return why that is impossible, empty if it is not.

        A thread would be missing in the ranks that are forked, and a GPU's context would not work in them.
        """
        with fast_import():
            for name in MODULES:
                importlib.import_module(name)
            before = set(sys.modules)
            for name in filter(None, preload.split(",")):
                threads = len(os.listdir("/proc/self/task"))
                try:
                    importlib.import_module(name)
                except (Exception, SystemExit) as error:
                    return f"cannot import {name}: {type(error).__name__}: {error}"
                if len(os.listdir("/proc/self/task")) > threads:
                    return f"{name} starts a thread while it is imported: leave it out of --preload"
                if sys.modules["torch"].cuda.is_initialized():
                    return f"{name} uses the GPU while it is imported: leave it out of --preload"
        self._names = {*sys.modules} - before
        files = [getattr(sys.modules[name], "__file__", None) for name in ("torch", *self._names)]
        self._times = {file: read_time(file) for file in files if file}
        return ""

    def note_imported(self) -> None:
        """Note what a rank's end leaves alone: the template's modules, and its finalizers."""
        self._imported = {name: module for name, module in sys.modules.items() if name not in INTERPRETER}
        for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
            finalizer.atexit = False

    def begin_run(self, folder: str) -> None:
        """Prepare this process, a rank, for a script in a folder."""
        self._is_of_a_rank = True
        self._forget_shadowed(folder)

    def _outlive_python(self) -> None:
        """Keep what was imported before the run out of Python's end, which would write to all of it, and so copy it.

        What the script has put there is not freed either, so that its files are flushed here; a pipe might block.
        """
        if not self._is_of_a_rank:
            return
        for thing in gc.get_objects():  # without those from before the script, which termination.py has frozen
            if any(type(thing) is kind for kind in FILES):
                with contextlib.suppress(BaseException):  # it is closed, or cannot be written
                    if stat.S_ISREG(os.fstat(thing.fileno()).st_mode):
                        thing.flush()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._imported))
        for name, module in self._imported.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def warn_of_changes(self) -> None:
        """Say which files have changed since they were imported."""
        changed = [file for file, time_s in self._times.items() if read_time(file) != time_s]
        if changed:
            others = f" and {len(changed) - 1} more files" if changed[1:] else ""
            write_line(f"mpiddp.run: warning: the hold imported {changed[0]}{others} before the last change; to import "
                       "everything again: python -m mpiddp.run --renew")

    def _forget_shadowed(self, folder: str) -> None:
        """Forget preloaded packages that the script's folder has, too: the script gets its own, as in plain Python."""
        for package in {name.partition(".")[0] for name in self._names}:
            spec = importlib.machinery.PathFinder.find_spec(package, [folder])
            own = getattr(sys.modules.get(package), "__file__", None) or ""
            if spec is not None and spec.origin and os.path.realpath(spec.origin) != os.path.realpath(own):
                for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                    del sys.modules[name]


def read_time(file: str) -> float:
    """Return when a file was changed last, 0 if it is not there."""
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


class NoMpi(importlib.abc.MetaPathFinder):
    """Refuses to import MPI in a run: its ranks are none of MPI's."""

    def find_spec(self, name: str, *_: object) -> None:
        """Raise ImportError for mpi4py.MPI."""
        if name == "mpi4py.MPI":
            raise ImportError("this script runs in a hold (python -m mpiddp.run), and MPI's world is the hold's; to "
                              f"use mpi4py, start the script with {MPIRUN.command} or {SRUN.command}")


class Keeper:
    """Waits for the server's orders, and for the run's rank: its output, and its end."""

    def __init__(self, channel: Channel[protocol.FromTemplate, protocol.ToTemplate], plan: Template) -> None:
        self.listener: socket.socket | None = None  # on rank 0, for the next run
        self._channel, self._address, self._is_first = channel, plan.address, plan.rank == 0
        self._child = 0  # the agent of the run's rank, 0 for none
        self._pidfd = -1
        self._pipes: dict[int, int] = {}  # streams by descriptors
        self._stdin = -1  # of the run, if it has one
        self._input = b""  # what does not fit into that pipe yet
        self._is_full = False  # the server takes no output
        for number in IGNORED:  # which a launcher or a terminal may send to all processes of the hold's ranks
            signal.signal(number, signal.SIG_IGN)

    def run(self) -> protocol.Fork | protocol.Renew | None:
        """Return at the end of the hold, and if there is something to do: in the child that is forked for a run."""
        while True:
            waiting = select.poll()
            waiting.register(self._channel, select.POLLIN | (select.POLLOUT if self._is_full else 0))
            for descriptor in (self._pidfd, *(() if self._is_full else self._pipes)):
                if descriptor >= 0:
                    waiting.register(descriptor, select.POLLIN)
            if self._input:
                waiting.register(self._stdin, select.POLLOUT)
            ready = [descriptor for descriptor, _ in waiting.poll()]
            self._is_full = self._is_full and not self._channel.flush()
            for descriptor in ready:
                if descriptor in self._pipes:
                    self._forward(descriptor)
            if self._input:
                self._write_input()
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
                            if self._fork(message.run.is_prompt or (message.run.has_input and self._is_first)):
                                return message
                        case protocol.Input(data) if self._stdin >= 0:
                            self._give(data)
                        case protocol.Renew():
                            return message
                        case protocol.Signal(number) if self._child:
                            os.kill(self._child, number)
                        case protocol.EndHold():
                            self._end_run()
                            return None

    def _fork(self, has_input: bool) -> bool:
        """Fork the agent of a run's rank; return whether this is the child, whose stdout and stderr are pipes."""
        pipes = {stream: os.pipe() for stream in (1, 2)}
        reading, self._stdin = os.pipe() if has_input else (os.open(os.devnull, os.O_RDONLY), -1)
        if has_input:
            os.set_blocking(self._stdin, False)
        template = os.getpid()
        self._child = os.fork()
        if self._child:
            self._pidfd = os.pidfd_open(self._child)
            os.close(reading)
            for stream, (output, writing) in pipes.items():
                os.close(writing)
                self._pipes[output] = stream
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
        os.dup2(reading, 0)
        os.close(reading)
        if has_input:
            os.close(self._stdin)
        for stream, (output, writing) in pipes.items():
            os.dup2(writing, stream)
            os.close(output)
            os.close(writing)
        return True

    def _give(self, data: bytes) -> None:
        """Give the run's rank something on stdin, as soon as it reads it; nothing ends it."""
        if data:
            self._input = (self._input + data)[:protocol.MAX_INPUT_BYTES]
            self._write_input()
        elif self._stdin >= 0:
            os.close(self._stdin)
            self._stdin, self._input = -1, b""

    def _write_input(self) -> None:
        try:
            self._input = self._input[os.write(self._stdin, self._input):]
        except BlockingIOError:
            pass
        except OSError:  # the rank has ended, or closed it
            self._input = b""

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
        self._give(b"")
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


def run(plan: Template, fork: protocol.Fork, packages: Packages, listener: socket.socket | None) -> int:
    """Run a script in this process and the rank that it forks, as `python -m mpiddp` does; return the exit status."""
    from ..cli import read_config
    from ..launch import launch

    os.environ.update(json.loads(fork.run.variables))
    try:
        os.chdir(fork.run.folder)
    except OSError as error:
        write_line(f"mpiddp.run: rank {plan.rank} on {hostname()}: cannot enter {fork.run.folder}: {error.strerror}")
        return EXIT_CANNOT_START
    if plan.rank == 0:
        packages.warn_of_changes()
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

    def meet_others(config: LaunchConfig, *_: object) -> SocketCommunicator:
        packages.begin_run(sys.path[0])
        return meet(meeting, listener, config.startup_timeout_s)

    return launch(config, connect=meet_others)


if __name__ == "__main__":
    sys.exit(main())
