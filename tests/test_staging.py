"""--stage: what travels and how, the record, mirrors and their locks, and where they may lie."""

from __future__ import annotations

import compileall
import fcntl
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from mpiddp.staging import access_trace, broadcast
from mpiddp.staging import mirror as lease
from mpiddp.staging.access_trace import AccessTrace, TouchedFile, find_source
from mpiddp.staging.manifest import (
    CHUNK_BYTES,
    Chunk,
    File,
    Folder,
    Manifest,
    Mount,
    assign_readers,
    environment_folders,
    make_manifest,
    mount_of,
    outermost,
    parent_folders,
    plan_chunks,
)
from mpiddp.staging.mirror import SITE_FOLDER, STAGED_BY, MirrorLease, MirrorWriter, is_complete
from mpiddp.staging.stage import Outcome, StagedEnvironment, common_roots, mirror_paths
from tests import processes
from tests.cgroups import inside
from tests.conftest import LIMIT_BYTES
from tests.messages import find, message
from tests.support import ROOT, Mpi, check, mpiexec_command, need, single_node_environ


def some_files(seed: int) -> list[File]:
    """Return files of many sizes, empty ones and such of exactly a chunk among them."""
    draw = random.Random(seed)
    sizes = [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, *(int(draw.lognormvariate(9, 3)) for _ in range(draw.randint(0, 300)))]
    return [File(f"/env/{number}", size, 7, 0o644) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(40))
def test_each_byte_travels_once_and_the_nodes_share_the_reading(seed: int) -> None:
    files, nodes = some_files(seed), seed % 7 + 1
    found = plan_chunks(files, nodes, assign_readers([file.path for file in files], nodes))
    seen: dict[int, list[tuple[int, int]]] = {}
    for chunk in found:
        assert 0 <= chunk.reader < nodes
        assert chunk.size <= CHUNK_BYTES
        for piece in chunk.pieces:
            seen.setdefault(piece.file, []).append((piece.start, piece.length))
    assert seen.keys() == set(range(len(files)))
    for number, parts in seen.items():
        end = 0
        for start, length in sorted(parts):
            assert start == end
            end += length
        assert end == files[number].size
    large = Counter(dict.fromkeys(range(nodes), 0))
    large.update(chunk.reader for chunk in found if files[chunk.pieces[0].file].size > CHUNK_BYTES)
    assert max(large.values()) - min(large.values()) <= 1


@pytest.mark.parametrize("copied", [1, 20, 30, 39])
def test_small_files_are_read_by_who_has_looked_at_them(copied: int) -> None:
    """Of a large folder each node looks at a part, of others one node at all."""
    paths = [f"/env/large/{number}.py" for number in range(40)] + [f"/env/few/{number}.py" for number in range(9)]
    looked = assign_readers(paths, 3)
    assert {looked[path] for path in paths[:40]} == {0, 1, 2}
    assert len({looked[path] for path in paths[40:]}) == 1
    files = [File(path, 10, 7, 0o644) for path in (*paths[:copied], *paths[40:])]
    for chunk in plan_chunks(files, 3, looked):
        assert {looked[files[piece.file].path] for piece in chunk.pieces} == {chunk.reader}


def test_large_files_are_read_between_small_ones() -> None:
    files = [File(f"/env/{number}", 400_000, 7, 0o644) for number in range(40)]
    files += [File("/env/large", 40 * CHUNK_BYTES, 7, 0o644)]
    found = plan_chunks(files, 3, assign_readers([file.path for file in files], 3))
    kinds = ["large" if chunk.pieces[0].file == 40 else "small" for chunk in found]
    assert {*kinds[:4]} == {*kinds[-4:]} == {"large", "small"}


def test_a_large_file_of_which_little_is_touched_stays_where_it_is() -> None:
    cases = [([(0, 2**25)], 3, False, False), ([(0, 2**25)], 3, True, True),
             ([(0, 2**24), (2**26, 2**24)], 16, False, True), ([(0, 2**20)], 3, True, False),
             ([(0, 2**20)], 1024, False, True)]
    for ranges, nodes, keep, is_worth in cases:
        assert TouchedFile(2**29, tuple(ranges)).is_worth_copying(nodes, keep) == is_worth


