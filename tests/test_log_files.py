"""The files that hold the ranks' output, also on a disk that is full; and their index."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpiddp.base.ranks import LogPlan
from mpiddp.output.index import (
    INDEX_NAME,
    MAX_LINE_CHARS,
    RankEnd,
    complete_index,
    find_last_line,
    write_index,
)
from mpiddp.output.log import RankLog
from mpiddp.systems.statuses import wait_status_to_shell
from tests import processes
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    ROOT,
    Done,
    Mpi,
    check,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

GONE_S = 10  # for the processes beside a rank that was killed to come to their end
READS_ITS_LOG = """
import glob, os, sys, time
print("I am", os.environ["RANK"])
(log,) = glob.glob(f"{sys.argv[1]}/*/rank-0000{os.environ['RANK']}.*.log")
while open(log).read() != f"I am {os.environ['RANK']}\\n":
    time.sleep(0.02)
for number in range(30_000):
    print("line", number)
"""
FULL_FOR_A_WHILE = """
import os, sys, time, torch.distributed as dist
def say(when):
    for number in range(20_000):
        print("line", number, when, os.urandom(20).hex())
    sys.stdout.flush()
    time.sleep(1.5)
    dist.barrier()
say("before")
if os.environ["RANK"] == "0":
    os.unlink(sys.argv[1])
dist.barrier()
print("after")
"""
HOW_RANKS_END = """
import os, sys, time, torch.distributed as dist
rank = int(os.environ["RANK"])
print("rank", rank, flush=True)
dist.barrier()
if rank == 1 and sys.argv[1] == "raises":
    raise ValueError("seven")
if sys.argv[1] == "requeue":
    sys.stdout.write("what has no end")
    sys.exit(0)
time.sleep(600 if sys.argv[1] == "raises" else 0)
"""


def index_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the ranks of a job that has ended."""
    (path,) = folder.glob(f"*/{INDEX_NAME}")
    records: list[dict[str, Any]] = json.loads(path.read_text())
    return records


def test_a_log_can_be_read_while_its_rank_runs(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "watched.py").write_text(READS_ITS_LOG)
    check(mpiexec(quick, 2, "--log-dir", tmp_path / "logs", "--show", "none", script, tmp_path / "logs"))
    for rank, one in enumerate(index_of(tmp_path / "logs")):
        assert (one["status"], one["last"]) == (0, "line 29999")
        (log,) = tmp_path.glob(f"logs/*/rank-{rank:05d}.*")
        assert log.name == one["file"]
        assert log.read_text() == f"I am {rank}\n" + "".join(f"line {number}\n" for number in range(30_000))


def written(plan: LogPlan, pieces: Sequence[bytes]) -> RankLog:
    """Return a log to which pieces were written, and which is complete."""
    log = RankLog(plan, "rank 3 on n07")
    for piece in pieces:
        log.write(piece)
    log.close()
    return log


def test_a_second_attempt_goes_on_after_the_first(tmp_path: Path) -> None:
    """Also where another process writes at the same time."""
    path = tmp_path / "rank-00003.n07.log"
    plan = LogPlan(str(path))
    written(plan, [b"one\n", b"two"])
    killed = RankLog(plan, "rank 3 on n07")
    killed.write(b"three\n" * 25)
    last = RankLog(plan, "rank 3 on n07")
    for log, text in ((last, b"four\n"), (killed, b"five\n"), (last, b"six\n")):
        log.write(text)
    assert path.read_text().endswith("three\nfour\nfive\nsix\n")
    last.close()
    assert path.read_text() == "one\ntwo" + "three\n" * 25 + "four\nfive\nsix\n"
    last.close()  # as when the rank has left nothing running that wrote more
    assert path.read_text().endswith("five\nsix\n")
    assert last.lost_from == -1


