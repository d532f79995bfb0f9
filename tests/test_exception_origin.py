"""Errors that others pass on: which error it was first, and where."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import socket
import sys
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path

import joblib
import pytest
import torch.distributed
from torch.utils.data import DataLoader, Dataset

from mpiddp.failure.exception import find_traceback_line, list_related, make_exit_report, make_report
from mpiddp.failure.report import format_failure
from mpiddp.failure.root_cause import ReportKind, RootCause
from mpiddp.failure.traceback import find_origin, parse_traceback
from tests.messages import message
from tests.support import free_port

HERE = str(Path(__file__).resolve())


class Broken(Dataset[int]):
    """Data in which every item is missing."""

    def __getitem__(self, index: int) -> int:
        raise KeyError(f"label_{index}")

    def __len__(self) -> int:
        return 8


def test_an_error_where_no_module_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script that has opened too many files."""
    monkeypatch.setitem(sys.modules, "mpiddp.failure.traceback", None)
    error = OSError(24, "Too many open files")
    assert make_report(error, 0, "n0")[2:4] == (ReportKind.ERROR, "OSError: [Errno 24] Too many open files")


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


@pytest.fixture(autouse=True)
def _no_workers_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let multiprocessing forget the processes that other tests have left to it: reports name them."""
    monkeypatch.setattr(multiprocessing.process, "_dangling", weakref.WeakSet())


GROUPS = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 has groups")


@pytest.mark.process
@pytest.mark.parametrize(("by", "cause", "how", "function"), [
    (of_loader, "KeyError: 'label_0'", "in DataLoader worker process 0", "__getitem__"),
    (of_pool, "ValueError: seven", "in another process", "seven"),
    (of_executor, "ValueError: seven", "in another process", "seven"),
    (of_spawn, "ValueError: seven", "in Process 0", "seven"),
    (of_joblib, "ValueError: seven", "in another process", "seven"),
    (of_cause, "ValueError: seven", message("launch/reraised_as", error="RuntimeError: step failed"), "seven"),
    (of_two_causes, "ValueError: seven", message("launch/reraised_as", error="OSError: epoch failed"), "seven"),
    pytest.param(of_group, "ValueError: seven", message("launch/more_in_group", number=1), "seven", marks=GROUPS),
    pytest.param(of_nested_group, "ValueError: seven", message("launch/more_in_group", number=1), "seven",
                 marks=GROUPS),
    (of_loader_in_cause, "KeyError: 'label_0'", "in DataLoader worker process 0", "__getitem__"),
    (of_text, "ValueError: seven", "", "seven"),
])
def test_the_first_line_of_a_report_has_the_error_that_was_first(
    by: Callable[[], object], cause: str, how: str, function: str
) -> None:
    found = make_report(raised(by), 1, "n1")
    assert found.kind == ReportKind.ERROR
    words = re.escape(f"{cause} ({how}{', ' * bool(how)}test_exception_origin.py:")
    told = re.fullmatch(rf"{words}(\d+) {function}\)", found.cause)
    assert told, found.cause
    assert found.where == f"{HERE}:{told[1]} {function}"
    assert format_failure(RootCause(found), None, 7.0).splitlines()[0] == f"mpiddp: failed: rank 1 on n1: {found.cause}"


def test_an_error_of_ones_own_is_told_as_it_is() -> None:
    assert make_report(raised(lambda: seven(1)), 1, "n1").cause == "ValueError: seven"


def test_the_texts_of_others() -> None:
    """As joblib's, ray's and torchelastic's errors have them."""
    lines = ['  File "/home/me/deep.py", line 6, in load', "    open(x)", "FileNotFoundError: [Errno 2] x: 'y'"]
    text = "\n".join(["words", '"""', "Traceback (most recent call last):", *lines, '"""', ""])
    found = parse_traceback(text)
    assert found == ("FileNotFoundError: [Errno 2] x: 'y'", "/home/me/deep.py:6 load", "", False)
    assert find_origin(RuntimeError(text)) == found
    assert found is not None
    assert not found.is_loss
    assert parse_traceback("Traceback (most recent call last):\nno frames") is None


def test_the_loss_of_a_peer_stays_one() -> None:
    for by in (lost_cause, lost_context, lost_suppressed, lost_exit):
        found = make_report(raised(by), 1, "n1")
        assert found.kind == ReportKind.SECONDARY, by
        assert found.cause.startswith("RuntimeError: [gloo/pair.cc:553] Connection closed by peer ("), found.cause


def lose() -> None:
    """Lose a peer, as gloo says it."""
    raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer")


def lost_cause() -> None:
    """Pass it on as a cause."""
    try:
        lose()
    except RuntimeError as error:
        raise ValueError("step failed") from error


def lost_context() -> None:
    """Raise an error while it is handled."""
    try:
        lose()
    except RuntimeError:
        seven(1)


def lost_suppressed() -> None:
    """Hide it."""
    try:
        lose()
    except RuntimeError:
        raise ValueError("step failed") from None


def lost_exit() -> None:
    """Log it and exit, as hydra does."""
    try:
        lost_cause()
    except ValueError:
        sys.exit(1)


def own_exit() -> None:
    """Exit because of an error of one's own."""
    try:
        seven(1)
    except ValueError:
        sys.exit(3)


