"""The end of a job: exit status, leftovers, waiting for the last rank."""

from __future__ import annotations

import json
import os
import pstats
import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    EACH_MPI,
    MPICH_FIRST,
    MPIS,
    PROGRAMS,
    ROOT,
    TWO_NAMES,
    Mpi,
    check,
    first_of,
    mpiexec,
    need,
    noise,
    single_node_environ,
    srun,
)

pytestmark = pytest.mark.light

Script = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Return a function that writes a script and returns its path."""
    def write(*lines: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("\n".join(("import os, sys, time", "rank = int(os.environ['RANK'])", *lines)) + "\n")
        return path
    return write


@pytest.fixture(params=first_of(["impi", "openmpi4"]))
def mpi_of_srun(request: pytest.FixtureRequest) -> Mpi:
    """Return an MPI for each of Slurm's interfaces."""
    return MPIS[request.param]


@pytest.mark.parametrize("mpi", first_of(EACH_MPI))
def test_a_rank_that_fails_gives_the_job_its_status(mpi: Mpi) -> None:
    """The other rank would sleep for ten minutes."""
    check(mpiexec(mpi, 2, PROGRAMS / "fails.py", 1, 7), 7)


def test_an_exception_is_shown_once_and_without_our_frames(quick: Mpi, script: Script) -> None:
    path = script("if rank == 1:", "    raise ValueError('seven')", "time.sleep(600)")
    done = check(mpiexec(quick, 2, path), 1)
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "ValueError: seven" in done.stderr
    assert "mpiddp/" not in done.stderr
    (report,) = find("launch/failure_report", done.stderr, rank=1, ranks=2, local_rank=1, device="cpu")
    assert report["cause"] == "ValueError: seven"
    assert report["where"] == f"{path}:4 <module>"
    assert re.fullmatch(r"\d+\.\d", report["seconds"])
    assert report["pid"].isdecimal()
    assert report["status"] == "1"


def test_a_package_that_is_missing_may_be_in_another_environment(quick: Mpi, script: Script) -> None:
    done = check(mpiexec(quick, 2, script("import no_such_package")), 1)
    assert find("launch/failed_rank", done.stderr, cause="ModuleNotFoundError: No module named 'no_such_package'")
    advice = message("launch/install_module", python=quick.python)
    assert done.stderr.count(f"  do       {advice}\n") == 1


@pytest.mark.torch
def test_ranks_that_lose_the_failed_one_are_quiet(mpi_of_srun: Mpi, cluster: Cluster, script: Script) -> None:
    """Of three ranks in a loop of collectives one raises."""
    path = script("import torch, torch.distributed as dist", "total = torch.ones(1)", "for step in range(10**9):",
                  "    dist.all_reduce(total)", "    total.fill_(1)", "    if rank == 2 and step == 100:",
                  "        raise ValueError('seven')")
    copy = f"cat > /tmp/loop.py <<'END'\n{path.read_text()}END\n"
    done = cluster.run("srun", f"--mpi={mpi_of_srun.pmi}", "-N3", "-n3", "sh", "-c",
                       f"{copy}exec {mpi_of_srun.python} -m mpiddp /tmp/loop.py", timeout=DEADLINE_S,
                       env=mpi_of_srun.environ(), cwd=ROOT)
    check(done, 1)
    assert done.stderr.count("Traceback (most recent call last)") == 1
    report = message("launch/failed_rank", rank=2, host="node3", cause="ValueError: seven")
    assert done.stderr.index(f"{report}\n") > done.stderr.index("Traceback")


def test_a_script_may_leave_by_os_exit(quick: Mpi, script: Script) -> None:
    """Launchers take a process that leaves so, without MPI_Finalize, for a crash."""
    done = check(mpiexec(quick, 2, script("print('done', flush=True)", "os._exit(0)")))
    assert done.stdout == "done\n" * 2
    assert noise(done) == []


def test_the_interpreter_tears_all_modules_down(quick: Mpi, script: Script) -> None:
    path = script("class Last:", "    def __del__(self):", "        os.write(1, b'destroyed\\n')",
                  "last = sys.modules['last'] = Last()")
    assert check(mpiexec(quick, 2, path)).stdout == "destroyed\n" * 2


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_the_exit_functions_of_a_scripts_libraries_run(mpi: Mpi, script: Script) -> None:
    """What they print is no less lost, nor is what the script has printed by C: both are in C's stream still."""
    path = script(
        "import ctypes", "libc = ctypes.CDLL(None)", "libc.printf(b'printed\\n')",
        "libc.strdup.restype = ctypes.c_void_p", "text = libc.strdup(b'closed')",
        "libc.__cxa_atexit(libc.puts, ctypes.c_void_p(text), None)", "sys.exit(0)")
    done = check(mpiexec(mpi, 2, path))
    assert sorted(done.stdout.splitlines()) == ["closed"] * 2 + ["printed"] * 2
    assert noise(done) == []


