"""Start PyTorch distributed training from MPI: ``mpirun python -m mpiddp train.py``.

Importing this package starts nothing: neither MPI nor torch is loaded before it is needed.
"""

import os
import sys

from .base import timeline as _timeline  # noqa: F401 (it records when this process begins to import us)

if any(os.path.basename(word) == __name__ for word in sys.argv[:1]) or (  # the command `mpiddp`, or `python -m mpiddp`
        sys.argv[:1] == ["-m"]
        and f"{' '.join(sys.orig_argv)} ".partition(" -m ")[2].startswith(f"{__name__} ")):
    from .staging import prefetch as _prefetch

    _prefetch.prefetch_modules()

from .api import destroy_process_group, init_process_group, process_group, should_stop, stop_for_requeue
from .base.errors import LaunchError
from .base.version import __version__
from .discovery.runtime import count_restarts as _restart_count
from .systems.statuses import EXIT_REQUEUE as REQUEUE

restart_count = _restart_count(os.environ)  # how often this job was restarted

__all__ = ["REQUEUE", "LaunchError", "__version__", "destroy_process_group", "init_process_group", "process_group",
           "restart_count", "should_stop", "stop_for_requeue"]
