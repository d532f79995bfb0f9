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
import os, signal, subprocess, time
from mpiddp.discovery.process import WatchedProcess
child = subprocess.Popen(["sleep", "60"])
process = WatchedProcess(child.pid)
assert not os.path.exists("/proc/self")
assert process.wait_status() is None
assert not process.is_stopped() and not process.has_handler(signal.SIGTERM) and not process.was_out_of_memory()
child.kill()
while True:
    try:
        status = process.wait_status()
    except ProcessLookupError:
        status = 0
    if status is not None:
        break
    time.sleep(0.01)
child.wait()
print("over", status in (0, 9))
"""


@pytest.mark.process
def test_a_process_that_is_stopped_and_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = WatchedProcess(child.pid)
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not process.is_stopped():
            assert time.monotonic() < deadline
        assert process.wait_status() is None
        child.kill()
        while (status := process.wait_status()) is None:
            assert time.monotonic() < deadline
        assert status == signal.SIGKILL


@pytest.mark.process
def test_a_process_that_is_not_there() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        WatchedProcess(child.pid)


@pytest.mark.process
def test_a_process_that_proc_does_not_show() -> None:
    """It is no process that is gone: an agent would take its rank for dead, and cancel the others' step."""
    need([] if os.geteuid() == 0 else ["root's right to mount a /proc that is empty"])
    hide = "mount -t tmpfs none /proc && exec \"$@\""
    done = subprocess.run(["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable, "-c", WITHOUT_PROC], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert check(done).stdout == "over True\n"
