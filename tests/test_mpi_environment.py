"""What is set for MPI before it starts: no GPU buffers with Cray MPICH, and memory that survives fork()."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.discovery import mpi
from mpiddp.discovery.mpi import name_library
from mpiddp.planning.environment import choose_fork_safety, disable_gpu_support
from mpiddp.systems.mpi_libraries import CRAY_MPICH
from tests import processes
from tests.messages import message
from tests.support import (
    DEADLINE_S,
    PROGRAMS,
    ROOT,
    Mpi,
    check,
    first_of,
    mpiexec_command,
    need,
    on_path,
    single_node_environ,
)

pytestmark = pytest.mark.light

CRAY = "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\nMPI BUILD INFO : Sun Feb 26 16:42 2023\n"
ALL = {"RDMAV_FORK_SAFE": "1", "IBV_FORK_SAFE": "1", "FI_EFA_FORK_SAFE": "1"}


@pytest.mark.parametrize(("name", "file", "description", "expected"), [
    ("Cray MPICH", "/opt/cray/pe/lib64/libmpi_gnu_123.so.12", CRAY, True),
    ("MPICH", "/opt/cray/pe/mpich/8.1.25/ofi/gnu/9.1/lib-abi-mpich/libmpi.so.12", CRAY, True),
    ("MPICH", "/opt/cray/pe/lib64/libmpi_cray.so.12", "", True),
    ("MPICH", "/usr/lib/libmpi.so.12", "MPICH Version:\t5.0.2", False),
    ("Open MPI", "/usr/lib/libmpi.so.40", "Open MPI v4.1.4", False),
])
def test_which_library_is_crays(name: str, file: str, description: str, expected: bool) -> None:
    assert (name_library(name, file, description) == CRAY_MPICH.name) is expected


@pytest.mark.parametrize(("value", "changed"), [("1", True), ("0", False), ("", False), (None, False)])
def test_gpu_support_is_switched_off_where_it_is_on(value: str | None, changed: bool) -> None:
    environ = {} if value is None else {"MPICH_GPU_SUPPORT_ENABLED": value}
    assert disable_gpu_support(environ) == ({"MPICH_GPU_SUPPORT_ENABLED": "0"} if changed else {})


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, ALL),
    ({"IBV_FORK_SAFE": "yes"}, {name: value for name, value in ALL.items() if name != "IBV_FORK_SAFE"}),
    ({"FI_EFA_FORK_SAFE": "0"}, {}),  # the user wants none, and libibverbs would take any value for a yes
    ({"FI_EFA_USE_HUGE_PAGE": "1"}, {}),  # EFA aborts where both are asked for
])
def test_memory_survives_fork_where_a_node_has_verbs(environ: dict[str, str], expected: dict[str, str]) -> None:
    assert choose_fork_safety(environ, has_verbs=True) == expected
    assert choose_fork_safety(environ, has_verbs=False) == {}


def test_verbs_are_where_the_kernel_has_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "VERBS_FOLDER", str(tmp_path))
    assert not mpi.has_verbs()
    (tmp_path / "mlx5_0").mkdir()
    assert mpi.has_verbs()


@pytest.mark.parametrize("keep", first_of([False, True]))
def test_a_job_on_a_cray(keep: bool, quick: Mpi) -> None:
    """MPICH stands in for Cray's library: it starts the same, and reads none of these variables."""
    need(quick.missing())
    names = ("MPICH_GPU_SUPPORT_ENABLED", "RDMAV_FORK_SAFE", "FI_EFA_FORK_SAFE")
    code = f"import os; print(*map(os.environ.get, {names}))"
    command = mpiexec_command(quick, 2, PROGRAMS / "on_cray.py", *["--gpu-aware-mpi"] * keep, "-c", code)
    env = {**single_node_environ(quick), **on_path(ROOT), "MPICH_GPU_SUPPORT_ENABLED": "1"}
    done = check(processes.run(*command, timeout=DEADLINE_S, env=env, cwd=ROOT))
    assert done.stdout.splitlines() == [f"{int(keep)} 1 1"] * 2
    warned = [line for line in done.stderr.splitlines() if "gpu-aware-mpi" in line]
    assert len(warned) == (0 if keep else 1), done.stderr
    if not keep:
        assert warned[0].startswith(message("launch/gpu_support_disabled", value=1))
