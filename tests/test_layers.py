"""The layers of tests, and what tests/run selects of them."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter, defaultdict

import pytest

from tests.support import ROOT, Mpi, alone, check


def test_a_unit_test_can_start_no_program() -> None:
    with pytest.raises(AssertionError, match=r"has none of subprocess\.Popen: mark it"):
        subprocess.run(["true"])


def test_a_unit_test_cannot_fork() -> None:
    with pytest.raises(AssertionError, match=r"has none of os\.fork: mark it"):
        os.fork()


def test_every_test_is_selected_once(quick: Mpi) -> None:
    """One of the four calls of pytest in tests/run has it, or the one for GPUs."""
    selections = [*re.findall(r'-m "([^"]*)\$without"', (ROOT / "tests/run").read_text()), "gpu"]
    assert len(selections) == 5
    code = ("from tests.left_out import collect\n"
            "for test in collect(): print(*{mark.name for mark in test.iter_markers()})")
    marks = Counter(frozenset(line.split()) for line in check(alone(quick, "-c", code)).stdout.splitlines())
    assert marks.total() > 3000
    for names in marks:
        markers = defaultdict(bool, dict.fromkeys(names, True))
        assert sum(bool(eval(selection, {}, markers)) for selection in selections) == 1, names