def test_what_is_touched_of_a_mapped_file(tmp_path: Path) -> None:
    """Pages far apart, so that none is there for another's sake. The kernel may map a huge page of 2 MiB for each."""
    path = tmp_path / "library"
    path.write_bytes(bytes(2**25))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for place in (2**21, 2**24):
            memory[place] = 1
        found = access_trace.touched_ranges(access_trace.mapped_parts()[str(path)])
    assert len(found) == 2
    assert all(any(at <= place < at + length for at, length in found) for place in (2**21, 2**24))
    assert sum(length for _, length in found) <= 2 * 2**21
    assert access_trace.merge_ranges([(2**20, 5), (0, 10), (10, 5), (2**20 + 3, 7)]) == ((0, 15), (2**20, 10))


def test_the_folders_of_what_is_wanted() -> None:
    paths = ["/env/lib/a/b.py", "/env/lib/a/__pycache__/b.cpython-311.pyc", "/elsewhere/c.py", "/env/d.pth"]
    assert parent_folders(paths, ["/env", "/more"]) == ["/env", "/env/lib", "/env/lib/a", "/more"]
    folders = [Folder(path, 7, ()) for path in ("/env", "/env/lib/a", "/more")]
    files = [File(path, 1, 7, 0o644) for path in ("/env/d.pth", "/env/lib/a/b.py", "/env/lib/a/__pycache__/b.pyc")]
    manifest = make_manifest(["/env", "/more"], [*files, *folders])
    assert [folder.path for folder in manifest.folders] == ["/env", "/more"]  # what /env/lib has is not known
    assert [file.path for file in manifest.files] == ["/env/d.pth"]


def test_the_environment_is_not_the_users_own_folders() -> None:
    own, other = f"{sys.prefix}/lib/python3/site-packages", "/shared/venv/lib/python3/site-packages"
    assert environment_folders(["", "/home/me/project", own, other]) == [sys.prefix, other]
    assert outermost(["/a/b", "/a", "/ab", "/a/b/c"]) == ["/a", "/ab"]


def test_which_file_systems_are_shared() -> None:
    kinds = {"/": "ext4", "/home": "nfs4", "/home/x": "tmpfs", "/image": "fuse.squashfuse_ll", "/s": "fuse.sshfs"}
    among = [Mount(path, kind, frozenset()) for path, kind in kinds.items()]
    paths = ("/a", "/home/me", "/homes", "/home/x/y", "/image/b", "/s/c")
    assert [path for path in paths if mount_of(path, among).is_shared] == ["/home/me", "/s/c"]


def test_the_record_grows_and_is_read_back(tmp_path: Path) -> None:
    file = access_trace.record_path(("/env",), {"XDG_CACHE_HOME": str(tmp_path)})
    assert access_trace.read_record(file) == AccessTrace()
    first = AccessTrace(frozenset({"/env/a", "/env/\udcff"}), {"/env/a": TouchedFile(9, ((0, 5),))})
    access_trace.write_record(file, first)
    assert access_trace.read_record(file) == first
    both = first.merge(AccessTrace(frozenset({"/env/b"}), {"/env/a": TouchedFile(10, ((3, 4),)),
                                                           "/env/b": TouchedFile(5, ((0, 1),))}))
    paths = frozenset({"/env/a", "/env/b", "/env/\udcff"})
    assert both == AccessTrace(paths, {"/env/a": TouchedFile(10, ((0, 7),)), "/env/b": TouchedFile(5, ((0, 1),))})
    Path(file).write_text(json.dumps({"format": 99}))
    assert access_trace.read_record(file) == AccessTrace()
    Path(file).write_text("{")
    assert access_trace.read_record(file) == AccessTrace()
    assert names(tmp_path / "mpiddp") == [Path(file).name]


RECORDED = """
import sys
from mpiddp.staging.access_trace import Tracer
env = sys.argv[1]
tracer = Tracer((env,))
tracer.watch_opens()
sys.path.insert(0, env + "/lib/site-packages")
import pack.replaced
print(*sorted(path.rpartition("/pack/")[2].replace(sys.implementation.cache_tag, "tag")
              for path in tracer.trace().paths), sep="\\n")
"""


