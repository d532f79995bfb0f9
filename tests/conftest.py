"""Fixtures: the cluster, the quick MPI; and the list of matrix rows that were run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster, missing_components
from tests.support import MPIS, ROOT, Mpi, need

rows_run: list[str] = []


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start the three-node Slurm cluster."""
    need(missing_components())
    with Cluster(visible=[ROOT]) as running:
        yield running


@pytest.fixture
def quick() -> Mpi:
    """Return the MPI for tests in which the MPI makes no difference."""
    return MPIS["mpich"]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note the rows of the matrix whose tests passed."""
    report = (yield).get_result()  # type: ignore[misc]
    if report.when == "call" and report.passed and (row := item.get_closest_marker("row")):
        rows_run.append(" | ".join(row.args))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "row(started_by, mpi): the row of the matrix that a test runs")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the rows of the matrix that ran."""
    if rows_run:
        terminalreporter.section("rows of the matrix that ran")
        for row in dict.fromkeys(rows_run):
            terminalreporter.line(row)