def test_an_exit_is_told_with_the_error_that_was_caught() -> None:
    found = make_report(raised(own_exit), 1, "n1")
    then = re.escape(message("launch/then_error", error="sys.exit(3)"))
    assert re.fullmatch(rf"ValueError: seven \({then}, test_exception_origin\.py:\d+ seven\)", found.cause)
    assert (found.kind, found.status) == (ReportKind.ERROR, 3)
    assert found.where.endswith(" seven")
    assert make_report(raised(lambda: sys.exit(3)), 1, "n1").cause == "sys.exit(3)"
    assert make_report(raised(lambda: sys.exit(0)), 1, "n1").status == 1


def test_an_os_exit_while_an_error_is_handled() -> None:
    try:
        lose()
    except RuntimeError:
        found = make_exit_report(7, sys._getframe(), 1, "n1")
    then = re.escape(message("launch/then_error", error="os._exit(7)"))
    assert re.fullmatch(rf"RuntimeError: .* \({then}, test_exception_origin\.py:\d+ lose\)", found.cause)
    assert (found.kind, found.status) == (ReportKind.SECONDARY, 7)
    plain = make_exit_report(7, sys._getframe(), 1, "n1")
    assert (plain.kind, plain.cause) == (ReportKind.ERROR, "os._exit(7)")
    assert plain.where.startswith(f"{HERE}:")


def test_an_exit_after_an_interrupt_is_one() -> None:
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(5)

    found = make_report(raised(interrupted), 1, "n1")
    assert (found.kind, found.signal, found.status) == (ReportKind.ERROR, "SIGINT", 5)


@GROUPS
def test_a_group_is_a_loss_if_all_its_errors_are() -> None:
    losses = [raised(lose), raised(lost_context)]
    one_own = [*losses, raised(lambda: seven(1))]
    group = ExceptionGroup("two", losses)  # noqa: F821 (from Python 3.11 on)
    assert make_report(group, 1, "n1").kind == ReportKind.SECONDARY
    found = make_report(ExceptionGroup("three", one_own), 1, "n1")  # noqa: F821
    assert found.kind == ReportKind.ERROR
    assert found.cause.startswith(f"ValueError: seven ({message('launch/more_in_group', number=2)}, ")


def refused() -> None:
    """Connect to a server that is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        socket.create_connection(free.getsockname(), timeout=5)


def broken() -> None:
    """Write to a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        os.write(writing, b"x")
    finally:
        os.close(writing)


def unmet() -> None:
    """Ask a store that is not there."""
    torch.distributed.TCPStore("127.0.0.1", free_port(), is_master=False, timeout=timedelta(seconds=1))


def test_where_a_connection_was_lost_decides() -> None:
    """A server of the script's own is no peer."""
    assert [make_report(raised(by), 1, "n1").kind for by in (refused, broken)] == [ReportKind.ERROR,
                                                                                   ReportKind.ERROR]
    assert make_report(raised(unmet), 1, "n1").kind == ReportKind.SECONDARY


MPICHS = "Message truncated, error stack:\ninternal_Recv(339): MPI_Recv(buf=0x5) failed\nwait(74): 16 bytes received\n"


@pytest.mark.parametrize(("text", "cause"), [
    (MPICHS, "Error: Message truncated: wait(74): 16 bytes received"),
    ("MPI_ERR_TRUNCATE: message truncated", "Error: MPI_ERR_TRUNCATE: message truncated"),
    ("Error(s) in loading state_dict for Linear:\n\tMissing key(s): \"bias\".",
     "Error: Error(s) in loading state_dict for Linear: Missing key(s): \"bias\"."),
    ("NCCL error in: x.hpp:268, unhandled\nncclSystemError: failed\nLast error:\nConnect to 10.0.0.1 failed",
     "Error: NCCL error in: x.hpp:268, unhandled: Connect to 10.0.0.1 failed"),
    ("\nseven\nmore", "Error: seven"), ("seven\nmore", "Error: seven"), ("", "Error"),
])
def test_the_line_that_tells_most(text: str, cause: str) -> None:
    class Error(Exception):
        pass

    assert make_report(Error(text), 1, "n1").cause == cause
    quoted = f"Traceback (most recent call last):\n  File \"deep.py\", line 6, in load\n{text and f'Error: {text}'}"
    assert not text or (found := parse_traceback(quoted)) is None or found.cause == cause


def test_where_a_runner_runs_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the likes of coverage, `__main__` is a file of the library."""
    script = tmp_path / "script.py"
    script.write_text("import json\ndef load():\n    json.loads('{')\nload()\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", joblib.__file__, raising=False)
    error = raised(lambda: runpy.run_path(str(script)))
    assert find_traceback_line(error.__traceback__) == f"{script}:3 load"


def test_odd_errors() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    class NoGroupError(Exception):
        exceptions = None

    class RaisingError(Exception):
        @property
        def exceptions(self) -> None:
            raise RuntimeError("none")

    one, other = ValueError("one"), ValueError("other")
    assert list_related(raising := RaisingError()) == [raising]
    assert list_related(no_group := NoGroupError()) == [no_group]
    one.__cause__, other.__cause__ = other, one
    assert find_origin(OddError()) is None
    assert find_origin(BrokenProcessPool("terminated abruptly")) is None
    assert find_origin(one) is None  # after as many turns as are made
