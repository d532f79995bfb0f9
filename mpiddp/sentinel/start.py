"""The start of a rank: what is said when it takes long, and what is done when it takes too long."""

from __future__ import annotations

from ..beside.messages import Watched
from . import events

ASKING_HOSTS_S = 2.0
HARD_GRACE_S = 15.0  # after the deadline of the start, for ranks to end the job in order
OTHERS_S = 1.0  # for other nodes' sentinels to say what they have to, before the job's step is cancelled
TERMINATING_S = 1.0  # between SIGTERM and SIGKILL
# Slurm 22.05's fences of the kind "tree" may end before all ranks have come; the next message finds one unprepared.
TRY_RING = "\nmpiddp: if this is srun --mpi=pmix, try it with SLURM_PMIX_FENCE=ring in the environment of srun"


class Start:
    """The start of a rank, until its script begins.

    `began_s` is when the sentinel began to watch. `stage` is what the rank does, empty for its script. `failed`
    tells that it did not come through its start, and that others may wait for it.
    """

    def __init__(self, watched: Watched, began_s: float) -> None:
        self.began_s = began_s
        self.stage = "starting"
        self.failed = False
        self._watched = watched

    def begin_watch(self) -> list[events.WatcherAction]:
        """Return what to do in the beginning."""
        return [events.SetTimer("warn", self._watched.timeout_s / 4), events.SetTimer("start", self._watched.timeout_s)]

    def begin(self, stage: str) -> list[events.WatcherAction]:
        """Note the stage that begins; the script has no name, and no deadline either."""
        self.stage = stage
        actions: list[events.WatcherAction] = [events.DropTimer("warn")] if stage != "MPI_Init" else []
        return actions if stage else [*actions, events.DropTimer("start")]

    def end(self, cause: str) -> list[events.WatcherAction]:
        """End the rank, and print why."""
        self.failed = True
        return [events.Say(f"mpiddp: {self._watched.who} {cause}, in {self.stage}"), events.Terminate(),
                events.SetTimer("kill", TERMINATING_S)]

    def tell_death(self, cause: str) -> list[events.WatcherAction]:
        """Print how the rank died in its start, because no other rank can know of it yet; nothing without a cause."""
        if not cause:
            return []
        self.failed = True
        hint = TRY_RING if self._watched.by_srun and self.stage == "MPI_Init" and "SIGSEGV" in cause else ""
        return [events.Say(f"mpiddp: {self._watched.who} {cause}, in {self.stage}{hint}")]

    def on_due(self, timer: str, now_s: float) -> list[events.WatcherAction]:
        """Return what to do when the time of a warning, or of the start, is over."""
        waited_s = now_s - self.began_s
        return self._warn(waited_s) if timer == "warn" else self._end_late(waited_s)

    def _warn(self, waited_s: float) -> list[events.WatcherAction]:
        """Print that the rank waits in MPI_Init, if that is where it is."""
        if self.stage != "MPI_Init" or not self._watched.first_on_node:
            return []
        return [events.AskHosts(f"mpiddp: {self._watched.who} has waited {waited_s:.0f} s in MPI_Init, "
                         "which returns when every rank of the job has reached it",
                         min(ASKING_HOSTS_S, self._watched.timeout_s / 4))]

    def _end_late(self, late_s: float) -> list[events.WatcherAction]:
        """End a rank whose time is over: in MPI_Init at once, in any other stage after a grace."""
        in_mpi = self.stage == "MPI_Init"
        if not in_mpi and late_s < self._watched.timeout_s + HARD_GRACE_S:
            return [events.SetTimer("start", self._watched.timeout_s + HARD_GRACE_S - late_s)]
        self.failed = True
        words = f"mpiddp: ending {self._watched.who}: still in {self.stage} {late_s:.0f} s after its start"
        told = self._watched.first_on_node or not in_mpi  # in MPI_Init, all ranks of the node are late
        end: list[events.WatcherAction] = [events.Terminate(), events.SetTimer("kill", TERMINATING_S)]
        return [events.Say(words), *end] if told else end
