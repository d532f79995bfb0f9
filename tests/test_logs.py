"""Where output goes: logs, whose is shown, prefixes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.support import MPIS, Mpi, check, mpiexec, srun

LINES = 100_000
CRASH = f"""
import os, signal, sys, time
rank = int(os.environ["RANK"])
for number in range({LINES}):
    print("line", number, "of", rank)
sys.stdout.flush()
os.write(2, b"last word in native code")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
    if rank == 0:
        open(sys.argv[1], "w").close()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(600)
"""
TALK = """
import os, sys
for number in range(2000):
    print("out", number, "x" * (number % 300))
    print("err", number, file=sys.stderr)
"""
BESIDE = """
import os, sys, time, psutil
me = psutil.Process()
def beside():
    found = [one for one in psutil.process_iter(["cmdline", "environ"]) if one.info["cmdline"] == me.cmdline()]
    return [one for one in found if one != me and (one.info["environ"] or {}).get("PMI_RANK") == os.environ["RANK"]]
"""


def log_of(folder: Path, rank: int) -> str:
    """Return what the one log of a rank holds."""
    (path,) = folder.glob(f"*/rank-{rank:05d}.*.log")
    return path.read_text()


@pytest.mark.parametrize("show", ["all", "0", "none"])
def test_a_log_is_complete_up_to_the_crash(quick: Mpi, show: str, tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    done = mpiexec(quick, 2, "--log-dir", tmp_path / "logs", "--show", show, script, tmp_path / "both")
    expected = "".join(f"line {number} of 1\n" for number in range(LINES)) + "last word in native code"
    assert log_of(tmp_path / "logs", 1).startswith(expected)
    shown = {int(line.split()[-1]) for line in done.stdout.splitlines() if re.fullmatch(r"line \d+ of \d", line)}
    assert shown == {"all": {0, 1}, "0": {0}, "none": set()}[show]
    if show == "0":
        assert sum(line.startswith("line ") for line in done.stdout.splitlines()) == LINES
    assert "mpiddp: failed: rank 1 on " in done.stderr
    assert str(tmp_path / "logs") in done.stderr.split("mpiddp: failed:")[1]


def test_prefixed_lines_are_whole(quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text(TALK)
    done = check(mpiexec(quick, 4, "--prefix", script))
    lines = done.stdout.splitlines()
    assert len(lines) == 4 * 2000
    assert all(re.fullmatch(r"\[[0-3] [\w.-]+\] out \d+ x*", line) for line in lines)
    assert sum(" err " in line for line in done.stderr.splitlines()) == 4 * 2000


def test_logs_of_three_nodes(cluster: Cluster) -> None:
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", "--log-dir", "/tmp/logs", "--show",
                      "local-0", "--prefix", "-m", "this"))
    assert {line.split("]")[0] for line in done.stdout.splitlines()} == {"[0 node1", "[2 node2", "[4 node3"}


def test_a_folder_that_cannot_be_made_is_refused_once(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = check(mpiexec(quick, 2, "--log-dir", tmp_path / "file", "-m", "this"), 3)
    assert done.stderr.count("mpiddp: cannot start: log-unwritable") == 1
    assert "Not a directory" in done.stderr


def test_a_rank_that_is_not_shown_still_says_why_it_failed(quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('seven')\n"
                      "time.sleep(600)\n")
    done = check(mpiexec(quick, 2, "--show", "0", script), 1)
    assert done.stderr.count("ValueError: seven\n") == 2  # the traceback's, and the block's
    assert "mpiddp: failed: rank 1 on " in done.stderr


@pytest.mark.parametrize("how", ["option", "variable", "record"])
def test_the_error_file_is_torchelastics(quick: Mpi, how: str, tmp_path: Path) -> None:
    script, path = tmp_path / "fails.py", tmp_path / "error.json"
    record = "from torch.distributed.elastic.multiprocessing.errors import record\n@record\n" if how == "record" else ""
    script.write_text(f"import os, time\n{record}def main():\n    if os.environ['RANK'] == '1':\n"
                      "        raise ValueError('seven')\n    time.sleep(600)\nmain()\n")
    options = ["--error-file", path] if how == "option" else []
    env = {} if how == "option" else {"TORCHELASTIC_ERROR_FILE": str(path)}
    done = check(mpiexec(quick, 2, *options, script, env=env), 1)
    assert done.stderr.count("Traceback (most recent call last)") == 1
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: seven"
    assert "in main" in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["timestamp"].isdigit()
    assert message["extraInfo"]["rank"] == 1


def test_an_error_file_of_a_rank_that_was_killed(quick: Mpi, tmp_path: Path) -> None:
    script, path = tmp_path / "killed.py", tmp_path / "error.json"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(600)\n")
    mpiexec(quick, 2, "--error-file", path, script)
    assert "rank 1 on " in json.loads(path.read_text())["message"]["message"]


@pytest.mark.parametrize("options", [["--prefix"], ["--log-dir"]], ids=" ".join)
def test_a_rank_that_is_hidden_has_no_relay(quick: Mpi, options: list[str], tmp_path: Path) -> None:
    script = tmp_path / "beside.py"
    script.write_text(f"{BESIDE}hidden = os.environ['RANK'] != '0'\ndeadline = time.monotonic() + 5\n"
                      "while hidden and len(beside()) > 1 and time.monotonic() < deadline:\n    time.sleep(0.1)\n"
                      "open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w').write(str(len(beside())))\n")
    logs = [tmp_path / "logs"] if "--log-dir" in options else []
    check(mpiexec(quick, 2, *options, *logs, "--show", 0, script, tmp_path))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2", "1"]  # the sentinel is one
