"""What makes the import of torch quicker, and is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick() -> Iterator[None]:
    """Import torch in this block: without a look for garbage, nor for the source of torch's own lines.

    What a module makes stays, so that all that looking finds nothing. What was made then counts as old at
    once, which the next collection would look at otherwise (gc.freeze() and gc.unfreeze() move it there
    without a look, CPython's Modules/gcmodule.c). And torch asks inspect.getframeinfo() for the line of
    each of its operators, of which it needs the number only (torch/_library/utils.py): with the text,
    which is the default, Python looks for the file of every module each time.
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
