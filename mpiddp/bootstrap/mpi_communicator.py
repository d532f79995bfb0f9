"""MPI's communicator, with what a job needs of it (base/communicator.py)."""

from __future__ import annotations

import array
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ..base import termination
from ..base.communicator import Request
from ..discovery.mpi import find_node, identify_library

if TYPE_CHECKING:
    from mpi4py import MPI

TAG = 1


class MpiCommunicator:
    """A communicator of MPI."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm, self._mpi = comm, load_module()
        self.rank, self.size = comm.rank, comm.size

    @property
    def library(self) -> str:
        """The MPI library, in words."""
        return identify_library().title

    @property
    def is_finalized(self) -> bool:
        """Whether MPI is finalised."""
        return bool(self._mpi.Is_finalized())

    def duplicate(self) -> MpiCommunicator:
        """Return a communicator with the same ranks, whose messages never meet this one's. Collective."""
        return MpiCommunicator(self.comm.Dup())

    def send(self, content: object, rank: int, until_received: bool = False) -> MPI.Request:
        """Send an object to a rank; complete when it is on its way, or `until_received`."""
        return (self.comm.issend if until_received else self.comm.isend)(content, rank, TAG)

    def receive(self, rank: int | None = None) -> tuple[int, Any] | None:
        """Return the sender and the content of a message from a rank, or from any; None if none has come."""
        return receive_message(self.comm, TAG, rank)

    def start_barrier(self) -> MPI.Request:
        """Return what is complete when all ranks have called this."""
        return self.comm.Ibarrier()

    def make_reduction(self) -> MpiReduction:
        """Return reductions over the ranks."""
        return MpiReduction(self.comm)

    def find_node(self) -> tuple[int, bool]:
        """Return the lowest rank on this node, and whether all ranks are on it. Collective."""
        return find_node(self.comm)

    def free(self) -> None:
        """Free it. Collective."""
        self.comm.Free()

    def finalize(self) -> None:
        """Finalise MPI. Collective."""
        self._mpi.Finalize()

    def abort(self, status: int, reason_printed: bool = True) -> NoReturn:
        """End the job on every rank by MPI_Abort."""
        termination.abort(self._mpi, status, reason_printed)


class MpiReduction:
    """Reductions over the ranks of a communicator; the first one makes a duplicate for the others."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._parent = comm
        self._comm: MPI.Comm | None = None
        self._start: Callable[[], MPI.Request] | None = None
        self._sent, self._result = array.array("i", [0]), array.array("i", [0])

    @property
    def result(self) -> int:
        """The largest of the ranks' values, once the request is complete; 0 for the first one, which only prepares."""
        return self._result[0]

    def start(self, value: int) -> Request:
        """Start the next one with this rank's value, at least 0. Collective, but it does not wait."""
        if self._comm is None:
            self._comm, request = self._parent.Idup()
            return request
        self._start = self._start or make_reduction(self._comm, self._sent, self._result)
        self._sent[0], self._result[0] = value, 0
        return self._start()

    def free(self) -> None:
        """Free it. Collective."""
        if self._comm is not None:
            self._comm.Free()


def make_reduction(comm: MPI.Comm, sent: array.array[int], result: array.array[int]) -> Callable[[], MPI.Request]:
    """Return a function that starts a reduction: `result` becomes the largest of the ranks' `sent`. Collective.

    The reduction is persistent, thus cheaper to start, if the library supports that (MPI 4.0).
    """
    mpi = load_module()
    source, target = [sent, 1, mpi.INT], [result, 1, mpi.INT]  # so that mpi4py need not find the type at each call
    try:
        request = comm.Allreduce_init(source, target, mpi.MAX)
    except NotImplementedError:
        return lambda: comm.Iallreduce(source, target, mpi.MAX)

    def start() -> MPI.Request:
        request.Start()
        return request

    return start


def receive_message(comm: MPI.Comm, tag: int, source: int | None = None) -> tuple[int, Any] | None:
    """Return the sender and the content of a message from a rank, or from any; None if none has come."""
    mpi = load_module()
    status = mpi.Status()
    message = comm.improbe(mpi.ANY_SOURCE if source is None else source, tag, status)
    return None if message is None else (status.source, message.recv())


def load_module() -> Any:
    """Return `mpi4py.MPI`, which whoever has the communicator has loaded: an import alone would initialise MPI."""
    return importlib.import_module("mpi4py.MPI")
