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
from pathlib import Path

import pytest

from mpiddp.staging import closure, copies, early, reading, room, use
from mpiddp.staging.closure import Closure
from mpiddp.staging.exchange import buffer_for
from mpiddp.staging.manifest import CHUNK, File, Folder, Manifest, chunks, folders_of, readers_of, rooted, worth_copying
from mpiddp.staging.mirror import Writer
from mpiddp.staging.mounts import Mount, mount_of
from mpiddp.staging.trees import environment, topmost
from tests import processes
from tests.cgroups import inside
from tests.conftest import LIMIT_BYTES
from tests.support import ROOT, Mpi, check, mpiexec_command, need, single_node_environ


def some_files(seed: int) -> list[File]:
    """Return files of many sizes, empty ones and such of exactly a chunk among them."""
    draw = random.Random(seed)
    sizes = [0, 1, CHUNK, CHUNK + 1, *(int(draw.lognormvariate(9, 3)) for _ in range(draw.randint(0, 300)))]
    return [File(f"/env/{number}", size, 7, 0o644) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(40))
def test_each_byte_travels_once_and_the_nodes_share_the_reading(seed: int) -> None:
    files, nodes = some_files(seed), seed % 7 + 1
    found = chunks(files, nodes)
    seen: dict[int, list[tuple[int, int]]] = {}
    for chunk in found:
        assert 0 <= chunk.reader < nodes
        assert chunk.size <= CHUNK
        for piece in chunk.pieces:
            seen.setdefault(piece.file, []).append((piece.at, piece.length))
    assert seen.keys() == set(range(len(files)))
    for number, parts in seen.items():
        end = 0
        for at, length in sorted(parts):
            assert at == end
            end += length
        assert end == files[number].size
    large = Counter(dict.fromkeys(range(nodes), 0))
    large.update(chunk.reader for chunk in found if files[chunk.pieces[0].file].size > CHUNK)
    assert max(large.values()) - min(large.values()) <= 9


@pytest.mark.parametrize("copied", [1, 20, 30, 39])
def test_small_files_are_read_by_who_has_looked_at_them(copied: int) -> None:
    """Of a large folder each node looks at a part, of others one node at all."""
    paths = [f"/env/large/{number}.py" for number in range(40)] + [f"/env/few/{number}.py" for number in range(9)]
    looked = dict(zip(paths, readers_of(paths, 3), strict=True))
    assert {looked[path] for path in paths[:40]} == {0, 1, 2}
    assert len({looked[path] for path in paths[40:]}) == 1
    files = [File(path, 10, 7, 0o644) for path in (*paths[:copied], *paths[40:])]
    for chunk in chunks(files, 3, paths[copied:40]):
        assert {looked[files[piece.file].path] for piece in chunk.pieces} == {chunk.reader}


def test_large_files_are_read_between_small_ones() -> None:
    files = [File(f"/env/{number}", 400_000, 7, 0o644) for number in range(40)]
    files += [File("/env/large", 40 * CHUNK, 7, 0o644)]
    kinds = ["large" if chunk.pieces[0].file == 40 else "small" for chunk in chunks(files, 3)]
    assert {*kinds[:4]} == {*kinds[-4:]} == {"large", "small"}


def test_a_large_file_of_which_little_is_touched_stays_where_it_is() -> None:
    assert worth_copying(2**20, [], 3, keep=False)
    assert worth_copying(2**29, None, 3, keep=False)
    assert not worth_copying(2**29, [(0, 2**25)], 3, keep=False)
    assert worth_copying(2**29, [(0, 2**25)], 3, keep=True)
    assert worth_copying(2**29, [(0, 2**24), (2**26, 2**24)], 16, keep=False)
    assert not worth_copying(2**29, [(0, 2**20)], 3, keep=True)
    assert worth_copying(2**29, [(0, 2**20)], 1024, keep=False)


