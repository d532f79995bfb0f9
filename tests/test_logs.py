"""Where output goes: logs, whose is shown, prefixes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from mpiddp.base.files import open_for_writing
from mpiddp.base.ranks import LogPlan
from mpiddp.output.log import RankLog
from mpiddp.output.writer import FdWriter
from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    MPIS,
    PROGRAMS,
    TWO_NAMES,
    Done,
    Mpi,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
    srun,
)

pytestmark = pytest.mark.light

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

ROOM_COMES_BACK = """
import os, sys
for number in range(20_000):
    print("line", number, "before")
sys.stdout.flush()
os.unlink(sys.argv[1])
for number in range(100):
    print("line", number, "after")
"""


def log_of(folder: Path, rank: int) -> str:
    """Return what the one log of a rank holds."""
    (path,) = folder.glob(f"*/rank-{rank:05d}.*.log")
    return path.read_text()


@pytest.mark.torch
@pytest.mark.parametrize("show", first_of(["0", "all", "none"]))
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


def test_a_prefix_of_the_users_own(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "talk.py").write_text(
        "import time\nprint('one', flush=True)\ntime.sleep(1.1)\nprint('two')\n")
    done = check(mpiexec(quick, 2, "--quiet", "--prefix", "{{{rank}.{local_rank:02}}} {time:%H:%M:%S} ", script))
    assert "independent-ranks" in done.stderr
    found = sorted(line.split() for line in done.stdout.splitlines())
    assert [(words[0], words[2]) for words in found] == [
        ("{0.00}", "one"), ("{0.00}", "two"), ("{1.01}", "one"), ("{1.01}", "two")]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", words[1]) for words in found)
    assert found[0][1] < found[1][1] or found[1][1].startswith("00:00")
    done = check(mpiexec(quick, 2, script, env={"MPIDDP_PREFIX": "1"}))
    assert re.search(r"^\[1 \S+\] one$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("form", ["{rnak}", "{rank", "{rank:x%}", "{time:%H {rank}}", "{host.x}", "{time[0]}"])
def test_a_prefix_that_is_none(quick: Mpi, tmp_path: Path, form: str) -> None:
    done = check(mpiexec(quick, 2, "--prefix", form, "-m", "this"), 2)
    assert len(find("launch/invalid_prefix", done.stderr, default="[{rank} {host}] ", value=repr(form))) == 1


@pytest.mark.thorough("the same on one node")
def test_logs_of_three_nodes(cluster: Cluster) -> None:
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", "--log-dir", "/tmp/logs", "--show",
                      "local-0", "--prefix", "-m", "this"))
    assert {line.split("]")[0] for line in done.stdout.splitlines()} == {"[0 node1", "[2 node2", "[4 node3"}


@pytest.mark.mpi
@pytest.mark.parametrize("name", TWO_NAMES)
def test_the_last_line_of_a_rank_that_fails_needs_no_end(name: str, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    print('so far', end='')\n"
                      "    raise ValueError('seven')\ntime.sleep(600)\n")
    done = check(mpiexec(MPIS[name], 2, "--prefix", script), 1)
    assert re.search(r"^\[1 \S+\] so far$", done.stdout, re.MULTILINE), done.stdout


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


@pytest.mark.parametrize("how", first_of(["option", "variable", pytest.param("record", marks=pytest.mark.torch)]))
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


@pytest.mark.mpi
def test_an_error_file_of_a_rank_that_was_killed(tmp_path: Path) -> None:
    script, path = tmp_path / "killed.py", tmp_path / "error.json"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(600)\n")
    mpiexec(MPIS["openmpi5"], 2, "--error-file", path, script)
    assert "rank 1 on " in json.loads(path.read_text())["message"]["message"]


def in_shell(mpi: Mpi, command: str, *arguments: object) -> Done:
    """Run two ranks whose program is a shell's, which finds `python -m mpiddp ARGUMENTS` as its own arguments."""
    need(mpi.missing())
    shell, python = mpiexec_command(mpi, 2), str(mpi.python)
    assert shell.pop() == python
    return processes.run(*shell, "sh", "-c", command, "sh", python, "-m", "mpiddp", *map(str, arguments),
                         timeout=DEADLINE_S, env=single_node_environ(mpi))


