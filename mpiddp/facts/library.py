"""Which MPI library mpi4py has loaded, and by which interface it can meet a launcher; no MPI_Init needed."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

from .files import names

PMI, PMIX = "pmi", "pmix"
ALL_INTERFACES = frozenset({PMI, PMIX})


class Library(NamedTuple):
    """The MPI library: its name and version, the file it lies in, and the interfaces it speaks.

    The interfaces are PMI (versions 1 and 2, as MPICH's mpiexec and srun --mpi=pmi2 offer it) and
    PMIx (Open MPI's mpirun and srun --mpi=pmix). An unknown library is taken to speak both.
    """

    name: str
    version: tuple[int, ...]
    path: str
    interfaces: frozenset[str]

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
    path = library_path(MPI.__file__)
    return Library(name, version, path, interfaces(name, version, path, MPI.Get_library_version()))


def interfaces(name: str, version: tuple[int, ...], path: str, description: str) -> frozenset[str]:
    """Return the interfaces that a library speaks.

    Intel MPI speaks PMI; with I_MPI_PMI set it may speak either. MPICH's description tells how it was
    configured. Open MPI 5 speaks PMIx only. For Open MPI up to 4 a site may have built components that speak
    Slurm's PMI: they are files beside the library.
    """
    if name == "Intel MPI":
        return ALL_INTERFACES if os.environ.get("I_MPI_PMI") else frozenset({PMI})
    if name == "MPICH":
        return ALL_INTERFACES if "pmix" in description.lower() else frozenset({PMI})
    if name == "Open MPI" and version >= (5,):
        return frozenset({PMIX})
    if name == "Open MPI":
        folder = os.path.dirname(path)
        places = [f"{folder}/openmpi", *(f"{folder}/openmpi/lib/{name}" for name in names(f"{folder}/openmpi/lib", ""))]
        components = [file for place in places for file in names(place, "mca_pmix_")]
        if components and not {"mca_pmix_s1.so", "mca_pmix_s2.so"} & set(components):
            return frozenset({PMIX})
    return ALL_INTERFACES


def library_path(extension: str) -> str:
    """Return the file of the libmpi in this process, or the extension module if it contains libmpi."""
    with open("/proc/self/maps", errors="surrogateescape", newline="\n") as maps:
        paths = [line.split(maxsplit=5)[-1].strip() for line in maps if "/libmpi" in line]
    named = [path for path in paths if os.path.basename(path).startswith(("libmpi.", "libmpich.", "libmpi_cray"))]
    return named[0] if named else extension


def is_cray(loaded: Library, description: str) -> bool:
    """Tell whether a library is Cray MPICH; `description` is what MPI_Get_library_version returns.

    That begins with "MPI VERSION    : CRAY MPICH version 8.1.25.17" or the like. It tells also where the file has the
    name of MPICH's (module cray-mpich-abi) and mpi4py was built against MPICH.
    """
    return (loaded.name == "Cray MPICH" or "CRAY MPICH" in description
            or os.path.basename(loaded.path).startswith("libmpi_cray"))


def needs_exit_functions(environ: Mapping[str, str]) -> bool:
    """Tell whether the exit functions that C libraries have registered up to now must run.

    In one of them MPICH and its relatives tell their launcher that the rank has ended well; otherwise the
    launcher ends the other ranks. A profiler that was loaded into the process writes its results in one.
    """
    tools = ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH")
    return library().name != "Open MPI" or any(environ.get(name) for name in tools)