def test_what_is_touched_of_a_mapped_file(tmp_path: Path) -> None:
    """Pages far apart, so that none is there for another's sake."""
    path = tmp_path / "library"
    path.write_bytes(bytes(2**25))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for place in (2**21, 2**24):
            memory[place] = 1
        found = closure.touched(closure.mapped()[str(path)])
    assert len(found) == 2
    assert all(any(at <= place < at + length for at, length in found) for place in (2**21, 2**24))
    assert sum(length for _, length in found) < 2**21
    assert closure.merged([(2**20, 5), (0, 10), (10, 5), (2**20 + 3, 7)]) == ((0, 15), (2**20, 10))


@pytest.mark.parametrize("seed", range(20))
def test_threads_share_what_is_read_ahead(seed: int) -> None:
    draw = random.Random(seed)
    ranges = [(number * 10**6, draw.randint(1, 10**5)) for number in range(draw.randint(0, 9))]
    parts = [reading.part_of(ranges, number) for number in range(reading.AHEAD)]
    assert closure.merged(one for part in parts for one in part) == closure.merged(ranges)
    sizes = [sum(length for _, length in part) for part in parts]
    assert sum(sizes) == sum(length for _, length in ranges)
    assert max(sizes) - min(sizes) <= 1


def test_the_folders_of_what_is_wanted() -> None:
    paths = ["/env/lib/a/b.py", "/env/lib/a/__pycache__/b.cpython-311.pyc", "/elsewhere/c.py", "/env/d.pth"]
    assert folders_of(paths, ["/env", "/more"]) == ["/env", "/env/lib", "/env/lib/a", "/more"]
    folders = [Folder(path, 7, ()) for path in ("/env", "/env/lib/a", "/more")]
    assert [folder.path for folder in rooted(folders, ["/env", "/more"])] == ["/env", "/more"]


def test_the_environment_is_not_the_users_own_folders() -> None:
    own, other = f"{sys.prefix}/lib/python3/site-packages", "/shared/venv/lib/python3/site-packages"
    assert environment(["", "/home/me/project", own, other]) == [sys.prefix, other]
    assert topmost(["/a/b", "/a", "/ab", "/a/b/c"]) == ["/a", "/ab"]


def test_which_file_systems_are_shared() -> None:
    kinds = {"/": "ext4", "/home": "nfs4", "/home/x": "tmpfs", "/image": "fuse.squashfuse_ll", "/s": "fuse.sshfs"}
    among = [Mount(path, kind, frozenset()) for path, kind in kinds.items()]
    paths = ("/a", "/home/me", "/homes", "/home/x/y", "/image/b", "/s/c")
    assert [path for path in paths if mount_of(path, among).shared] == ["/home/me", "/s/c"]


def test_the_record_grows_and_is_read_back(tmp_path: Path) -> None:
    file = closure.record_of(("/env",), {"XDG_CACHE_HOME": str(tmp_path)})
    assert closure.read(file) == Closure()
    first = Closure(frozenset({"/env/a", "/env/\udcff"}), {"/env/a": ((0, 5),)})
    closure.write(file, first)
    assert closure.read(file) == first
    both = first.with_more(Closure(frozenset({"/env/b"}), {"/env/a": ((3, 4),), "/env/b": ((0, 1),)}))
    paths = frozenset({"/env/a", "/env/b", "/env/\udcff"})
    assert both == Closure(paths, {"/env/a": ((0, 7),), "/env/b": ((0, 1),)})
    Path(file).write_text(json.dumps({"form": 99}))
    assert closure.read(file) == Closure()
    Path(file).write_text("{")
    assert closure.read(file) == Closure()
    assert names(tmp_path / "mpiddp") == [Path(file).name]


RECORDED = """
import sys
from mpiddp.staging.closure import Recorder
env = sys.argv[1]
recorder = Recorder((env,))
recorder.listen()
sys.path.insert(0, env + "/lib/site-packages")
import pack.replaced
print(*sorted(path.rpartition("/pack/")[2].replace(sys.implementation.cache_tag, "tag")
              for path in recorder.found().paths), sep="\\n")
"""


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
    (package / "libhot.so.1").write_bytes(os.urandom(3 * CHUNK + 5))
    (package / "libhot.so").symlink_to("libhot.so.1")
    (package / "absolute").symlink_to(package / "hot.py")
    (package / "outside").symlink_to("/etc/hostname")
    (env / "lib64").symlink_to("lib")
    (env / "bin").mkdir()
    return env


