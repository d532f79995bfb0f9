"""What a rank prints is there when it is printed: on the terminal, in its log, and when another rank fails."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from mpiddp.failure.postmortem import extract_crash_stack, find_crash_line
from tests import processes
from tests.support import (
    DEADLINE_S,
    MPICH_FIRST,
    ROOT,
    Mpi,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

LINES = 3
SEEN = f"""
import os, sys, time
for number in range({LINES}):
    print("line", number)
    while not os.path.exists(f"{{sys.argv[1]}}/{{number}}"):
        time.sleep(0.02)
"""  # each line waits until the one before is seen
FAILS = """
import ctypes, os, sys, time
import torch.distributed as dist
rank = int(os.environ["RANK"])
for number in range(3):
    print("line", number, "of", rank)
ctypes.CDLL(None).puts(b"line 3 of %d" % rank)
dist.barrier()
if rank == 1 and sys.argv[1] == "raise":
    raise ValueError("seven")
if rank == 1 and sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
dist.barrier()
time.sleep(600)
"""
HOW_BUFFERED = """
import os, subprocess, sys
child = [sys.executable, "-c", "import sys; print(sys.stdout.line_buffering)"]
child = subprocess.run(child, stdout=subprocess.PIPE, text=True).stdout.strip()
print(os.environ["RANK"], sys.stdout.line_buffering, sys.stdout.write_through, child)
sys.stdout.reconfigure(line_buffering=False)
print("last words", end="")
"""
EACH_WRITE = """
import ctypes, os, socket
reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
os.dup2(writer.fileno(), 1)
libc = ctypes.CDLL(None)
for line in (b"first %d\\n", b"second %d\\n"):
    libc.printf(line, int(os.environ["RANK"]))
os.write(2, reader.recv(99) + reader.recv(99))
"""
OWN_MAIN = """
import sys, mpiddp
with mpiddp.process_group() as env:
    print(env.rank, sys.stdout.line_buffering)
"""
CRASHES = """
import ctypes, os, threading, time
import torch.distributed as dist
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def deep():
    ctypes.string_at(0)
os.write(2, b"no line's end")
dist.barrier()
if os.environ["RANK"] == "1":
    deep()
time.sleep(600)
"""
PACKAGE = ROOT / "mpiddp"
PRINTED = f"""
Fatal Python error: Segmentation fault

Thread 0x01 (most recent call first):
  File "{PACKAGE}/where/dumper.py", line 110 in _answer

Thread 0x02 (most recent call first):
  File "{threading.__file__}", line 975 in run

Current thread 0x03 (most recent call first):
  File "/venv/lib/python3.11/site-packages/numpy/core.py", line 7 in dot
  File "/home/me/train.py", line 4 in deep
  File "/home/me/train.py", line 10 in <module>
  File "{PACKAGE}/runner/script.py", line 57 in run
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy.core, torch._C (total: 2)
"""


@pytest.mark.parametrize("options", first_of([["--prefix"], [], ["--log-dir"], ["--show", "fold"]]), ids=" ".join)
@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_a_line_is_seen_before_the_next_one_is_printed(mpi: Mpi, options: list[str], tmp_path: Path) -> None:
    need(mpi.missing())
    (script := tmp_path / "seen.py").write_text(SEEN)
    (seen := tmp_path / "seen").mkdir()
    logs = [tmp_path / "logs"] if "--log-dir" in options else []
    command = mpiexec_command(mpi, 2, "-m", "mpiddp", "--quiet", *options, *logs, script, seen)
    env = processes.marked(single_node_environ(mpi))
    found: list[str] = []
    with processes.start(command, env, ROOT, stdout=subprocess.PIPE) as job:
        cut_off = threading.Timer(DEADLINE_S, processes.end_tree, [job.pid])
        cut_off.start()
        try:
            assert job.stdout is not None
            for line in job.stdout:
                found.append(line)
                number = line.split()[-1]
                if sum(one.endswith(f"line {number}\n") for one in found) == (1 if "fold" in options else 2):
                    while logs and job.poll() is None and not are_logged(tmp_path, f"line {number}\n"):
                        time.sleep(0.01)
                    (seen / number).touch()
            assert job.wait(DEADLINE_S) == 0
        finally:
            cut_off.cancel()
            processes.end_tree(job.pid)
            assert processes.leftovers(env) == []
    assert len(found) == LINES * (1 if "fold" in options else 2), found


def are_logged(folder: Path, line: str) -> bool:
    """Return whether a line is in both ranks' logs, once."""
    return [path.read_text().count(line) for path in folder.glob("logs/*/*.log")] == [1, 1]


