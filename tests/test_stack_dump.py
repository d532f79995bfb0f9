"""Processes are asked for their stacks, whatever they do, and go on."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from mpiddp.ipc.event_loop import EventLoop
from mpiddp.where import dumper, sampler
from mpiddp.where.process_sample import ProcSample
from mpiddp.where.protocol import ASK_SIGNAL, InspectFds
from mpiddp.where.sampler import INSTALL_HINT, MIN_AGE_S, StackCollector, extract_error
from tests.messages import message
from tests.support import PROGRAMS, ROOT, VENVS

DEADLINE_S = 20
ANSWERING_S = 30  # for all answers of a test, on a machine that is busy


class Asked:
    """A process with a window, its child, and who asks them."""

    def __init__(self, pid: int, child: int, inspect_fds: InspectFds) -> None:
        self.pid, self.child = pid, child
        self.errors: list[Exception] = []
        self._loop = EventLoop(self.errors.append)
        self._collector = StackCollector(self._loop, pid, inspect_fds)

    @property
    def native(self) -> list[str]:
        """Why the stacks of both are not seen, as they were asked last."""
        return [self._collector.native.get(one, "") for one in (self.pid, self.child)]

    def ask(self, signals: bool = True) -> list[str]:
        """Return the functions in which both are, as soon as all is heard that comes in time."""
        began_s = time.monotonic()

        def look() -> None:
            left_s = began_s + self._collector.timeout_s - time.monotonic()
            self._loop.set_timer("over", max(0.0, left_s), end)

        def end() -> None:
            self._loop.stop()

        self._loop.stopped = False
        self._collector.collect([self.child], look, signals)
        look()
        self._loop.run()
        assert self.errors == []
        found = [self._collector.stacks.get(one, []) for one in (self.pid, self.child)]
        return [" ".join(frame.function for frame in frames) for frames in found]


@contextmanager
def windowed(what: str) -> Iterator[Asked]:
    ours, its = socket.socketpair()
    command = [sys.executable, PROGRAMS / "windowed.py", str(its.fileno()), what]
    with ours, its, subprocess.Popen(command, pass_fds=[its.fileno()], cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
                                     start_new_session=True) as process:
        ours.settimeout(DEADLINE_S)
        try:
            words, ends, _, _ = socket.recv_fds(ours, 100, 2)
            descriptor, child = map(int, words.split())
            time.sleep(MIN_AGE_S + 0.2)
            yield Asked(process.pid, child, InspectFds(ends[0], descriptor, ends[1]))
            for end in ends:
                os.close(end)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.process
@pytest.mark.parametrize(("what", "most"), [("calls", 100), ("raises", 10), ("keeps", 2)])
def test_python_that_is_asked_all_the_time_goes_on(what: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal whose handler in C read the stack ended such a process after some hundred questions.

    One whose handlers raise exceptions gets each of them.
    """
    sent: set[int] = set()
    monkeypatch.setattr(sampler.os, "kill", lambda pid, number, kill=os.kill: (sent.add(number), kill(pid, number)))
    with windowed(what) as both:
        end, heard = time.monotonic() + ANSWERING_S, 0
        while heard < most:
            heard += all(what in one for one in both.ask())
            assert time.monotonic() < end, heard
        time.sleep(1.0)  # in which one ends that has lost an exception
        assert {psutil.Process(pid).status() for pid in (both.pid, both.child)} <= {"running", "sleeping"}
    assert sent == {ASK_SIGNAL}


@pytest.mark.process
def test_a_process_that_is_asked_without_signals_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its child, nor is py-spy run, though native code hides both."""
    touched: list[object] = []
    monkeypatch.setattr(sampler.os, "kill", lambda *arguments: touched.append(arguments))
    monkeypatch.setattr(sampler, "dump_stacks", lambda *arguments: touched.append(arguments))
    with windowed("sleeps") as both:
        assert both.ask(signals=False) == ["", ""]
        assert touched == []
        both.ask()
        assert touched != []


@pytest.mark.parametrize("name", ["encode", "file_identity"])
def test_an_exception_of_the_scripts_own_handler_reaches_the_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come in the middle of ours."""
    def interrupted(*_: object) -> None:
        raise TimeoutError

    (reading, writing), (_, its) = os.pipe(), socket.socketpair()
    former = signal.getsignal(ASK_SIGNAL)
    os.set_blocking(writing, False)
    dumper.StackDumper(writing, its.fileno())
    try:
        with monkeypatch.context() as patched, pytest.raises(TimeoutError):
            patched.setattr(dumper, name, interrupted)
            os.kill(os.getpid(), ASK_SIGNAL)
        os.close(reading)
        os.kill(os.getpid(), ASK_SIGNAL)  # which nobody reads
    finally:
        signal.signal(ASK_SIGNAL, former)


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_stays_as_it_was(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        frame = dumper.read_frame(threading.get_ident())
        assert gc.isenabled() == collects
        assert frame is not None
        assert frame.f_code.co_name == "read_frame"
    finally:
        (gc.enable if before else gc.disable)()


def test_a_rank_that_is_gone_with_a_question_unread_is_no_error() -> None:
    errors: list[Exception] = []
    loop = EventLoop(errors.append)
    ours, its = socket.socketpair()
    with ours, its:
        StackCollector(loop, os.getpid(), InspectFds(-1, -1, os.dup(ours.fileno())))
        ours.send(b"?")
        its.close()
        loop.set_timer("over", 0.1, loop.stop)
        loop.run()
    assert errors == []


KINDS = ["sleeps", pytest.param("spins", marks=pytest.mark.alone), "naps"]  # one needs a core


@pytest.mark.process
@pytest.mark.parametrize("what", KINDS)
def test_a_process_tells_where_it_is_or_py_spy_does(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{VENVS / 'base/bin'}:/usr/bin:/bin")
    with windowed(what) as both:
        end = time.monotonic() + 2 * ANSWERING_S
        for _ in range(2):
            found = ["", ""]
            while not all(found):  # one that has had no processor, or prints late, is not heard at each question
                found = [one or new for one, new in zip(found, both.ask(), strict=True)]
                assert time.monotonic() < end
            assert [one.split()[-1] for one in found] == [what, what]


@pytest.mark.process
@pytest.mark.parametrize("what", KINDS[:2])
def test_native_code_hides_a_stack_without_py_spy(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    with windowed(what) as both:
        end, found = time.monotonic() + 2 * ANSWERING_S, ""
        while not found:  # one that has had no processor has not shown that it could have answered
            assert both.ask()[0] == ""
            found = both.native[0]
            assert time.monotonic() < end
    assert found == INSTALL_HINT


@pytest.mark.parametrize(("printed", "told"), [
    (INSTALL_HINT, INSTALL_HINT), ("", message("where/py_spy_printed_nothing")),
    ('[\n  {\n    "pid"\npy-spy did not finish', "py-spy did not finish"),
    ("Error: Permission denied\n\nStack backtrace:\n   0: anyhow", "Error: Permission denied"),
])
def test_what_py_spy_prints_instead_of_a_stack(printed: str, told: str) -> None:
    assert extract_error(printed) == told


def test_who_runs_no_python() -> None:
    """Only one who could have answered, or has slept all the time."""
    before = ProcSample("S", "", 1.0, 1.0, 5, 1.0, 0)
    assert before.has_slept(before)
    assert not before._replace(turns=6).has_slept(before)
    assert not before._replace(state="R").has_slept(before)
    assert not before._replace(turns=0).has_slept(before._replace(turns=0))
    assert not before._replace(ran_s=1.01, turns=50).could_answer(before)
    assert before._replace(ran_s=1.2).could_answer(before)
