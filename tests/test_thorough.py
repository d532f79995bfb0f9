"""What the quick run leaves out has a reason, and is listed."""

from __future__ import annotations

import re

from tests.support import Mpi, alone, check

ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (.*) \|$", re.MULTILINE)


def test_the_table_says_what_runs_in_the_place_of_what_is_left_out(quick: Mpi) -> None:
    """A test that has no case in tests/run names another one in its marker."""
    rows = ROW.findall(check(alone(quick, "-m", "tests.left_out")).stdout)
    assert "test_an_end" in {name for name, *_ in rows}
    assert [name for name, _, _, instead in rows if not instead] == []
    assert all(int(some) < int(every) for _, some, every, _ in rows)
