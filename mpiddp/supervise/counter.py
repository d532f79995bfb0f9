"""The numbers of a job's attempts, which do not repeat when Slurm has queued the job again."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Mapping

from ..facts import runtime, schedulers
from ..facts.files import free_claim, names


class Counter:
    """Numbers attempts from 0 on, or from where the job was before it was queued again.

    In a Slurm job a file for each attempt keeps the number, in a hidden folder of `folder`. Each supervisor of the job
    has a folder of its own. Where none can be written, the first number is how often Slurm has started the job again.
    """

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        self._next, self._folder = runtime.restart_count(environ), ""
        if job := environ.get("SLURM_JOB_ID"):
            wanted = os.path.join(folder, f".mpiddp-attempts-{job}")
            restarts, own = schedulers.slurm_restarts(environ), secrets.token_hex(4)
            self._folder = free_claim(wanted, restarts, own, itertools.count(1)).folder
            self._next = max([self._next, *(int(name) + 1 for name in names(self._folder) if name.isdecimal())])

    def take(self) -> int:
        """Return the number of the next attempt."""
        number, self._next = self._next, self._next + 1
        if self._folder:
            try:
                os.close(os.open(os.path.join(self._folder, str(number)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            except OSError:  # the numbers may repeat then, but the job goes on
                self._folder = ""
        return number

    def forget(self) -> None:
        """Remove the numbers, of a job that has succeeded: any other may be queued again."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
