"""Whether this node has a fast network, and which components Open MPI was told to use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..base.files import list_names

# Where the kernel lists devices of InfiniBand, RoCE, Omni-Path and EFA; of Slingshot; of Aries.
VERBS = "/sys/class/infiniband"
PLACES = (VERBS, "/sys/class/cxi", "/sys/class/gni")
PREFIX = "OMPI_MCA_"


def has_fabric() -> bool:
    """Tell whether this node has a network device that programs drive without the kernel."""
    return any(map(list_names, PLACES))


def has_verbs() -> bool:
    """Tell whether this node has a network device that libibverbs drives: InfiniBand, RoCE, EFA."""
    return bool(list_names(VERBS))


def chosen_components(environ: Mapping[str, str], library: str) -> dict[str, str]:
    """Return the parameters of Open MPI that variables and files set, by name.

    `library` is the path of libmpi. Variables win over the user's file, and the user's file wins over the
    site's (Open MPI, "Setting MCA parameter values"). Builds keep the site's file in different folders.
    """
    root = os.path.dirname(os.path.dirname(library))
    site = [f"{environ.get('OPAL_PREFIX') or root}/etc",
            *(f"/etc/{name}" for name in sorted(list_names("/etc", "openmpi")))]
    named = environ.get(f"{PREFIX}mca_base_param_files") or environ.get(f"{PREFIX}mca_param_files")
    files = [f"{environ.get('HOME', '')}/.openmpi/mca-params.conf", *(f"{one}/openmpi-mca-params.conf" for one in site)]
    found: dict[str, str] = {}
    for file in reversed(named.split(",") if named else files):
        found |= parameters(file)
    return found | {name.removeprefix(PREFIX): value for name, value in environ.items() if name.startswith(PREFIX)}


def parameters(file: str) -> dict[str, str]:
    """Return the parameters that a file sets in lines of ``name = value``; none if there is no such file."""
    try:
        with open(file) as lines:
            pairs = [line.partition("#")[0].partition("=") for line in lines]
    except (OSError, UnicodeDecodeError):
        return {}
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}
