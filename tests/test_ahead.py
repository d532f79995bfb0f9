"""The modules that are read ahead: they are those of a start, and load as by Python's own imports."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import py_compile
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.staging import ahead
from mpiddp.staging.ahead import COORDINATOR, MODULES, SENTINEL, STAGING, Finder
from tests.support import ROOT, Mpi, alone, check, mpiexec

FIRST = {"stages", "staging", "staging.ahead"}
PRINT = """import sys
if __name__ == "__main__":
    import os
    if os.environ.get("RANK") == "1":
        import mpiddp.sentinel.process
        print(sorted(name[7:] for name in sys.modules if name.startswith("mpiddp.")))
"""


def test_the_modules_of_a_start_are_read(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "modules.py").write_text(PRINT)
    line, = check(mpiexec(quick, 2, "--quiet", tmp_path / "modules.py")).stdout.splitlines()
    assert set(ast.literal_eval(line)) - FIRST == set(MODULES.split())
    code = ("import sys, mpiddp.join.watched; before = {*sys.modules}; import mpiddp.sentinel.process; "
            "its = {*sys.modules}; import mpiddp.sentinel.office; "
            "print([[name[7:] for name in some if name.startswith('mpiddp.')] for some in "
            "(its - before, {*sys.modules} - its)])")
    sentinel, coordinator = ast.literal_eval(check(alone(quick, "-c", code)).stdout)
    assert set(sentinel) >= set(SENTINEL.split())
    assert {name for name in sentinel if name.startswith("sentinel")} <= set(SENTINEL.split())
    assert set(coordinator) == set(COORDINATOR.split())
    files = (ROOT / "mpiddp/staging").glob("[a-z]*.py")
    assert {f"staging.{one.stem}" for one in files} - FIRST == set(STAGING.split())


SLOW = """import sys, time
sys.argv, sys.orig_argv = ["-m"], ["python", "-m", {words}]
clock = iter(range(10**6))
time.perf_counter = lambda: next(clock)
import mpiddp.launch
print(type(mpiddp.launch.__loader__).__module__)
"""


@pytest.mark.parametrize(("words", "read"), [
    ('"mpiddp", "train.py"', True), ('"mpiddp.where", "mpiddp"', False),
    ('"mpiddp.supervise", "srun", "python", "-m", "mpiddp"', False)])
def test_where_opening_a_file_takes_long_modules_are_read_ahead(words: str, read: bool, quick: Mpi) -> None:
    """As a clock has it that is a second ahead at each look; not by other commands."""
    done = check(alone(quick, "-c", SLOW.format(words=words)))
    assert (done.stdout == f"{ahead.__name__}\n") == read


@pytest.mark.parametrize("first", [True, False])
def test_a_sentinel_reads_ahead_what_it_needs_itself(first: bool, quick: Mpi) -> None:
    """Of the sentinels none but rank 0's needs the coordinator."""
    code = SLOW.format(words='"mpiddp", "train.py"').replace("mpiddp.launch\n", "mpiddp\n").replace(
        "print(type(mpiddp.launch.__loader__).__module__)",
        f"from mpiddp.staging import ahead\nahead.prepare_sentinel({first})\n"
        "import mpiddp.sentinel.process, mpiddp.sentinel.office\n"
        "print(*(type(one.__loader__).__module__ for one in (mpiddp.sentinel.process, mpiddp.sentinel.office)))")
    process, office = check(alone(quick, "-c", code)).stdout.split()
    assert process == ahead.__name__
    assert (office == ahead.__name__) == first


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Finder]:
    """Return one that has read three modules, one of them out of date, and not a fourth, which is not compiled."""
    room = tmp_path / "laden/room"
    room.mkdir(parents=True)
    (tmp_path / "laden/__init__.py").touch()
    for path, text in ((room / "__init__.py", "from .one import ONE"), (room / "one.py", "ONE = 1"),
                       (room / "old.py", "OLD = 1"), (room / "bare.py", "BARE = 1")):
        path.write_text(text)
        if path.stem != "bare":
            py_compile.compile(str(path))
    (room / "old.py").write_text("OLD = 'new'")
    os.utime(room / "old.py", (1, 1))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Finder("laden", str(tmp_path / "laden"), ["room", "room.one", "room.old", "room.bare", "room.none"])
    sys.meta_path.insert(0, found)
    yield found
    sys.meta_path.remove(found)
    for name in [one for one in sys.modules if one.startswith("laden")]:
        del sys.modules[name]


@pytest.mark.usefixtures("finder")
def test_modules_load_as_ever(tmp_path: Path) -> None:
    room, old, bare = (importlib.import_module(f"laden.room{name}") for name in ("", ".old", ".bare"))
    one = sys.modules["laden.room.one"]
    assert (room.ONE, old.OLD, bare.BARE) == (1, "new", 1)
    assert [type(module.__loader__).__module__ == ahead.__name__ for module in (room, one, old, bare)] == [
        True, True, True, False]
    assert room.__path__ == [str(tmp_path / "laden/room")]
    assert (one.__file__, one.__cached__) == (str(tmp_path / "laden/room/one.py"), importlib.util.cache_from_source(
        str(tmp_path / "laden/room/one.py")))
    assert inspect.getsource(one) == "ONE = 1\n"
    (tmp_path / "laden/room/one.py").write_text("ONE = 'other'")
    importlib.invalidate_caches()
    assert importlib.reload(one).ONE == "other"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("laden.room.none")
