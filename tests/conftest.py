"""Fixtures: the cluster, the quick MPI; which tests run side by side; and the list of matrix rows that were run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cgroups import limited
from tests.cluster import Cluster, debian13, missing_components
from tests.support import MPIS, ROOT, Mpi, need, scratch

CLUSTERS_OWN = ROOT / "tests/cluster/test_cluster.py"
MARKERS = (
    "cluster: starts the cluster or uses it, as its fixture and launchers tell: no two such tests may run at a time",
    "row(started_by, mpi): the row of the matrix that a test runs",
    "thorough(instead): left out by tests/run, which has something else instead; run by tests/run --all",
    "gpu: needs a GPU; run by tests/gpu/run",
    "alone: measures time or fills the machine, so that nothing else may run beside it",
)

LIMIT_BYTES = 700 * 2**20  # two ranks with torch need half of it


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Start the three-node Slurm cluster; where the fixture's parameter is "debian13", in that root folder."""
    need(missing_components())
    options = {}
    if getattr(request, "param", None) == "debian13":
        need(debian13.missing_components())
        options = debian13.cluster_options()
    with Cluster(visible=[ROOT], **options) as running:
        yield running


@pytest.fixture
def quick() -> Mpi:
    """Return the MPI for tests in which the MPI makes no difference."""
    return MPIS["mpich"]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and make the folder that all processes of this run share, also for what jobs note."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    os.environ["XDG_STATE_HOME"] = f"{scratch()}/state"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the cluster, and note the matrix rows of tests."""
    for item in items:
        if uses_cluster(item):
            item.add_marker(pytest.mark.cluster)
        if row := item.get_closest_marker("row"):
            item.user_properties.append(("row", " | ".join(row.args)))


def uses_cluster(item: pytest.Item) -> bool:
    """Tell whether a test starts the cluster, or uses it: by its fixture, or by a launcher that is srun."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return (item.path == CLUSTERS_OWN or "cluster" in getattr(item, "fixturenames", ())
            or any(getattr(value, "srun", False) for value in values))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the rows of the matrix that ran."""
    rows = [value for report in terminalreporter.stats.get("passed", [])
            for name, value in report.user_properties if name == "row"]
    if rows:
        terminalreporter.section("rows of the matrix that ran")
        for row in dict.fromkeys(rows):
            terminalreporter.line(row)


@pytest.fixture
def group() -> Iterator[Path]:
    """Return a new cgroup with a limit of memory."""
    with limited("memory", "memory.limit_in_bytes", str(LIMIT_BYTES), "memory.max", str(LIMIT_BYTES)) as folder:
        yield folder
