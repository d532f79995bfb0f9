"""A small process that watches a rank start, for as long as the rank may be unable to speak for itself.

MPI_Init holds the interpreter while it waits for the other ranks, so that no thread of the rank can
tell that it waits. The sentinel is forked before MPI and torch are there, learns the rank's stages
from a pipe, and is gone before the script runs. It knows neither MPI nor torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

HARD_GRACE_S = 15.0  # after the deadline, in which ranks that can speak end the job themselves


class Sentinel:
    """The rank's end: it tells the stages, and dismisses the sentinel before the script."""

    def __init__(self, who: str, speaks: bool, step: str | None, timeout_s: float) -> None:
        """Fork the sentinel of rank `who`; it speaks of what a whole node waits for only where `speaks`.

        `step` is the Slurm step of the rank, which is cancelled if it comes to the worst.
        """
        reading, self._writing = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._writing)
            watch(reading, os.getppid(), who, speaks, step, timeout_s)
        os.close(reading)

    def stage(self, name: str) -> None:
        """Tell the stage that begins; a sentinel that was ended from outside is not missed."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writing, name.encode() + b"\n")

    def dismiss(self) -> None:
        """End the sentinel and wait for it, so that the script finds no child that it did not start."""
        os.close(self._writing)
        os.waitpid(self._child, 0)


def watch(reading: int, rank: int, who: str, speaks: bool, step: str | None, timeout_s: float) -> None:
    """Be the sentinel of process `rank` until its end of the pipe is closed; never return.

    While it waits in MPI_Init a line is printed after a quarter of the time. At the deadline there,
    and a grace after it anywhere else, the rank is ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    close_all_but(reading)
    start, name, warned = time.monotonic(), "starting", False
    while True:
        in_mpi = name == "MPI_Init"
        end = start + timeout_s + (0 if in_mpi else HARD_GRACE_S)
        until = end if warned or not in_mpi else start + timeout_s / 4
        if select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
            told = os.read(reading, 4096)
            if not told:
                os._exit(0)
            name = told.decode().splitlines()[-1]
        elif time.monotonic() < end:
            warned = True
            say(speaks, f"{who} has waited {time.monotonic() - start:.0f} s in MPI_Init, "
                        "which returns when every rank of the job has reached it")
        else:
            say(speaks or not in_mpi, f"ending {who}: still in {name} {time.monotonic() - start:.0f} s after its start")
            end_process(rank)
            end_step(step)
            os._exit(0)


def say(speaks: bool, line: str) -> None:
    """Print a line on stderr."""
    if speaks:
        os.write(sys.stderr.fileno(), f"mpiddp: {line}\n".encode())


def close_all_but(kept: int) -> None:
    """Close what was inherited, a launcher's connection among it: it must end with the rank."""
    os.closerange(3, kept)
    os.closerange(kept + 1, max(kept + 1, 1024))


def end_step(step: str | None) -> None:
    """Cancel a Slurm step: srun waits on for the other ranks where it has no PMIx to tell it of one."""
    import subprocess  # needed by few sentinels, and started by every rank

    if step is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=HARD_GRACE_S)


def end_process(pid: int) -> None:
    """End a process, in native code and when it is stopped too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        time.sleep(1)
