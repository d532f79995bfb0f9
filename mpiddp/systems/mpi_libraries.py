"""The MPI libraries that mpi4py may load, and the interfaces by which a library connects to a launcher."""

from __future__ import annotations

from typing import NamedTuple

PMI, PMIX, CRAY_PMI, FLUX_PMI = "pmi", "pmix", "Cray's PMI", "Flux's PMI"
# The variables that show that a launcher offers an interface.
INTERFACE_VARIABLES = {PMI: ("PMI_FD", "PMI_PORT"), PMIX: ("PMIX_NAMESPACE",), CRAY_PMI: ("PALS_APINFO",),
                       FLUX_PMI: ("FLUX_PMI_LIBRARY_PATH",)}
ALL_INTERFACES = frozenset(INTERFACE_VARIABLES)


class MpiLibrary(NamedTuple):
    """An MPI library, by the name that mpi4py gives it.

    `launcher` is its own launcher in words, empty if it has none, and `start` the command of one; `package` is its
    package on PyPI. `modules` is a regular expression for the beginning of the names of its environment modules;
    `interface` is the one that it is mostly built for; `segments` are the beginnings of its files in /dev/shm, which a
    killed rank leaves behind. If it `needs_shm`, MPI_Init aborts without /dev/shm.
    """

    name: str
    launcher: str = ""
    start: str = "mpirun"
    package: str = ""
    modules: str = ""
    segments: tuple[str, ...] = ()
    interface: str = PMI
    needs_shm: bool = False


OPEN_MPI = MpiLibrary(
    "Open MPI", "Open MPI's mpirun", package="openmpi", modules=r"(open-?mpi|ompi|hpcx|foss|gompi)\b",
    segments=("vader_segment.", "sm_segment."), interface=PMIX)  # of versions 4.1 and 5
MPICH = MpiLibrary("MPICH", "MPICH's mpiexec", "mpiexec", package="mpich", modules=r"(mpich|gmpich)\b",
                   segments=("mpich_shm_",), needs_shm=True)
INTEL_MPI = MpiLibrary("Intel MPI", "Intel MPI's mpiexec", "mpiexec", package="impi-rt",
                       modules=r"(impi|intel-?mpi|(intel-)?oneapi-mpi)\b", segments=("Intel_MPI_",))
CRAY_MPICH = MpiLibrary("Cray MPICH", start="mpiexec", modules=r"cray-mpich", interface=CRAY_PMI)
MVAPICH = MpiLibrary("MVAPICH", modules=r"mvapich2?\b")
LIBRARIES = (OPEN_MPI, MPICH, INTEL_MPI, CRAY_MPICH, MVAPICH)


def find_library(name: str) -> MpiLibrary:
    """Return the library with a name; one that is in no row has defaults only."""
    return next((row for row in LIBRARIES if row.name == name), MpiLibrary(name))
