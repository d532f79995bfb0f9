"""What a rank knows of itself before torch is there."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..base.config import LaunchConfig
from . import mpi
from .host import HostFacts, host_facts
from .mpi import library
from .script import script_facts

if TYPE_CHECKING:
    from mpi4py import MPI


def look_at_host(comm: MPI.Comm, config: LaunchConfig, stop_in_s: float | None = None) -> HostFacts:
    """Return the facts of this rank before torch; the job stops in `stop_in_s`, if that is known. Collective."""
    node, whole = mpi.node_key(comm)
    found = script_facts(config.script) if config.script else None
    fresh = "torch" not in sys.modules and config.device in (None, "cuda")  # CUDA cannot have started
    facts = host_facts(os.environ, comm.rank, node, whole, found, library().title, look_at_gpus=fresh)
    return facts._replace(options=config.job_wide_options(), stop_in_s=stop_in_s)