@pytest.mark.mpi
@pytest.mark.thorough("test_a_profiler_that_runs_us_writes_its_results")
def test_the_exit_functions_of_a_profiler_run(tmp_path: Path) -> None:
    """It is in the process before torch, by LD_PRELOAD; this one is C's own library of mathematics."""
    path = tmp_path / "script.py"
    path.write_text("\n".join((
        "import os", "from mpiddp.base.termination import needs_exit_functions",
        "print(needs_exit_functions(os.environ))")))
    mpi = MPIS["openmpi4"]
    found = [check(mpiexec(mpi, 1, path, env=env)).stdout for env in ({}, {"LD_PRELOAD": "libm.so.6"})]
    assert found == ["False\n", "True\n"]


def test_a_child_that_the_script_forks_is_left_to_itself(quick: Mpi, script: Script) -> None:
    """It may raise and exit without an end to the job, and os.wait() finds no child of ours."""
    path = script("pid = os.fork()", "if pid == 0:", "    raise ValueError('in the child')",
                  "assert os.wait() == (pid, 256)", "print('parent', flush=True)")
    done = check(mpiexec(quick, 1, path))
    assert done.stdout == "parent\n"
    assert "mpiddp: failed" not in done.stderr


@pytest.mark.thorough("the same on one node")
@pytest.mark.parametrize("mpi", EACH_MPI)
def test_a_rank_that_fails_ends_the_job_on_three_nodes(mpi: Mpi, cluster: Cluster) -> None:
    check(srun(cluster, mpi, "-N3 -n3", PROGRAMS / "fails.py", 2, 7), 7)


@pytest.mark.parametrize(("line", "status"), first_of([
    ("sys.exit('a word')", 1), ("raise KeyboardInterrupt", 130), ("sys.exit()", 0), ("sys.exit(0)", 0),
    ("sys.exit(256 + 3)", 3),
]))
def test_exit_status_is_as_python_gives_it(quick: Mpi, line: str, status: int, script: Script) -> None:
    done = check(mpiexec(quick, 1, script(line)), status)
    assert ("a word" in done.stderr) == ("a word" in line)


@pytest.mark.thorough("test_threads_and_atexit_functions_of_a_rank_that_fails")
@pytest.mark.torch
def test_threads_and_atexit_functions_still_have_their_group(quick: Mpi, script: Script) -> None:
    path = script(
        "import atexit, threading",
        "import torch, torch.distributed as dist",
        "from mpi4py import MPI",
        "def add(word):",
        "    total = torch.ones(1)",
        "    dist.all_reduce(total)",
        "    said = f'{dist.get_rank()} {word} {int(total)} {MPI.COMM_WORLD.allreduce(1)}'",
        "    print(f'{said}\\n', end='', flush=True)",
        "atexit.register(add, 'atexit')",
        "def later():",
        "    time.sleep(1)",
        "    add('thread')",
        "threading.Thread(target=later).start()",
    )
    done = check(mpiexec(quick, 2, path))
    for rank in ("0", "1"):
        assert [line for line in done.stdout.splitlines() if line[0] == rank] == [
            f"{rank} thread 2 2", f"{rank} atexit 2 2"]
    assert noise(done) == []


def test_a_script_that_finalizes_mpi_itself(quick: Mpi, script: Script) -> None:
    done = check(mpiexec(quick, 2, script("from mpi4py import MPI", "MPI.Finalize()", "print('done')")))
    assert done.stdout == "done\n" * 2


def test_the_last_rank_is_waited_for_and_named_at_the_deadline(quick: Mpi, script: Script) -> None:
    path = script("if rank == 1:", "    time.sleep(600)")
    done = mpiexec(quick, 2, "--exit-timeout", "3", path)
    assert done.returncode == 1
    late = message("launch/late_at_exit", ranks="rank 0", limit="3 s")
    assert len(find("launch/failed_rank", done.stderr, rank=1, cause=late)) == 1
    assert re.findall(r"^  where    script\.py:\d+ <module> → \w+\(\)$", done.stderr, re.MULTILINE)
    assert done.stderr.count("script.py:") == 1
    assert "  others " not in done.stderr


