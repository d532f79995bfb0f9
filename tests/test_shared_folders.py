"""Folders that others can write to, and files that are none: what another user has put there does no harm."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpiddp.base.files import (
    NOBODY,
    FolderClaim,
    PathStep,
    check_protected,
    find_risk,
    format_os_error,
    open_checked,
    open_for_reading,
    open_for_writing,
)
from mpiddp.staging import mirror
from tests import processes
from tests.messages import message
from tests.support import (
    DEADLINE_S,
    ROOT,
    Done,
    Mpi,
    alone,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

VICTIM, OTHER = 64_001, 64_002  # users of whom nothing else is known


@pytest.fixture
def commons() -> Iterator[Path]:
    """Return a folder that every user can reach, with `shared`, in which each can write, and `home`, the victim's."""
    need([] if os.geteuid() == 0 else ["root's right to be another user"])
    folder = Path(tempfile.mkdtemp(prefix="mpiddp-tests-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        for name, owner, mode in (("shared", 0, 0o777), ("home", VICTIM, 0o700)):
            (folder / name).mkdir()
            (folder / name).chmod(mode)
            os.chown(folder / name, owner, owner)
        yield folder
    finally:
        shutil.rmtree(folder)


def as_victim(mpi: Mpi, home: Path, ranks: int, *arguments: object) -> Done:
    """Run a job as the victim, with the number that a batch system would give it; Python may lie in root's home."""
    need(mpi.missing())
    environ = {**single_node_environ(mpi), "TMPDIR": str(home), "HOME": str(home), "XDG_STATE_HOME": str(home),
               "SLURM_JOB_ID": "77"}
    return processes.run("setpriv", f"--reuid={VICTIM}", f"--regid={VICTIM}", "--clear-groups",
                         "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
                         *mpiexec_command(mpi, ranks, "-m", "mpiddp", "--no-init", *arguments, "-c", "print('ran')"),
                         timeout=DEADLINE_S, env=environ, cwd=ROOT)


def given_to(user: int, *paths: Path) -> None:
    """Let paths belong to a user, links themselves."""
    for path in paths:
        os.lchown(path, user, user)


def precious(home: Path, *names: str) -> list[Path]:
    """Return files of the victim's that nobody may change."""
    files = [home / name for name in names]
    for file in files:
        file.write_text("precious")
    given_to(VICTIM, *files)
    return files


@pytest.mark.parametrize("mode", first_of([0o755, 0o777], 2), ids=["links", "pipe"])
def test_a_job_folder_that_another_user_has_prepared_is_refused(quick: Mpi, mode: int, commons: Path) -> None:
    thesis, profile = precious(commons / "home", "thesis.tex", ".bashrc")
    (prepared := commons / "shared/77").mkdir()
    log = prepared / f"rank-00000.{os.uname().nodename.split('.')[0]}.log"
    if mode == 0o755:
        (prepared / "ranks.json").symlink_to(thesis)
        log.symlink_to(profile)
    else:
        os.mkfifo(log)
        log.chmod(0o666)
    prepared.chmod(mode)
    given_to(OTHER, prepared, *prepared.iterdir())
    done = check(as_victim(quick, commons / "home", 1, "--log-dir", commons / "shared"), 3)
    (found,) = re.findall("found +(.*)", done.stderr)
    assert found.startswith(f"{prepared}: {message('launch/entry_of_another_user', user=f'user {OTHER}')}")
    assert (thesis.read_text(), profile.read_text()) == ("precious", "precious")
    assert "ran" not in done.stdout


def test_a_folder_that_all_can_write_to_holds_ones_own_job(quick: Mpi, commons: Path) -> None:
    done = check(as_victim(quick, commons / "home", 1, "--log-dir", commons / "shared/new"))
    (log,) = (commons / "shared/new/77").glob("*.log")
    assert log.read_text() == "ran\n"
    for folder in (log.parent, log.parent.parent):
        assert folder.stat().st_uid == VICTIM
        assert not folder.stat().st_mode & 0o002
    assert done.stdout == "ran\n"


def refusal(path: Path, **options: bool) -> str:
    """Return why a file cannot be written, empty where it can."""
    try:
        os.close(open_for_writing(str(path), **options))
    except OSError as error:
        return format_os_error(error, str(path))
    return ""


def test_what_another_user_has_put_into_a_shared_folder_is_not_written(commons: Path) -> None:
    """As root, for whom a file of the victim's is another user's."""
    shared, (file,) = commons / "shared", precious(commons / "home", "file")
    (shared / "link").symlink_to(file)
    (shared / "folder").mkdir()
    (shared / "file").touch()
    os.link(file, shared / "name")
    given_to(OTHER, *(shared / name for name in ("link", "folder", "file")))
    others = message("launch/entry_of_another_user", user=f"user {OTHER}")
    assert refusal(shared / "link") == refusal(shared / "file") == others
    assert refusal(shared / "folder/new") == f"{shared}/folder: {others}"
    given_to(0, file)
    assert refusal(shared / "name") == message("launch/hard_link")
    assert file.read_text() == "precious"
    (shared / "name").unlink()
    given_to(0, shared / "link", shared / "folder")  # one's own link, to a larger disk perhaps, is followed
    assert refusal(shared / "link") == refusal(shared / "folder/new") == ""
    assert file.read_text() == ""


def test_a_group_shares_files_but_no_folders_of_jobs(commons: Path) -> None:
    (shared := commons / "shared").chmod(0o775)
    (shared / "folder").mkdir()
    (shared / "history").touch()
    given_to(OTHER, shared / "folder", shared / "history")
    assert refusal(shared / "history", append=True) == refusal(shared / "folder/new") == ""
    assert refusal(shared / "folder/log", job_folder=True).startswith(f"{shared}/folder: it belongs to user {OTHER}")


@pytest.mark.parametrize("replace", [os.link, os.symlink])
def test_a_file_that_is_replaced_while_it_is_opened_is_not_emptied(
    commons: Path, replace: Callable[[Path, Path], None]
) -> None:
    (file,) = precious(commons / "home", "file")
    (path := commons / "shared/file").touch()

    def check(step: PathStep) -> str:
        if not step.names_left and step.entry.st_size == 0:
            path.unlink()
            replace(file, path)
        return find_risk(step)

    with pytest.raises(OSError):
        open_checked(str(path), os.O_WRONLY | os.O_TRUNC, check)
    assert file.read_text() == "precious"


def test_a_folder_that_is_replaced_while_a_file_is_opened(commons: Path) -> None:
    """By a link to a folder with a file of the same name."""
    (file,) = precious(commons / "home", "file")
    (folder := commons / "shared/run").mkdir()
    (folder / "file").touch()

    def replace_and_find_risk(step: PathStep) -> str:
        if not step.names_left and not folder.is_symlink():
            folder.rename(commons / "shared/before")
            folder.symlink_to(commons / "home")
        return find_risk(step)

    with pytest.raises(PermissionError, match=message("launch/folder_replaced")):
        open_checked(str(folder / "file"), os.O_WRONLY | os.O_TRUNC, replace_and_find_risk)
    assert file.read_text() == "precious"


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    assert refusal(pipe) == message("launch/not_a_regular_file", kind="a FIFO")
    assert refusal(tmp_path) == message("launch/not_a_regular_file", kind="a folder")
    with pytest.raises(OSError, match=message("launch/not_a_regular_file", kind="a FIFO")):
        open_for_reading(str(pipe))
    for path in (os.devnull, "/dev/full", "/dev/stderr", "/dev/fd/2", "/proc/self/fd/2"):
        assert refusal(Path(path)) == ""
    (link := tmp_path / "link").symlink_to("/dev/stderr")
    assert refusal(link) == ""
    (loop := tmp_path / "loop").symlink_to("loop")
    assert refusal(loop).endswith("Too many levels of symbolic links")
    (dangling := tmp_path / "dangling").symlink_to("new")
    assert refusal(dangling) == ""
    assert (tmp_path / "new").is_file()
    assert refusal(tmp_path / "a/b") == f"{tmp_path}/a: No such file or directory"


@pytest.mark.torch
def test_pipes_in_the_place_of_files_are_named(quick: Mpi, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.json")
    named = [f"--{name}={pipe}" for name in ("map", "trace", "facts")]
    done = check(mpiexec(quick, 1, *named, "--no-init", "-c", "print('ran')"))
    assert done.stdout == "ran\n"
    reason = message("launch/not_a_regular_file", kind="a FIFO")
    assert done.stderr.count(f"mpiddp: cannot write {pipe}: {reason}") == 3


@pytest.mark.parametrize("arguments", ["mpiddp --dry-run --facts", "mpiddp.supervise --exclude n1 --hostfile"])
def test_a_pipe_is_not_read(quick: Mpi, arguments: str, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    done = alone(quick, "-m", *arguments.split(), pipe, *(["mpiexec", "true"] if "host" in arguments else []))
    assert done.returncode == 2
    assert message("launch/not_a_regular_file", kind="a FIFO") in done.stderr


@pytest.mark.parametrize(("mode", "safe"), [(0o777, False), (0o775, False), (0o1777, True), (0o755, True)])
def test_a_folder_that_others_can_replace_is_not_protected(mode: int, safe: bool, commons: Path) -> None:
    (shared := commons / "shared").chmod(mode)
    (shared / "ours").mkdir()
    refused = pytest.raises(PermissionError, match=message("launch/replaceable_folder"))
    with contextlib.nullcontext() if safe else refused:
        check_protected(str(shared / "ours"))
    check_protected(str(shared))
    given_to(OTHER, shared / "ours")
    refused = pytest.raises(PermissionError, match=r"by other users|belongs to")
    with contextlib.nullcontext() if mode == 0o755 else refused:
        check_protected(str(shared / "ours"))
    given_to(OTHER, shared)
    with pytest.raises(PermissionError, match=message("launch/folder_of_another_user", user=f"user {OTHER}")):
        check_protected(str(shared / "ours"))


@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=oct)
def test_a_mirror_that_others_can_replace_is_not_used(mode: int, commons: Path) -> None:
    """Neither is one made there, nor does a start use one that lies there."""
    (shared := commons / "shared").chmod(mode)
    why = mirror.target_problem(str(shared), 1)
    assert (message("launch/replaceable_folder") in why) is (mode == 0o777)
    assert mirror.is_private(mirror.mirrors_folder(str(shared))) is (mode == 0o1777)


def test_a_claim_touches_nothing_by_the_links_of_others(commons: Path) -> None:
    (commons / "home/ours").mkdir()
    (commons / "shared/logs").symlink_to(commons / "home/ours")
    (commons / "shared/77").symlink_to(commons / "home/ours")
    given_to(OTHER, commons / "shared/logs", commons / "shared/77")
    for name in ("logs/77", "77"):
        assert FolderClaim(str(commons / "shared" / name), 0, "run").acquire()  # making the log says what is in the way
    assert list((commons / "home/ours").iterdir()) == []


def test_a_claimed_folder_is_not_for_all_to_write_to(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert FolderClaim(str(tmp_path / "logs/77"), 0, "run").acquire()
    finally:
        os.umask(before)
    for folder in (tmp_path / "logs", tmp_path / "logs/77"):
        assert folder.stat().st_mode & 0o777 == 0o775


@pytest.mark.parametrize(("owner", "user"), [(0, NOBODY), (OTHER, OTHER)], ids=["root squash", "one owner"])
def test_a_file_system_that_gives_root_s_files_to_another_user(commons: Path, owner: int, user: int) -> None:
    """NFS that squashes root, or a mount whose files all belong to one user.

    Here the kernel takes this thread for another user with files alone.
    """
    (shared := commons / "shared").chmod(0o777)
    given_to(owner, shared)
    kernel = ctypes.CDLL(None)
    kernel.setfsuid(user)
    try:
        assert refusal(shared / "logs/77/log", job_folder=True) == refusal(shared / "logs/77/log", append=True) == ""
    finally:
        kernel.setfsuid(0)
    assert (shared / "logs/77/log").stat().st_uid == user
    assert sorted(path.name for path in shared.rglob("*")) == ["77", "log", "logs"]


def test_nothing_is_made_in_a_folder_that_is_refused(commons: Path) -> None:
    """A file that may not be written is found by looking alone."""
    (folder := commons / "shared/folder").mkdir()
    folder.chmod(0o777)
    given_to(OTHER, folder)
    before = folder.parent.stat().st_mtime_ns, folder.stat().st_mtime_ns
    assert refusal(folder / "log", job_folder=True).startswith(f"{folder}: it belongs to user {OTHER}")
    assert (folder.parent.stat().st_mtime_ns, folder.stat().st_mtime_ns) == before


def test_a_link_of_the_folders_owner_is_not_followed(commons: Path) -> None:
    given_to(OTHER, commons / "shared")
    (file,) = precious(commons / "home", "file")
    given_to(0, file)
    (link := commons / "shared/link").symlink_to(file)
    given_to(OTHER, link)
    assert refusal(link) == message("launch/entry_of_another_user", user=f"user {OTHER}")
    assert file.read_text() == "precious"


def test_a_link_of_nobodys_is_not_followed(commons: Path) -> None:
    """A server that squashes root gives root's files to nobody, but another process may run as nobody, too."""
    (commons / "shared").chmod(0o1777)
    (file,) = precious(commons / "home", "file")
    (link := commons / "shared/link").symlink_to(file)
    given_to(NOBODY, link)
    assert refusal(link) == message("launch/entry_of_another_user", user="nobody")
    assert file.read_text() == "precious"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_error_file_may_be_a_standard_stream(quick: Mpi, stream: str, tmp_path: Path) -> None:
    """What a batch system's file has got before stays."""
    (tmp_path / "script.py").write_text("print('before', flush=True)\nraise ValueError('seven')\n")
    command = ["-m", "mpiddp", "--no-init", "--error-file", f"/dev/{stream}", str(tmp_path / "script.py")]
    with (tmp_path / "output").open("a") as output:
        done = processes.start([str(quick.python), *command], single_node_environ(quick), stdout=output, stderr=output)
        try:
            assert done.wait(DEADLINE_S) == 1
        finally:
            processes.end_tree(done.pid)
    said = (tmp_path / "output").read_text()
    assert "before\n" in said
    assert "mpiddp: failed: rank 0" in said
    assert '"errorCode": 1' in said