@pytest.mark.process
def test_the_sources_of_modules_that_replace_themselves_are_recorded(tmp_path: Path) -> None:
    """Python asks for them, though it opens what is compiled alone, as of torch.backends."""
    package = tree(tmp_path) / "lib/site-packages/pack"
    shutil.rmtree(package / "__pycache__")
    (package / "replaced.py").write_text("import sys\nsys.modules[__name__] = object()\n")
    compileall.compile_dir(package, quiet=1)
    done = check(processes.run(sys.executable, "-c", RECORDED, str(tmp_path / "env"), timeout=60,
                               env={**os.environ, "PYTHONPATH": str(ROOT)}))
    assert done.stdout.split() == ["__init__.py", "__pycache__/__init__.tag.pyc", "__pycache__/replaced.tag.pyc",
                                   "replaced.py"]


def names(folder: Path) -> list[str]:
    """Return what is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def tree(folder: Path) -> Path:
    """Make a small environment with what real ones have: links of each kind, compiled modules, odd names."""
    env = folder / "env"
    package = env / "lib/site-packages/pack"
    (package / "__pycache__").mkdir(parents=True)
    (package / "cold").mkdir()
    for name in ("__init__.py", "hot.py", "colder.py", "cold/data.txt"):
        (package / name).write_text(f"NAME = {name!r}\n")
    tag = sys.implementation.cache_tag
    for name in ("__init__", "hot", "colder"):
        (package / "__pycache__" / f"{name}.{tag}.pyc").write_bytes(name.encode() * 100)
    (package / "libhot.so.1").write_bytes(os.urandom(3 * CHUNK_BYTES + 5))
    (package / "libhot.so").symlink_to("libhot.so.1")
    (package / "absolute").symlink_to(package / "hot.py")
    (package / "outside").symlink_to("/etc/hostname")
    (env / "lib64").symlink_to("lib")
    (env / "bin").mkdir()
    return env


def listed(env: Path, hot: list[str]) -> Manifest:
    """Return the manifest of an environment with these files as copies."""
    paths = [str(env / path) for path in hot]
    entries = broadcast.inspect_paths(sorted(paths), parent_folders(paths, [str(env)]), [str(env)])
    return make_manifest([str(env)], entries)


def chunks_of(manifest: Manifest) -> list[Chunk]:
    """Return the chunks in which a manifest's files come to a single node."""
    return plan_chunks(manifest.files, 1, {file.path: 0 for file in manifest.files})


def mirrored(env: Path, hot: list[str], into: Path) -> tuple[MirrorLease, Manifest]:
    """Make a mirror of an environment, with these files as copies."""
    manifest = listed(env, hot)
    into.mkdir(exist_ok=True)
    made = lease.acquire_new(str(into / f"e-{manifest.fingerprint()}"))
    assert made
    writer = MirrorWriter(made, manifest)
    writer.begin()
    for chunk in chunks_of(manifest):
        writer.write(chunk, broadcast.read_chunk(manifest.files, chunk))
    writer.finish([file.path for file in manifest.files])
    assert not writer.left_out
    os.close(made.lock)
    used = lease.acquire_shared(made.path)
    assert used
    return used, manifest


HOT = ["lib/site-packages/pack/__init__.py", "lib/site-packages/pack/hot.py", "lib/site-packages/pack/libhot.so.1",
       f"lib/site-packages/pack/__pycache__/hot.{sys.implementation.cache_tag}.pyc"]


