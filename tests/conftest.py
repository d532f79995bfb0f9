"""Fixtures: the cluster, the quick MPI; which tests run side by side; and the list of matrix rows that were run."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from mpiddp.agent.state_machine import StateMachine
from tests.cgroups import limited
from tests.cluster import Cluster, debian, missing_components
from tests.support import LIGHT, MPIS, ROOT, Mpi, is_light, need, scratch, torch_of_jobs

CLUSTERS_OWN = ROOT / "tests/cluster/test_cluster.py"
MARKERS = (
    "cluster: starts the cluster or uses it, as its fixture and launchers tell: no two such tests may run at a time",
    "row(started_by, mpi): the row of the matrix that a test runs",
    "thorough(instead): left out by tests/run, which has something else instead; run by tests/run --all",
    "gpu: needs a GPU; run by tests/gpu/run",
    "alone: measures time or fills the machine, so that nothing else may run beside it",
    "unit: plain functions, in this process (set by itself where nothing else is)",
    "process: starts processes or forks, without MPI",
    "mpi: starts ranks (set by itself where a parameter or fixture is an MPI)",
    "light: torch makes no difference: jobs have the stand-in for it of tests/standins/light",
    "long: takes longest in its layer, so that it is started first",
    "torch: jobs have torch itself, although the rest of the file is `light`",
)
LAYERS = ("cluster", "alone", "gpu", "mpi", "process")
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")

running: list[pytest.Function] = []  # the unit test that runs

StateMachine.raises = True
LIMIT_BYTES = 700 * 2**20  # two ranks with torch need half of it


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Start the three-node Slurm cluster; where the fixture's parameter is a release of Debian, in its root folder."""
    need(missing_components())
    options = {}
    if release := getattr(request, "param", None):
        need(debian.missing_components())
        options = debian.cluster_options(release)
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
    sys.addaudithook(refuse_processes)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the cluster, note the matrix rows of tests, and put the long ones first."""
    for item in items:
        if uses_cluster(item):
            item.add_marker(pytest.mark.cluster)
        elif uses_mpi(item):
            item.add_marker(pytest.mark.mpi)
        if not any(item.get_closest_marker(layer) for layer in LAYERS):
            item.add_marker(pytest.mark.unit)
        if row := item.get_closest_marker("row"):
            item.user_properties.append(("row", " | ".join(row.args)))
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a test's jobs the stand-in for torch if it is `light`."""
    torch_of_jobs.clear()
    torch_of_jobs.update(LIGHT if is_light(item) else {})


def uses_cluster(item: pytest.Item) -> bool:
    """Tell whether a test starts the cluster, or uses it: by its fixture, or by a launcher that is srun."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return (item.path == CLUSTERS_OWN or "cluster" in getattr(item, "fixturenames", ())
            or any(getattr(value, "srun", False) for value in values))


def uses_mpi(item: pytest.Item) -> bool:
    """Tell whether a test has an MPI, by a fixture or as a parameter."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return "quick" in getattr(item, "fixturenames", ()) or any(isinstance(value, Mpi) for value in values)


def refuse_processes(event: str, _: object) -> None:
    """Fail a unit test that starts a process."""
    if running and event in STARTS:
        running.clear()
        raise AssertionError(f"a unit test has none of {event}: mark it with `process` or `mpi`")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Note that a unit test runs."""
    running.extend([pyfuncitem] if pyfuncitem.get_closest_marker("unit") else [])
    try:
        return (yield)
    finally:
        running.clear()


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