def test_a_print_that_stdout_does_not_take_raises(quick: Mpi) -> None:
    done = check(in_shell(quick, 'exec "$@" > /dev/full', "-c", "print('seven')\nprint('eight')"), 1)
    assert "OSError: [Errno 28] No space left on device" in done.stderr
    assert "mpiddp: failed: rank " in done.stderr


@pytest.mark.parametrize("options", first_of([["--prefix"], ["--log-dir"]]), ids=" ".join)
def test_output_that_stdout_does_not_take_is_told_and_shows_in_the_status(
        quick: Mpi, options: list[str], tmp_path: Path) -> None:
    """As Python has it; a log is complete all the same."""
    script = tmp_path / "talks.py"
    script.write_text("for number in range(200):\n    print('line', number)\n")
    logs = [tmp_path / "logs"] if "--log-dir" in options else []
    done = check(in_shell(quick, 'exec "$@" > /dev/full', *options, *logs, script), 120)
    losses = find("launch/output_lost", done.stderr, target="stdout", error="No space left on device", position=0)
    assert sorted(loss["rank"] for loss in losses) == ["0", "1"], done.stderr
    for log in logs:
        assert log_of(log, 1) == "".join(f"line {number}\n" for number in range(200))


def test_a_log_goes_on_when_there_is_room_again(quick: Mpi, tmp_path: Path) -> None:
    """On a file system of its own, which a file fills up, until the script removes that."""
    need(["root"] if os.geteuid() else [])
    disk, script = tmp_path / "disk", tmp_path / "script.py"
    disk.mkdir()
    script.write_text(ROOM_COMES_BACK)
    job = mpiexec_command(quick, 1, "-m", "mpiddp", "--log-dir", disk / "logs", script, disk / "filler")
    prepare = 'mount -t tmpfs -o size=1m tmpfs "$0"; head -c 900k /dev/zero > "$0/filler"'
    copy = f'{prepare}; "$@" && cat "$0"/logs/*/*.log > "$0/../copy" && cp "$0"/logs/*/ranks.json "$0/.."'
    done = check(processes.run("unshare", "--mount", "sh", "-c", copy, str(disk), *job, timeout=DEADLINE_S,
                               env=single_node_environ(quick)))
    before, after = ["".join(f"line {number} {when}\n" for number in range(many))
                     for when, many in (("before", 20_000), ("after", 100))]
    assert done.stdout == before + after
    (loss,) = find("launch/log_lost", done.stderr, rank=0, error="No space left on device")
    assert Path(loss["path"]).parent.parent == disk / "logs"
    assert Path(loss["index"]) == Path(loss["path"]).with_name("ranks.json")
    log = (tmp_path / "copy").read_text()
    (missing,) = find("launch/bytes_missing", log)
    first, last = log.split(f"\n{message('launch/bytes_missing', **missing)}\n")
    assert len(first) == int(loss["position"])
    assert first == before[:len(first)]
    assert last == (before + after)[len(first) + int(missing["count"]):]
    assert last.endswith(after)
    (record,) = json.loads((tmp_path / "ranks.json").read_text())
    assert (record["lost"], record["last"], record["status"]) == (len(first), "line 99 after", 0)
    assert re.fullmatch(r"mpiddp: logs are incomplete: rank 0 \(first lost byte of each in \S+/ranks.json\)",
                        done.stderr.splitlines()[-1])


TAKES_NAME = """
import os, socket
mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
mine.bind(f"\\0mpiddp logs of {os.environ['TORCHELASTIC_RUN_ID']} {os.getuid()}")
print("." * 2**21)
"""


def test_nobody_else_can_silence_that_a_log_is_lost(quick: Mpi, tmp_path: Path) -> None:
    """As another user of the node could, who has seen the job's name."""
    need(["root"] if os.geteuid() else [])
    (disk := tmp_path / "disk").mkdir()
    job = mpiexec_command(quick, 1, "-m", "mpiddp", "--no-init", "--log-dir", disk / "logs", "-c", TAKES_NAME)
    done = check(processes.run("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0"; exec "$@"',
                               str(disk), *job, timeout=DEADLINE_S, env=single_node_environ(quick)))
    assert len(find("launch/log_lost", done.stderr, error="No space left on device")) == 1


