"""Launcher and library: each pair trains, or is refused by name before MPI_Init."""

from __future__ import annotations

import pytest

from mpiddp.base.config import Script
from mpiddp.base.errors import LaunchError
from mpiddp.discovery import runtime, schedulers
from mpiddp.discovery.launchers import read_launch_facts
from mpiddp.discovery.mpi import Library, list_launch_interfaces
from mpiddp.planning.compatibility import (
    check_compatibility,
    check_nested,
    check_outer_tasks,
    check_world_size,
    list_hidden_prefixes,
    warn_unlaunched,
)
from mpiddp.systems.mpi_libraries import ALL_INTERFACES
from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPIS,
    ROOT,
    VENVS,
    Done,
    Mpi,
    check_hello,
    first_of,
    mpiexec_command,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

HELLO = EXAMPLES / "hello_world.py"
FAMILY = {"openmpi4": "pmix", "openmpi5": "pmix", "mpich": "pmi", "impi": "pmi"}  # as the pairs were seen to work
OPEN_MPI_5 = Library("Open MPI", (5, 0, 11), "/lib/libmpi.so.40", frozenset({"pmix"}))
MPICH = Library("MPICH", (5, 0, 2), "/lib/libmpi.so.12", frozenset({"pmi"}))
INTEL = Library("Intel MPI", (2021, 19, 0), "/lib/libmpi.so", frozenset({"pmi"}))
CRAY = Library("Cray MPICH", (8, 1), "/opt/cray/pe/lib64/libmpi_cray.so.12", ALL_INTERFACES)
UNKNOWN = Library("Fujitsu MPI", (4, 0), "/lib/libmpi.so", ALL_INTERFACES)

MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "x", "PMIX_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
STEP_PMIX = {**STEP, "SLURM_MPI_TYPE": "pmix", "PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "1"}
STEP_PMI2 = {**STEP, "SLURM_MPI_TYPE": "pmi2", "PMI_FD": "10", "PMI_RANK": "1", "PMI_SIZE": "4"}
# As seen in the tasks of such a step, and of ranks that Open MPI's and MPICH's and Intel's launchers start inside one.
IN_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
IN_PMI2 = {**IN_STEP, "SLURM_MPI_TYPE": "pmi2", "PMI_JOBID": "7.0", "PMI_FD": "10", "PMI_RANK": "0", "PMI_SIZE": "1"}
IN_PMIX = {**IN_STEP, "SLURM_MPI_TYPE": "pmix", "PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "0",
           "PMIX_SERVER_URI2": "pmix-server.5957;tcp4://127.0.0.1:56157"}
BY_OPEN_MPI = {**MPIRUN, "PMIX_SERVER_URI2": "1565458432.0;tcp4://127.0.0.1:35401"}
BY_PRRTE = {**MPIRUN, "PMIX_SERVER_URI2": "prterun-node1-6170@0.0;tcp4://127.0.0.1:46885"}
BY_MPICH = {**HYDRA, "MPI_LOCALRANKID": "1", "HYDI_CONTROL_FD": "7"}
BY_INTEL = {**HYDRA, "MPI_LOCALRANKID": "1", "HYDRA_BSTRAP_LAUNCHER": "fork"}
# The same where an allocation's mpirun has its daemons on three nodes started by srun.
ON_NODES = {**IN_STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}
DAEMONS = [
    {**MPIRUN, "PMIX_SERVER_URI2": "493486080.2;tcp4://127.0.0.1:41033"},
    {**MPIRUN, "PMIX_SERVER_URI2": "prterun-login-6744@0.2;tcp4://127.0.0.1:54603"},
    {**HYDRA, "MPI_LOCALRANKID": "1"}, {**HYDRA, "MPI_LOCALRANKID": "1", "HYDRA_BSTRAP_LAUNCHER": "slurm"},
]
SLURM_PMI = {"I_MPI_PMI_LIBRARY": "/usr/lib64/libpmi2.so"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "6"}


@pytest.mark.parametrize(("environ", "library"), [
    ({}, OPEN_MPI_5), ({}, MPICH), (BATCH, OPEN_MPI_5), (BATCH, INTEL),
    (MPIRUN, OPEN_MPI_5), ({**STEP, **MPIRUN}, OPEN_MPI_5), ({**BATCH, **MPIRUN}, OPEN_MPI_5),
    (HYDRA, MPICH), (HYDRA, INTEL), ({**STEP, **HYDRA}, MPICH),
    (STEP_PMIX, OPEN_MPI_5), (STEP_PMI2, MPICH), ({**STEP_PMI2, **SLURM_PMI}, INTEL),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, MPICH), (STEP_PMIX, UNKNOWN), (HYDRA, UNKNOWN),
    ({**IN_PMIX, **BY_MPICH}, MPICH), ({**IN_PMI2, **BY_INTEL}, INTEL), ({**IN_PMI2, **BY_PRRTE}, OPEN_MPI_5),
    (IN_PMIX, MPICH), (IN_PMI2, OPEN_MPI_5), (IN_PMI2, INTEL),
])
def test_what_fits(environ: dict[str, str], library: Library) -> None:
    check_compatibility(read_launch_facts(environ), library)


