"""Nodes read each its part of the files, and pass it on to all others by MPI: each byte enters a node once."""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from ..waiting import wait_for
from .manifest import Chunk
from .reading import PAGE, THREADS, Read, Source, threads

if TYPE_CHECKING:
    from mpi4py import MPI

AHEAD = 48  # chunks that a node has read before their turn
ON_THEIR_WAY = 32  # chunks that are passed on at the same time
REMIND_AFTER_S = 10.0
LOOKING_S = 0.02  # at once, for a chunk
HOW = struct.Struct("<BI")  # of a piece: the outcome and the checksum


Take = Callable[[Chunk, memoryview, list[Read]], None]


class Sent(NamedTuple):
    """A chunk on its way into a buffer."""

    chunk: Chunk
    buffer: memoryview
    request: MPI.Request


class Exchange:
    """The nodes' leaders, each of which reads its chunks and gets those of the others.

    On this node `begin` is called first, and `take` gets each chunk, its data and how it was read. `late` returns the
    error for a deadline, a time of time.monotonic(), by which a node has not sent its part, and `remind` says that it
    is waited for; both get the number of the node.
    """

    def __init__(
        self, comm: MPI.Comm, chunks: Sequence[Chunk], source: Source, deadline: float,
        late: Callable[[int], Exception], remind: Callable[[int, float], None],
    ) -> None:
        self._comm, self._chunks, self._source = comm, chunks, source
        self._deadline, self._late, self._remind = deadline, late, remind

    def run(self, begin: Callable[[], None], take: Take) -> None:
        """Read, send and receive all chunks, in their order. Collective."""
        mine = deque(chunk for chunk in self._chunks if chunk.reader == self._comm.rank)
        reading: deque[Future[memoryview]] = deque()
        on_their_way: deque[Sent] = deque()
        taken: deque[Future[None]] = deque()
        with threads(THREADS) as pool, threads(1) as writer:
            taken.append(writer.submit(begin))

            def arrive() -> None:
                taken.append(writer.submit(take, *self._arrived(on_their_way.popleft())))
                if len(taken) > AHEAD:
                    taken.popleft().result()

            for chunk in self._chunks:
                while mine and len(reading) < AHEAD:
                    reading.append(pool.submit(self._read, mine.popleft()))
                own = chunk.reader == self._comm.rank
                whole = self._own(reading.popleft()) if own else buffer_for(chunk)
                on_their_way.append(Sent(chunk, whole, self._comm.Ibcast(whole, root=chunk.reader)))
                if len(on_their_way) == ON_THEIR_WAY:
                    arrive()
            while on_their_way:
                arrive()
            for one in taken:
                one.result()

    def _own(self, read: Future[memoryview]) -> memoryview:
        """Wait until this node has read a chunk; what is on its way meanwhile goes on."""
        def moved() -> bool:
            self._comm.Iprobe()  # of a request that is done, MPI knows that without moving any other
            return read.done()

        def look() -> memoryview | None:
            for_a_while(moved)
            return read.result() if read.done() else None

        rank = self._comm.rank
        return wait_for(look, self._deadline, lambda: self._late(rank), lambda waited_s: self._remind(rank, waited_s),
                        REMIND_AFTER_S)

    def _read(self, chunk: Chunk) -> memoryview:
        whole = buffer_for(chunk)
        found = self._source.read(chunk, whole)
        for number, read in enumerate(found):
            HOW.pack_into(whole, chunk.size + number * HOW.size, *read)
        return whole

    def _arrived(self, sent: Sent) -> tuple[Chunk, memoryview, list[Read]]:
        """Return a chunk, its data and how that was read, when it has come."""
        chunk, size = sent.chunk, sent.chunk.size
        wait_for(lambda: for_a_while(sent.request.Test) or None, self._deadline, lambda: self._late(chunk.reader),
                 lambda waited_s: self._remind(chunk.reader, waited_s), REMIND_AFTER_S)
        how = [Read(*one) for one in HOW.iter_unpack(sent.buffer[size:size + len(chunk.pieces) * HOW.size])]
        return chunk, sent.buffer[:size], how


def for_a_while(look: Callable[[], bool]) -> bool:
    """Look again and again, but not for long, until there is something: MPI moves data only while it is called."""
    until = time.monotonic() + LOOKING_S
    while not (found := look()) and time.monotonic() < until:
        time.sleep(0)  # lets this process's other threads go on
    return found


def buffer_for(chunk: Chunk) -> memoryview:
    """Return a buffer for a chunk on its way: its data, how each of its pieces was read, and a page more to read into.

    It begins at a whole page.
    """
    return memoryview(mmap.mmap(-1, chunk.size + len(chunk.pieces) * HOW.size + PAGE))
