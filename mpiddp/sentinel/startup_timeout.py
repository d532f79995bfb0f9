"""The start of a rank, and of all: what is said when it takes long, and what is done when it takes too long."""

from __future__ import annotations

from collections.abc import Mapping

from ..base.text import format_ranges, join_names
from . import events
from .protocol import Stage, Watched

ASKING_HOSTS_S = 2.0
HARD_GRACE_S = 15.0  # after the deadline of the start, for ranks to end the job in order
OTHERS_S = 1.0  # for other nodes' sentinels to say what they have to, before the job's step is cancelled
TERMINATING_S = 1.0  # between SIGTERM and SIGKILL
LATE_S = 10.0  # from the time that a rank joins its job until its script, before others hear of it
OTHERS_LATE_S = 1.0  # for others to be late, too
FEW = 3  # ranks that are named with their hosts
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
        self._late = False  # the coordinator knows of it

    def begin_watch(self) -> list[events.WatcherAction]:
        """Return what to do in the beginning."""
        return [events.SetTimer("warn", self._watched.timeout_s / 4), events.SetTimer("start", self._watched.timeout_s)]

    def begin(self, stage: str) -> list[events.WatcherAction]:
        """Note the stage that begins; the script has no name, and no deadline either."""
        self.stage = stage
        actions: list[events.WatcherAction] = [events.DropTimer("warn")] if stage != "MPI_Init" else []
        if self._late:
            actions.append(events.ToCoordinator(Stage(stage)))
        return actions if stage else [*actions, events.DropTimer("start"), events.DropTimer("late")]

    def join(self) -> list[events.WatcherAction]:
        """Note that the rank has joined its job: from now on the coordinator tells of one that is late."""
        return [events.SetTimer("late", LATE_S)] if self.stage else []

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
        """Return what to do when the time of a warning, or of the start, is over, or that for its last stages."""
        if timer == "late":
            self._late = True
            return [events.ToCoordinator(Stage(self.stage))]
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


class LateRanks:
    """The ranks that have joined the job and are late, as the coordinator knows them, and what it says of them."""

    def __init__(self) -> None:
        self._stages: dict[int, str] = {}
        self._is_set = False  # the timer
        self._pause_s = LATE_S

    def note(self, rank: int, stage: str) -> list[events.CoordinatorAction]:
        """Note the stage of a rank that is late; it has no name when its script begins."""
        self.forget(rank)
        if not stage:
            return []
        self._stages[rank] = stage
        is_first, self._is_set = not self._is_set, True
        return [events.SetTimer("late", OTHERS_LATE_S)] if is_first else []

    def forget(self, rank: int) -> None:
        """Note that a rank is gone."""
        self._stages.pop(rank, None)

    def remind(self, waited_s: float, hosts: Mapping[int, str], world_size: int) -> list[events.CoordinatorAction]:
        """Return what to say of the ranks that are late, and when again: each time that the wait has doubled.

        `hosts` are those of all ranks that have joined. The others are named while rank 0 is late.
        """
        self._is_set = bool(self._stages)
        if not self._stages:
            return []
        groups: dict[str, list[int]] = {}
        for rank, stage in sorted(self._stages.items()):
            groups.setdefault(stage, []).append(rank)
        parts = [f"{group_of(ranks, hosts)} ({stage})" for stage, ranks in groups.items()]
        if 0 in self._stages and (missing := [rank for rank in range(world_size) if rank not in hosts]):
            parts.append(f"{group_of(missing, hosts)} (not joined)")
        self._pause_s *= 2
        return [events.Say(f"mpiddp: {waited_s:.0f} s after the start the script waits for {'; '.join(parts)}"),
                events.SetTimer("late", self._pause_s)]


def group_of(ranks: list[int], hosts: Mapping[int, str]) -> str:
    """Return ranks in words, a few with their hosts."""
    if len(ranks) > FEW:
        return f"ranks {format_ranges(ranks)}"
    return join_names([f"rank {rank}" + (f" on {hosts[rank]}" if rank in hosts else "") for rank in ranks])
