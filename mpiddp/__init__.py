"""Start PyTorch distributed training from MPI: ``mpirun python -m mpiddp train.py``.

Importing this package starts nothing: neither MPI nor torch is loaded before it is needed.
"""

from .api import destroy_process_group, init_process_group, process_group
from .errors import LaunchError
from .version import __version__

__all__ = ["LaunchError", "__version__", "destroy_process_group", "init_process_group", "process_group"]
