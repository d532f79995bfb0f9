"""How mpiddp says something: each line and block in one piece, and a refusal before the job is gone."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest

from mpiddp.base.stderr import write_line
from tests import processes, starts
from tests.cluster import Cluster
from tests.messages import message
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPIS,
    PROGRAMS,
    ROOT,
    Done,
    Mpi,
    alone,
    check,
    first_of,
    mpiexec_command,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

Packet = tuple[float, str]


def job(mpi: Mpi, *arguments: object) -> list[str]:
    """Return the command of a rank whose writes are printed with their times, under `2>&1`."""
    return [str(mpi.python), str(PROGRAMS / "packets.py"), str(mpi.python), "-m", "mpiddp", *map(str, arguments)]


def packets(done: Done, statuses: list[int]) -> list[Packet]:
    """Return what the ranks of a job wrote, each with its time, the ranks' ends among it."""
    found = [(at, text) for at, text in map(json.loads, check(done).stdout.splitlines())]
    assert [text for _, text in found if text.startswith("status ")] == [f"status {status}" for status in statuses]
    return found


def on_one_node(mpi: Mpi, *arguments: object, status: int = 0) -> list[Packet]:
    """Return what two ranks of a job wrote."""
    need(mpi.missing())
    command = mpiexec_command(mpi, 2, *job(mpi, *arguments)[1:])
    return packets(processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(mpi)), [status] * 2)


def check_time(found: list[Packet]) -> None:
    """Fail where a rank ended within the time that a launcher needs to pass on the one refusal."""
    ((said, refusal),) = [(at, text) for at, text in found if text.startswith("mpiddp: ")]
    assert min(at for at, text in found if text.startswith("status ")) - said > 0.09
    assert refusal.endswith("\n")


@pytest.mark.mpi
@pytest.mark.parametrize("name", first_of(["openmpi4", "mpich"]))
def test_the_start_line_and_the_map_are_one_write(name: str) -> None:
    said = [text for _, text in on_one_node(MPIS[name], EXAMPLES / "hello_world.py") if not text.startswith("status ")]
    assert [text for text in said if not text.endswith("\n")] == []
    (start,) = [text for text in said if text.startswith("mpiddp ")]
    assert re.search(r"\n  host .*(\n  \S+ +0(-1)? .*)(\n  \S+ +1 .*)?\n$", start), start


@pytest.mark.parametrize("options", first_of(["--no-init --traceback=full", "--no-init", "--traceback=full", ""]))
def test_a_traceback_is_one_write(quick: Mpi, tmp_path: Path, options: str) -> None:
    """However long it is, and whatever Python's streams hold back."""
    script = tmp_path / "deep.py"
    script.write_text("def even(n):\n    odd(n - 1) if n else {}['seven']\n\ndef odd(n):\n    even(n)\n\neven(200)\n")
    done = alone(quick, *job(quick, "--quiet", *options.split(), script)[1:], env={"PYTHONUNBUFFERED": "1"})
    traceback, report = [text for _, text in packets(done, [1]) if not text.startswith("status ")]
    assert len(traceback) > 20_000
    assert re.match(r"(\[rank0\]: )?Traceback ", traceback)
    assert traceback.endswith("KeyError: 'seven'\n")
    assert report.startswith("mpiddp: failed: rank 0 ")


@pytest.mark.parametrize("arguments", [("--dry-run", "--nodes", 400, "--ranks-per-node", 4), ("--explain", "--quiet")],
                         ids=["dry-run", "explain"])
def test_an_answer_is_one_write(quick: Mpi, arguments: tuple[object, ...]) -> None:
    done = alone(quick, *job(quick, *arguments)[1:], env={"PYTHONUNBUFFERED": "1"})
    (answer,) = [text for _, text in packets(done, [0]) if not text.startswith("status ")]
    assert len(answer) > 800
    assert answer.endswith("\n")


@pytest.mark.mpi
@pytest.mark.parametrize(("argument", "status"), [("no_such_script.py", 3), ("--frobnicate", 2)],
                         ids=["with MPI", "before MPI"])
@pytest.mark.parametrize("name", ["openmpi4", "mpich"])
def test_a_refusal_has_time_to_get_through(name: str, argument: str, status: int) -> None:
    """A launcher that sees a rank end may drop what it has not read, or speak in the middle of it."""
    check_time(on_one_node(MPIS[name], argument, status=status))


@pytest.mark.parametrize("name", ["openmpi4", "impi"])
def test_no_node_ends_before_a_refusal_got_through(cluster: Cluster, name: str) -> None:
    """For srun prints a block line by line, and its own errors as they come."""
    mpi = MPIS[name]
    need(mpi.missing()[:1])
    done = cluster.run("srun", f"--mpi={mpi.pmi}", "-N3", "--ntasks-per-node=2", *job(mpi, "no_such_script.py"),
                       timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)
    check_time(packets(done, [3] * 6))


def test_what_is_said_goes_to_the_terminal_where_a_script_keeps_its_stderr(quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "keeps.py"
    script.write_text("import io, os, signal, sys, mpiddp\nsys.stderr = io.StringIO()\n"
                      "assert not mpiddp.should_stop()\n"
                      "os.kill(os.getpid(), signal.SIGUSR1)\nassert mpiddp.should_stop()\n")
    done = check(alone(quick, "-m", "mpiddp", "--quiet", "--stop-before", 1, script))
    assert done.stderr.splitlines()[-1] == message("launch/time_to_stop", signal="SIGUSR1")


def test_all_is_said_where_a_pipe_that_does_not_block_is_full() -> None:
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    text, heard = "x" * 300_000 + "\n", bytearray()

    def hear() -> None:
        while len(heard) < len(text):
            time.sleep(0.01)
            heard.extend(os.read(source, 30_000))

    listener = threading.Thread(target=hear, daemon=True)
    listener.start()
    write_line(text, sink)
    listener.join(10)
    os.close(sink)
    os.close(source)
    assert heard.decode() == text


def test_a_closed_end_is_no_error() -> None:
    source, sink = os.pipe()
    os.close(source)
    write_line("nobody hears", sink)
    os.close(sink)
    write_line("nobody hears", sink)


@pytest.mark.mpi
@pytest.mark.thorough("no other test")
def test_lines_of_jobs_with_one_pipe_are_whole() -> None:
    assert list(starts.look(len(MPIS))) == []


@pytest.mark.parametrize("line", [
    "  vm    1      cpu     core 1  0     1        lo[tcp://127.0.0.1:7] hello from [vm:gloo] process 0/2",
    "mpiddp 0.1.0: 2 ranks on 1 node, gloo on cpu, tcp://127.0.0.1:40375[tcp://127.0.0.1:40375] hello from",
    "  vm    1      cpu     core 1", "mpiddp 0.1.0: 2 ranks on", "",
])
def test_a_line_that_is_not_whole_is_found(line: str) -> None:
    assert not any(one.fullmatch(line) for one in starts.WHOLE)