def test_a_mirror_has_all_that_the_environment_has(tmp_path: Path) -> None:
    env = tree(tmp_path)
    used, manifest = mirrored(env, HOT, tmp_path / "ours")
    root = Path(used.root + str(env))
    for folder, folders, files in os.walk(env, followlinks=True):
        for name in [*folders, *files]:
            original = Path(folder, name)
            there = root / original.relative_to(env)
            assert there.exists(), there
            assert there.is_dir() == original.is_dir()
            assert there.is_dir() or there.read_bytes() == original.read_bytes()
    package = root / "lib/site-packages/pack"
    for path in HOT:
        assert (root / path).is_file()
        assert not (root / path).is_symlink()
        assert (root / path).stat().st_mtime_ns == (env / path).stat().st_mtime_ns
    original = env / "lib/site-packages/pack"
    links = {"libhot.so": Path("libhot.so.1"), "absolute": package / "hot.py", "cold": original / "cold",
             "outside": original / "outside", "../../../lib64": Path("lib")}
    assert {name: (package / name).readlink() for name in links} == links
    assert is_complete(used, manifest)
    assert lease.read_stamp(used.path) == {file.path for file in manifest.files}
    assert not package.stat().st_mode & 0o222
    lease.release(used, keep=False)
    assert names(tmp_path) == ["env"]


def test_a_mirror_is_whole_or_not_there(tmp_path: Path) -> None:
    env = tree(tmp_path)
    used, manifest = mirrored(env, HOT, tmp_path / "ours")
    victim = Path(used.root + str(env / HOT[0]))
    victim.parent.chmod(0o700)
    victim.unlink()
    assert not is_complete(used, manifest)
    stamp = Path(used.path, lease.STAMP)
    stamp.write_bytes(stamp.read_bytes().replace(b"-", b"+"))  # as of another start of the host
    assert lease.acquire_shared(used.path) is None
    stamp.unlink()
    assert lease.acquire_shared(used.path) is None
    os.close(used.lock)
    again, _ = mirrored(env, HOT, tmp_path / "ours")  # in its place
    assert again.path == used.path
    assert is_complete(again, manifest)


def test_a_mirror_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    env, ours = tree(tmp_path), tmp_path / "ours"
    manifest = listed(env, HOT)
    ours.mkdir()
    made = lease.acquire_new(str(ours / "e-1"))
    assert made
    writer = MirrorWriter(made, manifest)
    writer.begin()
    for chunk in chunks_of(manifest)[:-1]:
        writer.write(chunk, broadcast.read_chunk(manifest.files, chunk))
    Path(made.path, SITE_FOLDER).touch()  # where a folder is to be made
    with pytest.raises(FileExistsError):
        writer.finish([])
    assert lease.acquire_shared(made.path) is None
    lease.release(made, keep=False)
    assert names(tmp_path) == ["env"]


@pytest.mark.process
@pytest.mark.parametrize(("words", "rank", "is_mirrored"), [
    ((), os.getpid, True), (("mpiddp",), os.getpid, False), ((), lambda: 2**22 + 1, False)],
    ids=["as it is", "another job", "the rank is gone"])
