"""Processes that multiprocessing starts: SIGTERM is theirs again when they have started, SIGUSR1 never is."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.bootstrap.worker_start import LEAVE_USR1_CODE, START_CODE, add_code
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


@pytest.mark.parametrize(("command", "code"), [
    ("from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)", START_CODE),
    ("from multiprocessing.forkserver import main; main(3, 4, ['__main__'])", START_CODE),
    ("import sys; from multiprocessing.forkserver import main; main(3, 4, [], sys_argv=sys.argv[1:])", START_CODE),
    ("from multiprocessing.resource_tracker import main;main(7)", LEAVE_USR1_CODE),
    ("print(7)", ""),
])
def test_our_code_precedes_the_command_of_multiprocessing(command: str, code: str) -> None:
    """As Python 3.14.10 starts a fork server, too, with the script's arguments; those are left alone."""
    rest = ["-c", "from multiprocessing.spawn import spawn_main"]
    assert add_code([b"python3", "-B", "-c", command, *rest]) == [b"python3", "-B", "-c", code + command, *rest]
