"""The agent's samples of its rank: stacks, from the rank's processes or from py-spy, and the kernel's counters."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from posix import fork  # os.fork may be a debugger's own

from ..base.process import close_other_descriptors, redirect_to_devnull
from ..base.text import truncate_middle
from ..failure import stack
from ..failure.root_cause import MAX_STACK_CHARS
from ..ipc.channel import Codec, FrameReader, Unreadable
from ..ipc.event_loop import EventLoop
from .process_sample import (
    ProcSample,
    TcpCounter,
    can_handle_signal,
    explain_unseen,
    list_descendants,
    other_program_name,
    sample_process,
)
from .protocol import (
    ASK_SIGNAL,
    WHERE,
    InspectFds,
    Progress,
    RankSample,
    Sample,
    SampleRequest,
    StackSample,
    ThreadsReply,
    ThreadsRequest,
)

# Times since the request:
FIRST_CHECK_S = 0.2  # until then interpreters may answer; then processes are checked for native code
INTERPRETERS_TIMEOUT_S = 0.6
PY_SPY_TIMEOUT_S = 0.8
STACKS_TIMEOUT_S = 0.9
CHECK_INTERVAL_S = 0.1  # between two checks for processes in native code
MIN_AGE_S = 1.0  # a younger child may be about to execute another program, which the signal would kill
MAX_DUMPS = 4  # runs of py-spy for one request
CPU_INTERVAL_S = 0.2  # over which CPU time is measured, and in which a system call may end
MAX_CHILDREN = 16
THREADS_TIMEOUT_S = 15.0  # for py-spy, which may have to read the symbols of large libraries
INSTALL_HINT = "py-spy is not installed in the job's environment (pip install py-spy)"
REAP_DELAY_S = 0.1  # of py-spy, after SIGKILL

CODEC: Codec[RankSample] = Codec(RankSample)


class StackCollector:
    """Collects stacks, and the rank's progress, without blocking.

    Each interpreter sends its own stack: the rank's by its thread, or by a signal handler in Python if the thread does
    not answer; those of its children by that handler. A process without an answer that has slept all the time, or has
    run long enough to call the handler, is in native code that holds the GIL: py-spy reads its stack from outside.
    None of this can kill a process.
    """

    def __init__(self, loop: EventLoop, pid: int, descriptors: InspectFds) -> None:
        self._loop, self._pid, self._descriptors = loop, pid, descriptors
        self.stacks: dict[int, list[stack.Frame]] = {}
        self.native: dict[int, str] = {}  # the processes in native code, and why py-spy shows no stack of them
        self.progress: Progress | None = None
        self.spins = False  # as in the rank's last progress
        self.received_bytes = 0  # in total
        self._awaits_progress = False  # the rank has not answered a request, perhaps an earlier one
        self._signals = True  # as in the request
        self._pending: set[int] = set()  # processes whose stack may still arrive
        self._dumped: set[int] = set()  # those of them that py-spy reads
        self._signalled: dict[int, ProcSample] = {}  # the signalled processes, sampled before the signal
        self._last: dict[int, ProcSample] = {}  # their last samples
        self._readers = {end: FrameReader(CODEC) for end in (descriptors.pipe, descriptors.socket)}
        self._began_s = 0.0
        self._on_change: Callable[[], object] = lambda: None
        for end, read in ((descriptors.pipe, self._read_pipe), (descriptors.socket, self._read_socket)):
            if end >= 0:
                os.set_blocking(end, False)
                loop.watch(end, read)

    def collect(self, children: Sequence[int], on_change: Callable[[], None], signals: bool = True) -> None:
        """Request the stacks of the rank and its children; call `on_change` when `timeout_s` may have changed.

        Without `signals` request only the rank's, from its thread.
        """
        self._signals = signals
        self.stacks, self.native, self.progress, self._on_change = {}, {}, None, on_change
        self._began_s = time.monotonic()
        self._pending, self._dumped, self._signalled, self._last = set(), set(), {}, {}
        rank = sample_process(self._pid)
        if rank is not None and not rank.is_stopped and self._descriptors.pipe >= 0:
            self._pending.add(self._pid)
            self._last[self._pid] = rank
            if self._descriptors.socket >= 0 and not self._awaits_progress:
                with contextlib.suppress(OSError):
                    self._awaits_progress = bool(os.write(self._descriptors.socket, WHERE))
        self._pending.update(filter(self._signal, children if signals else ()))
        self._loop.set_timer("stack", FIRST_CHECK_S if self._pending else 0.0, self._check)

    def _signal(self, pid: int) -> bool:
        """Send ASK_SIGNAL if the process handles it, and return whether it was sent."""
        sample = sample_process(pid)
        pipe, descriptor, _ = self._descriptors
        min_age_s = MIN_AGE_S if pid != self._pid else 0.0
        if (sample is None or sample.is_held or pipe < 0
                or not can_handle_signal(pid, ASK_SIGNAL, descriptor, pipe, min_age_s)):
            return False
        try:
            os.kill(pid, ASK_SIGNAL)
        except OSError:
            return False
        self._signalled[pid] = sample
        self._last.pop(pid, None)  # the signal wakes the process: its next sample is the first to compare with
        return True

    @property
    def socket(self) -> int:
        """The socket for requests to the rank, -1 if it is closed."""
        return self._descriptors.socket

    @property
    def timeout_s(self) -> float:
        """The time after the request until which stacks or the rank's progress may still arrive."""
        return STACKS_TIMEOUT_S if self._pending else INTERPRETERS_TIMEOUT_S if self._awaits_progress else 0.0

    def _left_s(self, timeout_s: float) -> float:
        return max(0.0, self._began_s + timeout_s - time.monotonic())

    def _check(self) -> None:
        """Start py-spy for processes in native code; repeat this until no stack is pending."""
        self._read_pipe()
        for pid in sorted(self._pending - self._dumped, key=lambda pid: pid != self._pid) if self._signals else ():
            if self._is_native(pid):
                self._dump(pid)
            elif pid == self._pid and pid in self._pending and pid not in self._signalled:
                self._signal(pid)
        if not self._left_s(INTERPRETERS_TIMEOUT_S):
            self._pending &= self._dumped
        if self._pending:
            self._loop.set_timer("stack", CHECK_INTERVAL_S, self._check)
        else:
            self._on_change()

    def _is_native(self, pid: int) -> bool:
        """Return whether a pending process is in native code that holds the GIL; drop it if it has exited."""
        if (now := sample_process(pid)) is None:
            self._pending.discard(pid)
            return False
        signalled, last = self._signalled.get(pid), self._last.get(pid)
        self._last[pid] = now
        return (signalled is not None and now.could_answer(signalled)) or (last is not None and now.has_slept(last))

    def _dump(self, pid: int) -> None:
        """Start py-spy for a process, if there is time."""
        self.native[pid] = "py-spy was not run, for lack of time; try again"
        if len(self._dumped) < MAX_DUMPS and (left_s := self._left_s(PY_SPY_TIMEOUT_S)):
            try:
                dump_stacks(self._loop, pid, ["--nonblocking", "--json"], left_s, partial(self._take_dump, pid))
                self._dumped.add(pid)
            except OSError as error:
                self.native[pid] = f"cannot start py-spy: {error}"

    def _take_dump(self, pid: int, output: str) -> None:
        """Take the output of py-spy about a process, unless the process has answered meanwhile."""
        if pid not in self._pending:
            return
        try:
            frames = stack.parse_py_spy(output, pid)
        except (ValueError, TypeError, KeyError):
            self.native[pid] = extract_error(output)
        else:
            self._store(pid, frames)
        self._finish(pid)

    def _store(self, pid: int, frames: list[stack.Frame]) -> None:
        """Store the main thread's stack of a process; ignore an empty one, which is another thread's."""
        if frames:
            self.stacks[pid] = frames
            self.native.pop(pid, None)

    def _finish(self, pid: int) -> None:
        """Stop waiting for a process."""
        self._pending.discard(pid)
        if not self._pending:
            self._loop.cancel_timers("stack")
            self._on_change()

    def _read(self, end: int) -> list[RankSample | Unreadable]:
        """Return the messages that can be read; close this end if the other one is closed."""
        try:
            data = os.read(end, 65536)
            messages = self._readers[end].feed(data)
        except BlockingIOError:
            return []
        except OSError:  # the rank has exited without reading a request, or a message is too long
            data, messages = b"", []
        self.received_bytes += len(data)
        if not data:
            self._loop.unwatch(end)
            os.close(end)
            pipe, descriptor, socket = (-1 if value == end else value for value in self._descriptors)
            self._descriptors = InspectFds(pipe, descriptor, socket)
        return messages

    def _read_pipe(self) -> None:
        """Take the messages of signal handlers."""
        if self._descriptors.pipe >= 0:
            for message in self._read(self._descriptors.pipe):
                self._take_stack(message)

    def _take_stack(self, message: RankSample | Unreadable) -> None:
        if isinstance(message, StackSample) and message.pid in self._pending:
            self._store(message.pid, stack.parse_dump(message.text))
            self._finish(message.pid)

    def _read_socket(self) -> None:
        """Take the messages of the rank's thread."""
        for message in self._read(self._descriptors.socket):
            self._take_stack(message)
            if isinstance(message, Progress):
                self._awaits_progress = False
                self.progress, self.spins = message, message.spins
                self._on_change()


