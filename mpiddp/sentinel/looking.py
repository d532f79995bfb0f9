"""A sentinel that looks where its rank is: it asks for the stack, and reads what the kernel tells of the process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from ..beside.asking import Where, Whereabouts
from ..beside.messages import STACK_SIGNAL
from ..facts.process import Glance, glance, handles
from ..where import stack
from .leftovers import children
from .loop import Loop

ANSWER_S = 1.0  # for a process to print its stack
QUIET_S = 0.02  # after which it has printed all of it
LOOKING_S = 0.2  # for which the processor time is measured
CHILDREN = 8  # of a rank, that are asked
YOUNG_S = 1.0  # a child of less may be about to become another program, which the signal would end


class Looking:
    """Looks at a rank and at the processes that it has forked, one after the other, without waiting for any."""

    def __init__(self, loop: Loop, pid: int, tell: Callable[[Whereabouts], None]) -> None:
        self._loop, self._pid, self._tell = loop, pid, tell
        self._pipe = self._descriptor = -1
        self._request: Where | None = None
        self._ended = False
        self._asked: list[int] = []  # processes, whose stacks have come or will not
        self._waiting: list[int] = []
        self._printed = b""
        self._stacks: dict[int, str] = {}
        self._began: Glance | None = None
        self._began_s = 0.0

    def hear(self, pipe: int, descriptor: int) -> None:
        """Take the reading end of a pipe, into which the rank prints by its own `descriptor`."""
        self._pipe, self._descriptor = pipe, descriptor
        os.set_blocking(pipe, False)
        self._loop.listen(pipe, self._read)

    def look(self, request: Where, ended: bool) -> None:
        """Look, and tell what is seen; one who asks meanwhile gets the same answer."""
        busy, self._request, self._ended = self._request is not None, request, ended
        if busy:
            return
        self._began, self._began_s = glance(self._pid), time.monotonic()
        self._stacks, self._asked = {}, []
        self._waiting = [self._pid, *self._children()]
        self._ask_next()

    def _children(self) -> list[int]:
        now_s = time.time()
        return [one.pid for one in sorted(children(self._pid), key=lambda one: one.pid)
                if now_s - one.create_time() > YOUNG_S][:CHILDREN]

    def _ask_next(self) -> None:
        """Ask the next process, or come to an end when the processor time can be told."""
        while self._waiting:
            pid = self._waiting.pop(0)
            self._asked.append(pid)
            self._printed = b""
            if self._can_be_asked(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, STACK_SIGNAL)
                    self._loop.set_timer("stack", ANSWER_S, self._take)
                    return
        left_s = self._began_s + LOOKING_S - time.monotonic()
        self._loop.set_timer("looked", max(0.0, left_s), self._end)

    def _can_be_asked(self, pid: int) -> bool:
        """Tell whether a process would print its stack: the signal would end any other, or fill a wrong file."""
        try:
            same = os.stat(f"/proc/{pid}/fd/{self._descriptor}").st_ino == os.fstat(self._pipe).st_ino
        except OSError:
            return False
        found = glance(pid)
        return same and found is not None and found.state not in "TtZX" and handles(pid, STACK_SIGNAL)

    def _read(self) -> None:
        """Take what is printed; it is complete when nothing more comes for a moment."""
        with contextlib.suppress(BlockingIOError):
            self._printed += os.read(self._pipe, 65536)
        if self._request is not None and self._loop.is_set("stack"):
            self._loop.set_timer("stack", QUIET_S, self._take)

    def _take(self) -> None:
        if self._printed.endswith(b"\n"):
            frames = stack.read(self._printed.decode(errors="replace").splitlines())
            self._stacks[self._asked[-1]] = stack.as_text(frames)
        self._ask_next()

    def _end(self) -> None:
        request, self._request = self._request, None
        assert request
        now, cores = glance(self._pid), 0.0
        if now is not None and self._began is not None:
            cores = (now.busy_s - self._began.busy_s) / (time.monotonic() - self._began_s)
        own = self._asked[0]
        self._tell(Whereabouts(request.number, self._stacks.get(own, ""), now.state if now else "",
                               now.kernel if now else "", round(cores, 2), self._busy_s(), self._ended,
                               "\n".join(map(self._child, self._asked[1:]))))

    def _busy_s(self) -> float:
        return sum(found.busy_s for pid in self._asked if (found := glance(pid)) is not None)

    def _child(self, pid: int) -> str:
        """Return what is seen of a child, in lines."""
        found = glance(pid)
        state, kernel = (found.state, found.kernel) if found else ("X", "")
        lines = self._stacks.get(pid, "").splitlines()
        return "\n".join([f"{pid} {state} {kernel}", *(f"  {line}" for line in lines)])
