"""What a rank, and the processes that it has forked, tell of themselves when their sentinel asks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

from ..beside.asking import WHERE, Calls, Progress, Sight
from ..beside.lines import decode
from ..beside.loop import Loop
from ..beside.messages import ASK_SIGNAL, STACK_SIGNAL
from ..where import stack
from ..where.glance import Glance, can_be_sent, glance

ANSWER_S = 0.2  # for the interpreters
AGAIN_S = 0.1  # between one look for processes that may be asked in native code and the next
LONGEST_S = 0.9  # for all
RANK_S = 0.6  # of these, for the rank
QUIET_S = 0.05  # after which a stack is whole that may be so, and that a process needs to print one
YOUNG_S = 1.0  # a child of less may be about to become another program, which the signal would end
MOST_BYTES = 2**20  # of which are kept of what is printed


class Hearing:
    """Asks for stacks, and the rank how far it is, without waiting for any.

    Each interpreter is asked first: the rank's by its thread, and where that does not answer by a handler in Python, as
    those of the processes that it has forked. A process which has slept all the time, or has run long enough to answer
    that handler, runs no Python: it is asked by the signal that it heeds in native code, one after the other. It may
    come back to Python before the signal comes, though that takes some microseconds: where a job is asked all the time
    those that have run are left alone.
    """

    def __init__(self, loop: Loop, pid: int, sight: Sight) -> None:
        self._loop, self._pid, self._sight = loop, pid, sight
        self.stacks: dict[int, list[stack.Frame]] = {}
        self.progress: Progress | None = None
        self.spins = False  # as the rank has told last
        self.heard_bytes = 0  # in all
        self._owes = False  # the rank has not told how far it is, perhaps since an earlier time
        self._awaited: set[int] = set()  # the processes whose stack is awaited
        self._asked: dict[int, Glance] = {}  # as they were when their handler was asked
        self._last: dict[int, Glance] = {}  # as they were seen last
        self._printing = 0  # the process that prints its stack, 0 for none
        self._printed = ""
        self._closely = self._prints = True  # whether one that has run is asked in native code, and any other one still
        self._rests = dict.fromkeys((sight.pipe, sight.socket), b"")  # of what was read, what is no whole line
        self._began_s = 0.0
        self._heard: Callable[[], object] = int
        for end, read in ((sight.pipe, self._read_pipe), (sight.socket, self._read_socket)):
            if end >= 0:
                os.set_blocking(end, False)
                loop.listen(end, read)

    def ask(self, family: Sequence[int], heard: Callable[[], None], closely: bool = True) -> None:
        """Ask the rank and its `family`; call `heard` whenever `wait_s` may have changed."""
        self._loop.drop_timers("quiet")
        self.stacks, self.progress, self._heard = {}, None, heard
        self._printing, self._began_s = 0, time.monotonic()
        self._closely, self._prints = closely, True
        self._awaited, self._asked, self._last = set(), {}, {}
        rank = glance(self._pid)
        if rank is not None and not rank.is_stopped and self._sight.pipe >= 0:
            self._awaited.add(self._pid)
            self._last[self._pid] = rank
            if self._sight.socket >= 0 and not self._owes:
                with contextlib.suppress(OSError):
                    self._owes = bool(os.write(self._sight.socket, WHERE))
        self._awaited.update(filter(self._ask_handler, family))
        self._loop.set_timer("stack", ANSWER_S if self._awaited else 0.0, self._ask_next)

    def _ask_handler(self, pid: int) -> bool:
        """Ask a process by the handler that it has in Python, and tell whether that could be done."""
        one = glance(pid)
        if one is None or one.is_held or not self._can_be_sent(pid, ASK_SIGNAL):
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
        return LONGEST_S if self._awaited else RANK_S if self._owes else 0.0

    def _left_s(self, of_s: float) -> float:
        return max(0.0, self._began_s + of_s - time.monotonic())

    def _can_be_sent(self, pid: int, number: int) -> bool:
        pipe, descriptor, _ = self._sight
        return pipe >= 0 and can_be_sent(pid, number, descriptor, pipe, YOUNG_S if pid != self._pid else 0.0)

    def _ask_next(self) -> None:
        """Let the next process print its stack in native code, if that may be, and come to an end after the last."""
        self._printing, self._printed = 0, ""
        for pid in sorted(self._awaited, key=lambda one: one != self._pid):
            left_s = self._left_s(RANK_S if pid == self._pid else LONGEST_S)
            may_print = self._prints and left_s > QUIET_S and self._can_be_sent(pid, STACK_SIGNAL)
            self._read_pipe()
            if pid in self._awaited and self._is_native(pid):  # the last thing that is looked at
                with contextlib.suppress(OSError):
                    if may_print:
                        os.kill(pid, STACK_SIGNAL)
                        self._printing = pid
                        self._loop.set_timer("stack", left_s, self._take)
                        return
            elif pid in self._awaited and pid == self._pid and pid not in self._asked:
                self._ask_handler(pid)
        if self._awaited and self._left_s(RANK_S):
            self._loop.set_timer("stack", AGAIN_S, self._ask_next)
        else:
            self._awaited = set()
            self._heard()

    def _is_native(self, pid: int) -> bool:
        """Tell whether a process that has not answered runs no Python; one that is gone is forgotten."""
        if (now := glance(pid)) is None:
            self._awaited.discard(pid)
            return False
        asked, last = self._asked.get(pid), self._last.get(pid)
        self._last[pid] = now
        could = self._closely and asked is not None and now.could_answer(asked)
        return could or (last is not None and now.has_slept(last))

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
        """Take what a handler has told, or one in C has printed."""
        if self._sight.pipe < 0:
            return
        for line in self._lines(self._sight.pipe):
            told = decode(line)
            if isinstance(told, Calls):
                self._note(told)
            elif self._printing:
                self._printed += line.decode(errors="replace") + "\n"
        if self._printing:
            if stack.is_whole(self._printed):
                self._take()
            elif stack.is_whole(self._printed, is_quiet=True):
                self._loop.set_timer("quiet", QUIET_S, self._take)
            else:
                self._loop.drop_timers("quiet")

    def _take(self) -> None:
        """Take what has been printed, if it is a whole stack, and ask the next one."""
        self._loop.drop_timers("stack", "quiet")
        pid, text = self._printing, self._printed
        self._awaited.discard(pid)
        self._prints = stack.is_whole(text, is_quiet=True)  # else what comes late would be taken for another's
        if self._prints and (frames := stack.read(text)):
            self.stacks[pid] = frames
        self._ask_next()

    def _note(self, told: Calls) -> None:
        """Take a stack that an interpreter has told."""
        if told.pid in self._awaited and told.pid != self._printing:
            self._awaited.discard(told.pid)
            if frames := stack.read(told.text):
                self.stacks[told.pid] = frames
            if not self._awaited:
                self._loop.drop_timers("stack")
                self._heard()

    def _read_socket(self) -> None:
        """Take what the rank's thread tells."""
        for line in self._lines(self._sight.socket):
            told = decode(line)
            if isinstance(told, Calls):
                self._note(told)
            elif isinstance(told, Progress):
                self._owes = False
                self.progress, self.spins = told, told.spins
                self._heard()