def extract_error(output: str) -> str:
    """Return the error line of py-spy's output; py-spy's own backtrace may follow it."""
    lines = output.strip().splitlines() or ["py-spy printed nothing"]
    return truncate_middle(next((line for line in lines if line.startswith("Error")), lines[-1]))


class ProcessSampler:
    """Samples a rank and its children, without blocking."""

    def __init__(
        self, loop: EventLoop, pid: int, descriptors: InspectFds, store_port: int, reply: Callable[[Sample], None]
    ) -> None:
        self._loop, self._pid, self._reply = loop, pid, reply
        self._collector, self._tcp = StackCollector(loop, pid, descriptors), TcpCounter(store_port)
        self._last: dict[int, ProcSample] = {}
        self._fed_bytes = 0  # sum of ProcSample.fed_bytes()
        self._request: SampleRequest | None = None
        self._has_ended = False
        self._descendants: list[int] = []
        self._began: ProcSample | None = None
        self._began_s = 0.0

    @property
    def socket(self) -> int:
        """The socket for requests to the rank, -1 if it is closed."""
        return self._collector.socket

    def sample(self, request: SampleRequest, has_ended: bool) -> None:
        """Take a sample, and reply with it; a request for no more that arrives meanwhile gets the same sample."""
        is_busy = self._request is not None and (self._request.signals or not request.signals)
        self._request, self._has_ended = request, has_ended
        if is_busy:
            return
        self._began, self._began_s = sample_process(self._pid), time.monotonic()
        self._descendants = list_descendants(self._pid)
        self._collector.collect(self._descendants[:MAX_CHILDREN], self._schedule_end, request.signals)
        self._schedule_end()

    def _schedule_end(self) -> None:
        """End the sample when all stacks have arrived and CPU time can be measured, or at the timeout."""
        if self._request is not None:
            length_s = max(CPU_INTERVAL_S, self._collector.timeout_s)
            self._loop.set_timer("sample", max(0.0, self._began_s + length_s - time.monotonic()), self._end)

    def _end(self) -> None:
        request, self._request = self._request, None
        assert request
        collector = self._collector
        rank, cores = sample_process(self._pid), 0.0
        if rank is not None and self._began is not None:
            cores = (rank.main_s - self._began.main_s) / (time.monotonic() - self._began_s)
        descendants = {pid: sample for pid in self._descendants if (sample := sample_process(pid)) is not None}
        by_pid = {**({self._pid: rank} if rank else {}), **descendants}
        samples = list(by_pid.values())
        self._fed_bytes += sum(sample.fed_bytes(self._last.get(pid, sample)) for pid, sample in by_pid.items())
        self._last = by_pid
        tcp = self._tcp.count(by_pid)
        frames = collector.stacks.get(self._pid, [])
        is_spinning = collector.spins and stack.is_in_torch(frames)
        children = [self._describe_child(pid, sample) for pid, sample in descendants.items()
                    if self._is_shown(pid, sample)]
        unseen = (explain_unseen(self._descendants), tcp.unseen, *(sample.unseen for sample in samples))
        self._reply(Sample(
            request.number, stack.frames_to_json(frames), rank.state if rank else "", rank.wchan if rank else "",
            round(cores, 2), sum(sample.busy_s for sample in (descendants.values() if is_spinning else samples)),
            sum(sample.moved_bytes for sample in samples) + self._fed_bytes + tcp.moved_bytes
            - collector.received_bytes,
            self._has_ended, json.dumps(children[:MAX_CHILDREN], ensure_ascii=False), collector.progress,
            sum(sample.faults for sample in samples), next(filter(None, unseen), ""),
            collector.native.get(self._pid, ""), tcp.unacked_bytes))

    def _is_shown(self, pid: int, sample: ProcSample) -> bool:
        """Return whether to show a child: it is held, runs no Python, or its stack is not that of an idle worker."""
        if pid in self._collector.stacks:
            return sample.is_held or not stack.is_idle_worker(self._collector.stacks[pid])
        return sample.is_held or pid in self._collector.native or bool(other_program_name(pid, self._pid))

    def _describe_child(self, pid: int, sample: ProcSample) -> tuple[object, ...]:
        frames = self._collector.stacks.get(pid, [])
        return (pid, stack.frames_to_lists(frames), sample.state, sample.wchan, other_program_name(pid, self._pid),
                self._collector.native.get(pid, ""))


