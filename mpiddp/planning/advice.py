"""What a message tells a user to type: options of the launcher and the scheduler that the job has, and of no others."""

from __future__ import annotations

from typing import NamedTuple

from ..discovery.host import HostFacts
from ..discovery.launchers import LAUNCHERS, Launcher
from ..discovery.schedulers import SCHEDULERS, Scheduler

NO_LAUNCHER, NO_SCHEDULER = Launcher("", ()), Scheduler("", ())


class Advice(NamedTuple):
    """The launcher and the scheduler of a job; one that is not known has no options."""

    launcher: Launcher
    scheduler: Scheduler

    def words(self, option: str, number: int | str = "N") -> str:
        """Return the option of a field of Scheduler, or else of Launcher, in brackets after a space; empty for none.

        A launcher's comes with its command.
        """
        of_launcher = getattr(self.launcher, option, "")
        found = getattr(self.scheduler, option, "") or (of_launcher and f"{self.launcher.command} {of_launcher}")
        return f" ({found.format(number)})" if found else ""


NO_ADVICE = Advice(NO_LAUNCHER, NO_SCHEDULER)


def choose_advice(facts: HostFacts) -> Advice:
    """Return what a rank's messages may name."""
    launcher = next((row for row in LAUNCHERS if row.name == facts.launcher), NO_LAUNCHER)
    return Advice(launcher, next((row for row in SCHEDULERS if row.name == facts.scheduler), NO_SCHEDULER))
