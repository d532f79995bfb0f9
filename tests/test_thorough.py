"""What the quick run leaves out is told of."""

from __future__ import annotations

import re

from tests.support import ROOT, Mpi, alone, check


def test_the_table_names_all_that_is_left_out(quick: Mpi) -> None:
    listed = check(alone(quick, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--collect-only", "-m", "thorough"))
    left_out = set(re.findall(r"::(\w+)", listed.stdout))
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "tests/README.md").read_text(), re.MULTILINE)
    assert "test_an_end" in left_out
    assert left_out == {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