def inspect_threads(loop: EventLoop, pid: int, request: ThreadsRequest, reply: Callable[[ThreadsReply], None]) -> None:
    """Reply with all threads of a rank when py-spy has printed them, or with the reason why it has not."""
    def send(text: str) -> None:
        reply(ThreadsReply(request.rank, truncate_middle(text, MAX_STACK_CHARS), request.asker))

    try:
        option = "--native" if request.native else "--nonblocking"  # --native stops the process meanwhile
        dump_stacks(loop, pid, [option], THREADS_TIMEOUT_S, send)
    except OSError as error:
        send(str(error))


def dump_stacks(
    loop: EventLoop, pid: int, options: list[str], timeout_s: float, on_output: Callable[[str], object]
) -> None:
    """Call `on_output` with the output of `py-spy dump` for a process, up to the timeout.

    Raises OSError if py-spy cannot be started. It is a child of this process, so Yama lets it trace what this process
    may trace.
    """
    reading, writing = os.pipe()
    try:
        child = fork()
        if not child:
            exec_py_spy(pid, options, writing)
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    os.set_blocking(reading, False)
    output, timer = b"", f"py-spy {child}"

    def read() -> None:
        nonlocal output
        with contextlib.suppress(BlockingIOError):
            data = os.read(reading, 65536)
            output += data
            if not data:
                end()

    def end(note: str = "") -> None:
        loop.cancel_timers(timer)
        loop.unwatch(reading)
        os.close(reading)
        if not try_reap(child):
            os.kill(child, signal.SIGKILL)
            loop.set_timer(f"end of {timer}", REAP_DELAY_S, partial(try_reap, child))
        on_output(output.decode(errors="replace") + note)

    loop.set_timer(timer, timeout_s, lambda: end(f"\npy-spy did not finish within {timeout_s:.1f} s"))
    loop.watch(reading, read)


def try_reap(child: int) -> bool:
    """Reap a child if it has ended, and return whether it has; a file system that hangs delays its end."""
    try:
        return bool(os.waitpid(child, os.WNOHANG)[0])
    except ChildProcessError:  # the agent has reaped it with all that had ended
        return True


def exec_py_spy(pid: int, options: list[str], output: int) -> None:
    """Become py-spy, in a forked process: a slow file system delays that process, not the parent."""
    try:
        os.setsid()
        redirect_to_devnull(0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        close_other_descriptors(())
        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        os.execvp("py-spy", ["py-spy", "dump", "--pid", str(pid), *options])  # noqa: S606 (no shell: it takes a number)
    except OSError:
        os.write(1, INSTALL_HINT.encode())
    finally:
        os._exit(1)
