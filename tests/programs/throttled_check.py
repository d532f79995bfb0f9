"""A launch with --check whose rank 1 enters a cgroup, GROUP, when the check begins."""

import os
import sys
from pathlib import Path
from typing import Any

from mpiddp.check import preflight
from mpiddp.cli import main

check_nodes = preflight.check_nodes


def throttle(*arguments: Any) -> None:
    """Check in the cgroup."""
    if os.environ["PMI_RANK"] == "1":
        Path(os.environ["GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    check_nodes(*arguments)


preflight.check_nodes = throttle
sys.exit(main())
