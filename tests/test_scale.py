"""Starts of many ranks, with a stand-in for torch where there are more than this machine has memory for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import processes
from tests.messages import find
from tests.support import (
    DEADLINE_S,
    EACH_MPI,
    LIGHT,
    PROGRAMS,
    ROOT,
    Mpi,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    single_node_environ,
)

MANY = {**LIGHT, "OMP_NUM_THREADS": "1"}
# With two in the place of 64, a few ranks find what otherwise takes 65: what a rank sends waits until it calls MPI.
FEW_CELLS = {"MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS": "2"}
MANY_S = 400  # for a job of hundreds of ranks


@pytest.mark.parametrize("options", first_of([["--no-init"], []]), ids=["script", "group"])
def test_rank_0_waits_outside_mpi_only_for_ranks_that_have_received_what_it_sent(
    quick: Mpi, tmp_path: Path, options: list[str]
) -> None:
    """It waits in its script, or in torch for the process group."""
    check(mpiexec(quick, 6, *options, PROGRAMS / "meets.py", tmp_path, env={**MANY, **FEW_CELLS}, timeout=40))


def test_a_checks_rank_0_works_only_when_the_others_have_received_its_answer(quick: Mpi, tmp_path: Path) -> None:
    env = {**single_node_environ(quick), **MANY, **FEW_CELLS, "PYTHONPATH": f"{ROOT}:{LIGHT['PYTHONPATH']}"}
    check(processes.run(*mpiexec_command(quick, 6, PROGRAMS / "steps.py", tmp_path), timeout=40, env=env, cwd=ROOT))


WAITS = """\
import functools, os, time
import torch.distributed as dist
create = dist.init_process_group
@functools.wraps(create)
def init_process_group(*arguments, **keywords):
    time.sleep(14 if keywords["rank"] == 1 else 0)
    create(*arguments, **keywords)
dist.init_process_group = init_process_group
"""


@pytest.mark.long
def test_ranks_that_wait_inside_torch_are_named(quick: Mpi, tmp_path: Path) -> None:
    """Rank 1 comes late to the process group; rank 0, which waits for it there, cannot say so."""
    (tmp_path / "sitecustomize.py").write_text(WAITS)
    env = {**MANY, "PYTHONPATH": f"{tmp_path}:{LIGHT['PYTHONPATH']}"}
    done = check(mpiexec(quick, 2, "-c", "pass", env=env))
    (late,) = find("launch/script_awaits_ranks", done.stderr)
    assert re.fullmatch(r"rank 0 on \S+, rank 1 on \S+ \(process group\)", late["ranks"])


@pytest.mark.alone
@pytest.mark.thorough("six ranks of an MPICH with two cells for messages")
@pytest.mark.parametrize("mpi", EACH_MPI)
@pytest.mark.parametrize(("ranks", "options"), [(96, ["--no-init"]), (96, []), (256, [])],
                         ids=["script-96", "group-96", "group-256"])
def test_many_ranks_start(mpi: Mpi, ranks: int, options: list[str], tmp_path: Path) -> None:
    check(mpiexec(mpi, ranks, *options, PROGRAMS / "meets.py", tmp_path, env=MANY, timeout=MANY_S))


@pytest.mark.alone
@pytest.mark.thorough("six ranks of an MPICH with two cells for messages")
def test_72_ranks_start_with_torch(quick: Mpi, tmp_path: Path) -> None:
    check(mpiexec(quick, 72, PROGRAMS / "meets.py", tmp_path, env={"OMP_NUM_THREADS": "1"}, timeout=4 * DEADLINE_S))
