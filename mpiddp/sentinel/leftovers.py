"""What a job leaves behind."""

from __future__ import annotations

import contextlib

CANCELLING_S = 15.0  # for scancel to answer


def cancel(step: str | None) -> None:
    """Cancel a Slurm step, if there is one: without PMIx, srun waits on for the other ranks when one is gone."""
    import subprocess

    if step is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=CANCELLING_S)
