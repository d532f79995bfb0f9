"""Whether this node has a fast network."""

from __future__ import annotations

from .files import names

# Where the kernel lists devices of InfiniBand, RoCE, Omni-Path and EFA; of Slingshot; of Aries.
VERBS = "/sys/class/infiniband"
PLACES = (VERBS, "/sys/class/cxi", "/sys/class/gni")


def has_fabric() -> bool:
    """Tell whether this node has a network device that programs drive without the kernel."""
    return any(map(names, PLACES))


def has_verbs() -> bool:
    """Tell whether this node has a network device that libibverbs drives: InfiniBand, RoCE, EFA."""
    return bool(names(VERBS))
