"""Wrong input: one clear error a job, the right status, no hang, no traceback of ours."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    EACH_MPI,
    EXAMPLES,
    MPIS,
    ROOT,
    Done,
    Mpi,
    alone,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    on_path,
    single_node_environ,
    srun,
)

pytestmark = pytest.mark.light

HELLO = EXAMPLES / "hello_world.py"
LATE = r" the script has not started after \d+ s; waiting for "  # a reminder


def check_refused(done: Done, status: int, words: str) -> None:
    """Fail unless a job ended with a status and one error of ours that says the words."""
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.count(words) == 1, done.stderr
    assert len(re.findall(f"^mpiddp:(?!{LATE})", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    script = tmp_path / "broken.py"
    script.write_text("import os\nif True print('x')\n")
    return script


@pytest.mark.parametrize("mpi", EACH_MPI)
@pytest.mark.parametrize(("arguments", "status", "words"), [
    (["no_such_script.py"], 3, "cannot start: script-missing"),
    (["--frobnicate", HELLO], 2, message("launch/unrecognized_arguments", arguments="--frobnicate")),
], ids=["missing-script", "unknown-option"])
def test_once_per_job_under_every_launcher(mpi: Mpi, arguments: list[object], status: int, words: str) -> None:
    check_refused(mpiexec(mpi, 4, *arguments), status, words)


@pytest.mark.parametrize(("arguments", "status", "words"), [
    ([EXAMPLES], 3, message("launch/no_main_module", path=EXAMPLES, kind="directory")),
    (["-m", "no_such_module"], 3, "No module named no_such_module"),
    (["-m", "tests.no_such_module"], 3, "No module named tests.no_such_module"),
    (["-m", "os.path.x"], 3, "cannot start: script-missing"),
    (["--backend", "nonsense", HELLO], 3, "cannot start: backend-unavailable"),
    (["--startup-timeout", "-3", HELLO], 2, message("launch/seconds_out_of_range", value=-3)),
    ([], 2, message("launch/no_script")),
], ids=["directory", "module", "submodule", "submodule-of-module", "backend", "negative-timeout", "nothing"])
def test_wrong_arguments(quick: Mpi, arguments: list[object], status: int, words: str) -> None:
    check_refused(mpiexec(quick, 2, *arguments), status, words)


@pytest.mark.torch
def test_nccl_without_a_gpu(quick: Mpi) -> None:
    done = alone(quick, "-m", "mpiddp", "--backend", "nccl", HELLO, env={"CUDA_VISIBLE_DEVICES": ""})
    check_refused(done, 3, "cannot start: backend-unavailable")
    assert find("launch/backend_unavailable", done.stderr, backend="nccl", devices="no GPU")


@pytest.mark.thorough("test_nccl_without_a_gpu")
@pytest.mark.torch
def test_a_device_that_is_not_there(quick: Mpi) -> None:
    done = alone(quick, "-m", "mpiddp", "--device", "cuda", HELLO, env={"CUDA_VISIBLE_DEVICES": ""})
    check_refused(done, 3, "cannot start: device-unavailable")


def test_the_cpu_may_be_asked_for(quick: Mpi) -> None:
    assert check(mpiexec(quick, 2, "--device", "cpu", HELLO)).stdout.count(":gloo]") == 2


def test_a_syntax_error(quick: Mpi, broken: Path) -> None:
    done = mpiexec(quick, 2, broken)
    check_refused(done, 3, "cannot start: script-error")
    assert "broken.py, line 2: SyntaxError: " in done.stderr
    assert "if True print('x')" in done.stderr


@pytest.mark.parametrize("arguments", [["no_such_script.py"], ["--frobnicate", HELLO]], ids=["script", "option"])
def test_once_per_job_on_three_nodes(cluster: Cluster, arguments: list[object]) -> None:
    done = srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", *arguments)
    if "--frobnicate" in arguments:
        check_refused(done, 2, message("launch/unrecognized_arguments", arguments="--frobnicate"))
    else:
        check_refused(done, 3, message("launch/script_missing", path="no_such_script.py", hosts="on every rank"))


@pytest.mark.parametrize(("seen_on", "missing_on"), [("node1|node3", "node2"), ("node1", "node[2-3]")])
def test_a_script_that_some_nodes_cannot_see_names_them(seen_on: str, missing_on: str, cluster: Cluster) -> None:
    mpi = MPIS["openmpi4"]
    need(mpi.missing())
    command = (f"case $SLURMD_NODENAME in {seen_on}) cp {HELLO} /tmp/t.py;; *) rm -f /tmp/t.py;; esac; "
               f"exec {mpi.python} -m mpiddp /tmp/t.py")
    done = cluster.run("srun", "--mpi=pmix", "-N3", "-n3", "sh", "-c", command, timeout=60, env=mpi.environ(), cwd=ROOT)
    check_refused(done, 3, message("launch/script_missing", path="/tmp/t.py", hosts=f"on {missing_on}"))


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 3])
def test_no_mpi_library(tmp_path: Path, ranks: int) -> None:
    """Hide every libmpi from mpi4py, as where it was installed alone; Hydra still starts the ranks."""
    mpi = MPIS["mpich"]
    env = {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    done = mpiexec(mpi, ranks, HELLO, env=env) if ranks > 1 else alone(mpi, "-m", "mpiddp", HELLO, env=env)
    check_refused(done, 3, "cannot start: no-mpi-library")
    assert str(tmp_path / "libmpi.so") in done.stderr
    assert "pip install mpich" in done.stderr


def test_a_python_without_mpi4py(quick: Mpi) -> None:
    """As where the environment is not activated in the job."""
    done = alone(quick, "-c", "import sys; sys.modules['mpi4py'] = None; sys.argv[1:] = ['-c', '1']; import runpy; "
                              "runpy.run_module('mpiddp', run_name='__main__', alter_sys=True)")
    assert done.returncode == 3
    assert "mpiddp: cannot start: no-mpi4py\n  found    ModuleNotFoundError: " in done.stderr
    assert str(quick.python) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.torch
@pytest.mark.parametrize("error", [
    "ImportError('libcudart.so.12: cannot open shared object file')",
    "RuntimeError('Failed to load the backend extension: torch_npu') from ImportError('libhccl.so: no such file')",
])
def test_a_torch_that_does_not_import(quick: Mpi, tmp_path: Path, error: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}\n")
    done = mpiexec(quick, 2, HELLO, env={"PYTHONPATH": str(tmp_path)})
    check_refused(done, 3, "cannot start: torch-unusable")
    assert f"({quick.python})" in done.stderr
    assert all(text in done.stderr for text in error.split("'")[1::2])


@pytest.mark.long
@pytest.mark.parametrize(("lines", "timeout", "name", "fields"), first_of([
    ("import torch.distributed as dist; dist.init_process_group = lambda *_, **__: time.sleep(600)", "20",
     "launch/startup_timeout_of_group", {"stage": "process group"}),
    ("time.sleep(600)", "10", "launch/startup_timeout", {"missing": 1, "ranks": 2}),
]), ids=["group", "import"])
def test_a_rank_that_hangs_ends_the_job_at_the_deadline(
    quick: Mpi, tmp_path: Path, lines: str, timeout: str, name: str, fields: dict[str, object]
) -> None:
    """A torch that blocks on rank 1, in its import or later: the other rank gives up and takes it along."""
    (tmp_path / "torch.py").write_text(
        "import os, sys, time\n"
        "sys.path.remove(os.path.dirname(__file__))\ndel sys.modules['torch']\nimport torch\n"
        f"if os.environ.get('PMI_RANK') == '1':\n    {lines}\n")
    done = mpiexec(quick, 2, "--startup-timeout", timeout, HELLO, env=on_path(tmp_path))
    check_refused(done, 3, "cannot start: startup-timeout")
    assert len(find(name, done.stderr, seconds=timeout, **fields)) == 1


@pytest.mark.long
@pytest.mark.torch
def test_the_start_has_one_clock(quick: Mpi, tmp_path: Path) -> None:
    """What MPI_Init took counts: the deadline is that of the agents, and rank 0 names who is late in time."""
    need(quick.missing())
    (tmp_path / "torch.py").write_text(
        "import os, sys, time\n"
        "sys.path.remove(os.path.dirname(__file__))\ndel sys.modules['torch']\nimport torch\n"
        "if os.environ.get('PMI_RANK') == '1':\n    time.sleep(600)\n")
    late = "[ $PMI_RANK = 1 ] && sleep 30; exec \"$@\""
    command = mpiexec_command(quick, 2, "-m", "mpiddp", "--startup-timeout=40", HELLO)
    python = command.index(str(quick.python))
    start = time.monotonic()
    done = processes.run(*command[:python], "sh", "-c", late, "sh", *command[python:], timeout=DEADLINE_S, cwd=ROOT,
                         env={**single_node_environ(quick), "PYTHONPATH": str(tmp_path)})
    assert time.monotonic() - start < 30 + 40  # when a clock that began after MPI_Init would end
    (late,) = find("launch/startup_timeout", done.stderr, seconds=40, missing=1, ranks=2)
    assert re.fullmatch(r"rank 1 on \S+ \(importing torch\)", late["names"])
    assert done.stderr.count("cannot start: startup-timeout") == 1


NO_SHM = """
set -e
mount -t tmpfs -o mode=755 none "$0"
for name in null zero full random urandom tty; do touch "$0/$name"; mount --bind "/dev/$name" "$0/$name"; done
ln -s /proc/self/fd "$0/fd"
ln -s pts/ptmx "$0/ptmx"
mkdir "$0/pts"
mount --rbind /dev/pts "$0/pts"
mount --rbind "$0" /dev
exec "$@"
"""
READ_ONLY_SHM = 'set -e; mount -t tmpfs -o ro none /dev/shm; exec "$@"'


def without_shm(mpi: Mpi, prepare: str, folder: Path) -> Done:
    """Run two ranks where /dev/shm is not there, or cannot be written."""
    need(["root"] if os.geteuid() else mpi.missing())
    job = mpiexec_command(mpi, 2, "-m", "mpiddp", "--no-init", "-c", "print('ran')")
    return processes.run("unshare", "--mount", "sh", "-c", prepare, str(folder), *job, timeout=DEADLINE_S,
                         env=single_node_environ(mpi))


@pytest.mark.parametrize(("prepare", "name"), first_of([
    (READ_ONLY_SHM, "launch/shm_not_writable"), (NO_SHM, "launch/shm_missing")], 2), ids=["read-only", "none"])
def test_mpich_without_shared_memory(quick: Mpi, prepare: str, name: str, tmp_path: Path) -> None:
    done = without_shm(quick, prepare, tmp_path)
    check_refused(done, 3, "cannot start: no-shm")
    assert len(find(name, done.stderr, host=os.uname().nodename)) == 1
    assert "UCX" not in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("name", first_of(["openmpi4", "openmpi5"]))
def test_open_mpi_without_shared_memory(name: str, tmp_path: Path) -> None:
    done = check(without_shm(MPIS[name], NO_SHM, tmp_path))
    assert done.stdout.count("ran\n") == 2
    assert find("launch/shm_small", done.stderr, mib=0)