def test_a_python_that_a_rank_starts_finds_the_mirror(
    words: tuple[str, ...], rank: Callable[[], int], is_mirrored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that starts another job, nor one that outlives the rank; the user's own sitecustomize runs, too."""
    env = tree(tmp_path)
    packages = str(env / "lib/site-packages")
    monkeypatch.syspath_prepend(packages)
    used, _ = mirrored(env, HOT, tmp_path / "ours")
    (tmp_path / "sitecustomize.py").write_text("print('own')")
    path = os.pathsep.join([str(Path(used.path, SITE_FOLDER)), str(tmp_path), packages])
    done = check(processes.run(
        sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')", *words, timeout=60,
        env={**os.environ, "PYTHONPATH": path, STAGED_BY: f"{os.uname().nodename}:{rank()}"}))
    assert done.stdout.splitlines()[:4] == [
        "own", "", str(tmp_path), f"{used.root}{packages}" if is_mirrored else packages]


@pytest.mark.parametrize(("path", "source"), [
    ("/env/__pycache__/a.cpython-311.pyc", "/env/a.py"), ("/env/__pycache__/a.v2.cpython-311.pyc", ""),
    ("/env/a.pyc", ""),
])
def test_the_source_of_a_bytecode_file(path: str, source: str) -> None:
    assert find_source(path) == source


def test_what_is_used_is_not_removed(tmp_path: Path) -> None:
    env, ours = tree(tmp_path), str(tmp_path / "ours")
    used, _ = mirrored(env, HOT, tmp_path / "ours")
    other = lease.acquire_shared(used.path)
    assert other
    assert lease.acquire_new(used.path) is None
    lease.release(used, keep=False)
    assert lease.read_stamp(used.path) is not None
    lease.remove_leftovers(ours, "other-name")
    assert lease.read_stamp(used.path) is not None
    lease.release(other, keep=True)
    lease.remove_leftovers(ours, "other-name")
    assert lease.read_stamp(used.path) is not None
    lease.remove_leftovers(ours, "e-newer")  # of the same environment
    assert names(tmp_path) == ["env"]


def test_what_a_killed_job_left_is_removed(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    (ours / "e-1/root/x").mkdir(parents=True)
    (ours / "e-1/root/x").chmod(0o555)
    (ours / "f-2/root").mkdir(parents=True)
    (ours / "f-2/stamp").touch()
    (ours / "g-3/root").mkdir(parents=True)
    lock = os.open(ours / "g-3", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    lease.remove_leftovers(str(ours), "h-4")
    assert names(ours) == ["g-3"]
    os.close(lock)
    (ours / "g-3/root/half").touch()
    made = lease.acquire_new(str(ours / "g-3"))
    assert made
    assert names(ours / "g-3") == []


def test_a_file_that_changes_meanwhile_is_not_copied(tmp_path: Path) -> None:
    env = tree(tmp_path)
    manifest = listed(env, HOT)
    made = lease.acquire_new(str(tmp_path / "e-1"))
    assert made
    (env / HOT[1]).write_text("NAME = 'another'\n")
    with (env / HOT[2]).open("ab") as file:
        file.write(b"more")
    (env / HOT[0]).unlink()
    writer = MirrorWriter(made, manifest)
    writer.begin()
    for chunk in chunks_of(manifest):
        writer.write(chunk, broadcast.read_chunk(manifest.files, chunk))
    writer.finish([])
    assert writer.left_out == {str(env / path) for path in HOT[:3]}
    there = Path(made.root + str(env))
    assert [(there / path).is_symlink() for path in HOT] == [True, True, True, False]
    assert (there / HOT[2]).readlink() == env / HOT[2]
    assert listed(env, HOT).fingerprint() != manifest.fingerprint()


def test_what_comes_is_what_was_read(tmp_path: Path) -> None:
    manifest = listed(tree(tmp_path), HOT)
    made = lease.acquire_new(str(tmp_path / "e-1"))
    assert made
    writer = MirrorWriter(made, manifest)
    writer.begin()
    chunk = chunks_of(manifest)[0]
    buffer = broadcast.read_chunk(manifest.files, chunk)
    buffer[0] ^= 1
    with pytest.raises(ValueError, match=message("launch/checksum_mismatch")):
        writer.write(chunk, buffer)


def test_a_folder_of_anothers_is_not_used(tmp_path: Path) -> None:
    ours = Path(lease.mirrors_folder(str(tmp_path)))
    ours.mkdir(mode=0o777)
    ours.chmod(0o777)
    assert lease.target_problem(str(tmp_path), 1) == message("launch/folder_not_private", folder=ours)
    ours.rmdir()
    ours.symlink_to("/var")
    assert lease.target_problem(str(tmp_path), 1) == message("launch/folder_not_private", folder=ours)
    ours.unlink()
    assert find("launch/folder_too_small", lease.target_problem(str(tmp_path), 2**60), folder=tmp_path)
    assert lease.target_problem(str(tmp_path), 1) == ""


@pytest.mark.process
@pytest.mark.parametrize("name", ["plain", "with space", "Müller daten", "back\\slash", "no-break\u00a0space"])
def test_a_mount_point_is_known_by_any_name(name: str, tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    (place := tmp_path / name).mkdir()
    code = ("import os, sys; from mpiddp.staging.manifest import mount_of, mounts; "
            "print(os.fsencode(mount_of(sys.argv[1] + '/file', mounts()).path).hex())")
    done = subprocess.run(["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$4" && exec "$@"', "sh",
                           sys.executable, "-c", code, str(place)],
                          capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert bytes.fromhex(done.stdout) == os.fsencode(place)


@pytest.mark.process
@pytest.mark.parametrize(("options", "name", "fields"), [
    ("size=8m,noexec", "launch/folder_mounted_noexec", {}), ("size=8m,ro", "", {}),
    ("size=1m", "launch/folder_too_small", {"free": 1, "needed": 2})])
def test_folders_that_cannot_be_used(options: str, name: str, fields: dict[str, int], tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    code = f"from mpiddp.staging import mirror; print(mirror.choose_target([{str(tmp_path)!r}], 2**21)[1])"
    prepare = f"mount -t tmpfs -o {options} tmpfs {tmp_path} && exec \"$@\""
    done = subprocess.run(["unshare", "--mount", "sh", "-c", prepare, "sh", sys.executable, "-c", code],
                          capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    if name:
        assert done.stdout == message(name, folder=tmp_path, **fields) + "\n"
    else:
        assert done.stdout.endswith(": Read-only file system\n")


@pytest.mark.process
def test_a_cgroups_memory_is_all_that_is_left(group: Path) -> None:
    """That of the job, as Slurm limits it, and not only that of the group below in which its ranks are."""
    code = "from mpiddp.staging import mirror; print(mirror.available_memory())"
    below = group / "step"
    below.mkdir()
    try:
        for one in (group, below):
            done = subprocess.run(inside(one, sys.executable, "-c", code), capture_output=True, text=True, timeout=60,
                                  cwd=ROOT, check=True)
            assert LIMIT_BYTES / 2 < int(done.stdout) < LIMIT_BYTES
    finally:
        below.rmdir()


LATE = r"""
import threading, time
from mpi4py import MPI
from mpiddp.base.errors import LocalLaunchError
from mpiddp.bootstrap.mpi_communicator import MpiCommunicator
from mpiddp.bootstrap.rollcall import Rendezvous
from mpiddp.staging.broadcast import broadcast, new_buffer
from mpiddp.staging.manifest import File, plan_chunks

def read(chunk):
    if MPI.COMM_WORLD.rank == 1:
        time.sleep(600)
    return new_buffer(chunk)

begun, chunks = time.monotonic(), plan_chunks([File("/x", 2**25, 7, 0o644)], 2, {})
try:
    ranks = Rendezvous(MpiCommunicator(MPI.COMM_WORLD), 60, begun)
    broadcast(ranks, chunks, begun + 3, read, lambda: None, lambda *_: None)
except LocalLaunchError as error:
    print(f"{error.actual}\n", end="", flush=True)
time.sleep(1)
MPI.COMM_WORLD.Abort(7)
"""


def test_a_node_whose_file_system_hangs_is_named_in_time(quick: Mpi) -> None:
    done = processes.run(*mpiexec_command(quick, 2, "-c", LATE), timeout=60, env=single_node_environ(quick), cwd=ROOT)
    assert done.stdout.splitlines() == [message("launch/share_unread", reader="rank 1")] * 2, done.stderr


LEADERS = r"""
import sys, time
from pathlib import Path
from mpi4py import MPI
from mpiddp.base.config import LaunchConfig
from mpiddp.bootstrap.mpi_communicator import MpiCommunicator
from mpiddp.bootstrap.rollcall import Rendezvous
from mpiddp.staging.access_trace import AccessTrace
from mpiddp.staging.stage import NodeLeader

rank, root, target = MPI.COMM_WORLD.rank, sys.argv[1], f"{sys.argv[2]}/{MPI.COMM_WORLD.rank}"
known = AccessTrace(frozenset(str(path) for path in Path(root).rglob("*.py")) if rank == 0 else frozenset())
config = LaunchConfig(stage=target, stage_keep=True)
leader = NodeLeader(Rendezvous(MpiCommunicator(MPI.COMM_WORLD), 60, time.monotonic()), (root,), config)
used, outcome = leader.run(known, frozenset())
print(f"{rank} {outcome.path.removeprefix(target)} {outcome.problem} {outcome.left_out}\n", end="", flush=True)
"""


def test_each_node_gets_the_same_mirror(quick: Mpi, tmp_path: Path) -> None:
    """Three ranks, as the leaders of nodes with a folder each: copied, used again, and copied anew after a change."""
    env, targets, draw = tmp_path / "env", tmp_path / "targets", random.Random(22)
    for number in range(200):
        path = env / f"lib/{number % 5}/{'crowded' if number % 2 else number}/{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes(3 * CHUNK_BYTES + number if number % 40 == 3 else draw.randrange(20_000)))
    for rank in range(3):
        (targets / str(rank)).mkdir(parents=True)

    def stage() -> list[list[str]]:
        done = check(processes.run(*mpiexec_command(quick, 3, "-c", LEADERS, env, targets), timeout=100, cwd=ROOT,
                                   env=single_node_environ(quick)))
        return [line.split(maxsplit=1) for line in sorted(done.stdout.splitlines())]

    def mirrors() -> dict[Path, int]:
        return {path: (path / lease.STAMP).stat().st_mtime_ns for path in sorted(targets.glob("*/*/*"))}

    first, made = stage(), mirrors()
    assert len({words for _, words in first}) == 1, first
    assert len(made) == 3
    for mirror in made:
        for original in env.rglob("*.py"):
            copy = Path(f"{mirror}/{lease.ROOT}{original}")
            assert not copy.is_symlink()
            assert copy.read_bytes() == original.read_bytes()
    assert stage() == first
    assert mirrors() == made
    (env / "lib/1/crowded/1.py").write_bytes(b"changed")
    (targets / "2").rename(targets / "gone")
    again, anew = stage(), list(mirrors())
    assert again[0][1] == again[1][1] != first[0][1]
    assert "No such file or directory" in again[2][1]
    assert [path.relative_to(targets).parts[0] for path in anew] == ["0", "1", "gone"]
    for mirror in anew[:2]:
        assert mirror not in made
        assert Path(f"{mirror}/{lease.ROOT}{env}/lib/1/crowded/1.py").read_bytes() == b"changed"


def test_why_the_original_files_are_used(capfd: pytest.CaptureFixture[str]) -> None:
    common_roots([{"/a": (1, 2), "/b": (1, 2)}, None, {"/a": (1, 2), "/b": (7, 2)}])
    common_roots([{}])
    mirror_paths([(0, Outcome("/m", left_out=("/a/x", "/a/y"))), (1, Outcome(problem="no room"))], ["n1", "n2"])
    assert capfd.readouterr().err.splitlines() == [
        message("launch/folders_differ", folders="/b"), message("launch/nothing_shared"),
        message("launch/not_staged", reason="no room (on n2)"), message("launch/files_left_out", files="/a/x, /a/y")]


def test_a_record_that_cannot_be_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    record = tmp_path / "file/record.json"
    tracer = access_trace.Tracer((sys.base_prefix,))
    StagedEnvironment(None, tracer, str(record), AccessTrace(), keep=False).update_record()
    assert capfd.readouterr().err == message("launch/record_not_saved", record=record, error="File exists") + "\n"


def test_where_a_mirror_may_lie() -> None:
    environ = {"SLURM_TMPDIR": "/local/7", "TMPDIR": "/tmp/7"}
    assert lease.target_dirs("auto", environ) == ["/local/7", "/tmp/7", "/dev/shm"]
    assert lease.target_dirs("auto", {}) == ["/dev/shm"]
    assert lease.target_dirs("/scratch", environ) == ["/scratch"]


@pytest.mark.process
def test_a_model_of_many_nodes() -> None:
    """tests.benchmarks.staging_model: what is read once hardly grows, what each node reads does."""
    done = subprocess.run([sys.executable, "-m", "tests.benchmarks.staging_model"], capture_output=True, text=True,
                          timeout=60, cwd=ROOT, check=True)
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    times = {row[1]: [float(word.split()[0].replace(",", "")) for word in row[2:]] for row in rows[:3]}
    assert times["mpiddp"][-1] > 5 * times["mpiddp --stage, copied"][-1] > 5 * times["mpiddp --stage, again"][0]