def mirrored(env: Path, hot: list[str], into: Path) -> tuple[copies.Copy, Manifest]:
    """Make a mirror of an environment, with these files as copies."""
    paths = [str(env / path) for path in hot]
    seen = reading.look(sorted(paths), folders_of(paths, [str(env)]), [str(env)])
    manifest = Manifest((str(env),), tuple(sorted(seen.files)), tuple(sorted(seen.folders)))
    into.mkdir(exist_ok=True)
    copy = copies.make(str(into / f"e-{manifest.fingerprint()}"))
    assert copy
    parts = chunks(manifest.files, 1)
    writer, source = Writer(copy, manifest), reading.Source(manifest.files, parts)
    writer.begin()
    for chunk in parts:
        data = buffer_for(chunk)
        how = source.read(chunk, data)
        writer.write(chunk, data[:chunk.size], how)
    writer.finish()
    assert writer.left == []
    used = copies.use_own(copy)
    assert used
    return used, manifest


HOT = ["lib/site-packages/pack/__init__.py", "lib/site-packages/pack/hot.py", "lib/site-packages/pack/libhot.so.1",
       f"lib/site-packages/pack/__pycache__/hot.{sys.implementation.cache_tag}.pyc"]


def test_a_mirror_has_all_that_the_environment_has(tmp_path: Path) -> None:
    env = tree(tmp_path)
    copy, manifest = mirrored(env, HOT, tmp_path / "ours")
    root = Path(copy.root + str(env))
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
    assert copies.fits(copy, manifest)
    assert copies.manifest_of(copy.path) == manifest
    assert not package.stat().st_mode & 0o222
    copies.release(copy, keep=False)
    assert names(tmp_path) == ["env"]


def test_a_mirror_is_whole_or_not_there(tmp_path: Path) -> None:
    env = tree(tmp_path)
    copy, manifest = mirrored(env, HOT, tmp_path / "ours")
    victim = Path(copy.root + str(env / HOT[0]))
    victim.parent.chmod(0o700)
    victim.unlink()
    assert not copies.fits(copy, manifest)
    mark = Path(copy.path, copies.MARK)
    Path(copy.path, copies.MARK).write_bytes(mark.read_bytes().replace(b"-", b"+"))  # as of another start of the host
    assert copies.share(copy.path) is None
    mark.unlink()
    assert copies.share(copy.path) is None
    os.close(copy.lock)
    again, _ = mirrored(env, HOT, tmp_path / "ours")  # in its place
    assert again.path == copy.path
    assert copies.fits(again, manifest)


def test_a_mirror_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    env, ours = tree(tmp_path), tmp_path / "ours"
    paths = [str(env / path) for path in HOT]
    seen = reading.look(paths, folders_of(paths, [str(env)]), [str(env)])
    manifest = Manifest((str(env),), tuple(sorted(seen.files)), tuple(sorted(seen.folders)))
    ours.mkdir()
    copy = copies.make(str(ours / "e-1"))
    assert copy
    writer = Writer(copy, manifest)
    writer.begin()
    parts = chunks(manifest.files, 1)
    source = reading.Source(manifest.files, parts)
    for chunk in parts[:-1]:
        data = buffer_for(chunk)
        how = source.read(chunk, data)
        writer.write(chunk, data[:chunk.size], how)
    Path(f"{copy.path}.new", copies.START).touch()  # where a folder is to be made
    with pytest.raises(FileExistsError):
        writer.finish()
    writer.give_up()
    assert names(ours) == ["e-1.lock"]
    copies.release(copy, keep=False)
    assert names(tmp_path) == ["env"]