@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize(("end", "lives"), first_of([("", True), ("sys.exit(3)", False)]), ids=["success", "failure"])
def test_a_detached_child_lives_on_after_a_success_alone(mpi: Mpi, end: str, lives: bool, script: Script) -> None:
    path = script(
        "import subprocess",
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True, stdin=subprocess.DEVNULL,",
        "                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
        "print(child.pid, flush=True)", end)
    done = check(mpiexec(mpi, 1, path), 0 if lives else 3)
    child = int(done.stdout)
    try:
        deadline = time.monotonic() + (2 if lives else processes.LEAVING_S)
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert is_running(child) == lives
    finally:
        processes.end_tree(child)


@pytest.mark.mpi
def test_a_daemon_that_a_script_has_forked_does_not_hold_the_launcher(script: Script, tmp_path: Path) -> None:
    """Under MPICH it holds it without mpiddp, too, by the connection for PMI."""
    path = script(
        "import os",
        "child = os.fork()",
        "if child == 0:",
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))",
        "    os.setsid()",
        "    null = os.open(os.devnull, os.O_RDWR)",
        "    for descriptor in range(3):",
        "        os.dup2(null, descriptor)",
        "    time.sleep(600)",
        "    os._exit(0)",
        f"while not os.path.exists({str(tmp_path / 'pid')!r}):",
        "    time.sleep(0.01)")
    try:
        check(mpiexec(MPIS["openmpi5"], 1, "--prefix=[{rank}] ", path, timeout=30))
        assert is_running(int((tmp_path / "pid").read_text()))
    finally:
        processes.end_tree(int((tmp_path / "pid").read_text()))


def is_running(pid: int) -> bool:
    """Tell whether a process is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_group_is_there_until_the_last_rank_has_come_to_its_end(
    quick: Mpi, script: Script, tmp_path: Path
) -> None:
    """With NCCL, one that destroyed it before would wait in vain for the others, and abort at the group's timeout."""
    path = script(
        "import torch.distributed as dist",
        "destroy = dist.destroy_process_group",
        "def note():",
        f"    open({str(tmp_path / 'destroyed')!r}, 'w').close()",
        "    destroy()",
        "dist.destroy_process_group = note",
        "if rank == 0:",
        "    time.sleep(2)",
        f"    print(os.path.exists({str(tmp_path / 'destroyed')!r}), flush=True)")
    assert check(mpiexec(quick, 2, path)).stdout == "False\n"
    assert (tmp_path / "destroyed").exists()


@pytest.mark.mpi
@pytest.mark.parametrize("name", TWO_NAMES)
def test_a_thread_that_waits_in_input_does_not_hold_the_end(name: str, script: Script) -> None:
    """On a terminal it has C's stdin locked; Python ends all the same."""
    path = script("import threading", "threading.Thread(target=input, daemon=True).start()", "time.sleep(0.5)")
    mpi = MPIS[name]
    need(mpi.missing())
    ours, its = os.openpty()
    try:
        with processes.start([str(mpi.python), "-m", "mpiddp", "--quiet", str(path)], single_node_environ(mpi), ROOT,
                             stdin=its, stdout=its, stderr=its) as job:
            try:
                assert job.wait(DEADLINE_S) == 0
            finally:
                processes.end_tree(job.pid)
    finally:
        os.close(ours)
        os.close(its)


WHILE_LEAVING = (
    "import signal, torch.distributed as dist", "pids = [None, None]", "dist.all_gather_object(pids, os.getpid())",
    "if rank == 0:", "    time.sleep(1.5)", "    os.kill(pids[1], signal.{number})", "    time.sleep({then})",
    "else:", "    signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))")


@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize(("number", "status", "cause"), first_of([
    ("SIGINT", 130, "KeyboardInterrupt"), ("SIGTERM", 7, "sys.exit(7)")]))
def test_an_interruption_while_a_rank_waits_for_the_last(
    mpi: Mpi, number: str, status: int, cause: str, script: Script
) -> None:
    path = script(*(line.format(number=number, status=7, then=600) for line in WHILE_LEAVING))
    done = check(mpiexec(mpi, 2, path), status)
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    assert report["cause"].startswith(cause), done.stderr


def test_a_handler_that_exits_in_order_does_not_disturb_the_end(quick: Mpi, script: Script) -> None:
    path = script(*(line.format(number="SIGTERM", status=0, then=1) for line in WHILE_LEAVING))
    assert noise(check(mpiexec(quick, 2, path))) == []


