"""Python's garbage collector, which has nothing to find while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect no garbage meanwhile: a seventh of the time that the import of torch takes.

    What was made then counts as old at once: the next collection would look at all of it otherwise
    (gc.freeze() and gc.unfreeze() move it there without a look, CPython's Modules/gcmodule.c).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
