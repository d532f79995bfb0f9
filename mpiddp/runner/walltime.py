"""Prepares a stop before the scheduler ends the job, if the script or an option asks for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..base.config import LaunchConfig
from ..base.stderr import warn
from ..discovery import schedulers
from ..discovery.launchers import LaunchFacts
from ..discovery.script import has_should_stop

if TYPE_CHECKING:
    from .stop import Stop


def prepare_stop(config: LaunchConfig, started_by: LaunchFacts | None) -> Stop | None:
    """Return the `Stop` of this rank if the script's code or --stop-before asks for it."""
    if config.stop_before_s is None and not (config.script and has_should_stop(config.script)):
        return None
    from .stop import Stop

    stop = Stop()
    if config.stop_before_s is not None:
        is_first = started_by is None or started_by.rank == 0
        end = schedulers.find_end(os.environ, is_first)
        if end is not None:
            stop.stop_at(end - config.stop_before_s)
        elif is_first:
            reason = schedulers.describe_unknown_end(os.environ)
            warn([f"walltime-unknown: {reason}, so only a signal can stop the job in time"])
    return stop
