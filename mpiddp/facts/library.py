"""Which MPI library mpi4py has loaded, and by which interface it can meet a launcher; no MPI_Init needed."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

from .files import names

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
        places = [f"{folder}/openmpi", *(f"{folder}/openmpi/lib/{name}" for name in names(f"{folder}/openmpi/lib", ""))]
        if files := [file for place in places for file in names(place, "mca_pmix_")]:
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
