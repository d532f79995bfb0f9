"""Each launch has a folder of logs of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mpiddp.base.files import FolderClaim
from tests import processes
from tests.cluster import Cluster
from tests.support import (
    DEADLINE_S,
    MPIS,
    Mpi,
    check,
    mpiexec_command,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

TALKS = """\
import os, sys, time
print("begin", *sys.argv[1:], flush=True)
deadline = time.monotonic() + 60
open(f"{sys.argv[1]}.{os.environ['RANK']}", "w").close()
while not all(os.path.exists(f"{name}.{rank}") for name in sys.argv[2].split(",") for rank in (0, 1)):
    assert time.monotonic() < deadline
    time.sleep(0.05)
for number in range(40):
    print(sys.argv[1], number, "x" * 200, flush=True)
"""


def launch(mpi: Mpi, folder: Path, name: str, others: str, restarts: str = "") -> subprocess.Popen[str]:
    """Start a launch of a Slurm job, as one of several `mpirun` in a batch script."""
    need(mpi.missing())
    (folder / "talks.py").write_text(TALKS)
    env = {**single_node_environ(mpi), "SLURM_JOB_ID": "77", **({"SLURM_RESTART_COUNT": restarts} if restarts else {})}
    command = mpiexec_command(mpi, 2, "-m", "mpiddp", "--log-dir", folder / "logs", folder / "talks.py", name, others)
    return processes.start(command, env, folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def end(*jobs: subprocess.Popen[str]) -> None:
    """Wait for launches; fail unless all succeed."""
    try:
        for job in jobs:
            _, error = job.communicate(timeout=DEADLINE_S)
            assert job.returncode == 0, error
    finally:
        for job in jobs:
            processes.end_tree(job.pid)


def texts(folder: Path) -> dict[str, set[str]]:
    """Return the first words of the lines in rank 0's logs, by the folder of each launch."""
    return {path.name: {line.split()[0] for log in path.glob("rank-00000.*.log*")
                        for line in log.read_text().splitlines()} - {"begin"} for path in folder.iterdir()}


def test_launches_side_by_side_have_a_folder_each(quick: Mpi, tmp_path: Path) -> None:
    end(*(launch(quick, tmp_path, name, "one,two") for name in ("one", "two")))
    logs = tmp_path / "logs"
    assert sorted(texts(logs)) == ["77", "77-2"]
    assert sorted(texts(logs).values(), key=sorted) == [{"one"}, {"two"}]
    for name in ("77", "77-2"):
        assert len(json.loads((logs / name / "ranks.json").read_text())) == 2
        for rank in (0, 1):
            (log,) = (logs / name).glob(f"rank-{rank:05d}.*")
            _, *lines = log.read_text().splitlines()
            assert [int(line.split()[1]) for line in lines] == list(range(40))


@pytest.mark.thorough("launches beside each other")
def test_launches_one_after_another_and_again_after_a_requeue(quick: Mpi, tmp_path: Path) -> None:
    """Each goes on in the files that it had before the job was queued again, and keeps its index."""
    logs = tmp_path / "logs"
    end(launch(quick, tmp_path, "train", "train"))
    first = (logs / "77" / "ranks.json").read_text()
    end(launch(quick, tmp_path, "evaluate", "evaluate"))
    assert (logs / "77" / "ranks.json").read_text() == first
    for name in ("train", "evaluate"):
        end(launch(quick, tmp_path, name, name, "1"))
    assert texts(logs) == {"77": {"train"}, "77-2": {"evaluate"}}
    for log in logs.glob("*/rank-*.log"):
        assert log.read_text().count("begin") == 2


def test_only_one_launch_claims_a_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "logs" / "77")
    assert FolderClaim(folder, 0, "one").acquire()
    assert FolderClaim(folder, 0, "one").acquire()  # on another node of the launch
    assert not FolderClaim(folder, 0, "two").acquire()
    assert FolderClaim(folder, 1, "two").acquire()
    FolderClaim(folder, 0, "two").release()
    assert not FolderClaim(folder, 0, "three").acquire()
    FolderClaim(folder, 0, "one").release()
    assert FolderClaim(folder, 0, "three").acquire()
    (tmp_path / "file").write_text("")
    assert FolderClaim(str(tmp_path / "file" / "77"), 0, "one").acquire()  # making the log says why it cannot be made


def test_nodes_with_log_folders_of_their_own(cluster: Cluster) -> None:
    """Where another launch has the folder on the second node alone, this one keeps away from it on both."""
    mpi, logs = MPIS["openmpi4"], "/tmp/mpiddp-logs-of-nodes"
    need(mpi.missing()[:1])
    taken = f"{logs}/$SLURM_JOB_ID.1"
    script = (f"srun -N1 -n1 -w node2 sh -c 'mkdir -p {taken}; ln -s another {taken}/.run-0'; "
              f"srun --mpi=pmix -N2 -n2 {mpi.python} -m mpiddp --log-dir {logs} --quiet -c 1; "
              f"srun -N2 -n2 -l sh -c 'cd {logs}; ls -Ad */* */.run*; rm -r {logs}'")
    done = check(cluster.run("salloc", "-N2", "-w", "node1,node2", "sh", "-c", script, timeout=DEADLINE_S,
                             env=mpi.environ()))
    job = done.stdout.split()[1].partition(".")[0]
    assert sorted(done.stdout.split("\n")[:-1]) == sorted([
        f"0: {job}.1-2/.run-0", f"0: {job}.1-2/rank-00000.node1.log", f"0: {job}.1-2/ranks.json",
        f"1: {job}.1-2/.run-0", f"1: {job}.1-2/rank-00001.node2.log", f"1: {job}.1/.run-0"])
