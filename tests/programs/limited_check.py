"""A launch with --check whose rank 1 enters the cgroup GROUP when it begins to measure."""

import os
import sys
from pathlib import Path
from typing import Any

from mpiddp.check import preflight
from mpiddp.cli import main

measure_rank = preflight.measure_rank


def measure_in_group(*arguments: Any) -> Any:
    """Measure with the group's share of the CPUs."""
    Path(os.environ["GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    return measure_rank(*arguments)


if os.environ["PMI_RANK"] == "1":
    preflight.measure_rank = measure_in_group
sys.exit(main())
