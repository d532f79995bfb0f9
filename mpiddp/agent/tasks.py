"""What an agent does that may hang, such as writing to a file: in threads, while the agent goes on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from ..base.files import parse_stream_path, try_write_file
from ..base.stderr import STDERR, STDOUT, write_line
from ..ipc.event_loop import EventLoop
from .timeouts import TASK_TIMEOUT_S


class Tasks:
    """Runs functions in threads, each with a time limit."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._number = 0
        self._pending: set[str] = set()  # those for which the agent waits before it ends
        self._results: list[tuple[str, str]] = []  # of tasks that have ended
        self._ends: dict[str, Callable[[str], None]] = {}
        self._late: dict[str, str] = {}  # the results of those that take too long
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        loop.watch(self._reading, self._take_results)

    def write(self, path: str, content: str) -> None:
        """Write a file or a standard stream, and print why that fails; other descriptors are the rank's."""
        if (stream := parse_stream_path(path)) >= 0:
            if stream in (STDOUT, STDERR):
                write_line(content, stream)
            else:
                write_line(f"mpiddp: cannot write {path}: only the rank has this descriptor")
            return
        late = f"mpiddp: cannot write {path}: no response within {TASK_TIMEOUT_S:g} s"
        self.run(partial(try_write_file, path, content), write_line, late)

    def run(self, act: Callable[[], str | None], then: Callable[[str], object] = lambda _: None,
            late: str = "", timeout_s: float = TASK_TIMEOUT_S, is_required: bool = True) -> None:
        """Call `act` in a thread, and `then` with its result, or with `late` after the timeout, unless empty.

        This process does not end before that if the task `is_required`.
        """
        self._number += 1
        name = f"task {self._number}"

        def end(result: str) -> None:
            self._pending.discard(name)
            self._late.pop(name, None)
            self._loop.cancel_timers(name)
            if self._ends.pop(name, None) is not None and result:
                then(result)

        def run() -> None:
            result = ""
            with contextlib.suppress(Exception):
                result = act() or ""
            self._results.append((name, result))
            os.write(self._writing, b"!")

        self._ends[name], self._late[name] = end, late
        if is_required:
            self._pending.add(name)
        try:
            threading.Thread(target=run, daemon=True, name=name).start()
        except RuntimeError:  # no thread can be started
            end(late)
        else:
            self._loop.set_timer(name, timeout_s, lambda: end(late))

    def _take_results(self) -> None:
        with contextlib.suppress(BlockingIOError):  # finish(), called for another event, has read it
            os.read(self._reading, 1000)
        while self._results:
            name, result = self._results.pop(0)
            if (end := self._ends.get(name)) is not None:
                end(result)

    def finish(self, limit_s: float) -> None:
        """Wait for the required tasks, but not longer than the limit; then end those that are late."""
        deadline = time.monotonic() + limit_s
        while self._pending and time.monotonic() < deadline:
            self._take_results_now()
        for name in list(self._pending):
            self._ends[name](self._late[name])

    def _take_results_now(self) -> None:
        import select

        if select.select([self._reading], [], [], 0.01)[0]:
            self._take_results()