@pytest.mark.parametrize("options", first_of([[], ["--prefix"]]), ids=" ".join)
@pytest.mark.parametrize("kind", first_of(["raise", "kill"]))
@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_all_lines_are_there_when_a_rank_fails(mpi: Mpi, kind: str, options: list[str], tmp_path: Path) -> None:
    (script := tmp_path / "fails.py").write_text(FAILS)
    done = mpiexec(mpi, 3, *options, script, kind)
    assert done.returncode
    assert sorted(re.findall(r"line \d of \d", done.stdout)) == [
        f"line {number} of {rank}" for number in range(4) for rank in range(3)]


def test_stdout_is_buffered_by_lines_unless_somebody_says_otherwise(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "how.py").write_text(HOW_BUFFERED)
    for env, expected in (({}, "True False False"), ({"PYTHONUNBUFFERED": "1"}, "False True False")):
        done = check(mpiexec(quick, 1, script, env=env))
        assert done.stdout == f"0 {expected}\nlast words"
    (program := tmp_path / "own.py").write_text(OWN_MAIN)
    done = check(processes.run(*mpiexec_command(quick, 2, program), timeout=DEADLINE_S, env=single_node_environ(quick)))
    assert sorted(done.stdout.splitlines()) == ["0 False", "1 False"]


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_c_writes_whole_lines(mpi: Mpi, tmp_path: Path) -> None:
    """MPICH makes C's stdout unbuffered. A socket of datagrams shows what each write writes."""
    (script := tmp_path / "writes.py").write_text(EACH_WRITE)
    for env in ({}, {"PYTHONUNBUFFERED": "1"}):
        assert "first 0\nsecond 0\n" in check(mpiexec(mpi, 1, script, env=env)).stderr


@pytest.mark.thorough("test_a_line_is_seen_before_the_next_one_is_printed")
@pytest.mark.torch
def test_what_is_printed_as_the_group_begins_is_in_the_logs(quick: Mpi, tmp_path: Path) -> None:
    """As NCCL_DEBUG=INFO has it printed; seen with one rank of NCCL, too. The start line goes to the terminal alone."""
    (script := tmp_path / "short.py").write_text("import torch.distributed as dist; dist.barrier()")
    loud = {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    done = check(mpiexec(quick, 2, "--prefix", "--log-dir", tmp_path / "logs", script, env=loud))
    groups = re.compile(r"\[c10d.*set key:.*/group/")
    (log,) = tmp_path.glob("logs/*/rank-00000.*.log")  # of the rank that has the store
    assert groups.search(log.read_text())
    assert all(line.startswith("[") for line in done.stderr.splitlines() if groups.search(line))
    assert re.search(r"^mpiddp \S+: 2 ranks on 1 node", done.stderr, re.M)


@pytest.mark.torch
@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_the_stack_of_a_crash_is_in_its_ranks_log(mpi: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "crashes.py").write_text(CRASHES)
    done = mpiexec(mpi, 2, "--log-dir", tmp_path / "logs", script)
    report = done.stderr.split("mpiddp: failed: rank 1 on ")[1]
    assert re.search(rf"^  where    {script}:6 deep$", report, re.MULTILINE), report
    (named,) = re.findall(r"^  log      (.*)$", report, re.MULTILINE)
    log = Path(named).read_text()
    stack = log.partition("Fatal Python error: Segmentation fault\n")[2].splitlines()
    assert "no line's end\nFatal Python error: " in log
    assert stack[0].startswith("Current thread ")
    assert stack[1].endswith(" in string_at")
    assert stack[2:4] == [f'  File "{script}", line 6 in deep', f'  File "{script}", line 10 in <module>']
    assert not re.search(r"mpiddp/(run|beside|launch|cli)", log)
    (healthy,) = tmp_path.glob("logs/*/rank-00000.*.log")
    assert "no line's end" in healthy.read_text()


def test_a_stack_begins_with_the_thread_that_crashed() -> None:
    stack = extract_crash_stack(PRINTED.splitlines())
    assert [line.split()[-1] for line in stack.splitlines()] == [
        "fault", "first):", "dot", "deep", "<module>", "first):", "run"]
    assert stack.splitlines()[1].startswith("Current thread")
    assert find_crash_line(stack) == "/home/me/train.py:4 deep"
    of_no_python = [*PRINTED.splitlines()[:9], "Current thread 0x03 (most recent call first):", "  <no Python frame>"]
    assert extract_crash_stack(of_no_python).splitlines()[2] == "  <no Python frame>"
    assert find_crash_line(extract_crash_stack(of_no_python)) == ""
    assert extract_crash_stack([]) == find_crash_line("") == ""


def test_a_crash_of_our_own_is_shown_whole() -> None:
    ours = [line for line in PRINTED.splitlines() if "train.py" not in line and "numpy/" not in line]
    assert f'{PACKAGE}/runner/script.py", line 57 in run' in extract_crash_stack(ours)
