"""What the kernel tells of another process, and what is known where /proc does not show it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mpiddp.discovery.process import WatchedProcess
from tests.support import ROOT, check, need

WITHOUT_PROC = """
import os, signal, subprocess
from mpiddp.discovery.process import WatchedProcess
child = subprocess.Popen(["sleep", "60"])
process = WatchedProcess(child.pid)
assert not os.path.exists("/proc/self")
assert not process.is_stopped() and not process.has_handler(signal.SIGTERM) and not process.was_out_of_memory()
child.kill()
child.wait()
print("over")
"""


@pytest.mark.process
def test_a_process_that_is_stopped() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = WatchedProcess(child.pid)
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not process.is_stopped():
            assert time.monotonic() < deadline
        child.kill()
        child.wait()
    assert not process.is_stopped()


@pytest.mark.process
def test_the_handlers_of_a_process() -> None:
    handles = "import signal, sys; signal.signal(15, print); print(); sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", handles], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = WatchedProcess(child.pid)
        assert process.has_handler(signal.SIGTERM)
        assert not process.has_handler(signal.SIGUSR1)


@pytest.mark.process
def test_a_process_that_proc_does_not_show() -> None:
    need([] if os.geteuid() == 0 else ["root's right to mount a /proc that is empty"])
    hide = "mount -t tmpfs none /proc && exec \"$@\""
    done = subprocess.run(["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable, "-c", WITHOUT_PROC], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert check(done).stdout == "over\n"
