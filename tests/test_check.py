"""A check of nodes: real jobs, on this machine and on three nodes, of which one is bad or hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mpiddp.base.config import LaunchConfig
from mpiddp.check import CheckOptions, command
from mpiddp.runner.lifecycle import RunningJob
from tests.benchmarks.checking import FAULTS, TCP, check
from tests.cluster import Cluster, impair
from tests.cluster.cluster import RUN
from tests.messages import find, message
from tests.support import EXAMPLES, MPIS, PROGRAMS, ROOT, Done, Mpi, alone, first_of, mpiexec, srun
from tests.support import check as ended

README = ROOT / "mpiddp/check/README.md"


@pytest.fixture
def folder(cluster: Cluster) -> Iterator[Path]:
    """Yield a folder that all nodes share, and that is gone with the cluster."""
    with tempfile.TemporaryDirectory(dir=RUN) as path:
        yield Path(path)


def check_of_three(cluster: Cluster, *options: object, srun_options: str = "") -> Done:
    """Run a check with a rank on each node of the cluster."""
    return srun(cluster, MPIS["openmpi4"], f"-N3 --ntasks-per-node=1 {srun_options}", *options, timeout=100,
                module="mpiddp.check", env=TCP)


@pytest.mark.parametrize(("fault", "ranks"), first_of([("a tenth, out", 1), *((name, 2) for name in FAULTS)]))
@pytest.mark.alone
def test_a_bad_node_is_named(cluster: Cluster, fault: str, ranks: int) -> None:
    os.sync()  # the nodes share one disk, which may still be busy with what other tests have written
    found = check(cluster, FAULTS[fault], MPIS["openmpi4"], ranks=ranks)
    assert found.named, found.said
    assert not found.others
    if FAULTS[fault].named:
        assert message("check/exclude", option="--exclude=node2\n") in found.said


@pytest.mark.alone
@pytest.mark.thorough("a check of a node that sends slowly; lost ranks as plain functions")
@pytest.mark.parametrize("stage", ["nodes, pass 1", "pairs of nodes, pass 2"])
def test_a_node_that_hangs_is_named_and_the_others_are_checked(cluster: Cluster, folder: Path, stage: str) -> None:
    suspects, stderr = folder / "bad.txt", folder / "stderr"
    with impair.frozen("node3", lambda: stderr.exists() and f"measuring {stage}" in stderr.read_text()):
        done = check_of_three(cluster, "--suspects", suspects, srun_options=f"--error={stderr}")
    print(done.stdout, written := stderr.read_text())
    assert done.returncode  # what srun makes of ranks that are ended with the one that is stopped
    assert len(find("check/no_reply", done.stdout, host="node3")) == 1
    assert message("check/exclude", option="--exclude=node3\n") in done.stdout
    assert [line.split("\t")[1] for line in suspects.read_text().splitlines()] == ["node3"]
    assert len(find("check/no_reply", written, host="mpiddp: failed: rank 2 on node3")) == 1


@pytest.mark.alone
@pytest.mark.thorough("what a check's files say, from plain figures")
def test_what_is_asked_for_is_written(cluster: Cluster, folder: Path) -> None:
    done = check_of_three(cluster, "--quick", "--json", folder / "check.json", "--suspects", folder / "bad.txt")
    found = json.loads((folder / "check.json").read_text())
    ended(done, 1 if found["findings"] else 0)
    assert (message("check/no_findings") in done.stdout) == (not found["findings"])
    links = subprocess.run(
        ["jq", "-r", ".links.bandwidth_bytes_per_s[]? | [.from, .to, .values[0]] | @tsv", "check.json"],
        cwd=folder, capture_output=True, text=True, check=True).stdout
    assert sorted(line.split("\t")[:2] for line in links.splitlines()) == [
        [str(one), str(other)] for one in range(3) for other in range(3) if one != other]
    assert len(found["all_reduce"]) > 2
    assert (folder / "bad.txt").exists()


@pytest.mark.alone
@pytest.mark.thorough("a check of a node that sends slowly; lost ranks as plain functions")
def test_a_way_has_the_bandwidth_that_mpi_finds(cluster: Cluster, folder: Path) -> None:
    mpi, file = MPIS["openmpi4"], folder / "check.json"
    with impair.slow_links(cluster, 125e6):
        done = check_of_three(cluster, "--json", file)
        found = json.loads(file.read_text())
        largest = found["all_reduce"][-1]
        alone_mpi = cluster.run("srun", f"--mpi={mpi.pmi}", "-N3", "--ntasks-per-node=1", str(mpi.python),
                                str(PROGRAMS / "ring.py"), str(largest["size_bytes"]), timeout=100, cwd=ROOT,
                                env={**mpi.environ(), **TCP, "OMPI_MCA_mpi_yield_when_idle": "1"})
    own = json.loads(ended(alone_mpi).stdout)
    links = {(one["from"], one["to"]): one["values"] for one in found["links"]["bandwidth_bytes_per_s"]}
    way = links[0, 1][0]
    bus = largest["size_bytes"] / largest["time_s"] * 4 / 3
    print(f"from node to node: {way:.4g} B/s, MPI alone {own['way']:.4g}; ring: {bus:.4g}, MPI alone {own['ring']:.4g}")
    assert 0.7 < way / own["way"] < 1.4, done.stdout
    assert 0.4 < bus / own["ring"] < 2.5  # three ranks take turns on two cores


@pytest.mark.alone
@pytest.mark.thorough("a check of a node that sends slowly; lost ranks as plain functions")
def test_the_documents_batch_script_trains_without_the_bad_node(cluster: Cluster, folder: Path) -> None:
    mpi = MPIS["openmpi4"]
    lines = re.search(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    assert lines
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\nPATH={mpi.python.parent}:$PATH\n{lines[1]}")
    (folder / "train.py").write_text((EXAMPLES / "hello_world.py").read_text())
    with impair.small_shm(cluster, "node2", 16 * 2**20):
        done = cluster.run("sbatch", "--wait", "-N3", "--ntasks-per-node=1", "--output=out", str(script), timeout=120,
                           env={**mpi.environ(), **TCP, "PYTHONPATH": str(ROOT)}, cwd=folder)
    said = (folder / "out").read_text()
    assert done.returncode == 0, said
    assert message("check/exclude", option="--exclude=node2\n") in said
    assert "2 ranks on 2 nodes" in said
    assert "node[1,3]" in said


def test_a_job_scripts_variables_do_not_end_ranks_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog ends a process whose collective takes too long, where a variable lets it."""
    seen: dict[str, str] = {}

    def create_group(*_: object, **__: object) -> None:
        seen.update({name: os.environ[name] for name in command.NCCL_WAITS})
        raise InterruptedError

    termination = SimpleNamespace(fail_by_exception=lambda error: isinstance(error, InterruptedError) and 7)
    job = SimpleNamespace(membership=SimpleNamespace(create_group=create_group), termination=termination,
                          refuse_alone=None)
    for name in command.NCCL_WAITS:
        monkeypatch.setenv(name, "1")
    assert command.check_in_rank(CheckOptions(), cast(RunningJob, job), LaunchConfig()) == 7
    assert seen == dict.fromkeys(command.NCCL_WAITS, "0")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in seen


