"""Settings for the time of torch's import, which make it quicker."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick() -> Iterator[None]:
    """Import torch in this block without collecting garbage and without reading torch's source.

    The objects that an import makes stay, so a collection finds nothing. Afterwards gc.freeze() and
    gc.unfreeze() move them to the oldest generation at once (CPython, Modules/gcmodule.c); otherwise the
    next collection would look at all of them. torch also asks inspect.getframeinfo() for the line number
    of each of its operators (torch/_library/utils.py). By default Python reads the text of the line too,
    and looks for the file of every module to do so.
    """
    from inspect import getframeinfo

    collects, defaults = gc.isenabled(), getframeinfo.__defaults__
    gc.disable()
    if defaults == (1,):  # lines of context
        getframeinfo.__defaults__ = (0,)
    try:
        yield
    finally:
        getframeinfo.__defaults__ = defaults
        if gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()
        if collects:
            gc.enable()
