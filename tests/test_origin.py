"""Errors that others pass on: which error it was first, and where."""

from __future__ import annotations

import multiprocessing
import re
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import joblib
import pytest
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

from mpiddp.plan.verdict import CONSEQUENCE, OWN, Verdict
from mpiddp.run.failure import describe
from mpiddp.run.origin import origin, read
from mpiddp.show.report import block

HERE = str(Path(__file__).resolve())


class Broken(Dataset[int]):
    """Data in which every item is missing."""

    def __getitem__(self, index: int) -> int:
        raise KeyError(f"label_{index}")

    def __len__(self) -> int:
        return 8


def test_an_error_where_no_module_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script that has opened too many files."""
    monkeypatch.setitem(sys.modules, "mpiddp.run.origin", None)
    error = OSError(24, "Too many open files")
    assert describe(error, 0, "n0")[2:4] == (OWN, "OSError: [Errno 24] Too many open files")


def seven(_: object) -> None:
    """Raise."""
    raise ValueError("seven")


def of_loader() -> None:
    """Read what cannot be read, in a worker."""
    list(DataLoader(Broken(), num_workers=1, multiprocessing_context="fork"))


def of_pool() -> None:
    """Raise in a process of a pool."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(seven, [1])


def of_executor() -> None:
    """Raise in a process of an executor."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(seven, 1).result()


def of_spawn() -> None:
    """Raise in a process that torch has started."""
    torch.multiprocessing.start_processes(seven, nprocs=1, start_method="fork")


def of_cause() -> None:
    """Pass an error on as the cause of another one."""
    try:
        seven(1)
    except ValueError as error:
        raise RuntimeError("step failed") from error


def of_two_causes() -> None:
    """Pass it on twice."""
    try:
        of_cause()
    except RuntimeError as error:
        raise OSError("epoch failed") from error


def of_group() -> None:
    """Raise several at once."""
    errors = []
    for one in (1, 2):
        try:
            seven(one)
        except ValueError as error:
            errors.append(error)
    raise ExceptionGroup("two", errors)  # noqa: F821 (from Python 3.11 on)


def of_loader_in_cause() -> None:
    """Pass a worker's error on."""
    try:
        of_loader()
    except KeyError as error:
        raise RuntimeError("epoch failed") from error


def raised(by: Callable[[], object]) -> BaseException:
    """Return what a function raises."""
    with pytest.raises(BaseException) as found:
        by()
    return found.value


def of_joblib() -> None:
    """Raise in a process of joblib's."""
    joblib.Parallel(n_jobs=2)([joblib.delayed(seven)(1)])


def of_nested_group() -> None:
    """Raise a group within a cause of another error."""
    try:
        of_group()
    except Exception as error:
        raise RuntimeError("step failed") from error


def of_text() -> None:
    """Raise an error that carries another one's traceback as text, as ray's do."""
    try:
        seven(1)
    except ValueError:
        raise RuntimeError(f"task failed:\n{traceback.format_exc()}") from None


GROUPS = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 has groups")


@pytest.mark.parametrize(("by", "cause", "how", "function"), [
    (of_loader, "KeyError: 'label_0'", "in DataLoader worker process 0", "__getitem__"),
    (of_pool, "ValueError: seven", "in another process", "seven"),
    (of_executor, "ValueError: seven", "in another process", "seven"),
    (of_spawn, "ValueError: seven", "in Process 0", "seven"),
    (of_joblib, "ValueError: seven", "in another process", "seven"),
    (of_cause, "ValueError: seven", "re-raised as RuntimeError: step failed", "seven"),
    (of_two_causes, "ValueError: seven", "re-raised as OSError: epoch failed", "seven"),
    pytest.param(of_group, "ValueError: seven", "and 1 more in a group", "seven", marks=GROUPS),
    pytest.param(of_nested_group, "ValueError: seven", "and 1 more in a group", "seven", marks=GROUPS),
    (of_loader_in_cause, "KeyError: 'label_0'", "in DataLoader worker process 0", "__getitem__"),
    (of_text, "ValueError: seven", "", "seven"),
])
def test_the_first_line_of_a_report_has_the_error_that_was_first(
    by: Callable[[], object], cause: str, how: str, function: str
) -> None:
    found = describe(raised(by), 1, "n1")
    assert found.kind == OWN
    words = re.escape(f"{cause} ({how}{', ' * bool(how)}test_origin.py:")
    told = re.fullmatch(rf"{words}(\d+) in {function}\)", found.cause)
    assert told, found.cause
    assert found.where == f"{HERE}, line {told[1]}, in {function}"
    assert block(Verdict(found), None, 7.0).splitlines()[0] == f"mpiddp: failed: rank 1 on n1: {found.cause}"


def test_an_error_of_ones_own_is_told_as_it_is() -> None:
    assert describe(raised(lambda: seven(1)), 1, "n1").cause == "ValueError: seven"


def test_the_texts_of_others() -> None:
    """As joblib's, ray's and torchelastic's errors have them."""
    lines = ['  File "/home/me/deep.py", line 6, in load', "    open(x)", "FileNotFoundError: [Errno 2] x: 'y'"]
    text = "\n".join(["words", '"""', "Traceback (most recent call last):", *lines, '"""', ""])
    found = read(text)
    assert found == ("FileNotFoundError: [Errno 2] x: 'y'", "/home/me/deep.py, line 6, in load", "")
    assert origin(RuntimeError(text)) == found
    assert read("Traceback (most recent call last):\nno frames") is None


def test_the_loss_of_a_peer_stays_one() -> None:
    def lost() -> None:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as error:
            raise ValueError("step failed") from error

    assert describe(raised(lost), 1, "n1").kind == CONSEQUENCE


def test_odd_errors() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert origin(OddError()) is None
    assert origin(BrokenProcessPool("terminated abruptly")) is None
    assert origin(one) is None  # after as many turns as are made
