"""Which components Open MPI shall leave out on a node without a fast network."""

from __future__ import annotations

from collections.abc import Mapping

# Components that drive nothing but a fast network. On a node without one they are of no use, and some take time:
# libpsm2 measures the clock for 0.2 s when it is loaded, Open MPI 5's btl/ofi sleeps for a second when it is closed.
FABRIC_ONLY = {"btl": ("ofi",), "mtl": ("ofi", "psm", "psm2")}
ASKED_FOR = ("btl_ofi", "mtl_ofi", "opal_common_ofi", "mtl_psm")  # who sets one of these wants the components


def left_out(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters by which Open MPI leaves out components on a node without a fast network.

    `chosen` are the parameters that are set already. A list of components to use stays as it is; only a list of
    components to leave out ("^...") grows. Nothing is left out if `chosen` selects a pml to use, or sets
    a parameter in ASKED_FOR.
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