def test_a_rank_alone_says_what_it_cannot_be_compared_with(quick: Mpi) -> None:
    said = ended(alone(quick, "-m", "mpiddp.check", "--quick", "--nodes-only", timeout=60)).stdout
    assert message("check/one_rank") in said
    assert message("check/no_findings") in said


@pytest.mark.parametrize("name", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_hangs_or_dies_is_named(quick: Mpi, name: str) -> None:
    """If it hangs, the others are checked without it, and there is a table."""
    done = mpiexec(quick, 3, env={"SIGNAL": name}, module="tests.programs.ended_check", timeout=90)
    host = os.uname().nodename
    assert done.returncode
    assert done.stderr.count(f"mpiddp: failed: rank 1 on {host}: ") == 1, done.stderr
    if name == "SIGSTOP":
        assert len(find("check/no_reply", done.stdout, host=host)) == 1, done.stdout
        assert find("check/no_reply", done.stderr, host=f"mpiddp: failed: rank 1 on {host}"), done.stderr
        assert "measuring nodes, pass 3" in done.stderr
    else:
        assert "killed by SIGKILL" in done.stderr


@pytest.mark.light
@pytest.mark.parametrize(("options", "status", "words"), [
    (["--quik"], 2, "mpiddp.check: unrecognized arguments: --quik; did you mean --quick? (see python -m mpiddp.check"),
    (["--backend", "none"], 3, "mpiddp: cannot start: "),
])
def test_bad_input_is_told_once(quick: Mpi, options: list[str], status: int, words: str) -> None:
    done = mpiexec(quick, 2, *options, timeout=60, module="mpiddp.check")
    assert done.returncode == status
    assert done.stderr.count(words) == 1, done.stderr
    assert "Traceback" not in done.stderr
