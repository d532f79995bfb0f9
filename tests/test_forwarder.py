"""What an agent does with its rank's output, without a job: to the terminal and to the log, both of which may hang."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from mpiddp.base.ranks import LogPlan
from mpiddp.ipc.authentication import AuthListener
from mpiddp.ipc.channel import listen
from mpiddp.ipc.event_loop import EventLoop
from mpiddp.output import forwarder
from mpiddp.output.aggregator import Aggregator
from mpiddp.output.forwarder import RankOutput
from mpiddp.output.protocol import AggregationConfig, ForwardConfig
from mpiddp.output.writer import Terminal
from tests import processes
from tests.messages import find, message
from tests.support import DEADLINE_S, PROGRAMS, ROOT, Done, check, free_port

pytestmark = pytest.mark.process

AGENT = (sys.executable, str(PROGRAMS / "small_agent.py"))
EARLY = """
import os, time
print({!r})
open("early", "w").close()
while not os.path.exists("configured"):
    time.sleep(0.02)
print("late")
"""
FLOOD = "for number in range({}): print('line', number, '.' * 50)"


def agent_command(program: str, **config: object) -> list[str]:
    """Return the command of an agent whose rank runs a Python program."""
    return [*AGENT, json.dumps(config), sys.executable, "-uc", program]


def start(program: str, **config: object) -> subprocess.Popen[str]:
    """Start such an agent; its stdout and stderr are pipes."""
    return processes.start(agent_command(program, **config), {**os.environ, "PYTHONPATH": str(ROOT)}, ROOT,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(program: str, status: int = 0, **config: object) -> Done:
    """Return what such an agent prints."""
    folder = str(config.get("folder", ROOT))
    return check(processes.run(*agent_command(program, **config), timeout=DEADLINE_S, cwd=Path(folder),
                               env={**os.environ, "PYTHONPATH": str(ROOT)}), status)


def test_output_before_the_plan_is_shown_at_once_and_is_in_the_log(tmp_path: Path) -> None:
    done = run(EARLY.format("early"), prefix="[3] ", log=str(log := tmp_path / "log"), folder=str(tmp_path))
    assert done.stdout == "early\n[3] late\n"
    assert log.read_text() == "early\nlate\n"


def test_a_log_tells_how_much_came_too_early(tmp_path: Path) -> None:
    done = run(EARLY.format("x" * 99_999), log=str(log := tmp_path / "log"), folder=str(tmp_path))
    assert len(done.stdout) == 100_000 + len("late\n")
    early, _, rest = log.read_text().partition("\n")
    assert early == "x" * 2**16
    assert rest == message("launch/bytes_missing", count=100_000 - 2**16) + "\nlate\n"


def test_a_hidden_rank_has_only_a_log(tmp_path: Path) -> None:
    done = run("print('seven')", log=str(log := tmp_path / "log"), shown=False)
    assert done.stdout == ""
    assert log.read_text() == "seven\n"


def test_a_report_comes_after_all_output(tmp_path: Path) -> None:
    program = f"import sys; {FLOOD.format(5000)}\nprint('no end', end='', file=sys.stderr)"
    done = run(program.replace("import sys; ", "import sys\n"), prefix="[3] ", log=str(log := tmp_path / "log"),
               report="mpiddp: failed\n  where here\n")
    assert done.stderr == "[3] no end\nmpiddp: failed\n  where here\n"
    assert len(done.stdout.splitlines()) == 5000
    assert log.read_text().endswith("\nmpiddp: failed\n  where here\n")


def test_a_slow_reader_gets_everything_and_blocks_the_rank(tmp_path: Path) -> None:
    (tmp_path / "early").touch()
    job = start(f"{FLOOD.format(10_000)}\nopen({str(tmp_path / 'done')!r}, 'w').close()", folder=str(tmp_path))
    try:
        assert job.stdout is not None
        first = job.stdout.readline()
        time.sleep(0.5)
        assert not (tmp_path / "done").exists()
        lines = (first + job.stdout.read()).splitlines()
        assert lines == [f"line {number} {'.' * 50}" for number in range(10_000)]
        assert job.wait(DEADLINE_S) == 0
    finally:
        processes.end_tree(job.pid)


def test_a_reader_that_takes_nothing_does_not_keep_the_agent(tmp_path: Path) -> None:
    """The log has what the rank could write before."""
    job = start(FLOOD.format(3000), log=str(log := tmp_path / "log"), stall_s=0.5, report="mpiddp: failed")
    try:
        assert job.wait(DEADLINE_S) == 120
        assert job.stderr is not None
        assert job.stderr.read().splitlines() == [
            "mpiddp: failed", message("launch/output_stalled", rank=3, host="n07", limit="0.5 s")]
        assert len(log.read_text().splitlines()) == 3000 + 1
    finally:
        processes.end_tree(job.pid)


def test_a_log_that_hangs_does_not_keep_the_agent(tmp_path: Path) -> None:
    done = run(FLOOD.format(2000), 120, log=str(tmp_path / "log"), log_hangs=True, stall_s=0.5)
    assert find("launch/output_stalled", done.stderr, rank=3, host="n07", limit="0.5 s")
    assert len(done.stdout.splitlines()) == 2000


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    (log := tmp_path / "log").symlink_to("/dev/full")
    done = run("print('seven')", 120, log=str(log))
    assert done.stdout == "seven\n"
    assert find("launch/output_lost", done.stderr, error="No space left on device", position=0)


def test_a_daemon_that_holds_the_pipes_does_not_keep_the_agent(tmp_path: Path) -> None:
    daemon = f"echo now; touch {tmp_path}/ready; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; echo late"
    try:
        done = run(f"import os, subprocess, time\nsubprocess.Popen(['sh', '-c', {daemon!r}], start_new_session=True)\n"
                   f"while not os.path.exists('{tmp_path}/ready'): time.sleep(0.02)\nprint('seven')")
    finally:
        (tmp_path / "go").touch()
    assert done.stdout == "now\nseven\n"


def test_a_rank_without_pipes_has_nothing_to_wait_for() -> None:
    loop, came = EventLoop(lambda error: pytest.fail(str(error))), list[str]()
    output = RankOutput(loop, {}, "rank 3 on n07")
    output.flush(lambda: came.append("flushed"))
    output.finish(lambda: came.append("finished"))
    assert came == ["flushed", "finished"]


def test_what_comes_soon_after_a_line_waits_and_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, bytes]] = []
    monkeypatch.setattr(Terminal, "write", lambda _, stream, pieces: shown.extend((stream, piece) for piece in pieces))
    monkeypatch.setattr(forwarder, "READ_INTERVAL_S", 0.5)
    pipes = {1: os.pipe(), 2: os.pipe()}
    loop = EventLoop(lambda error: pytest.fail(str(error)))
    RankOutput(loop, {stream: ends[0] for stream, ends in pipes.items()}, "rank 3")
    written: list[list[tuple[int, bytes]]] = []

    def write(stream: int, data: bytes) -> None:
        written.append([*shown])
        os.write(pipes[stream][1], data)

    for number, (stream, data) in enumerate([(1, b"first"), (2, b"second"), (1, b"third"), (1, b" and fourth")]):
        loop.set_timer(str(number), 0.02 * (number + 1), partial(write, stream, data))
    loop.set_timer("end", 2.0, loop.stop)
    loop.run()
    assert written == [[], [(1, b"first")], [(1, b"first")], [(1, b"first")]]
    assert shown == [(1, b"first"), (2, b"second"), (1, b"third and fourth")]
    for ends in pipes.values():
        for end in ends:
            os.close(end)


def test_an_error_in_folding_lets_output_pass(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("seven")

    monkeypatch.setattr(Aggregator, "take", fail)
    folding = AggregationConfig(0, "3", "", 0, "token", 1.0, False, True)
    assert forward(folding, (b"lost\n", b"kept\n"), listen("127.0.0.1", 0).detach())
    shown = capfd.readouterr()
    assert shown.out == "[0] kept\n"
    assert shown.err == message("launch/output_error", rank=0, host="n0", error="ValueError: seven") + "\n"


def test_without_a_way_to_the_aggregator_output_is_not_folded(capfd: pytest.CaptureFixture[str]) -> None:
    assert not forward(AggregationConfig(0, "3", "127.0.0.1", free_port(), "token", 1.0, False, False), (b"kept\n",))
    shown = capfd.readouterr()
    assert shown.out == "[0] kept\n"
    (refusal,) = find("launch/aggregator_unreachable", shown.err, rank=0, host="n0")
    assert refusal["error"].endswith("Connection refused")


def test_a_rank_that_has_lost_the_aggregator_shows_its_own_output(capfd: pytest.CaptureFixture[str]) -> None:
    loop = EventLoop(lambda error: pytest.fail(str(error)))
    pipes = {1: os.pipe(), 2: os.pipe()}
    listener = listen("127.0.0.1", 0)
    folding = AggregationConfig(1, "2", *listener.getsockname()[:2], "token", 1.0, False, False)
    output = RankOutput(loop, {stream: ends[0] for stream, ends in pipes.items()}, "rank 1 on n0")

    def lose(connection: socket.socket) -> None:
        connection.close()
        loop.set_timer("write", 0.3, write)

    def write() -> None:
        os.write(pipes[1][1], b"kept\n")
        for _, end in pipes.values():
            os.close(end)
        loop.set_timer("finish", 0.3, lambda: output.finish(loop.stop))

    server = AuthListener(loop, listener, "token", 2, lose)
    output.configure(ForwardConfig(LogPlan(), "[{rank}] ", "rank 1 on n0", True, folding))
    loop.set_timer("deadline", DEADLINE_S, lambda: pytest.fail("it does not end"))
    loop.run()
    server.close()
    shown = capfd.readouterr()
    assert shown.out == "[1] kept\n"
    assert find("launch/aggregator_lost", shown.err, rank=1, host="n0")


def forward(folding: AggregationConfig, lines: Sequence[bytes], listener: int = -1) -> bool:
    """Forward the output of rank 0, which prints lines, one after the other; return whether some is lost."""
    pipes = {1: os.pipe(), 2: os.pipe()}
    loop = EventLoop(lambda error: pytest.fail(str(error)))
    output = RankOutput(loop, {stream: ends[0] for stream, ends in pipes.items()}, "rank 0 on n0")
    output.configure(ForwardConfig(LogPlan(), "[{rank}] ", "rank 0 on n0", True, folding), listener)
    rest = [*lines]

    def write() -> None:
        if rest:
            os.write(pipes[1][1], rest.pop(0))
            loop.set_timer("write", 0.3, write)
        else:
            for _, end in pipes.values():
                os.close(end)
            output.finish(loop.stop)

    write()
    loop.set_timer("deadline", DEADLINE_S, lambda: pytest.fail("it does not end"))
    loop.run()
    return output.has_lost_output
