"""Signals are their owners': handlers of preloaded tools stay, and event loops take the wake-up descriptor in turn."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.agent.client import WakeupFd
from tests.messages import find, message
from tests.support import MPICH_FIRST, Mpi, first_of, mpiexec, need, on_path

pytestmark = pytest.mark.light

# A tool that is there before us; its handler, in C, leaves with the signal's number.
PRELOADED = """
import ctypes
library = ctypes.CDLL(None)
for number in {numbers}:
    library.signal(number, ctypes.cast(library._exit, ctypes.c_void_p))
"""


@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize("number", first_of([signal.SIGSEGV, signal.SIGUSR2]), ids=lambda number: number.name)
def test_a_handler_of_a_preloaded_tool_stays(mpi: Mpi, number: int, tmp_path: Path) -> None:
    need(mpi.missing())
    (tmp_path / "sitecustomize.py").write_text(PRELOADED.format(numbers=[int(number)]))
    script = tmp_path / "script.py"
    script.write_text(f"import os\nprint('sent', flush=True)\nos.kill(os.getpid(), {int(number)})\nprint('back')\n")
    done = mpiexec(mpi, 1, script, env=on_path(tmp_path))
    assert done.stdout == "sent\n"
    assert done.returncode == number


def test_under_stop_before_too(quick: Mpi, tmp_path: Path) -> None:
    need(quick.missing())
    (tmp_path / "sitecustomize.py").write_text(PRELOADED.format(numbers=[int(signal.SIGUSR1)]))
    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGUSR1)})\nprint('back')\n")
    done = mpiexec(quick, 1, "--stop-before=1", script, env=on_path(tmp_path))
    assert done.stdout == ""
    cause = message("launch/native_exit", status=int(signal.SIGUSR1))
    assert len(find("launch/failed_rank", done.stderr, rank=0, cause=cause)) == 1


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        ours.setblocking(False)
        its.setblocking(False)
        yield ours, its


def test_an_event_loop_takes_the_descriptor_and_gives_it_back(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, its = ends
    before = signal.set_wakeup_fd
    wakeup = WakeupFd(ours.fileno())
    try:
        asyncio.run(interrupted())
        with pytest.raises(BlockingIOError):  # the loop has had it
            its.recv(1)
        signal.signal(signal.SIGURG, lambda *_: None)
        os.kill(os.getpid(), signal.SIGURG)
        assert its.recv(1) == bytes([signal.SIGURG])
        assert signal.set_wakeup_fd(-1) == -1  # who asks finds none
    finally:
        signal.signal(signal.SIGURG, signal.SIG_DFL)
        wakeup.end()
    assert signal.set_wakeup_fd is before
    assert signal.set_wakeup_fd(-1) == -1


async def interrupted() -> None:
    """Get a signal by the loop."""
    came = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGURG, came.set)
    os.kill(os.getpid(), signal.SIGURG)
    await asyncio.wait_for(came.wait(), 5)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGURG)


def test_another_descriptor_that_is_there_stays(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = ends
    theirs, other = socket.socketpair()
    with theirs, other:
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        wakeup = WakeupFd(ours.fileno())
        wakeup.end()
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
