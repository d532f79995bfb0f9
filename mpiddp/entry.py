"""What `python -m mpiddp` and the command `mpiddp` run: a rank of a job, or the doctor."""

from __future__ import annotations

import os
import sys

DOCTOR = "doctor"


def main() -> int:
    """Run one rank of a job, or the doctor, from the command line and return the exit status."""
    if sys.argv[1:2] == [DOCTOR] and not os.path.exists(DOCTOR):  # a script of that name is run
        from .doctor.__main__ import main as check_job_script

        return check_job_script(sys.argv[2:])
    from .cli import main as run_rank

    return run_rank()
