"""What a rank leaves behind when it fails: the processes that it started, and the other ranks' Slurm step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..plan.member import Member

if TYPE_CHECKING:
    import psutil

MANY_CHILDREN = 1000
CLEANING_S = 0.7  # for processes to end when they are asked to
CANCELLING_S = 15.0  # for scancel to return


class Leftovers:
    """The processes that a rank started, as far as they were seen."""

    def __init__(self, rank: int) -> None:
        """Know of no process of the rank yet; `rank` is the number of its own process."""
        self._rank = rank
        self._seen: set[psutil.Process] = set()

    def note(self, child: int) -> None:
        """Note a process that the rank has forked: it bears no mark of the job, and soon perhaps no parent."""
        import psutil

        if len(self._seen) > MANY_CHILDREN:
            self._seen = {one for one in self._seen if one.is_running()}
        with contextlib.suppress(psutil.Error):
            self._seen.add(psutil.Process(child))

    def note_descendants(self) -> None:
        """Note the rank's descendants while it is there to be their parent."""
        from .descendants import children

        self._seen |= children(self._rank)

    def end(self, member: Member | None) -> None:
        """End the processes that were seen, and those that bear the mark of a member of the job."""
        from .descendants import end, marked

        if member is not None:
            self._seen |= marked(f"TORCHELASTIC_RUN_ID={member.run_id}", f"RANK={member.rank}")
        end(self._seen, CLEANING_S)


def cancel(step: str | None) -> None:
    """Cancel a Slurm step, if there is one: without PMIx, srun does not end the other ranks when one is gone."""
    import subprocess

    if step is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=CANCELLING_S)
