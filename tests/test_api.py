"""The functions for programs that keep their own main()."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPICH_FIRST,
    MPIS,
    PROGRAMS,
    ROOT,
    TWO_NAMES,
    Done,
    Mpi,
    alone,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    on_path,
    single_node_environ,
)

pytestmark = pytest.mark.light

PROGRAM = PROGRAMS / "own_main.py"


def own_main(mpi: Mpi, ranks: int, *arguments: object) -> Done:
    """Run `mpiexec -n RANKS python ARGUMENTS`, without `-m mpiddp`."""
    need(mpi.missing())
    return processes.run(*mpiexec_command(mpi, ranks, *arguments), timeout=DEADLINE_S,
                         env={**single_node_environ(mpi), **on_path(ROOT)}, cwd=ROOT)


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_a_with_block_holds_a_group_and_restores_the_environment(mpi: Mpi) -> None:
    done = check(own_main(mpi, 2, PROGRAM, "with"))
    assert done.stdout == "with 2\n" * 2
    assert done.stderr.splitlines() == [
        f"mpiddp: warning: {message('launch/stale_environment', variables='RANK=stale on rank 0')}"]


@pytest.mark.mpi
def test_a_split_world_is_refused_on_every_rank() -> None:
    """As under `srun` without an interface that the library speaks: each process is a world of its own."""
    mpiexec_of, library = MPIS["mpich"], MPIS["openmpi5"]
    need([*mpiexec_of.missing(), *library.missing()])
    command = mpiexec_command(mpiexec_of, 2, PROGRAM, "with")
    command[command.index(str(mpiexec_of.python))] = str(library.python)
    done = processes.run(*command, timeout=DEADLINE_S, cwd=ROOT,
                         env={**single_node_environ(mpiexec_of), **on_path(ROOT)})
    assert done.returncode != 0
    assert done.stdout == ""
    assert "LaunchError: mpiddp: cannot start: split-world" in done.stderr
    assert find("launch/split_world", done.stderr, processes="2 processes", size=1,
                launcher="MPICH's or Intel MPI's mpiexec")


def test_each_process_of_srun_may_work_alone_if_it_says_so(quick: Mpi) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    assert check(alone(quick, PROGRAM, "alone", env={**on_path(ROOT), **step})).stdout == "alone\n"
    done = alone(quick, PROGRAM, "again", env={**on_path(ROOT), **step})
    assert "LaunchError: mpiddp: cannot start: split-world" in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("name", TWO_NAMES)
def test_a_process_that_its_parent_has_cut_off_from_mpirun_is_alone(name: str) -> None:
    """As programs do that a rank, or a test under mpirun, starts: only what MPI meets mpirun by is taken away."""
    mpi = MPIS[name]
    need(mpi.missing())
    command = mpiexec_command(mpi, 2, PROGRAM, "again")
    begin = command.index(str(mpi.python))
    command[begin:begin] = ["bash", "-c", 'unset ${!PMIX_@} PMI_FD PMI_PORT; exec "$@"', "-"]
    done = processes.run(*command, timeout=DEADLINE_S, env={**single_node_environ(mpi), **on_path(ROOT)}, cwd=ROOT)
    assert check(done).stdout == "again\n" * 2


@pytest.mark.thorough("test_twenty_groups_one_after_another")
def test_one_group_after_another(quick: Mpi) -> None:
    assert check(own_main(quick, 2, PROGRAM, "again")).stdout == "again\n" * 2


def test_each_communicator_has_its_group(quick: Mpi) -> None:
    lines = check(own_main(quick, 4, PROGRAM, "halves")).stdout.splitlines()
    assert sorted(lines) == ["halves 0"] * 2 + ["halves 1"] * 2


def test_a_refusal_is_an_exception_on_every_rank(quick: Mpi) -> None:
    assert check(own_main(quick, 2, PROGRAM, "refused")).stdout == "refused backend-unavailable\n" * 2


def test_a_block_that_raises_gives_the_group_of_a_single_rank_up(quick: Mpi) -> None:
    assert check(alone(quick, PROGRAM, "raises", env=on_path(ROOT))).stdout == "raises\n"


def test_a_world_of_one_as_in_a_notebook(quick: Mpi) -> None:
    assert check(alone(quick, PROGRAM, "again", env=on_path(ROOT))).stdout == "again\n"


@pytest.mark.torch
@pytest.mark.parametrize("how", first_of(["halves", "adopts"]))
def test_under_the_launcher_too(quick: Mpi, how: str) -> None:
    done = check(mpiexec(quick, 3, PROGRAM, how))
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.thorough("test_each_communicator_has_its_group")
@pytest.mark.parametrize("name", ["mpich", "openmpi4"])
def test_simulation_and_training_share_an_mpirun(name: str) -> None:
    check_coupled(own_main(MPIS[name], 4, EXAMPLES / "coupled.py"))


@pytest.mark.torch
@pytest.mark.thorough("test_each_communicator_has_its_group")
def test_simulation_and_training_share_an_srun(cluster: Cluster) -> None:
    mpi = MPIS["openmpi4"]
    need(mpi.missing())
    done = cluster.run("srun", "--mpi=pmix", "-N3", "-n4", str(mpi.python), str(EXAMPLES / "coupled.py"),
                       timeout=DEADLINE_S, env={**mpi.environ(), **on_path(ROOT)}, cwd=ROOT)
    check_coupled(done)


def check_coupled(done: Done) -> None:
    """Fail unless both trainers of coupled.py learned."""
    lines = sorted(check(done).stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == ["trainer 0/2", "trainer 1/2"]
    for line in lines:
        first, _, last = line.split("loss ")[1].split()
        assert float(last) < float(first) / 10


def own_end(mpi: Mpi, ranks: int, how: str, **env: str) -> Done:
    """Run own_end.py without `-m mpiddp`."""
    need(mpi.missing())
    return processes.run(*mpiexec_command(mpi, ranks, PROGRAMS / "own_end.py", how), timeout=DEADLINE_S,
                         env={**single_node_environ(mpi), **on_path(ROOT), **env}, cwd=ROOT)


STATUSES = {"with": 1, "with-caught": 1, "with-exit": 7, "raise": 1, "exit": 7, "interrupt": 130}
QUICK = [("mpich", "with"), ("mpich", "raise"), ("mpich", "exit"), ("mpich", "interrupt")]


@pytest.mark.parametrize(("mpi", "how"), [
    pytest.param(mpi, how, id=f"{name}-{how}",
                 marks=() if (name, how) in QUICK else pytest.mark.thorough)
    for name, mpi in MPIS.items() for how in STATUSES])
def test_a_program_that_fails_ends_the_job(mpi: Mpi, how: str) -> None:
    """The other rank sleeps. A block ends the job even if the exception is caught outside of it."""
    done = check(own_end(mpi, 2, how), STATUSES[how])
    assert done.stderr.count("Traceback (most recent call last)") == ("exit" not in how)
    assert done.stderr.count("ValueError: seven\n") == (STATUSES[how] == 1)
    assert "mpiddp" not in done.stderr.replace(str(ROOT), "")


@pytest.mark.parametrize(("line", "status"), [("sys.exit(3)", 3), ("raise ValueError", 1), ("raise SystemExit(5)", 5)])
def test_a_single_rank_ends_as_python_ends_it(quick: Mpi, line: str, status: int) -> None:
    program = f"import sys, mpiddp\nmpiddp.init_process_group()\n{line}"
    check(alone(quick, "-c", program, env=on_path(ROOT)), status)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["mpich", pytest.param("openmpi4", marks=pytest.mark.thorough)])
def test_ranks_outside_of_the_communicator_end_as_well(name: str) -> None:
    done = check(own_end(MPIS[name], 4, "half"), 1)
    assert done.stderr.count("ValueError: seven\n") == 1


ORDERLY = first_of(["order", "forgotten", pytest.param("descriptors", marks=pytest.mark.torch), "handled", "finalize",
                    "thread", "generator"])


@pytest.mark.parametrize("how", ORDERLY)
def test_an_end_in_order_is_no_failure(quick: Mpi, how: str) -> None:
    """Also where a sys.exit() was caught, MPI was finalised before, or the end came in a thread."""
    assert check(own_end(quick, 2, how)).stderr == ""


@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.parametrize("name", first_of(["mpich", "openmpi5"]))
def test_a_rank_that_raised_systemexit_does_not_hang_the_others(name: str) -> None:
    """Nobody learns its status; the collective of the other rank fails."""
    check(own_end(MPIS[name], 2, "unsaid"), 1)


@pytest.mark.mpi
@pytest.mark.parametrize("name", first_of(["mpich", "openmpi4"]))
def test_a_block_whose_ranks_stop_for_requeue_has_not_failed(name: str) -> None:
    done = check(own_end(MPIS[name], 2, "requeue"), 75)
    assert done.stderr.splitlines().count(message("launch/time_to_stop", signal="SIGUSR1")) == 1


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_a_rank_that_never_comes_is_not_waited_for_beyond_the_deadline(mpi: Mpi) -> None:
    done = check(own_end(mpi, 3, "late", MPIDDP_STARTUP_TIMEOUT="4"), 3)
    assert done.stderr.count("mpiddp: cannot start: startup-timeout") == 1
    assert find("launch/startup_timeout_of_program", done.stderr, seconds=4)


def test_pytest_in_ranks(quick: Mpi, tmp_path: Path) -> None:
    (tests := tmp_path / "test_it.py").write_text(
        "import torch.distributed as dist\ndef test_it():\n    assert dist.get_world_size() == 2\n")
    pytest_here = "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests
    done = check(mpiexec(quick, 2, *pytest_here))
    assert done.stdout.count("1 passed") == 2
    tests.write_text("import torch.distributed as dist\ndef test_it():\n    assert dist.get_rank() == 0\n"
                     "    dist.barrier()\ndef test_more():\n    dist.barrier()\n")
    done = check(mpiexec(quick, 2, *pytest_here), 1)
    assert "assert 1 == 0" in done.stdout
    assert "rank 1 on" in done.stderr


def test_tests_that_use_a_group(quick: Mpi, tmp_path: Path) -> None:
    """Pytest notes the errors that it catches where Python notes that of a program's end."""
    (tmp_path / "test_it.py").write_text(
        "import mpiddp, pytest\n@pytest.fixture(scope='session', autouse=True)\ndef group():\n"
        "    return mpiddp.init_process_group()\n@pytest.mark.xfail\ndef test_fails():\n    assert False\n"
        "def test_passes():\n    pass\n")
    done = check(own_main(quick, 2, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "test_it.py"))
    assert done.stdout.count("1 passed, 1 xfailed") == 2
    assert "mpiddp" not in done.stderr


