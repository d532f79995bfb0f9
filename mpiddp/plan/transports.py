"""Which parts of an MPI library are better left out, because this node has nothing for them to find."""

from __future__ import annotations

from collections.abc import Mapping

# What drives a fast network by itself. On a node without one each finds that out, and some take their time: libpsm2
# measures the clock for 0.2 s when it is loaded, Open MPI 5's btl/ofi sleeps a second when it is closed.
FABRIC_ONLY = {"btl": ("ofi",), "mtl": ("ofi", "psm", "psm2")}
ASKED_FOR = ("btl_ofi", "mtl_ofi", "opal_common_ofi", "mtl_psm")  # parameters of somebody who knows what he does


def left_out(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return Open MPI's lists of components for a node without a fast network, `chosen` being what they are.

    Lists of what to use, and all where they are meant for such a network anyway, stay as they are.
    """
    selected = chosen.get("pml", "")
    if (selected and not selected.startswith("^")) or any(name.startswith(ASKED_FOR) for name in chosen):
        return {}
    found = {}
    for framework, components in FABRIC_ONLY.items():
        given = chosen.get(framework, "")
        if not given or given.startswith("^"):
            without = [name for name in given.removeprefix("^").split(",") if name]
            found[framework] = "^" + ",".join(dict.fromkeys((*without, *components)))
    return found
