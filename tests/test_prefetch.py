"""The modules that are read in parallel: they are those of a start, and load as by Python's own imports."""

from __future__ import annotations

import importlib
import inspect
import os
import py_compile
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.staging import prefetch
from mpiddp.staging.prefetch import COMMANDS, PrefetchedFinder
from tests.support import ROOT, Mpi, alone, check

SLOW = """import sys, time
sys.argv, sys.orig_argv = [{first!r}], ["python", "-m", {words}]
clock = iter(range(10**6))
time.perf_counter = lambda: next(clock)
import mpiddp.launch
print(type(mpiddp.launch.__loader__).__module__)
"""


@pytest.mark.parametrize(("first", "words", "read"), [
    ("-m", '"mpiddp", "train.py"', True), ("/venv/bin/mpiddp", '"cProfile"', True), ("train.py", '"cProfile"', False),
    ("-m", '"mpiddp.where", "mpiddp"', False),
    ("-m", '"mpiddp.supervise", "srun", "python", "-m", "mpiddp"', False)])
def test_where_opening_a_file_takes_long_modules_are_read_ahead(first: str, words: str, read: bool, quick: Mpi) -> None:
    """As a clock has it that is a second ahead at each look; not by other commands."""
    done = check(alone(quick, "-c", SLOW.format(first=first, words=words)))
    assert (done.stdout == f"{prefetch.__name__}\n") == read


def test_all_modules_of_a_start_are_read(quick: Mpi) -> None:
    """Those of the commands are not."""
    code = ("import sys, mpiddp.staging.prefetch as it; read = it.PrefetchedFinder('mpiddp', it.FOLDER, it.COMMANDS); "
            "print(*(name for name, _ in read._files), *(name for name in sys.modules if name.startswith('mpiddp')))")
    names = set(check(alone(quick, "-c", code)).stdout.split())
    files = {path.relative_to(ROOT) for path in (ROOT / "mpiddp").rglob("*.py") if path.stem != "__main__"}
    wanted = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files
              if path.parts[1] not in COMMANDS}
    assert names == wanted


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefetchedFinder]:
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
    found = PrefetchedFinder("laden", str(tmp_path / "laden"))
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
    assert [type(module.__loader__).__module__ == prefetch.__name__ for module in (room, one, old, bare)] == [
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
