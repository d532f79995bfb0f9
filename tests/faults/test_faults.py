"""A part of the fault matrix: each way to end under one launcher or another; with --all, each pair of its values."""

from __future__ import annotations

import itertools

import pytest

from tests.faults.matrix import LAUNCHERS, MOMENTS, STATUSES, WHOLE, Launcher, run
from tests.support import need

OMPI4, OMPI5, HYDRA, PMIX, PMI2 = LAUNCHERS
LIGHT = [  # ends by Python, and by a signal under Open MPI: others of the kind have torch
    (HYDRA, "exit", "import", -1), (HYDRA, "message", "end", -1), (HYDRA, "thread", "before", 0),
    (HYDRA, "interrupt", "loop", -1), (HYDRA, "atexit", "end", 0), (OMPI5, "SIGSEGV", "loop", -1),
    (OMPI5, "SIGTERM", "loop", -1), (OMPI5, "SIGFPE", "end", -1),
    (OMPI4, "SIGHUP", "loop", 0), (HYDRA, "raise", "import", 0), (OMPI5, "_exit", "loop", 0),
    (OMPI4, "native-exit", "loop", 0), (OMPI5, "SIGUSR1", "before", -1),
]
CELLS = [
    *((launcher, "raise", "loop", -1) for launcher in LAUNCHERS),
    *((launcher, "SIGKILL", "loop", -1) for launcher in (OMPI4, PMI2)),
    (HYDRA, "SIGSTOP", "end", 0), (HYDRA, "loader", "loop", 0), *LIGHT,
]
RANKS = 0, -1
PAIRS = [  # each value of a dimension meets each of another: 95 of 760 cells, which `python -m tests.faults` runs
    (launcher, kind, MOMENTS[(row + column) % len(MOMENTS)], RANKS[(row // len(MOMENTS) + column) % len(RANKS)])
    for row, kind in enumerate(STATUSES) for column, launcher in enumerate(LAUNCHERS)
]
MATRIX = [
    *PAIRS,
    *((launcher, kind, "loop", -1) for kind, launcher in itertools.product(("raise", "SIGKILL", "SIGSTOP"), WHOLE)),
]


def name(cell: tuple[Launcher, str, str, int]) -> str:
    """Return the name of a cell."""
    launcher, *rest = cell
    return "-".join([launcher.name.replace(" ", "-"), *["whole"] * launcher.whole, *map(str, rest)])


@pytest.mark.mpi
@pytest.mark.parametrize(("launcher", "kind", "moment", "rank"), [
    *(pytest.param(*cell, id=name(cell), marks=[pytest.mark.light] * (cell in LIGHT)) for cell in CELLS),
    *(pytest.param(*cell, id=name(cell), marks=pytest.mark.thorough) for cell in MATRIX if cell not in CELLS),
])
def test_an_end(launcher: Launcher, kind: str, moment: str, rank: int, request: pytest.FixtureRequest) -> None:
    need(launcher.mpi.missing())
    outcome = run(launcher, kind, moment, rank, request.getfixturevalue("cluster") if launcher.srun else None)
    assert outcome.problems == [], outcome.stderr


def test_every_way_to_end_is_among_them() -> None:
    """But for signals that are like others."""
    assert set(STATUSES) - {kind for _, kind, _, _ in CELLS} == {"SIGABRT", "SIGBUS", "SIGUSR2"}


def test_each_value_meets_each_of_another_dimension() -> None:
    dimensions = LAUNCHERS, STATUSES, MOMENTS, RANKS
    for first, second in itertools.combinations(range(len(dimensions)), 2):
        met = {(cell[first], cell[second]) for cell in PAIRS}
        assert met == set(itertools.product(dimensions[first], dimensions[second]))


@pytest.mark.light
@pytest.mark.mpi
def test_all_ranks_fail_at_once() -> None:
    """One of them is named; the others are quiet."""
    need(HYDRA.mpi.missing())
    outcome = run(HYDRA, "raise", "before", None, None)
    assert outcome.problems == [], outcome.stderr
    assert outcome.stderr.count("Traceback (most recent call last)") == 1
