"""What a job needs of the communicator of its ranks: MPI's has it, and that of the runs in a hold."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol


class Request(Protocol):
    """An operation that goes on while other things are done; its methods have mpi4py's names."""

    def Test(self) -> bool:  # noqa: N802
        """Return whether it is complete."""

    def wait(self) -> object:
        """Return when it is complete."""


class Reduction(Protocol):
    """Reductions over all ranks, one after the other."""

    @property
    def result(self) -> int:
        """The largest of the ranks' values, once the request is complete; MPI's first one only prepares: 0."""

    def start(self, value: int) -> Request:
        """Start the next one with this rank's value, at least 0. Collective, but it does not wait."""

    def free(self) -> None:
        """Free it. Collective."""


class Communicator(Protocol):
    """The ranks of a job, and messages between them."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def library(self) -> str:
        """The MPI library, in words."""

    @property
    def is_finalized(self) -> bool:
        """Whether it can be used no more."""

    def duplicate(self) -> Communicator:
        """Return a communicator with the same ranks, whose messages never meet this one's. Collective."""

    def send(self, content: object, rank: int, until_received: bool = False) -> Request:
        """Send an object to a rank; complete when it is on its way, or `until_received`."""

    def receive(self, rank: int | None = None) -> tuple[int, Any] | None:
        """Return the sender and the content of a message from a rank, or from any; None if none has come."""

    def start_barrier(self) -> Request:
        """Return what is complete when all ranks have called this."""

    def make_reduction(self) -> Reduction:
        """Return reductions over the ranks."""

    def find_node(self) -> tuple[int, bool]:
        """Return the lowest rank on this node, and whether all ranks are on it. Collective."""

    def free(self) -> None:
        """Free it. Collective."""

    def finalize(self) -> None:
        """End the communication of all ranks. Collective."""

    def abort(self, status: int, reason_printed: bool = True) -> NoReturn:
        """End the job on every rank with a status, as base/termination.py does."""
