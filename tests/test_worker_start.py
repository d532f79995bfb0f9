"""Processes that multiprocessing starts: SIGTERM is theirs again when they have started, SIGUSR1 never is."""

from __future__ import annotations

from pathlib import Path

from tests.support import Mpi, alone, check

PROGRAM = """\
import multiprocessing, signal, sys
from mpiddp.bootstrap.worker_start import prepare_workers

def note(queue):
    queue.put((signal.pthread_sigmask(signal.SIG_BLOCK, ()), callable(signal.getsignal(signal.SIGUSR1))))
    signal.pause()

if __name__ == "__main__":
    prepare_workers()
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        worker = context.Process(target=note, args=(queue,))
        worker.start()
        seen = queue.get(timeout=60)
        worker.terminate()
        worker.join()
        print(method, *seen, worker.exitcode)
"""


def test_workers_obey_sigterm_and_not_sigusr1(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "starts.py").write_text(PROGRAM)
    assert check(alone(quick, script)).stdout == "spawn set() True -15\nforkserver set() True -15\n"
