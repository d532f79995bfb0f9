"""--no-agent: the script runs in the process that the launcher has started, and an error ends the job by MPI_Abort."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes
from tests.support import DEADLINE_S, MPICH_FIRST, ROOT, Mpi, check, mpiexec, mpiexec_command, single_node_environ

pytestmark = [pytest.mark.mpi, pytest.mark.light]

SCRIPT = """
import os, sys, torch, torch.distributed as dist
open(f"{sys.argv[0]}.{os.getppid()}.{dist.get_rank()}", "w").close()
if sys.argv[1:] == ["raises"] and dist.get_rank() == 1:
    raise ValueError("seven")
if sys.argv[1:] == ["exits"] and dist.get_rank() == 1:
    sys.exit(7)
dist.barrier()
print("done")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (path := tmp_path / "script.py").write_text(SCRIPT)
    return path


def test_the_launcher_is_the_ranks_own_parent(quick: Mpi, script: Path) -> None:
    done = check(mpiexec(quick, 2, "--no-agent", script))
    assert done.stdout == "done\n" * 2
    parents = {path.name.split(".")[2] for path in script.parent.glob("script.py.*")}
    assert len(parents) == 1  # Hydra's proxy


@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize(("how", "status"), [("raises", 1), ("exits", 7)])
def test_an_error_ends_all_ranks(mpi: Mpi, how: str, status: int, script: Path) -> None:
    done = check(mpiexec(mpi, 2, "--no-agent", script, how), status)
    assert ("ValueError: seven" in done.stderr) == (how == "raises")
    assert "mpiddp: failed" not in done.stderr


def test_a_debugger_that_runs_us_gets_the_exception(quick: Mpi, script: Path) -> None:
    (debugger := script.parent / "debugger.py").write_text("\n".join((
        "import runpy, sys", f"sys.argv = ['mpiddp', '--no-agent', {str(script)!r}, 'raises']",
        "try:", "    runpy.run_module('mpiddp', run_name='__main__', alter_sys=True)",
        "except ValueError as error:", "    print('seen:', error, flush=True)")))
    done = processes.run(*mpiexec_command(quick, 2, debugger), timeout=DEADLINE_S, env=single_node_environ(quick),
                         cwd=ROOT)
    assert "seen: seven\n" in check(done, 1).stdout
