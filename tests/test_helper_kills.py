"""Agents and relays are killed at random moments: no training is harmed, and no line is lost that came later."""

from __future__ import annotations

import pytest

from tests.helper_kills import kill_helpers
from tests.support import EACH_MPI, Mpi, need


@pytest.mark.thorough("test_relay_killed.py and test_agent_killed.py kill relays and agents at chosen moments")
@pytest.mark.parametrize("mpi", EACH_MPI)
def test_some_kills(mpi: Mpi) -> None:
    need(mpi.missing())
    assert kill_helpers(mpi, 8, seed=1)
