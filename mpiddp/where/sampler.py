"""A sentinel that looks where its rank is: it asks for the stack, and reads what the kernel tells of the process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from ..base.text import truncate_middle
from ..failure import stack
from ..failure.root_cause import MAX_STACK_CHARS
from ..ipc.event_loop import Loop
from .collector import Hearing
from .process_sample import Glance, descendants, glance, other_program, unseen_among
from .protocol import Inspect, Inspected, Sight, Where, Whereabouts
from .py_spy import NATIVE, NONBLOCKING, inspect
from .traffic import Traffic

LOOKING_S = 0.2  # for which the processor time is measured, and a process in the kernel is given time
MOST = 16  # children that are asked
INSPECTING_S = 15.0  # for py-spy, which may have to read the symbols of large libraries


class Looking:
    """Looks at a rank and at the processes that it has forked, without waiting for any."""

    def __init__(
        self, loop: Loop, pid: int, sight: Sight, store_port: int, tell: Callable[[Whereabouts], None]
    ) -> None:
        self._loop, self._pid, self._tell = loop, pid, tell
        self._hearing, self._traffic = Hearing(loop, pid, sight), Traffic(store_port)
        self._last: dict[int, Glance] = {}  # processes, as they were seen last
        self._fed_bytes = 0  # that came for processes which waited
        self._request: Where | None = None
        self._ended = False
        self._family: list[int] = []
        self._began: Glance | None = None
        self._began_s = 0.0

    @property
    def socket(self) -> int:
        """The end of the socket by which the rank is asked, -1 where that is closed."""
        return self._hearing.socket

    def look(self, request: Where, ended: bool) -> None:
        """Look, and tell what is seen; one who asks meanwhile gets the same answer."""
        busy, self._request, self._ended = self._request is not None, request, ended
        if busy:
            return
        self._began, self._began_s = glance(self._pid), time.monotonic()
        self._family = descendants(self._pid)
        self._hearing.ask(self._family[:MOST], self._go_on)
        self._go_on()

    def _go_on(self) -> None:
        """Come to an end when all is heard and the processor time can be told, or it has taken too long."""
        if self._request is not None:
            of_s = max(LOOKING_S, self._hearing.wait_s)
            self._loop.set_timer("looked", max(0.0, self._began_s + of_s - time.monotonic()), self._end)

    def _end(self) -> None:
        request, self._request = self._request, None
        assert request
        hearing = self._hearing
        now, cores = glance(self._pid), 0.0
        if now is not None and self._began is not None:
            cores = (now.main_s - self._began.main_s) / (time.monotonic() - self._began_s)
        seen = {pid: found for pid in self._family if (found := glance(pid)) is not None}
        family = {**({self._pid: now} if now else {}), **seen}
        everyone = list(family.values())
        self._fed_bytes += sum(one.fed_bytes(self._last.get(pid, one)) for pid, one in family.items())
        self._last = family
        tcp_bytes, hidden = self._traffic.see(family)
        frames = hearing.stacks.get(self._pid, [])
        workers = list(seen.values()) if hearing.spins and stack.is_in_torch(frames) else everyone
        children = [self._child(pid, found) for pid, found in seen.items() if self._is_shown(pid, found)]
        self._tell(Whereabouts(
            request.number, stack.frames_to_json(frames), now.state if now else "", now.kernel if now else "",
            round(cores, 2), sum(one.busy_s for one in workers),
            sum(one.moved_bytes for one in everyone) + self._fed_bytes + tcp_bytes - hearing.heard_bytes, self._ended,
            json.dumps(children[:MOST], ensure_ascii=False), hearing.progress, sum(one.faults for one in everyone),
            next(filter(None, (unseen_among(self._family), hidden, *(one.unseen for one in everyone))), ""),
            hearing.native.get(self._pid, "")))

    def _is_shown(self, pid: int, found: Glance) -> bool:
        """Tell whether a child is worth a word: it is held, runs no Python, or has a stack that is no idle worker's."""
        if pid in self._hearing.stacks:
            return found.is_held or not stack.is_idle_worker(self._hearing.stacks[pid])
        return found.is_held or pid in self._hearing.native or bool(other_program(pid, self._pid))

    def _child(self, pid: int, found: Glance) -> tuple[object, ...]:
        """Return what is seen of a child, as `Whereabouts` has it."""
        frames = self._hearing.stacks.get(pid, [])
        return (pid, stack.frames_to_lists(frames), found.state, found.kernel, other_program(pid, self._pid),
                self._hearing.native.get(pid, ""))


def inspect_threads(loop: Loop, pid: int, request: Inspect, tell: Callable[[Inspected], None]) -> None:
    """Tell all threads of a rank as soon as a program for that has printed them, or why it has not."""
    def answer(text: str) -> None:
        tell(Inspected(request.rank, truncate_middle(text, MAX_STACK_CHARS), request.asker))

    try:
        inspect(loop, pid, [NATIVE if request.native else NONBLOCKING], INSPECTING_S, answer)
    except OSError as error:
        answer(str(error))
