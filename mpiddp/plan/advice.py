"""What a message tells a user to type: options of the launcher and the scheduler that the job has, and of no others."""

from __future__ import annotations

from typing import NamedTuple

from ..facts.host import HostFacts
from ..facts.launchers import LAUNCHERS, Launcher
from ..facts.schedulers import SCHEDULERS, Scheduler

NO_LAUNCHER, NO_SCHEDULER = Launcher("", ()), Scheduler("", ())


class Advice(NamedTuple):
    """The launcher and the scheduler of a job; one that is not known has no options."""

    launcher: Launcher
    scheduler: Scheduler

    @property
    def more_cores(self) -> str:
        """The option for more cores of a rank, in brackets after a space, empty if none is known."""
        return brackets(self.scheduler.cores or self.launcher.cores)

    @property
    def unbound(self) -> str:
        """What keeps the launcher from binding ranks, in brackets after a space, empty if nothing is known."""
        return brackets(f"{self.launcher.command} {self.launcher.unbound}" if self.launcher.unbound else "")

    @property
    def all_gpus(self) -> str:
        """What shows each rank all GPUs of its node, in brackets after a space, empty if nothing is known."""
        return brackets(f"{self.launcher.command} {self.launcher.all_gpus}" if self.launcher.all_gpus else "")

    @property
    def own_gpu(self) -> str:
        """What shows each rank a GPU of its own alone, in brackets after a space, empty if nothing is known."""
        return brackets(f"{self.launcher.command} {self.launcher.own_gpu}" if self.launcher.own_gpu else "")

    def ranks_per_node(self, number: int) -> str:
        """Return the option for so many ranks a node, in brackets after a space, empty if none is known."""
        return brackets(self.launcher.ranks_per_node.format(number))

    def gpus(self, number: int | str = "N") -> str:
        """Return the option for so many GPUs of each node, in brackets after a space, empty if none is known."""
        return brackets(self.scheduler.gpus.format(number))


NO_ADVICE = Advice(NO_LAUNCHER, NO_SCHEDULER)


def advice_for(facts: HostFacts) -> Advice:
    """Return what a rank's messages may name."""
    launcher = next((row for row in LAUNCHERS if row.name == facts.launcher), NO_LAUNCHER)
    return Advice(launcher, next((row for row in SCHEDULERS if row.name == facts.scheduler), NO_SCHEDULER))


def brackets(words: str) -> str:
    """Return words in brackets after a space, empty for none."""
    return f" ({words})" if words else ""