def test_what_a_file_system_reports_at_the_end_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does if a quota is exceeded."""
    log = RankLog(LogPlan(str(tmp_path / "rank-00003.n07.log")), "rank 3 on n07")
    log.write(b"seven\n")
    close = os.close

    def close_and_fail(descriptor: int) -> None:
        monkeypatch.undo()
        close(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", close_and_fail)
    log.close()
    assert log.lost_from == 0


def test_the_stack_of_a_crash_begins_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.n07.log"
    log = RankLog(LogPlan(str(path)), "rank 3 on n07")
    log.write(b"seven\nno end")
    log.write_text("Fatal Python error")
    log.close()
    assert path.read_text() == "seven\nno end\nFatal Python error\n"


def on_small_disk(mpi: Mpi, disk: Path, prepare: str, ranks: int, *arguments: object) -> Done:
    """Run a job in a place where `disk` is a file system of 1 MB, which `prepare` fills; all of it is copied later."""
    need(["root"] if os.geteuid() else [])
    disk.mkdir()
    job = mpiexec_command(mpi, ranks, "-m", "mpiddp", "--log-dir", disk / "logs", *arguments)
    steps = (f'mount -t tmpfs -o size=1m tmpfs "$0"; {prepare}; "$@"; status=$?; cp -r "$0/logs" "$0/../copy"; '
             'exit $status')
    return check(processes.run("unshare", "--mount", "sh", "-c", steps, str(disk), *job, timeout=DEADLINE_S,
                               env=single_node_environ(mpi)))


def test_a_full_disk_is_told_of_once_and_at_the_end(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "full.py").write_text(FULL_FOR_A_WHILE)
    done = on_small_disk(quick, tmp_path / "disk", 'head -c 600k /dev/zero > "$0/filler"', 2, script,
                         tmp_path / "disk" / "filler")
    losses = find("launch/log_lost", done.stderr, error="No space left on device")
    assert len(losses) == 1, done.stderr
    assert re.fullmatch(r"mpiddp: logs are incomplete: ranks 0-1 \(first lost byte of each in \S+/ranks.json\)",
                        done.stderr.splitlines()[-1])
    records = index_of(tmp_path / "copy")
    assert int(losses[0]["position"]) == records[int(losses[0]["rank"])]["lost"]
    assert any(one["lost"] for one in records)
    for one in records:
        (log,) = tmp_path.glob(f"copy/*/{one['file']}")
        text = log.read_text()
        missing = find("launch/bytes_missing", text)[0]
        first, _, last = text.partition(f"\n{message('launch/bytes_missing', **missing)}\n")
        assert len(first) == one["lost"]
        assert re.match(r"line 0 before |\Z", first)  # empty where the other rank had filled the disk before
        assert last.endswith("after\n")
        assert (one["status"], one["last"]) == (0, "after")


def test_a_disk_that_is_full_from_the_start(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "talks.py").write_text("print('seven')\n")
    done = on_small_disk(quick, tmp_path / "disk", 'head -c 2m /dev/zero > "$0/filler" 2> /dev/null', 1, script)
    assert done.stdout == "seven\n"
    (index,) = find("launch/index_not_written", done.stderr, error="No space left on device")
    assert index["file"].endswith("/ranks.json")
    assert len(find("launch/output_lost", done.stderr, rank=0, position=0)) == 1
    assert done.stderr.endswith("\nmpiddp: logs are incomplete: rank 0\n")


def test_a_file_that_takes_nothing_any_more_is_opened_again(tmp_path: Path) -> None:
    """As where an NFS server has forgotten it (ESTALE); this descriptor has become one for reading."""
    path = tmp_path / "rank-00003.n07.log"
    log = RankLog(LogPlan(str(path)), "rank 3 on n07")
    log.write(b"one\n")
    (descriptor,) = [int(one.name) for one in Path("/proc/self/fd").iterdir() if one.exists() and one.samefile(path)]
    reading = os.open(path, os.O_RDONLY)
    os.dup2(reading, descriptor)
    os.close(reading)
    log.write(b"two\n")
    assert path.read_text() == "one\ntwo\n"
    assert log.lost_from == -1


@pytest.mark.parametrize("how", ["raises", "requeue"])
def test_the_index_tells_how_each_rank_ended(quick: Mpi, how: str, tmp_path: Path) -> None:
    (script := tmp_path / "ends.py").write_text(HOW_RANKS_END)
    check(mpiexec(quick, 3, "--log-dir", tmp_path / "logs", "--show", "0", script, how), 1 if how == "raises" else 0)
    records = index_of(tmp_path / "logs")
    assert [one["rank"] for one in records] == [0, 1, 2]
    (path,) = tmp_path.glob(f"logs/*/{INDEX_NAME}")
    assert all((path.parent / one["file"]).exists() for one in records)
    assert [one["lost"] for one in records] == [None] * 3
    if how == "raises":
        assert (records[1]["status"], records[1]["last"]) == (1, "[rank1]: ValueError: seven")
        assert {one["last"] for one in records} >= {"rank 0", "rank 2"}
        assert all(one["status"] for one in records)
    else:
        assert {(one["status"], one["last"]) for one in records} == {(0, "what has no end")}
    assert [one["first"] for one in records] == [False, how == "raises", False]


@pytest.mark.process
def test_the_documents_commands_find_the_odd_rank(tmp_path: Path) -> None:
    folder = tmp_path / "logs/48211"
    folder.mkdir(parents=True)
    logs = [LogPlan(f"{folder}/rank-{rank:05d}.n07.log", rank, "n07", "a-job", f"{folder}/{INDEX_NAME}")
            for rank in range(4)]
    write_index(f"{folder}/{INDEX_NAME}", logs)
    ends = {rank: RankEnd(status, -1, "begin of epoch 7") for rank, status in enumerate((0, 139, 0, 7))}
    assert complete_index(f"{folder}/{INDEX_NAME}", ends, 1) == ""
    text = (ROOT / "mpiddp/output/README.md").read_text()
    for begin, found, many in (("grep ", '"rank": 1, .*"status": 139, .*"begin of epoch 7"', 1),
                               ("jq -r", "(1 n07 139|3 n07 7) begin of epoch 7", 2)):
        need([begin.split()[0]] if shutil.which(begin.split()[0]) is None else [])
        (command,) = re.findall(rf"^{begin}.*$", text, re.MULTILINE)
        done = check(processes.run("sh", "-c", command, timeout=DEADLINE_S, cwd=tmp_path))
        assert len(re.findall(found, done.stdout)) == many, done.stdout
        assert not re.search("n07 0|status\": 0", done.stdout)


ODD = {
    b"": "", b"\n \n": "", b"one\ntwo": "two", b"one\r\ntwo\r\n\r\n": "two", b" 10%\r 20%\r": "20%",
    b"\x1b[31mred\x00\x7f": r"\x1b[31mred\x00\x7f", "é😀".encode(): "é😀", b"\xff\xfe": "��",
    "\u009b31m\u2028x".encode(): r"\x9b31m\u2028x", b"what\nmpiddp: failed: rank 1\n  where here\n": "what",
    b"mpiddp: failed: rank 1\n  log x\n": "mpiddp: failed: rank 1", b"x" * 10**6: "x" * MAX_LINE_CHARS,
}


@pytest.mark.parametrize("tail", ODD)
def test_an_odd_last_line_is_printable(tail: bytes) -> None:
    assert find_last_line(tail) == ODD[tail]


def test_an_index_is_replaced_when_all_is_known(tmp_path: Path) -> None:
    path = str(tmp_path / INDEX_NAME)
    write_index(path, [LogPlan(f"{tmp_path}/rank-{rank}.log", rank, "n\udc80", "job", path) for rank in range(3)])
    begun = json.loads((tmp_path / INDEX_NAME).read_text())
    assert begun[2] == {"rank": 2, "host": "n\udc80", "job": "job", "file": "rank-2.log", "status": None,
                        "first": None, "lost": None, "last": None}
    assert complete_index(path, {2: RankEnd(139, 0, '"é"'), 0: RankEnd(0, -1, "")}, 1) == ""
    text = (tmp_path / INDEX_NAME).read_text()
    assert len(text.splitlines()) == 3 + 2
    known = [(one["status"], one["first"], one["lost"], one["last"]) for one in json.loads(text)]
    assert known == [(0, False, None, ""), (None, True, None, None), (139, False, 0, '"é"')]
    assert [one.name for one in tmp_path.iterdir()] == [INDEX_NAME]


@pytest.mark.parametrize("content", ["", "7", "[7]", '{"a": 1}', "[" * 100_000, "\0"])
def test_an_index_that_somebody_has_changed_is_left_alone(content: str, tmp_path: Path) -> None:
    (path := tmp_path / INDEX_NAME).write_text(content)
    assert complete_index(str(path), {0: RankEnd(0, -1, "")}, -1).startswith(f"mpiddp: cannot update {path}: ")
    assert path.read_text() == content


@pytest.mark.parametrize(("wait_status", "status"), [(0, 0), (7 << 8, 7), (9, 137), (11 | 0x80, 139)])
def test_an_exit_status_is_a_shells(wait_status: int, status: int) -> None:
    assert wait_status_to_shell(wait_status) == status


def test_no_room_is_no_reason_to_open_a_file_again() -> None:
    from mpiddp.output.log import NO_ROOM

    assert set(NO_ROOM) == {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
