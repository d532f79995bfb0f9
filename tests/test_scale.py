"""Starts of many ranks, with a stand-in for torch where there are more than this machine has memory for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes
from tests.support import (
    DEADLINE_S,
    EACH_MPI,
    MPIS,
    PROGRAMS,
    ROOT,
    Mpi,
    check,
    mpiexec,
    mpiexec_command,
    single_node_environ,
)

LIGHT = {"PYTHONPATH": str(ROOT / "tests/standins/light"), "OMP_NUM_THREADS": "1"}
# With two in the place of 64, a few ranks find what otherwise takes 65: what a rank sends waits until it calls MPI.
FEW_CELLS = {"MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS": "2"}
MANY_S = 400  # for a job of hundreds of ranks


@pytest.mark.parametrize("options", [["--no-init"], []], ids=["script", "group"])
def test_rank_0_waits_outside_mpi_only_for_ranks_that_have_received_what_it_sent(
    quick: Mpi, tmp_path: Path, options: list[str]
) -> None:
    """It waits in its script, or in torch for the process group."""
    check(mpiexec(quick, 6, *options, PROGRAMS / "meets.py", tmp_path, env={**LIGHT, **FEW_CELLS}, timeout=40))


def test_a_checks_rank_0_works_only_when_the_others_have_received_their_orders(quick: Mpi, tmp_path: Path) -> None:
    env = {**single_node_environ(quick), **LIGHT, **FEW_CELLS, "PYTHONPATH": f"{ROOT}:{LIGHT['PYTHONPATH']}"}
    check(processes.run(*mpiexec_command(quick, 6, PROGRAMS / "ordered.py", tmp_path), timeout=40, env=env, cwd=ROOT))


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", EACH_MPI)
@pytest.mark.parametrize("ranks", [96, 256])
@pytest.mark.parametrize("options", [["--no-init"], []], ids=["script", "group"])
def test_many_ranks_start(mpi: Mpi, ranks: int, options: list[str], tmp_path: Path) -> None:
    check(mpiexec(mpi, ranks, *options, PROGRAMS / "meets.py", tmp_path, env=LIGHT, timeout=MANY_S))


@pytest.mark.thorough
def test_512_ranks_start(tmp_path: Path) -> None:
    check(mpiexec(MPIS["openmpi4"], 512, PROGRAMS / "meets.py", tmp_path, env=LIGHT, timeout=2 * MANY_S))


@pytest.mark.thorough
def test_72_ranks_start_with_torch(quick: Mpi, tmp_path: Path) -> None:
    check(mpiexec(quick, 72, PROGRAMS / "meets.py", tmp_path, env={"OMP_NUM_THREADS": "1"}, timeout=4 * DEADLINE_S))
