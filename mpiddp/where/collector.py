"""What a rank, and the processes that it has forked, tell of themselves when their sentinel asks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from ..base.text import truncate_middle
from ..failure import stack
from ..ipc.codec import decode
from ..ipc.event_loop import Loop
from ..sentinel.protocol import ASK_SIGNAL, Message
from .process_sample import Glance, can_be_sent, glance
from .protocol import WHERE, Calls, Progress, Sight
from .py_spy import JSON, NONBLOCKING, inspect

ANSWER_S = 0.2  # for the interpreters
AGAIN_S = 0.1  # between one look for processes that native code holds and the next
INTERPRETERS_S = 0.6  # after which no interpreter answers any more
INSPECTED_S = 0.8  # after which py-spy does not
LONGEST_S = 0.9  # for all
YOUNG_S = 1.0  # a child of less may be about to become another program, which the signal would end
MOST_BYTES = 2**20  # of which are kept of what is told
MOST_INSPECTED = 4  # processes, for one question


class Hearing:
    """Asks for stacks, and the rank how far it is, without waiting for any.

    Each interpreter tells its own: the rank's by its thread, and where that does not answer by a handler in Python, as
    those of the processes that it has forked. A process that has slept all the time, or has run long enough to answer
    that handler, runs no Python: native code holds its interpreter, and py-spy reads the stack from outside. Nothing
    that is done here can end a process.
    """

    def __init__(self, loop: Loop, pid: int, sight: Sight) -> None:
        self._loop, self._pid, self._sight = loop, pid, sight
        self.stacks: dict[int, list[stack.Frame]] = {}
        self.native: dict[int, str] = {}  # the processes that native code holds, and why py-spy shows no stack of them
        self.progress: Progress | None = None
        self.spins = False  # as the rank has told last
        self.heard_bytes = 0  # in all
        self._owes = False  # the rank has not told how far it is, perhaps since an earlier time
        self._awaited: set[int] = set()  # the processes whose stack is awaited
        self._inspected: set[int] = set()  # of these, those at which py-spy looks
        self._asked: dict[int, Glance] = {}  # as they were when their handler was asked
        self._last: dict[int, Glance] = {}  # as they were seen last
        self._rests = dict.fromkeys((sight.pipe, sight.socket), b"")  # of what was read, what is no whole line
        self._began_s = 0.0
        self._heard: Callable[[], object] = int
        for end, read in ((sight.pipe, self._read_pipe), (sight.socket, self._read_socket)):
            if end >= 0:
                os.set_blocking(end, False)
                loop.listen(end, read)

    def ask(self, family: Sequence[int], heard: Callable[[], None]) -> None:
        """Ask the rank and its `family`; call `heard` whenever `wait_s` may have changed."""
        self.stacks, self.native, self.progress, self._heard = {}, {}, None, heard
        self._began_s = time.monotonic()
        self._awaited, self._inspected, self._asked, self._last = set(), set(), {}, {}
        rank = glance(self._pid)
        if rank is not None and not rank.is_stopped and self._sight.pipe >= 0:
            self._awaited.add(self._pid)
            self._last[self._pid] = rank
            if self._sight.socket >= 0 and not self._owes:
                with contextlib.suppress(OSError):
                    self._owes = bool(os.write(self._sight.socket, WHERE))
        self._awaited.update(filter(self._ask_handler, family))
        self._loop.set_timer("stack", ANSWER_S if self._awaited else 0.0, self._look)

    def _ask_handler(self, pid: int) -> bool:
        """Ask a process by the handler that it has in Python, and tell whether that could be done."""
        one = glance(pid)
        pipe, descriptor, _ = self._sight
        age_s = YOUNG_S if pid != self._pid else 0.0
        if one is None or one.is_held or pipe < 0 or not can_be_sent(pid, ASK_SIGNAL, descriptor, pipe, age_s):
            return False
        try:
            os.kill(pid, ASK_SIGNAL)
        except OSError:
            return False
        self._asked[pid] = one
        self._last.pop(pid, None)  # the signal wakes it
        return True

    @property
    def socket(self) -> int:
        """The end of the socket by which the rank is asked, -1 where that is closed."""
        return self._sight.socket

    @property
    def wait_s(self) -> float:
        """For how long since it was asked more may come: stacks, or how far the rank is."""
        return LONGEST_S if self._awaited else INTERPRETERS_S if self._owes else 0.0

    def _left_s(self, of_s: float) -> float:
        return max(0.0, self._began_s + of_s - time.monotonic())

    def _look(self) -> None:
        """Let py-spy look at processes that native code holds, and come to an end after the last."""
        self._read_pipe()
        for pid in sorted(self._awaited - self._inspected, key=lambda one: one != self._pid):
            if self._is_native(pid):
                self._inspect(pid)
            elif pid == self._pid and pid in self._awaited and pid not in self._asked:
                self._ask_handler(pid)
        if not self._left_s(INTERPRETERS_S):
            self._awaited &= self._inspected
        if self._awaited:
            self._loop.set_timer("stack", AGAIN_S, self._look)
        else:
            self._heard()

    def _is_native(self, pid: int) -> bool:
        """Tell whether a process that has not answered runs no Python; one that is gone is forgotten."""
        if (now := glance(pid)) is None:
            self._awaited.discard(pid)
            return False
        asked, last = self._asked.get(pid), self._last.get(pid)
        self._last[pid] = now
        return (asked is not None and now.could_answer(asked)) or (last is not None and now.has_slept(last))

    def _inspect(self, pid: int) -> None:
        """Let py-spy look at a process that native code holds, if there is time."""
        self.native[pid] = "py-spy had no time to look: ask again"
        if len(self._inspected) < MOST_INSPECTED and (left_s := self._left_s(INSPECTED_S)):
            try:
                inspect(self._loop, pid, [NONBLOCKING, JSON], left_s, partial(self._take, pid))
                self._inspected.add(pid)
            except OSError as error:
                self.native[pid] = f"py-spy cannot be started: {error}"

    def _take(self, pid: int, printed: str) -> None:
        """Take what py-spy has printed of a process, unless that has answered meanwhile."""
        if pid not in self._awaited:
            return
        try:
            frames = stack.parse_py_spy(printed, pid)
        except (ValueError, TypeError, KeyError):
            self.native[pid] = complaint(printed)
        else:
            self._keep(pid, frames)
        self._forget(pid)

    def _keep(self, pid: int, frames: list[stack.Frame]) -> None:
        """Keep the stack of a process, if it is that of its main thread."""
        if frames:
            self.stacks[pid] = frames
            self.native.pop(pid, None)

    def _forget(self, pid: int) -> None:
        """Await nothing more of a process."""
        self._awaited.discard(pid)
        if not self._awaited:
            self._loop.drop_timers("stack")
            self._heard()

    def _read(self, end: int) -> bytes:
        """Return what can be read; nothing more comes from an end that others have left."""
        try:
            data = os.read(end, 65536)
        except BlockingIOError:
            return b""
        except ConnectionError:  # the rank is gone, and had not read a question
            data = b""
        self.heard_bytes += len(data)
        if not data:
            self._loop.forget(end)
            os.close(end)
            pipe, descriptor, socket = (-1 if one == end else one for one in self._sight)
            self._sight = Sight(pipe, descriptor, socket)
        return data

    def _lines(self, end: int) -> list[bytes]:
        """Return the lines that have come."""
        *lines, self._rests[end] = (self._rests[end] + self._read(end))[-MOST_BYTES:].split(b"\n")
        return [line for line in lines if line]

    def _read_pipe(self) -> None:
        """Take what handlers tell."""
        if self._sight.pipe >= 0:
            for line in self._lines(self._sight.pipe):
                self._note(decode(line))

    def _note(self, told: Message) -> None:
        """Take a stack that an interpreter has told."""
        if isinstance(told, Calls) and told.pid in self._awaited:
            self._keep(told.pid, stack.parse_dump(told.text))
            self._forget(told.pid)

    def _read_socket(self) -> None:
        """Take what the rank's thread tells."""
        for line in self._lines(self._sight.socket):
            self._note(told := decode(line))
            if isinstance(told, Progress):
                self._owes = False
                self.progress, self.spins = told, told.spins
                self._heard()


def complaint(printed: str) -> str:
    """Return the line in which py-spy says why it shows no stack; a backtrace of its own may follow that."""
    lines = printed.strip().splitlines() or ["py-spy has printed nothing"]
    return truncate_middle(next((line for line in lines if line.startswith("Error")), lines[-1]))
