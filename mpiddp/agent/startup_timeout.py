"""The startup timeout: warns of a slow start, of a rank or of all ranks, and ends one that takes too long."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from ..base.text import format_ranges, join_names
from ..systems.launchers import SRUN, SRUN_PMIX
from . import events
from .protocol import AgentConfig, Stage
from .timeouts import HARD_GRACE_S, KILL_DELAY_S, PROBE_HOSTS_TIMEOUT_S

LATE_S = 10.0  # from a rank's registration until it is reported that its script has not begun
LATE_SPREAD_S = 1.0  # for other late ranks to be reported
MAX_RANKS_WITH_HOST = 3
# Slurm 22.05's "tree" fences may end before all ranks have entered; the next message then reaches an unready rank. On a
# busy test cluster 22 of 78 starts crashed with the tree, 12 of 180 with Slurm's default, a mixture, and none of 159
# with the ring. A site selects it for all jobs by PMIxCollFence=ring in its mpi.conf.
TRY_RING = (f"\nmpiddp: if you use {SRUN_PMIX}, try again with SLURM_PMIX_FENCE=ring in the environment of "
            f"{SRUN.command}")
END: list[events.AgentAction] = [events.SignalRank(signal.SIGTERM), events.SetTimer("kill", KILL_DELAY_S)]  # the rank


class StartupTimeout:
    """The start of a rank, until its script begins.

    `began_s` is when the agent began to watch. `stage` is what the rank does, empty for its script. `failed`: its
    start has failed, and others may wait for it; `timed_out`, because it has taken too long.
    """

    def __init__(self, config: AgentConfig, began_s: float) -> None:
        self.began_s = began_s
        self.stage = "starting"
        self.failed = self.timed_out = False
        self._config = config
        self._is_late = False  # the coordinator knows it

    def begin(self) -> list[events.AgentAction]:
        """Return the first actions."""
        return [events.SetTimer("start", self._config.timeout_s)]

    def begin_stage(self, stage: str) -> list[events.AgentAction]:
        """Note the stage that begins; the script has no name, and no deadline either."""
        self.stage = stage
        actions: list[events.AgentAction] = [
            events.SetTimer("warn", self._mpi_warning_s) if stage == "MPI_Init" else events.CancelTimer("warn")]
        if self._is_late:
            actions.append(events.ToCoordinator(Stage(stage)))
        return actions if stage else [*actions, events.CancelTimer("start"), events.CancelTimer("late")]

    def on_registered(self) -> list[events.AgentAction]:
        """Note that the rank has joined its job: from now on the coordinator reports that it is late."""
        return [events.SetTimer("late", LATE_S)] if self.stage else []

    def end_rank(self, cause: str) -> list[events.AgentAction]:
        """End the rank, and print why."""
        return [*self.report_death(cause), *END]

    def report_death(self, cause: str) -> list[events.AgentAction]:
        """Print how the rank died in its start, which no other rank can know yet; nothing without a cause."""
        if not cause:
            return []
        self.failed = True
        hint = TRY_RING if self._config.by_srun and self.stage == "MPI_Init" and "SIGSEGV" in cause else ""
        return [events.PrintLine(f"mpiddp: {self._config.name}: {cause}, during startup ({self.stage}){hint}")]

    def on_due(self, timer: str, now_s: float) -> list[events.AgentAction]:
        """Act on one of the timers "warn", "start" and "late"."""
        if timer == "late":
            self._is_late = True
            return [events.ToCoordinator(Stage(self.stage))]
        return self._warn() if timer == "warn" else self._time_out(now_s - self.began_s)

    @property
    def _mpi_warning_s(self) -> float:
        """The seconds in MPI_Init after which the node's first rank warns."""
        return self._config.timeout_s / 4

    def _warn(self) -> list[events.AgentAction]:
        """Print that the rank waits in MPI_Init, once per node."""
        if not self._config.first_on_node:
            return []
        hint = f"; {self._config.may_hang}" if self._config.may_hang else ""
        return [events.ProbeHosts(f"mpiddp: {self._config.name} has waited {self._mpi_warning_s:.0f} s in MPI_Init, "
                                  f"which returns when all ranks of the job have called it{hint}",
                                  min(PROBE_HOSTS_TIMEOUT_S, self._mpi_warning_s))]

    def _time_out(self, waited_s: float) -> list[events.AgentAction]:
        """End the rank: in MPI_Init at once, in any other stage after a grace."""
        in_mpi = self.stage == "MPI_Init"
        if not in_mpi and waited_s < self._config.timeout_s + HARD_GRACE_S:
            return [events.SetTimer("start", self._config.timeout_s + HARD_GRACE_S - waited_s)]
        self.failed = self.timed_out = True
        line = f"mpiddp: ending {self._config.name}: still in {self.stage} {waited_s:.0f} s after its start"
        is_printed = self._config.first_on_node or not in_mpi  # in MPI_Init, all ranks of the node are late
        return [events.PrintLine(line), *END] if is_printed else END


class LateRanks:
    """The ranks that have joined the job and are late, as the coordinator knows them."""

    def __init__(self) -> None:
        self._stages: dict[int, str] = {}
        self._has_timer = False
        self._pause_s = LATE_S

    def set_stage(self, rank: int, stage: str) -> list[events.CoordinatorAction]:
        """Note the stage of a rank that is late; it has no name when its script begins."""
        self.forget(rank)
        if not stage:
            return []
        self._stages[rank] = stage
        is_first, self._has_timer = not self._has_timer, True
        return [events.SetTimer("late", LATE_SPREAD_S)] if is_first else []

    def forget(self, rank: int) -> None:
        """Note that a rank is gone."""
        self._stages.pop(rank, None)

    def remind(self, waited_s: float, hosts: Mapping[int, str], world_size: int) -> list[events.CoordinatorAction]:
        """Print which ranks are late, and again each time that the wait has doubled.

        `hosts` are those of all ranks that have joined. The others are named while rank 0 is late.
        """
        self._has_timer = bool(self._stages)
        if not self._stages:
            return []
        groups: dict[str, list[int]] = {}
        for rank, stage in sorted(self._stages.items()):
            groups.setdefault(stage, []).append(rank)
        parts = [f"{format_ranks(ranks, hosts)} ({stage})" for stage, ranks in groups.items()]
        if 0 in self._stages and (missing := [rank for rank in range(world_size) if rank not in hosts]):
            parts.append(f"{format_ranks(missing, hosts)} (not joined)")
        self._pause_s *= 2
        line = f"mpiddp: the script has not started after {waited_s:.0f} s; waiting for {'; '.join(parts)}"
        return [events.PrintLine(line), events.SetTimer("late", self._pause_s)]


def format_ranks(ranks: list[int], hosts: Mapping[int, str]) -> str:
    """Return ranks in words, a few with their hosts."""
    if len(ranks) > MAX_RANKS_WITH_HOST:
        return f"ranks {format_ranges(ranks)}"
    return join_names([f"rank {rank}" + (f" on {hosts[rank]}" if rank in hosts else "") for rank in ranks])