def test_a_job_that_another_one_has_started_goes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python has come to a mirror by variables, and holds no lock."""
    outer = f"/local/mpiddp-stage-{os.geteuid()}/e-1"
    monkeypatch.setattr(sys, "path", ["/mine", f"{outer}/root/env/lib", "/env/lib", "/other"])
    environ = {"PYTHONPATH": f"{outer}/start:/mine", copies.BY: "host:1"}
    use.leave_others(environ)
    assert sys.path == ["/mine", "/env/lib", "/other"]
    assert environ == {"PYTHONPATH": "/mine"}


def test_what_is_used_is_not_removed(tmp_path: Path) -> None:
    env = tree(tmp_path)
    copy, _ = mirrored(env, HOT, tmp_path / "ours")
    other = copies.share(copy.path)
    assert other
    assert copies.make(copy.path) is None
    copies.release(copy, keep=False)
    assert copies.is_whole(copy.path)
    copies.tidy(str(tmp_path / "ours"), "other-name")
    assert copies.is_whole(copy.path)
    copies.release(other, keep=True)
    copies.tidy(str(tmp_path / "ours"), "other-name")
    assert copies.is_whole(copy.path)
    copies.tidy(str(tmp_path / "ours"), "e-newer")  # of the same environment
    assert names(tmp_path) == ["env"]


def test_what_a_killed_job_left_is_removed(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    (ours / "e-1.new/root/x").mkdir(parents=True)
    (ours / "e-1.new/root/x").chmod(0o555)
    (ours / "e-1.lock").touch()
    (ours / "f-2/root").mkdir(parents=True)
    lock = os.open(ours / "g-3.lock", os.O_CREAT | os.O_RDWR)
    (ours / "g-3.new").mkdir()
    fcntl.flock(lock, fcntl.LOCK_EX)
    copies.tidy(str(ours), "h-4")
    assert names(ours) == ["g-3.lock", "g-3.new"]
    os.close(lock)


def test_a_file_that_changes_meanwhile_is_not_copied(tmp_path: Path) -> None:
    env = tree(tmp_path)
    paths = [str(env / path) for path in HOT]
    seen = reading.look(paths, folders_of(paths, [str(env)]), [str(env)])
    (env / HOT[1]).write_text("NAME = 'another'\n")
    with (env / HOT[2]).open("ab") as file:
        file.write(b"more")
    (env / HOT[0]).unlink()
    parts = chunks(seen.files, 1)
    source = reading.Source(seen.files, parts)
    outcomes = {}
    for chunk in parts:
        how = source.read(chunk, buffer_for(chunk))
        for piece, read in zip(chunk.pieces, how, strict=True):
            path = os.path.relpath(seen.files[piece.file].path, env)
            outcomes[path] = max(read.outcome, outcomes.get(path, 0))
    assert outcomes == {HOT[0]: reading.UNREADABLE, HOT[1]: reading.CHANGED, HOT[2]: reading.CHANGED,
                        HOT[3]: reading.WHOLE}
    assert not reading.unchanged(seen.files, [])
    assert not reading.unchanged([], seen.folders)


def test_a_folder_of_anothers_is_not_used(tmp_path: Path) -> None:
    ours = Path(room.ours(str(tmp_path)))
    ours.mkdir(mode=0o777)
    ours.chmod(0o777)
    assert "is not this user's alone" in room.why_not(str(tmp_path), 1)
    ours.rmdir()
    ours.symlink_to("/var")
    assert "is not this user's alone" in room.why_not(str(tmp_path), 1)
    ours.unlink()
    assert "MiB free" in room.why_not(str(tmp_path), 2**60)
    assert room.why_not(str(tmp_path), 1) == ""


@pytest.mark.parametrize("name", ["plain", "with space", "Müller daten", "back\\slash", "no-break\u00a0space"])
def test_a_mount_point_is_known_by_any_name(name: str, tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    (place := tmp_path / name).mkdir()
    code = ("import os, sys; from mpiddp.staging.mounts import mount_of, mounts; "
            "print(os.fsencode(mount_of(sys.argv[1] + '/file', mounts()).path).hex())")
    done = subprocess.run(["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$4" && exec "$@"', "sh",
                           sys.executable, "-c", code, str(place)],
                          capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert bytes.fromhex(done.stdout) == os.fsencode(place)


@pytest.mark.parametrize(("options", "said"), [
    ("size=8m,noexec", "noexec"), ("size=8m,ro", "Read-only file system"), ("size=1m", "1 MiB free")])
def test_folders_that_cannot_be_used(options: str, said: str, tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    code = f"from mpiddp.staging import room; print(room.choose([{str(tmp_path)!r}], 2**21))"
    prepare = f"mount -t tmpfs -o {options} tmpfs {tmp_path} && exec \"$@\""
    done = subprocess.run(["unshare", "--mount", "sh", "-c", prepare, "sh", sys.executable, "-c", code],
                          capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert said in done.stdout


def test_a_cgroups_memory_is_all_that_is_left(group: Path) -> None:
    """That of the job, as Slurm limits it, and not only that of the group below in which its ranks are."""
    code = "from mpiddp.staging import room; print(room.memory_left())"
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
from mpiddp.staging.exchange import Exchange
from mpiddp.staging.manifest import File, chunks
from mpiddp.staging.reading import Read

class Source:
    def read(self, chunk, into):
        if MPI.COMM_WORLD.rank == 1:
            time.sleep(30)
        return [Read(0, 0)] * len(chunk.pieces)

reminded = []
exchange = Exchange(MPI.COMM_WORLD, chunks([File("/x", 2**25, 7, 0o644)], 2), Source(), time.monotonic() + 3,
                    lambda node: TimeoutError(f"node {node} is late"), lambda node, waited_s: reminded.append(node))
begun = time.monotonic()
try:
    exchange.run(lambda: None, lambda *chunk: None)
except TimeoutError as error:
    print(f"rank {MPI.COMM_WORLD.rank}: {error}, {time.monotonic() - begun < 10}\n", end="", flush=True)
time.sleep(1)
MPI.COMM_WORLD.Abort(7)
"""


