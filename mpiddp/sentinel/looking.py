"""A sentinel that looks where its rank is: it asks for the stack, and reads what the kernel tells of the process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from ..beside.asking import Where, Whereabouts
from ..beside.messages import STACK_SIGNAL
from ..facts.glance import Glance, can_be_sent, descendants, glance
from ..where import stack
from .loop import Loop

LONGEST_S = 0.9  # for one look
RANK_S = 0.6  # of these, for the rank to print its stack
QUIET_S = 0.05  # after which a stack is whole that may be so
LOOKING_S = 0.2  # for which the processor time is measured, and a process in the kernel is given time
YOUNG_S = 1.0  # a child of less may be about to become another program, which the signal would end
MOST = 16  # children that are asked


class Looking:
    """Looks at a rank and at the processes that it has forked, one after the other, without waiting for any.

    The rank prints by its own `descriptor` into a pipe; `pipe` is the reading end. Both are -1 if it does not print.
    """

    def __init__(self, loop: Loop, pid: int, pipe: int, descriptor: int, tell: Callable[[Whereabouts], None]) -> None:
        self._loop, self._pid, self._tell = loop, pid, tell
        self._pipe, self._descriptor = pipe, descriptor
        self._request: Where | None = None
        self._ended = False
        self._asked = 0  # the process whose stack is awaited, 0 for none
        self._waiting: list[int] = []
        self._printed = b""
        self._stacks: dict[int, str] = {}
        self._family: list[int] = []
        self._began: Glance | None = None
        self._began_s = 0.0
        if pipe >= 0:
            os.set_blocking(pipe, False)
            loop.listen(pipe, self._read)

    def look(self, request: Where, ended: bool) -> None:
        """Look, and tell what is seen; one who asks meanwhile gets the same answer."""
        busy, self._request, self._ended = self._request is not None, request, ended
        if busy:
            return
        self._began, self._began_s = glance(self._pid), time.monotonic()
        self._family = descendants(self._pid)
        self._stacks, self._waiting = {}, [self._pid, *self._family[:MOST]]
        self._ask_next()

    def _left_s(self, of_s: float) -> float:
        return max(0.0, self._began_s + of_s - time.monotonic())

    def _ask_next(self) -> None:
        """Ask the next process, or come to an end when the processor time can be told."""
        self._asked, self._printed = 0, b""
        while self._waiting and self._left_s(LONGEST_S):
            pid = self._waiting.pop(0)
            if self._pipe >= 0 and can_be_sent(pid, STACK_SIGNAL, self._descriptor, self._pipe,
                                               YOUNG_S if pid != self._pid else 0.0):
                with contextlib.suppress(OSError):
                    os.kill(pid, STACK_SIGNAL)
                    self._asked = pid
                    self._loop.set_timer("stack", self._left_s(RANK_S if pid == self._pid else LONGEST_S), self._take)
                    return
        self._loop.set_timer("looked", self._left_s(LOOKING_S), self._end)

    def _read(self) -> None:
        """Take what is printed."""
        try:
            data = os.read(self._pipe, 65536)
        except BlockingIOError:
            return
        if not data:  # nobody has the other end any more
            self._loop.forget(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
        elif self._asked:
            self._printed += data
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
            self._stacks[self._asked] = stack.as_text(frames)
        self._ask_next()

    def _end(self) -> None:
        request, self._request = self._request, None
        assert request
        now, cores = glance(self._pid), 0.0
        if now is not None and self._began is not None:
            cores = (now.main_s - self._began.main_s) / (time.monotonic() - self._began_s)
        seen = {pid: found for pid in self._family if (found := glance(pid)) is not None}
        everyone = [*([now] if now else []), *seen.values()]
        self._tell(Whereabouts(
            request.number, self._stacks.get(self._pid, ""), now.state if now else "", now.kernel if now else "",
            round(cores, 2), sum(one.busy_s for one in everyone), sum(one.moved_bytes for one in everyone), self._ended,
            "\n".join(self._child(pid, found) for pid, found in seen.items() if pid in self._stacks or found.is_held)))

    def _child(self, pid: int, found: Glance) -> str:
        """Return what is seen of a child, in lines."""
        lines = self._stacks.get(pid, "").splitlines()
        return "\n".join([f"{pid} {found.state} {found.kernel}", *(f"  {line}" for line in lines)])
