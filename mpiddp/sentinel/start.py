"""The start of a rank: what is said when it takes long, and what is done when it takes too long."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..plan.words import folded
from ..say import say
from .loop import Loop
from .messages import Watched
from .rank import HARD_GRACE_S, RankProcess
from .reach import out_of_reach

ASKING_HOSTS_S = 2.0


class Start:
    """Watches the start of a rank, until its script begins.

    `began` is when the sentinel began to watch, on time.monotonic()'s clock. `stage` is what the rank does, empty
    for its script. `failed` tells that it did not come through its start, and that others may wait for it.
    """

    def __init__(self, loop: Loop, watched: Watched, rank: RankProcess, on_late: Callable[[], None]) -> None:
        """Watch the start; `on_late` is called when the rank is ended because it took too long."""
        self.began = time.monotonic()
        self.stage = "starting"
        self.failed = False
        self._loop, self._watched, self._rank, self._on_late = loop, watched, rank, on_late
        loop.set_timer("warn", watched.timeout_s / 4, self._warn)
        loop.set_timer("start", watched.timeout_s, self._end_late)

    def begin(self, stage: str) -> None:
        """Note the stage that begins; the script has no name, and no deadline either."""
        self.stage = stage
        if stage != "MPI_Init":
            self._loop.drop_timers("warn")
        if not stage:
            self.drop_deadline()

    def drop_deadline(self) -> None:
        """Let the rank have any time."""
        self._loop.drop_timers("start")

    def tell_death(self, cause: str) -> None:
        """Print how the rank died in its start, because no other rank can know of it yet."""
        say(f"mpiddp: {self._watched.who} {cause}, in {self.stage}")
        self.failed = True

    def _warn(self) -> None:
        """Print that the rank waits in MPI_Init, if that is where it is."""
        if self.stage == "MPI_Init" and self._watched.first_on_node:
            waited_s = time.monotonic() - self.began
            silent = out_of_reach(self._watched.hosts(), min(ASKING_HOSTS_S, self._watched.timeout_s / 4))
            say(f"mpiddp: {self._watched.who} has waited {waited_s:.0f} s in MPI_Init, "
                "which returns when every rank of the job has reached it"
                + (f"; no answer from {folded(silent)}" if silent else ""))

    def _end_late(self) -> None:
        """End a rank whose time is over: in MPI_Init at once, in any other stage after a grace."""
        late_s = time.monotonic() - self.began
        in_mpi = self.stage == "MPI_Init"
        if not in_mpi and late_s < self._watched.timeout_s + HARD_GRACE_S:
            self._loop.set_timer("start", self._watched.timeout_s + HARD_GRACE_S - late_s, self._end_late)
            return
        if self._watched.first_on_node or not in_mpi:  # in MPI_Init, all ranks of the node are late
            say(f"mpiddp: ending {self._watched.who}: still in {self.stage} {late_s:.0f} s after its start")
        self.failed = True
        self._on_late()
        self._rank.end_by_force()
