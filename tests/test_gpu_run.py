"""tests/gpu/run without a GPU: it installs what it needs, and each of its tests tells why it skips."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import processes
from tests.support import ROOT, VENVS, check, need

PYTHON = VENVS / "base/bin/python"
DOCUMENT = ROOT / "tests/gpu/README.md"
MOST_MB = 60


@pytest.mark.process
@pytest.mark.thorough("the tests of GPUs can be collected")
def test_a_machine_without_a_network(tmp_path: Path) -> None:
    need([] if os.geteuid() == 0 else ["root, to take the network away"])
    (download,) = re.findall(r"^    python (-m pip download .*)$", DOCUMENT.read_text(), re.MULTILINE)
    wheels = tmp_path / "wheels"
    download = download.replace("--dest wheels", f"--dest {wheels}")
    check(processes.run(str(PYTHON), *download.split(), timeout=200, cwd=ROOT))
    assert sum(file.stat().st_size for file in wheels.iterdir()) < MOST_MB * 10**6
    env = {**os.environ, "PYTHON": str(PYTHON), "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path),
           "PYTEST_ADDOPTS": ""}
    command = ("unshare", "--net", str(ROOT / "tests/gpu/run"), "--wheels", "wheels", "--table", "table.md")
    done = check(processes.run(*command, timeout=200, env=env, cwd=tmp_path))
    (summary,) = re.findall(r"^(\d+) skipped in ", done.stdout, re.MULTILINE)
    reasons = re.findall(r"^SKIPPED \[(\d+)\] .*: no GPU: torch \S+ sees none$", done.stdout, re.MULTILINE)
    assert sum(map(int, reasons)) == int(summary) >= 13, done.stdout
    assert not list(tmp_path.glob("mpiddp-gpu-*"))


@pytest.mark.process
def test_a_python_without_torch() -> None:
    done = processes.run(str(ROOT / "tests/gpu/run"), timeout=60, env={**os.environ, "PYTHON": "/usr/bin/python3"})
    assert done.returncode == 2
    assert "has no torch; name one that has by PYTHON=" in done.stderr