def test_a_stdout_that_does_not_block_is_waited_for(quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "talks.py"
    script.write_text("for number in range(4000):\n    print('line', number, '.' * 40)\n")
    job = mpiexec_command(quick, 1, PROGRAMS / "slow_reader.py", quick.python, "-m", "mpiddp", "--prefix", script)
    done = check(processes.run(*job, timeout=DEADLINE_S, env=single_node_environ(quick)))
    assert [line.split()[3] for line in done.stdout.splitlines()] == [str(number) for number in range(4000)]


def test_a_sink_that_fails_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    """A terminal that was hung up takes nothing more: EIO."""
    master, terminal = os.openpty()
    sink = FdWriter(terminal, "stdout", "rank 3 on n07")
    sink.write(b"seven\n")
    os.close(master)
    sink.write(b"eight\n")
    sink.write(b"nine\n")
    os.close(terminal)
    loss = message("launch/output_lost", rank=3, host="n07", target="stdout", error="Input/output error", position=6)
    assert capfd.readouterr().err == f"{loss}\n"
    assert sink.has_failed


def test_a_sink_that_nobody_reads_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    source, pipe = os.pipe()
    os.close(source)
    sink = FdWriter(pipe, "stdout", "rank 3 on n07")
    sink.write(b"seven\n")
    os.close(pipe)
    assert capfd.readouterr().err == ""
    assert not sink.has_failed


@pytest.mark.parametrize("options", first_of([["--prefix"], [], ["--log-dir"]]), ids=" ".join)
@pytest.mark.parametrize("closed", first_of([1, 2]))
def test_a_closed_descriptor_is_no_other_file(quick: Mpi, options: list[str], closed: int, tmp_path: Path) -> None:
    """A pipe to the agent and a socket to the agent would get the first numbers that are free."""
    script = tmp_path / "talks.py"
    script.write_text(f"import os\nprint('seven')\nnowhere = os.path.samefile('/dev/fd/{closed}', os.devnull)\n"
                      f"assert nowhere or {options}\n")
    logs = [tmp_path / "logs"] if "--log-dir" in options else []
    done = check(in_shell(quick, f'exec "$@" {closed}>&-', *options, *logs, script))
    assert done.stdout.count("seven") == (0 if closed == 1 else 2)
    assert done.stderr.count("mpiddp ") == (0 if closed == 2 else 1)


def test_a_log_tells_how_much_is_missing_in_all(tmp_path: Path) -> None:
    (path := tmp_path / "log").symlink_to("/dev/full")
    log = RankLog(LogPlan(str(path)), "rank 3 on n07")
    for data in (b"seven\n", b"eight\n", b""):
        log.write(data)
    path.unlink()
    for data in (b"nine\n", b"ten\n"):
        log.write(data)
    assert path.read_text() == f"\n{message('launch/bytes_missing', count=12)}\nnine\nten\n"
    assert log.lost_from == 0


@pytest.mark.parametrize("planted", ["file", "folder"])
def test_a_link_that_another_user_has_planted_is_not_followed(planted: str, tmp_path: Path) -> None:
    need([] if os.geteuid() == 0 else ["root's right to give a link to another user"])
    (folder := tmp_path / "shared").mkdir()
    folder.chmod(0o777)
    (target := tmp_path / "mine").mkdir()
    (target / "log").write_text("precious")
    link = folder / ("log" if planted == "file" else "job")
    link.symlink_to(target / "log" if planted == "file" else target)
    log = str(link if planted == "file" else link / "log")
    os.lchown(link, 1000, 1000)
    for append in (True, False):
        with pytest.raises(OSError, match="it belongs to ") as caught:
            open_for_writing(log, append)
        assert find("launch/entry_of_another_user", str(caught.value))
    assert (target / "log").read_text() == "precious"
    os.lchown(link, 0, 0)  # one's own link, to a larger disk perhaps, is followed
    os.close(open_for_writing(log))
    assert (target / "log").read_text() == ""