@pytest.mark.thorough("the same on one node")
@pytest.mark.parametrize(("how", "pmi"), [("with", "pmix"), ("exit", "pmi2")])
def test_a_program_that_fails_on_three_nodes(how: str, pmi: str, cluster: Cluster) -> None:
    mpi = MPIS["openmpi4" if pmi == "pmix" else "impi"]
    done = cluster.run("srun", f"--mpi={pmi}", "-N3", "-n3", str(mpi.python), str(PROGRAMS / "own_end.py"), how,
                       timeout=DEADLINE_S, env={**mpi.environ(), **on_path(ROOT)}, cwd=ROOT)
    assert done.returncode in ((1,) if pmi == "pmix" else (7, 137)), done.stderr


def test_variables_of_options(quick: Mpi, tmp_path: Path) -> None:
    """Those that need an agent have no effect."""
    done = check(own_end(quick, 2, "order", MPIDDP_LOG_DIR=str(tmp_path / "logs"), MPIDDP_SHOW="fold"))
    warning = message("launch/needs_launcher", variables="MPIDDP_LOG_DIR, MPIDDP_SHOW")
    assert done.stderr == f"mpiddp: warning: {warning}\n"
    assert not (tmp_path / "logs").exists()
    done = own_end(quick, 2, "order", MPIDDP_ABORT_GRACE="soon")
    assert "ValueError: mpiddp: MPIDDP_ABORT_GRACE " + message(
        "launch/invalid_seconds", value="'soon'") in done.stderr


@pytest.mark.torch
@pytest.mark.thorough("test_a_job_that_has_left_leaves_no_hook_behind")
def test_nothing_of_ours_is_left_in_a_program_that_goes_on(quick: Mpi) -> None:
    assert check(own_main(quick, 2, PROGRAM, "as before")).stdout == "as before\n" * 2
