"""The process of the rank: when it is gone, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from ..facts.process import Process
from .loop import Loop
from .messages import END_SIGNAL

HARD_GRACE_S = 15.0  # after the deadline of the start, for ranks to end the job in order
ASKING_S = 1.0  # between one way to end a rank and the next, harder one
LAST_S = 0.5  # for a rank whose grace is over to end by itself


class RankProcess:
    """Ends the rank's process, and notices when it is gone.

    `grace_s` is the time in which it may end by itself when it has to end. `gone` tells that it has ended.
    """

    def __init__(self, process: Process, loop: Loop, on_gone: Callable[[int | None], None]) -> None:
        """Watch a process; `on_gone` is called, once, with its wait status, None for an unknown one."""
        self.facts = process
        self.grace_s = HARD_GRACE_S
        self.gone = False
        self._loop, self._on_gone = loop, on_gone
        if process.ended >= 0:
            loop.listen(process.ended, self.look)

    def look(self) -> None:
        """Find out whether the process is gone; if it has only closed its connections, it became another program."""
        try:
            status = self.facts.wait_status()
        except ProcessLookupError:
            self._note_end(None)
            return
        if status is not None:
            self._note_end(status)
        elif self.facts.ended < 0:
            self._loop.set_timer("look", ASKING_S, self.look)

    def _note_end(self, status: int | None) -> None:
        if self.gone:
            return
        self.gone = True
        self._loop.drop_timers("ask", "kill", "look")
        if self.facts.ended >= 0:
            self._loop.forget(self.facts.ended)
        self._on_gone(status)

    def is_stopped(self) -> bool:
        """Tell whether a signal or a debugger holds the process."""
        return self.facts.is_stopped()

    def alert(self) -> None:
        """Let the process read the `End` that it was sent, also one that is stopped."""
        self._send_signal(END_SIGNAL)
        if self.is_stopped():
            self._send_signal(signal.SIGCONT)

    def ask_soon(self) -> None:
        """Ask the script to end, if it has not ended by then."""
        self._loop.set_timer("ask", min(ASKING_S, self.grace_s), self._ask)

    def kill_in_time(self) -> None:
        """Kill the process when its grace is over, which begins now unless it has begun before."""
        if not self._loop.is_set("kill"):
            self._loop.set_timer("kill", self.grace_s + LAST_S, self._kill)

    def end_by_force(self) -> None:
        """End the process by SIGTERM, and by SIGKILL if it is still there then."""
        self._send_signal(signal.SIGTERM)
        self._loop.set_timer("kill", ASKING_S, self._kill)

    def _ask(self) -> None:
        """Send SIGTERM to a script that handles it, which can end in its own way; any other would be cut off."""
        with contextlib.suppress(OSError):
            if self.facts.handles(signal.SIGTERM):
                self._send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.facts.pid, number)
