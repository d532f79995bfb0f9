"""What shows that a rank makes progress: --stall must not report a rank that does."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from mpiddp.where.process_sample import PACKET, READ_AHEAD, ProcSample, TcpCounter, list_socket_inodes
from mpiddp.where.stall import StallDetector, has_moved
from tests import processes
from tests.cluster import shared
from tests.messages import find, message
from tests.support import DEADLINE_S, PROGRAMS, Done, Mpi, check, first_of, mpiexec_command, need, single_node_environ
from tests.test_where_stacks import rank

STALL_S, MOVING_S = 4, 12
SLOW = shared.Speed(bytes_per_s=400_000)
SLEEPS = ProcSample("S", "hrtimer_nanosleep", 0.0, 0.0, 7, 0.0, 0)


def moving(mpi: Mpi, kind: str, folder: Path, *before: str) -> Done:
    """Run a job whose rank 1 moves in one way for longer than --stall, after the prefix of a command."""
    command = mpiexec_command(mpi, 2, "-m", "mpiddp", f"--stall={STALL_S}", "--stall-abort", PROGRAMS / "moves.py",
                              kind, MOVING_S, folder)
    return processes.run(*before, *command, timeout=DEADLINE_S, env=single_node_environ(mpi))


@pytest.mark.light
@pytest.mark.long
@pytest.mark.parametrize("kind", first_of(["tcp", "child", "unix", "touch"]))
def test_a_rank_whose_data_no_file_counts_is_not_ended(kind: str, quick: Mpi, tmp_path: Path) -> None:
    """It receives by TCP, its child does, by a Unix socket; or it touches new memory, a page at a time."""
    done = check(moving(quick, kind, tmp_path))
    assert find("where/no_progress", done.stderr) == []


@pytest.mark.light
@pytest.mark.long
@pytest.mark.parametrize("kind", first_of(["mapped", "read"]))
def test_a_rank_that_reads_a_slow_file_at_once_is_not_ended(kind: str, quick: Mpi, tmp_path: Path) -> None:
    """As safetensors, memmap and torch.load() do."""
    need(["root, to mount a file system"] if os.geteuid() else [])
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "file").write_bytes(os.urandom(SLOW.bytes_per_s * MOVING_S))
    state = shared.State(tmp_path)
    state.set(SLOW)
    done = check(moving(quick, kind, folder, *shared.here(state, folder)))
    assert find("where/no_progress", done.stderr) == []


@pytest.mark.long
def test_a_rank_that_logs_and_answers_while_it_hangs_is_found(quick: Mpi, tmp_path: Path) -> None:
    done = moving(quick, "idle", tmp_path)
    assert "  status   124" in done.stderr
    assert "mpiddp: failed: rank 1 on " in done.stderr


@pytest.mark.thorough("test_a_rank_that_logs_and_answers_while_it_hangs_is_found")
@pytest.mark.long
def test_what_cannot_be_seen_is_said_once_and_ends_nothing(quick: Mpi, tmp_path: Path) -> None:
    need(["root, to make a network namespace"] if os.geteuid() else [])
    done = check(moving(quick, "hidden", tmp_path))
    (reported,) = find("where/stall_undetectable", done.stderr, rank=1)
    assert find("where/sockets_in_other_namespace", reported["reason"])
    assert find("where/no_progress", done.stderr) == []


def test_what_a_connection_has_moved() -> None:
    """In both directions, on both of its ends; nothing of the store's."""
    own, deadline = [os.getpid()], time.monotonic() + DEADLINE_S
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        seen, without = TcpCounter(1), TcpCounter(address[1])
        with socket.create_connection(address), listener.accept()[0]:  # and then one end waits for the other
            pass
        with socket.create_connection(address) as ours, listener.accept()[0] as its, socket.socket() as half:
            half.connect(address)
            half.close()  # while the other end is still to be accepted
            (before, _, hidden), (before_without, *_) = seen.count(own), without.count(own)
            assert hidden == ""
            ours.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(its.recv(left))
            while seen.count(own).moved_bytes < before + 200_000:  # what was sent counts when it is acknowledged
                assert time.monotonic() < deadline
            assert seen.count(own) == (before + 200_000, 0, "")
            assert without.count(own) == (before_without - 100_000, 0, "")  # as the end that listens has read
        assert seen.count(own) == (before + 200_000, 0, "")  # what was closed is not taken back


@pytest.mark.process
def test_sockets_of_a_process_that_has_ended() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert list_socket_inodes(child) == set()  # nobody has waited for it
    os.waitpid(child, 0)
    assert list_socket_inodes(child) == set()


def test_a_read_that_goes_on_in_the_kernel() -> None:
    reads = SLEEPS._replace(state="D", wchan="folio_wait_bit_common")
    assert reads.fed_bytes(reads) == 0  # as in a file system that does not answer
    assert reads._replace(turns=9).fed_bytes(reads) == 2 * READ_AHEAD
    assert reads._replace(turns=9).fed_bytes(SLEEPS) == 0
    receives = SLEEPS._replace(wchan="unix_stream_read_generic")
    assert receives._replace(turns=10).fed_bytes(receives) == 0  # it was asked for its stack
    assert receives._replace(turns=107).fed_bytes(receives) == 96 * PACKET
    assert SLEEPS._replace(turns=107).fed_bytes(SLEEPS) == 0  # it polls


@pytest.mark.parametrize(("faults", "moved_bytes", "moves"), [
    (10, 0, False), (1000, 0, True), (0, 10_000, False), (0, READ_AHEAD, True), (0, 5_000_000, True)])
def test_how_much_is_movement(faults: int, moved_bytes: int, moves: bool) -> None:
    assert has_moved(rank(0), rank(0, faults=faults, moved_bytes=moved_bytes), 10.0) is moves


def test_a_rank_that_cannot_be_seen_is_reported_once() -> None:
    hidden = rank(3, unseen="its sockets are not visible (Permission denied)")
    stall, said = StallDetector(10.0), []
    for second in range(0, 60, 2):
        ranks = [rank(0), hidden if second < 40 else rank(3)]
        said.append(stall.update(ranks, float(second)))
    first, second = [line for line in said if line]
    assert first == message("where/stall_undetectable", rank=3, reason=hidden.unseen)
    assert second == message("where/no_progress", time="40 s")
    assert stall.update([rank(0), rank(3, busy_s=9.0)], 60.0) == message("where/progress_resumed", time="40 s")


@pytest.mark.parametrize("hidden", [rank(3, has_answered=False), rank(3, unseen="its sockets are not visible")])
def test_nothing_is_concluded_of_a_rank_that_is_not_seen(hidden: object) -> None:
    stall = StallDetector(10.0)
    lines = [stall.update([rank(0), hidden], float(second)) for second in range(0, 60, 2)]  # type: ignore[list-item]
    assert len([line for line in lines if line]) == 1
    assert stall.stalled_s == 0.0


def test_ranks_that_have_all_ended_do_not_hang() -> None:
    stall = StallDetector(10.0)
    both = [rank(0, has_ended=True), rank(1, has_ended=True)]
    assert [stall.update(both, float(at)) for at in range(0, 60, 2)] == [""] * 30
    assert any(stall.update([rank(0, has_ended=True), rank(1)], float(at)) for at in range(60, 120, 2))