@pytest.mark.parametrize(("environ", "library", "name", "words"), [
    (MPIRUN, MPICH, "launcher-mismatch", message(
        "launch/launcher_mismatch", processes="4 processes", launcher="Open MPI's mpirun", library=MPICH)),
    *((environ, library, "launcher-mismatch", message("launch/start_with_its_launcher", launcher=launcher))
      for environ, library, launcher in (
          (MPIRUN, INTEL, "Intel MPI's mpiexec"), (HYDRA, OPEN_MPI_5, "Open MPI's mpirun"),
          ({**STEP, **HYDRA}, OPEN_MPI_5, "Open MPI's mpirun"),
          ({**IN_PMIX, **BY_MPICH}, OPEN_MPI_5, "Open MPI's mpirun"),
          ({**IN_PMI2, **BY_PRRTE}, MPICH, "MPICH's mpiexec"))),
    (STEP, OPEN_MPI_5, "no-pmix", "use srun --mpi=pmix"),
    (STEP, MPICH, "no-pmix", "use srun --mpi=pmi2"),
    (STEP, UNKNOWN, "no-pmix", "use srun --mpi=pmix or --mpi=pmi2"),
    (STEP_PMIX, MPICH, "pmi-unsupported", "use srun --mpi=pmi2"),
    (STEP_PMI2, OPEN_MPI_5, "pmi-unsupported", "use srun --mpi=pmix"),
    (STEP_PMI2, INTEL, "pmi-unsupported", "I_MPI_PMI_LIBRARY"),
])
def test_what_does_not_fit(environ: dict[str, str], library: Library, name: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_compatibility(read_launch_facts(environ), library)
    assert caught.value.name == name
    assert words in str(caught.value)


@pytest.mark.parametrize(("environ", "script", "name", "launcher"), [
    ({"TORCHELASTIC_RUN_ID": "none"}, "t.py", "launch/rank_of_another_launcher", "torchrun"),
    ({"TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "no"}, "t.py", "launch/rank_of_another_launcher",
     "accelerate launch"),
    ({"TORCHELASTIC_RUN_ID": "mpiddp-1234"}, "t.py", "launch/rank_of_another_launcher", "mpiddp"),
    ({}, "/usr/bin/torchrun", "launch/script_is_a_launcher", "torchrun"),
    ({}, "torch.distributed.run", "launch/script_is_a_launcher", "torch.distributed.run"),
    ({}, "/usr/bin/mpirun", "launch/script_is_a_launcher", "mpirun"),
    ({}, "srun", "launch/script_is_a_launcher", "srun"),
])
def test_one_launcher_in_another(environ: dict[str, str], script: str, name: str, launcher: str) -> None:
    with pytest.raises(LaunchError, match="nested-launcher") as caught:
        check_nested(runtime.find_outer_launcher(environ), Script(script))
    assert caught.value.actual == message(name, launcher=launcher)
    if launcher in ("mpirun", "srun"):
        assert caught.value.do == message("launch/launcher_first", launcher=launcher)
    check_nested(runtime.find_outer_launcher({}), Script("t.py"))


@pytest.mark.parametrize("launcher", [BY_OPEN_MPI, BY_PRRTE, BY_MPICH, BY_INTEL])
def test_a_launcher_in_each_task_of_a_step(launcher: dict[str, str]) -> None:
    for kind in (IN_STEP, IN_PMI2, IN_PMIX):
        check_outer_tasks(read_launch_facts({**kind, **launcher}))
        found = read_launch_facts({**kind, **launcher, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
        assert found is not None
        assert (found.size, found.task) == (4, 1)
        with pytest.raises(LaunchError, match="nested-launcher") as caught:
            check_outer_tasks(found)
        assert caught.value.actual == message(
            "launch/launcher_in_each_task", launcher=found.launcher.name, tasks=2, outer="srun")
        check_outer_tasks(read_launch_facts(
            {**kind, **launcher, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PTY_PORT": "40001"}))  # a shell of srun --pty
        found = read_launch_facts(
            {**kind, **launcher, "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1", "SLURM_PTY_PORT": "40001"})
        assert found is not None
        assert (found.tasks, found.task) == (3, 0)  # it says why


@pytest.mark.parametrize("launcher", DAEMONS)
def test_a_launcher_whose_daemons_are_tasks_of_a_step(launcher: dict[str, str]) -> None:
    check_outer_tasks(read_launch_facts({**ON_NODES, **launcher}))
    check_outer_tasks(read_launch_facts(STEP_PMI2))


@pytest.mark.parametrize(("environ", "step"), [
    (STEP, "7.0"), (STEP_PMI2, "7.0"), (STEP_PMIX, "7.0"), (IN_STEP, None), (IN_PMI2, None), (BATCH, None), ({}, None),
    *[({**kind, **launcher}, None) for kind in (IN_STEP, IN_PMI2, IN_PMIX)
      for launcher in (BY_OPEN_MPI, BY_PRRTE, BY_MPICH, BY_INTEL, *DAEMONS)],
])
def test_only_a_step_of_this_jobs_ranks_may_be_cancelled(environ: dict[str, str], step: str | None) -> None:
    environ = {**environ, "SLURM_JOB_ID": "7"}
    assert runtime.find_slurm_step(environ, read_launch_facts(environ)) == step


@pytest.mark.parametrize(("environ", "name"), [
    ({}, None), ({"SLURM_JOB_ID": "7"}, "7"), ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "7"),
    ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, "7.2"), ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "batch"}, "7"),
])
def test_the_logs_of_two_steps_are_not_one_file(environ: dict[str, str], name: str | None) -> None:
    assert schedulers.name_logs(environ) == (name or "")


@pytest.mark.parametrize(("environ", "library", "beginning"), [
    (IN_PMIX, MPICH, "SLURM_"), (IN_PMI2, OPEN_MPI_5, "SLURM_"), (IN_STEP, INTEL, "SLURM_"),
    ({**IN_STEP, **SLURM_PMI}, INTEL, "I_MPI_PMI_LIBRARY"),
    ({**IN_PMIX, **BY_MPICH}, MPICH, "PMIX_"), (STEP_PMIX, OPEN_MPI_5, ""), (IN_PMIX, OPEN_MPI_5, "SLURM_"),
    ({**IN_PMI2, **BY_PRRTE}, OPEN_MPI_5, ""), ({**IN_PMI2, **SLURM_PMI}, INTEL, ""), ({}, MPICH, ""),
])
def test_what_a_library_must_not_see_of_a_step(environ: dict[str, str], library: Library, beginning: str) -> None:
    found = list_hidden_prefixes(read_launch_facts(environ), library)
    assert beginning in found if beginning else found == ()


def alone(environ: dict[str, str], library: Library) -> list[str]:
    """Return what is said to a process that no launcher has started."""
    return warn_unlaunched(library, *schedulers.find_intended_size(environ))


def test_a_process_alone_in_an_allocation_of_several_tasks() -> None:
    for library, start in ((OPEN_MPI_5, "srun --mpi=pmix, or Open MPI's mpirun,"),
                           (MPICH, "srun --mpi=pmi2, or MPICH's mpiexec,"),
                           (CRAY, "srun --mpi=cray_shasta, or mpiexec,")):
        assert alone(BATCH, library) == [message("launch/no_launcher", scheduler="Slurm", size="6 tasks", start=start)]
    for environ in ({**BATCH, "SLURM_NTASKS": "1"}, {**BATCH, "SLURM_NTASKS": "many"}, {}):
        assert alone(environ, OPEN_MPI_5) == []


@pytest.mark.torch
@pytest.mark.mpi
def test_torchrun_around_mpiddp_is_refused_once() -> None:
    need(MPIS["mpich"].missing())
    done = processes.run(str(VENVS / "base/bin/torchrun"), "--standalone", "--nproc-per-node=2", "-m", "mpiddp",
                         str(HELLO), timeout=DEADLINE_S, env=single_node_environ(MPIS["mpich"]), cwd=ROOT)
    assert done.returncode != 0
    assert done.stderr.count("mpiddp: cannot start: nested-launcher") == 1


@pytest.mark.parametrize(("environ", "library", "command", "offered", "needed"), [
    (STEP_PMI2, OPEN_MPI_5, "srun --mpi=pmi2", "pmi", "pmix"), (STEP_PMIX, MPICH, "srun --mpi=pmix", "pmix", "pmi")])
def test_the_command_of_the_user_is_named(
    environ: dict[str, str], library: Library, command: str, offered: str, needed: str
) -> None:
    with pytest.raises(LaunchError, match="pmi-unsupported") as caught:
        check_compatibility(read_launch_facts(environ), library)
    assert caught.value.actual == message(
        "launch/unsupported_interface", launcher=command, interface=offered, library=library)
    assert caught.value.needed == message("launch/needed_interface", library=library.name, interfaces=needed)


def test_a_value_that_this_slurm_lacks_is_not_named() -> None:
    with pytest.raises(LaunchError) as caught:
        check_compatibility(read_launch_facts(STEP), UNKNOWN, ["none", "pmi2"])
    assert caught.value.do == message("launch/fitting_option", options="--mpi=pmi2", available="none, pmi2")


def test_a_world_that_is_split() -> None:
    check_world_size(read_launch_facts(MPIRUN), 4, OPEN_MPI_5)
    check_world_size(read_launch_facts({}), 1, OPEN_MPI_5)
    with pytest.raises(LaunchError, match="split-world") as caught:
        check_world_size(read_launch_facts(MPIRUN), 1, UNKNOWN)
    assert caught.value.actual == message(
        "launch/split_world", processes="4 processes", launcher="Open MPI's mpirun", size=1, library=UNKNOWN)


@pytest.mark.parametrize(("name", "version", "description", "spoken"), [
    ("MPICH", (5, 0, 2), "MPICH configure:    --with-device=ch4:ucx,ofi --with-pm=hydra", {"pmi"}),
    ("MPICH", (4, 1), "MPICH configure: --with-pmix=/usr/lib/pmix", {"pmi", "pmix"}),
    ("Open MPI", (5, 0, 11), "", {"pmix"}),
    ("Open MPI", (4, 1, 6), "", ALL_INTERFACES),  # no component files are found: a static build
    ("Intel MPI", (2021, 19), "", {"pmi"}),
    ("Fujitsu MPI", (4,), "", ALL_INTERFACES), ("Cray MPICH", (8, 1), "", ALL_INTERFACES),
])
def test_what_a_library_speaks(name: str, version: tuple[int, ...], description: str, spoken: set[str]) -> None:
    assert list_launch_interfaces(name, version, "/nowhere/libmpi.so", description) == spoken


def check_refused(done: Done, name: str) -> None:
    """Fail unless a job was refused with one message, and MPI itself did not come to speak."""
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("mpiddp: cannot start:") == 1, done.stderr
    assert f"mpiddp: cannot start: {name}\n" in done.stderr, done.stderr
    for word in ("MPI_Init", "PMI version", "SLURM's PMI support", "suspicious MPI"):
        assert word not in done.stderr


@pytest.mark.parametrize(("launcher", "library"), [
    pytest.param(launcher, library, id=f"{launcher.name}-{library.name}",
                 marks=() if {"openmpi4", "mpich"} == {launcher.name, library.name} else pytest.mark.thorough)
    for launcher in MPIS.values() for library in MPIS.values()])
def test_every_mpiexec_with_every_library(launcher: Mpi, library: Mpi) -> None:
    need([*launcher.missing(), *library.missing()])
    command = mpiexec_command(launcher, 2, "-m", "mpiddp", HELLO)
    command[command.index(str(launcher.python))] = str(library.python)
    done = processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(launcher), cwd=ROOT)
    if FAMILY[launcher.name] == FAMILY[library.name]:
        check_hello(done, 2)
    else:
        check_refused(done, "launcher-mismatch")


@pytest.mark.parametrize(("option", "name", "problem"), first_of([
    ("none", "openmpi4", "no-pmix"), ("pmix", "mpich", "pmi-unsupported"), ("pmi2", "openmpi4", "pmi-unsupported"),
    ("none", "openmpi5", "no-pmix"), ("none", "mpich", "no-pmix"), ("none", "impi", "no-pmix"),
    ("pmi2", "impi", "pmi-unsupported"),
], 3))
def test_srun_that_offers_nothing_fitting(option: str, name: str, problem: str, cluster: Cluster) -> None:
    mpi = MPIS[name]
    need(mpi.missing()[:1])
    done = cluster.run("srun", f"--mpi={option}", "-N3", "-n3", str(mpi.python), "-m", "mpiddp", str(HELLO),
                       timeout=DEADLINE_S, env=single_node_environ(mpi), cwd=ROOT)
    check_refused(done, problem)
    if (option, name) != ("pmi2", "impi"):
        fitting = "--mpi=pmix" if FAMILY[name] == "pmix" else "--mpi=pmi2"
        (advice,) = find("launch/fitting_option", done.stderr, available="pmix, none, cray_shasta, pmi2")
        assert advice["options"].startswith(fitting)
