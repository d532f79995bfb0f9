"""Start PyTorch distributed training from MPI: ``mpirun python -m mpiddp train.py``.

Importing this package starts nothing: neither MPI nor torch is loaded before it is needed.
"""

import os
import sys

from . import stages as _stages  # noqa: F401 (it notes when this process comes to us)

if sys.argv[:1] == ["-m"] and f"{' '.join(sys.orig_argv)} ".partition(" -m ")[2].startswith(f"{__name__} "):
    from .staging import ahead as _ahead

    _ahead.begin()

from .api import destroy_process_group, init_process_group, process_group, should_stop, stop_for_requeue
from .errors import EXIT_REQUEUE as REQUEUE
from .errors import LaunchError
from .facts.runtime import restart_count as _restart_count
from .version import __version__

restart_count = _restart_count(os.environ)  # how often this job was started again

__all__ = ["REQUEUE", "LaunchError", "__version__", "destroy_process_group", "init_process_group", "process_group",
           "restart_count", "should_stop", "stop_for_requeue"]
