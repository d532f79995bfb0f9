"""A sentinel that looks where its rank is: it asks for the stack, and reads what the kernel tells of the process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from ..beside.asking import Inspect, Inspected, Progress, Sight, Where, Whereabouts
from ..beside.lines import decode
from ..beside.loop import Loop
from ..beside.messages import STACK_SIGNAL
from ..plan.verdict import LONG_TEXT
from ..plan.words import shortened
from ..where import stack
from ..where.glance import Glance, can_be_sent, descendants, glance, other_program

LONGEST_S = 0.9  # for one look
RANK_S = 0.6  # of these, for the rank to print its stack, and to tell how far it is
QUIET_S = 0.05  # after which a stack is whole that may be so
LOOKING_S = 0.2  # for which the processor time is measured, and a process in the kernel is given time
YOUNG_S = 1.0  # a child of less may be about to become another program, which the signal would end
MOST = 16  # children that are asked
MOST_BYTES = 2**20  # of which are kept of what is printed
INSPECTING_S = 15.0  # for py-spy, which may have to read the symbols of large libraries


class Looking:
    """Looks at a rank and at the processes that it has forked, one after the other, without waiting for any."""

    def __init__(self, loop: Loop, pid: int, sight: Sight, tell: Callable[[Whereabouts], None]) -> None:
        self._loop, self._pid, self._tell, self._sight = loop, pid, tell, sight
        self._request: Where | None = None
        self._ended = False
        self._asked = 0  # the process whose stack is awaited, 0 for none
        self._waiting: list[int] = []
        self._printed = b""
        self._heard_bytes = 0  # in all
        self._stacks: dict[int, list[stack.Frame]] = {}
        self._progress: Progress | None = None
        self._owes_progress = False  # the rank has not answered yet, perhaps since an earlier look
        self._spins = False  # as the rank has told last
        self._family: list[int] = []
        self._began: Glance | None = None
        self._began_s = 0.0
        for end, read in ((sight.pipe, self._read_stack), (sight.socket, self._read_progress)):
            if end >= 0:
                os.set_blocking(end, False)
                loop.listen(end, read)

    def look(self, request: Where, ended: bool) -> None:
        """Look, and tell what is seen; one who asks meanwhile gets the same answer."""
        busy, self._request, self._ended = self._request is not None, request, ended
        if busy:
            return
        self._began, self._began_s = glance(self._pid), time.monotonic()
        self._family = descendants(self._pid)
        self._stacks, self._waiting, self._progress = {}, [self._pid, *self._family[:MOST]], None
        self._ask_next()

    def _left_s(self, of_s: float) -> float:
        return max(0.0, self._began_s + of_s - time.monotonic())

    def _ask_next(self) -> None:
        """Ask the next process for its stack, or the rank how far it is when all have been asked."""
        self._asked, self._printed = 0, b""
        pipe, descriptor, _ = self._sight
        while self._waiting and self._left_s(LONGEST_S):
            pid = self._waiting.pop(0)
            age_s = YOUNG_S if pid != self._pid else 0.0
            if pipe >= 0 and can_be_sent(pid, STACK_SIGNAL, descriptor, pipe, age_s):
                with contextlib.suppress(OSError):
                    os.kill(pid, STACK_SIGNAL)
                    self._asked = pid
                    self._loop.set_timer("stack", self._left_s(RANK_S if pid == self._pid else LONGEST_S), self._take)
                    return
        self._ask_progress()

    def _ask_progress(self) -> None:
        """Ask the rank how far it is, if it can answer; come to an end when the processor time can be told."""
        can_answer = self._sight.socket >= 0 and self._began is not None and not self._began.is_held
        if can_answer and not self._owes_progress:
            with contextlib.suppress(OSError):
                self._owes_progress = bool(os.write(self._sight.socket, b"?"))
        answers = can_answer and self._owes_progress
        self._loop.set_timer("looked", self._left_s(RANK_S if answers else LOOKING_S), self._end)

    def _read(self, end: int) -> bytes:
        """Return what can be read; nothing more comes from an end that others have left."""
        try:
            data = os.read(end, 65536)
        except BlockingIOError:
            return b""
        self._heard_bytes += len(data)
        if not data:
            self._loop.forget(end)
            os.close(end)
            pipe, descriptor, socket = (-1 if one == end else one for one in self._sight)
            self._sight = Sight(pipe, descriptor, socket)
        return data

    def _read_stack(self) -> None:
        """Take what the rank, or a child, has printed."""
        self._printed = (self._printed + self._read(self._sight.pipe))[-MOST_BYTES:]
        if self._asked:
            text = self._printed.decode(errors="replace")
            if stack.is_whole(text):
                self._take()
            elif stack.is_whole(text, is_quiet=True):
                self._loop.set_timer("quiet", QUIET_S, self._take)
            else:
                self._loop.drop_timers("quiet")

    def _take(self) -> None:
        self._loop.drop_timers("stack", "quiet")
        text = self._printed.decode(errors="replace")
        if stack.is_whole(text, is_quiet=True) and (frames := stack.read(text)):
            self._stacks[self._asked] = frames
        self._ask_next()

    def _read_progress(self) -> None:
        """Take the rank's answer."""
        told = decode(self._read(self._sight.socket).rstrip().rpartition(b"\n")[2])
        if isinstance(told, Progress):
            self._owes_progress = False
            self._progress, self._spins = told, told.spins
            if self._loop.is_set("looked"):
                self._loop.set_timer("looked", self._left_s(LOOKING_S), self._end)

    def _end(self) -> None:
        request, self._request = self._request, None
        assert request
        now, cores = glance(self._pid), 0.0
        if now is not None and self._began is not None:
            cores = (now.main_s - self._began.main_s) / (time.monotonic() - self._began_s)
        seen = {pid: found for pid in self._family if (found := glance(pid)) is not None}
        everyone = [*([now] if now else []), *seen.values()]
        frames = self._stacks.get(self._pid, [])
        workers = list(seen.values()) if self._spins and stack.waits_in_torch(frames) else everyone
        children = "\n".join(self._child(pid, found) for pid, found in seen.items() if self._is_shown(pid, found))
        self._tell(Whereabouts(
            request.number, stack.as_text(frames), now.state if now else "", now.kernel if now else "",
            round(cores, 2), sum(one.busy_s for one in workers),
            sum(one.moved_bytes for one in everyone) - self._heard_bytes, self._ended, children, self._progress))

    def _is_shown(self, pid: int, found: Glance) -> bool:
        """Tell whether a child is worth a word: it is held, has a stack that is no idle worker's, or is no Python."""
        if pid in self._stacks:
            return found.is_held or not stack.is_idle_worker(self._stacks[pid])
        return found.is_held or bool(other_program(pid, self._pid))

    def _child(self, pid: int, found: Glance) -> str:
        """Return what is seen of a child, in lines."""
        lines = stack.as_text(self._stacks.get(pid, [])).splitlines()
        head = f"{pid} {found.state} {found.kernel} {other_program(pid, self._pid)}"
        return "\n".join([head, *(f"  {line}" for line in lines)])


def inspect(loop: Loop, pid: int, request: Inspect, tell: Callable[[Inspected], None]) -> None:
    """Tell all threads of a rank as soon as a program for that has printed them, or why it has not."""
    from ..where.inspector import Inspector

    try:
        inspector = Inspector(pid, request.native)
    except OSError as error:
        tell(Inspected(request.rank, str(error), request.asker))
        return
    printed = b""

    def read() -> None:
        nonlocal printed
        with contextlib.suppress(BlockingIOError):
            data = os.read(inspector.output, 65536)
            printed += data
            if not data:
                end()

    def end(late: str = "") -> None:
        loop.forget(inspector.output)
        loop.drop_timers(timer)
        inspector.end()
        text = printed.decode(errors="replace")
        tell(Inspected(request.rank, shortened(f"{text}{late}", LONG_TEXT), request.asker))

    timer = f"inspect {inspector.output}"
    loop.set_timer(timer, INSPECTING_S, lambda: end(f"py-spy has taken more than {INSPECTING_S:.0f} s"))
    loop.listen(inspector.output, read)