def test_the_crash_of_a_forked_child_goes_into_no_file_of_its_own(quick: Mpi, script: Script, tmp_path: Path) -> None:
    path = script(
        "import io, resource, signal", "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", "sys.stderr = io.StringIO()",
        "pid = os.fork()", "if pid == 0:",
        f"    files = [open({str(tmp_path)!r} + f'/{{n}}.data', 'wb') for n in range(100)]",
        "    os.kill(os.getpid(), signal.SIGSEGV)",
        "assert os.waitpid(pid, 0)[1] & 0x7F == signal.SIGSEGV")
    done = check(mpiexec(quick, 1, path))
    files = list(tmp_path.glob("*.data"))
    assert len(files) == 100
    assert [file.name for file in files if file.stat().st_size] == []
    assert "Fatal Python error: Segmentation fault" in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("name", first_of(["openmpi4", "mpich", "openmpi5"]))
@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise ValueError('seven')", 1)], ids=["success", "failure"])
def test_a_profiler_that_runs_us_writes_its_results(
    name: str, end: str, status: int, script: Script, tmp_path: Path
) -> None:
    """It catches SystemExit: then Python itself ends with 0, and the job with the script's status."""
    mpi = MPIS[name]
    need(mpi.missing())
    path = script("def work():", "    return sum(range(10))", "work()", end)
    run = f"exec {mpi.python} -m cProfile -o {tmp_path}/profile.${{PMI_RANK:-$OMPI_COMM_WORLD_RANK}} -m mpiddp {path}"
    command = [str(mpi.mpiexec), *mpi.options, "-n", "2", "sh", "-c", run]
    done = check(processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(mpi), cwd=ROOT), status)
    assert done.stderr.count("mpiddp: failed: ") == (status != 0)
    written = sorted(file.name for file in tmp_path.glob("profile.*"))
    complete = [functions for file in written if (functions := profiled(tmp_path / file))]
    assert len(complete) == 2 or (status and complete)  # the rank that fails second may be ended while it writes
    for functions in complete:
        assert ("script.py", "work") in functions


@pytest.mark.mpi
@pytest.mark.torch
def test_a_handler_that_does_nothing_gives_exit_functions_time(quick: Mpi, script: Script, tmp_path: Path) -> None:
    path = script(
        "import atexit, os, pathlib, signal, time", "import torch, torch.distributed as dist",
        "def upload():", "    time.sleep(1)", f"    pathlib.Path({str(tmp_path / 'uploaded')!r}).touch()",
        "if dist.get_rank():", "    raise ValueError('seven')",
        "signal.signal(signal.SIGTERM, lambda *_: None)", "atexit.register(upload)", "dist.all_reduce(torch.ones(1))")
    check(mpiexec(quick, 2, path), 1)
    assert (tmp_path / "uploaded").exists()


@pytest.mark.mpi
def test_a_profiler_of_the_script_alone(quick: Mpi, script: Script, tmp_path: Path) -> None:
    path = script("def work():", "    return sum(range(10))", "work()")
    run = f"exec {quick.python} -m mpiddp -m cProfile -o {tmp_path}/profile.$PMI_RANK {path}"
    check(processes.run(str(quick.mpiexec), "-n", "2", "sh", "-c", run, timeout=DEADLINE_S,
                        env=single_node_environ(quick), cwd=ROOT))
    for rank in range(2):
        functions = profiled(tmp_path / f"profile.{rank}")
        assert ("script.py", "work") in functions
        assert not any(file == "launch.py" for file, _ in functions)


def profiled(file: Path) -> set[tuple[str, str]]:
    """Return the files and names of the functions in a profile, none if it is not complete."""
    try:
        return {(Path(key[0]).name, key[2]) for key in pstats.Stats(str(file)).stats}
    except EOFError:
        return set()


@pytest.mark.torch
@pytest.mark.parametrize("unload", first_of([
    "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith(('torch', 'mpiddp'))]",
    "sys.modules['torch.distributed'] = None",
]), ids=["all", "one"])
def test_a_script_that_unloads_modules_ends_in_order(quick: Mpi, script: Script, tmp_path: Path, unload: str) -> None:
    """What happens after the script has loaded its modules before."""
    trace = tmp_path / "trace.json"
    done = check(mpiexec(quick, 2, "--trace", trace, script("import sys", unload)))
    assert "mpiddp: failed" not in done.stderr
    stages = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert {"import mpi4py", "MPI_Init", "import torch", "process group", "script", "exit"} <= stages
