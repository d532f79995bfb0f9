"""Set variables of this process, and remember what they were."""

from __future__ import annotations

import os
from collections.abc import Mapping

Former = dict[str, str | None]  # what variables were; None for one that was not set
ours: dict[str, str] = {}  # what this process has set


def set_all(new: Mapping[str, str]) -> Former:
    """Set variables and return their former values."""
    former = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    ours.update(new)
    return former


def set_missing(new: Mapping[str, str]) -> Former:
    """Set those variables that are not set yet, and return what they were."""
    return set_all({name: value for name, value in new.items() if name not in os.environ})


def hide(beginnings: tuple[str, ...]) -> Former:
    """Remove the variables whose names begin with one of `beginnings`, and return what they were."""
    return {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(beginnings)}


def restore(former: Mapping[str, str | None]) -> None:
    """Set variables to what they were, but not those that somebody else has changed since then."""
    for name, value in former.items():
        if os.environ.get(name) != ours.get(name):
            continue
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
