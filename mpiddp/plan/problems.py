"""What keeps a job from starting, found in the facts of all its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import LaunchError
from ..facts.host import HostFacts

LISTED = 5


def check_script(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `script-missing` or `script-error` where some rank cannot run the script."""
    missing = [one for one in facts if one.script and one.script.missing]
    if missing:
        raise LaunchError(
            "script-missing",
            found=f"{error_of(missing[0])} ({where(missing, facts)})",
            needed="a script file, or -m with a module, that every node can see",
            do="check the name and the working directory, and keep scripts on a file system that all nodes share",
        )
    broken = [one for one in facts if error_of(one)]
    if broken:
        raise LaunchError(
            "script-error",
            found=error_of(broken[0]),
            needed=f"a script that this Python can compile ({where(broken, facts)} cannot)",
            do="mend the line; `python -m py_compile FILE` shows the same",
        )


def error_of(one: HostFacts) -> str:
    """Return why a rank cannot run the script, empty where it can."""
    return (one.script.error if one.script else None) or ""


def where(some: Sequence[HostFacts], facts: Sequence[HostFacts]) -> str:
    """Return the hosts of some ranks in words, at most a handful by name."""
    if len(some) == len(facts):
        return "every rank" if len(facts) > 1 else "the one rank"
    return "on " + listed(list(dict.fromkeys(one.hostname for one in some)))


def listed(names: Sequence[str]) -> str:
    """Return names joined by commas, those after a handful only counted."""
    shown = ", ".join(names[:LISTED])
    return f"{shown} and {len(names) - LISTED:,} more" if len(names) > LISTED else shown