def test_a_node_whose_file_system_hangs_is_named_in_time(quick: Mpi) -> None:
    done = processes.run(*mpiexec_command(quick, 2, "-c", LATE), timeout=60, env=single_node_environ(quick), cwd=ROOT)
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: node 1 is late, True" for rank in (0, 1)], done.stderr


def test_where_a_mirror_may_lie() -> None:
    environ = {"SLURM_TMPDIR": "/local/7", "TMPDIR": "/tmp/7"}
    assert room.asked("auto", environ) == ["/local/7", "/tmp/7", "/dev/shm"]
    assert room.asked("auto", {}) == ["/dev/shm"]
    assert room.asked("/scratch", environ) == ["/scratch"]


def test_a_model_of_many_nodes() -> None:
    """tests.benchmarks.staging_model: what is read once hardly grows, what each node reads does."""
    done = subprocess.run([sys.executable, "-m", "tests.benchmarks.staging_model"], capture_output=True, text=True,
                          timeout=60, cwd=ROOT, check=True)
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    times = {row[1]: [float(word.split()[0].replace(",", "")) for word in row[2:]] for row in rows[:3]}
    assert times["mpiddp"][-1] > 5 * times["mpiddp --stage, copied"][-1] > 5 * times["mpiddp --stage, again"][0]


def test_the_option_is_seen_before_anything_is_imported() -> None:
    assert early.asked_for(["--quiet", "--stage", "train.py"], {}) == "auto"
    assert early.asked_for(["--stage=/local", "train.py"], {}) == "/local"
    assert early.asked_for(["train.py", "--stage", "3"], {}) == ""
    assert early.asked_for(["-m", "train", "--stage"], {}) == ""
    assert early.asked_for(["./train", "--stage", "2"], {}) == ""
    assert early.asked_for(["--stage", "/local", "train.py"], {}) == "/local"
    assert early.asked_for(["train.py"], {"MPIDDP_STAGE": "1"}) == "auto"
    assert early.asked_for(["train.py"], {"MPIDDP_STAGE": "0"}) == ""
