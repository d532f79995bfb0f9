"""Launchers and schedulers: what is concluded from their variables, as they were dumped or are documented."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from mpiddp.base.errors import LaunchError
from mpiddp.base.text import memory_advice
from mpiddp.discovery import schedulers
from mpiddp.discovery.cpus import CpuGrant, Topology, read_grant
from mpiddp.discovery.devices import DeviceFacts
from mpiddp.discovery.gpus import Gpu
from mpiddp.discovery.host import HostFacts
from mpiddp.discovery.launchers import is_first_on_node, read_launch_facts
from mpiddp.discovery.mpi import Library
from mpiddp.discovery.runtime import find_slurm_step
from mpiddp.planning import cores, gpus, problems
from mpiddp.planning.compatibility import (
    check_compatibility,
    check_outer_tasks,
    check_world_size,
    list_hidden_prefixes,
    warn_unlaunched,
)
from mpiddp.planning.gpus import GpuChoice
from mpiddp.planning.problems import choose_advice
from mpiddp.systems.launchers import LAUNCHERS, TORCHRUN, Launcher
from mpiddp.systems.mpi_libraries import ALL_INTERFACES
from mpiddp.systems.schedulers import FLUX, LSF, PBS, SCHEDULERS, SGE, SLURM, Scheduler
from mpiddp.where.client import UnansweredError, find_endpoint
from mpiddp.where.registry import JobEndpoint, find_job_number, write_endpoint
from tests.messages import find, message

MPICH = Library("MPICH", (5, 0, 2), "/lib/libmpi.so.12", frozenset({"pmi"}))
CRAY_BUILT = Library("MPICH", (4, 1), "/opt/x/libmpi.so.12", ALL_INTERFACES)  # it has loaded Cray's libpmi
OPEN_MPI_4 = Library("Open MPI", (4, 1, 4), "/lib/libmpi.so.40", frozenset({"pmix", "Flux's PMI"}))  # as Debian has it
OPEN_MPI_5 = Library("Open MPI", (5, 0, 11), "/lib/libmpi.so.40", frozenset({"pmix"}))
INTEL = Library("Intel MPI", (2021, 19, 0), "/lib/libmpi.so", frozenset({"pmi"}))
CRAY = Library("Cray MPICH", (8, 1, 28), "/opt/cray/pe/lib64/libmpi_cray.so.12", ALL_INTERFACES)
MVAPICH = Library("MVAPICH", (3, 0), "/lib/libmpi.so.12", ALL_INTERFACES)
LIBRARIES = (MPICH, CRAY_BUILT, OPEN_MPI_4, OPEN_MPI_5, INTEL, CRAY, MVAPICH)

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "0"}
PALS_SET = {"PALS_APID": "7.0", "PALS_APINFO": "/var/spool/apinfo", "PALS_NODEID": "1", "PALS_RANKID": "2",
            "PALS_SPOOL_DIR": "/var/spool"}
SHASTA_22 = {**STEP, "SLURM_MPI_TYPE": "cray_shasta", **PALS_SET}
SHASTA_24 = {**SHASTA_22, "PALS_LOCAL_RANKID": "0", "PMI_JOBID": "7", "PMI_RANK": "2", "PMI_LOCAL_RANK": "0",
             "PMI_LOCAL_SIZE": "2", "PMI_SIZE": "4", "PMI_UNIVERSE_SIZE": "4", "PMI_SHARED_SECRET": "1"}
FLUX_TASK = {"FLUX_TASK_RANK": "2", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2",
             "FLUX_JOB_ID": "ƒXGLLfH", "FLUX_JOB_ID_PATH": "/ƒ6PMw2aL7/ƒXGLLfH", "FLUX_ENCLOSING_ID": "ƒ6PMw2aL7",
             "FLUX_URI": "local:///run/flux"}
FLUX_SIMPLE = {**FLUX_TASK, "PMI_FD": "9", "PMI_RANK": "2", "PMI_SIZE": "4", "FLUX_PMI_LIBRARY_PATH": "/libpmi.so"}
FLUX_PMIX = {**FLUX_TASK, "PMIX_NAMESPACE": "ƒXGLLfH", "PMIX_RANK": "2"}
FLUX_CRAY = {**FLUX_TASK, **PALS_SET, "PMI_CONTROL_PORT": "1,2", "PMI_SHARED_SECRET": "1"}
FLUX_SPECTRUM = {**FLUX_TASK, "OMPI_COMM_WORLD_RANK": "2"}
PALS = {**PALS_SET, "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2", "PALS_DEPTH": "8", "PBS_JOBID": "9.pbs01"}
PALS_CRAY = {**PALS, "PMI_RANK": "2", "PMI_LOCAL_RANK": "0", "PMI_SIZE": "4", "PMI_LOCAL_SIZE": "2"}
PALS_PMIX = {**PALS, "PALS_TRANSFER": "0", "PMIX_NAMESPACE": "x", "PMIX_RANK": "2"}
PARASTATION = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9", "PMI_ID": "1", "PMI_UNIVERSE_SIZE": "4",
               "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PS_JOB_SIZE": "4", "PSP_SMP_NODE_ID": "1"}
PARASTATION_PMIX = {"PMIX_NAMESPACE": "x", "PMIX_RANK": "2", "PS_JOB_SIZE": "4", "PMIX_JOB_SIZE": "4"}
PSSLURM_PMI = {**STEP, **PARASTATION}
PSSLURM_PMIX = {**STEP, **PARASTATION_PMIX, "SLURM_MPI_TYPE": "pspmix"}
JSRUN = {"JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "0",
         "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "x", "PMIX_RANK": "2"}
MPIRUN_RSH = {"MPIRUN_RANK": "2", "MPIRUN_NPROCS": "4", "MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4",
              "MV2_COMM_WORLD_LOCAL_RANK": "0", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}
APRUN = {"ALPS_APP_PE": "2", "ALPS_APP_DEPTH": "8", "PMI_FORK_RANK": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
          "PMIX_NAMESPACE": "x", "PMIX_RANK": "2", "PMIX_SERVER_URI2": "1565458432.0;tcp4://127.0.0.1:35401"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "0", "HYDI_CONTROL_FD": "7"}
SET = {
    "srun none": STEP,
    "srun pmi2": {**STEP, "SLURM_MPI_TYPE": "pmi2", "PMI_FD": "10", "PMI_RANK": "2", "PMI_SIZE": "4"},
    "srun pmix": {**STEP, "SLURM_MPI_TYPE": "pmix", "PMIX_NAMESPACE": "x", "PMIX_RANK": "2"},
    "srun cray_shasta 22": SHASTA_22, "srun cray_shasta 24": SHASTA_24, "flux simple": FLUX_SIMPLE,
    "flux pmix": FLUX_PMIX, "flux cray-pals": FLUX_CRAY, "flux cray-pals,simple": {**FLUX_CRAY, **FLUX_SIMPLE},
    "flux off": FLUX_TASK, "flux spectrum": FLUX_SPECTRUM, "PALS cray": PALS_CRAY, "PALS pmix": PALS_PMIX,
    "PALS without a size": PALS, "ParaStation": PARASTATION, "ParaStation pmix": PARASTATION_PMIX,
    "psslurm pmi": PSSLURM_PMI, "psslurm pmix": PSSLURM_PMIX, "jsrun": JSRUN, "mpirun_rsh": MPIRUN_RSH, "aprun": APRUN,
    "mpirun": MPIRUN, "mpiexec": HYDRA, "pmix": {"PMIX_NAMESPACE": "x", "PMIX_RANK": "2", "PMIX_JOB_SIZE": "4"},
}
NAMES = {"srun": "srun", "psslurm": "srun", "flux": "flux run", "PALS": "PALS's mpiexec", "jsrun": "jsrun",
         "ParaStation": "ParaStation's mpiexec", "mpirun_rsh": "mpirun_rsh", "aprun": "aprun",
         "mpirun": "Open MPI's mpirun", "mpiexec": "MPICH's or Intel MPI's mpiexec", "pmix": "a PMIx launcher"}
SIZELESS = {"PALS pmix", "PALS without a size", "aprun"}


@pytest.mark.parametrize("kind", SET)
def test_each_launcher_is_known_by_its_variables(kind: str) -> None:
    found = read_launch_facts(SET[kind])
    assert found is not None
    assert (found.launcher.name, found.rank, found.size) == (
        NAMES[kind.split()[0]], 2, None if kind in SIZELESS else 4)
    assert found.tasks == 1
    assert is_first_on_node(SET[kind])
    local = next((name for name in found.launcher.local_ranks if name in SET[kind]), None)
    assert local is None or not is_first_on_node({**SET[kind], local: "1"})


def test_torchruns_variables_alone_are_no_launcher() -> None:
    """A script, a container or a recipe may have set them."""
    ranks = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert read_launch_facts(ranks) is None
    found = read_launch_facts({**ranks, "TORCHELASTIC_RUN_ID": "none"})
    assert found is not None
    assert (found.launcher, found.rank, found.size) == (TORCHRUN, 1, 4)


@pytest.mark.parametrize("kind", SET)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_split_world_is_named_by_one_rank(kind: str, library: Library) -> None:
    """Each process is a world of its own. Where nobody knows the number of ranks, rank 1 speaks, and rank 0 trains."""
    speakers = []
    for rank in range(4):
        started_by = read_launch_facts({name: str(rank) if value == "2" and "RANK" in name.upper() + "RANK" * (name in (
            "SLURM_PROCID", "ALPS_APP_PE")) else value for name, value in SET[kind].items()})
        assert started_by is not None
        assert started_by.rank == rank
        try:
            check_world_size(started_by, 1, library)
        except LaunchError as error:
            assert error.name == "split-world"
            assert started_by.launcher.name in error.actual
            speakers += [rank] if error.speaker == rank else []
    assert speakers == [1 if kind in SIZELESS else 0]
    check_world_size(read_launch_facts(SET[kind]), 4, library)


FITS = {
    "srun pmi2": {MPICH, CRAY_BUILT, CRAY, MVAPICH}, "srun pmix": {CRAY_BUILT, OPEN_MPI_4, OPEN_MPI_5, CRAY, MVAPICH},
    "srun cray_shasta 22": {CRAY_BUILT, CRAY, MVAPICH}, "srun cray_shasta 24": {CRAY_BUILT, CRAY, MVAPICH},
    "flux simple": {MPICH, INTEL, CRAY_BUILT, CRAY, MVAPICH, OPEN_MPI_4},
    "flux pmix": {OPEN_MPI_4, OPEN_MPI_5, CRAY_BUILT, CRAY, MVAPICH}, "flux cray-pals": {CRAY_BUILT, CRAY, MVAPICH},
    "flux cray-pals,simple": {*LIBRARIES} - {OPEN_MPI_5}, "PALS cray": {CRAY_BUILT, CRAY, MVAPICH},
    "PALS pmix": {OPEN_MPI_4, OPEN_MPI_5, CRAY_BUILT, CRAY, MVAPICH},
    "PALS without a size": {CRAY_BUILT, CRAY, MVAPICH},
    "ParaStation": {MPICH, INTEL, CRAY_BUILT, CRAY, MVAPICH}, "psslurm pmi": {MPICH, INTEL, CRAY_BUILT, CRAY, MVAPICH},
    "ParaStation pmix": {OPEN_MPI_4, OPEN_MPI_5, CRAY_BUILT, CRAY, MVAPICH},
    "psslurm pmix": {OPEN_MPI_4, OPEN_MPI_5, CRAY_BUILT, CRAY, MVAPICH}, "srun none": set(), "flux off": set(),
    "flux spectrum": set(), "mpirun": {OPEN_MPI_4, OPEN_MPI_5, CRAY_BUILT, CRAY, MVAPICH},
    "mpiexec": {MPICH, INTEL, CRAY_BUILT, CRAY, MVAPICH}, "jsrun": {*LIBRARIES}, "mpirun_rsh": {*LIBRARIES},
    "aprun": {*LIBRARIES}, "pmix": {*LIBRARIES},
}


@pytest.mark.parametrize("kind", SET)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: f"{library.title} {len(library.interfaces)}")
def test_what_can_start_and_what_is_refused_by_name(kind: str, library: Library) -> None:
    if library in FITS[kind]:
        check_compatibility(read_launch_facts(SET[kind]), library)
        return
    with pytest.raises(LaunchError) as caught:
        check_compatibility(read_launch_facts(SET[kind]), library)
    error = caught.value
    assert error.name in ("launcher-mismatch", "no-pmix", "pmi-unsupported")
    assert "  do       " in str(error)
    words = error.needed + error.do
    if kind.startswith(("PALS", "ParaStation")) and library in (MPICH, INTEL):
        assert f"start with {library.name}'s mpiexec" in words  # no option of these launchers helps
    if kind.startswith("srun cray_shasta"):
        assert ("--mpi=pmi2" if library in (MPICH, INTEL) else "--mpi=pmix") in words


@pytest.mark.parametrize("kind", SET)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: f"{library.title} {len(library.interfaces)}")
def test_no_refusal_names_the_option_of_another_launcher(kind: str, library: Library) -> None:
    started_by = read_launch_facts(SET[kind])
    assert started_by is not None
    said = []
    for check in (lambda: check_compatibility(started_by, library), lambda: check_world_size(started_by, 1, library),
                  lambda: check_outer_tasks(started_by._replace(tasks=2, outer="flux run"))):
        try:
            check()
        except LaunchError as error:
            said.append(str(error))
    own = {*started_by.launcher.options.values()}
    foreign = {option for launcher in LAUNCHERS for option in launcher.options.values()} - own
    for text in said:
        assert not [option for option in foreign if option in text], text


def options_of(row: Launcher | Scheduler) -> set[str]:
    """Return the options that a row names, each up to its value."""
    fields = ("ranks_per_node", "cores", "unbound", "export", "all_gpus", "own_gpu", "gpus", "exclude", "memory")
    named = [getattr(row, field, "") for field in fields] + [*getattr(row, "options", {}).values()]
    return {word.partition("{")[0].rstrip(" =") for word in named if word}


def said_in_planning(launcher: str, scheduler: str) -> list[str]:
    """Return the messages of a start that name options, of a job with a launcher and a scheduler."""
    node = Topology(((0,), (1,)), (0, 1), (0, 1), ((0, 0), (1, 1)))
    facts = HostFacts("n1", 0, frozenset({0}), frozenset({0, 1}), node, False, None, (), None, {}, "", 0, 0,
                      given_gpus=1, launcher=launcher, scheduler=scheduler)
    three, gpu = [facts, facts._replace(topology=None), facts._replace(topology=None)], Gpu("GPU-a", "GPU-a", numa=0)
    advice = choose_advice(facts)
    nothing, torch = DeviceFacts("2"), DeviceFacts("2", kind="cuda", gpus=(gpu,), backends={"nccl": ("cuda",)})
    said = cores.warn_crowded_cores(three, "auto")
    said += cores.warn_far_gpus([facts], [cores.CpuShare(frozenset({0}), 1, (0,))], [1])
    said += gpus.warn_isolated_gpus([("n1", True)], advice)
    for check in (
        lambda: problems.check_idle_gpus([facts._replace(given_gpus=4)]), lambda: problems.check_gpu_count(three),
        lambda: problems.check_options([facts, facts._replace(options={"--quiet": "1"})]),
        lambda: gpus.choose_gpus([gpus.RankGpus(0, (gpu,)), gpus.RankGpus(1, (gpu,))], "n1", advice=advice),
        lambda: gpus.choose_gpus([gpus.RankGpus(0, ()), gpus.RankGpus(1, ())], "n1", advice=advice),
        lambda: gpus.check_device_kinds("cuda", [nothing], ["n1"], advice),
        lambda: gpus.check_device_kinds(None, [nothing, torch], ["n1", "n2"], advice),
        lambda: gpus.check_gpu_index(GpuChoice(gpu, 1), torch, 0, "n1", True, False, advice),
        lambda: gpus.choose_backend("nccl", [nothing._replace(backends={"nccl": ("cuda",)})], ["n1"], advice=advice),
    ):
        with pytest.raises(LaunchError) as caught:
            check()
        said.append(str(caught.value))
    return said


ROWS = (*LAUNCHERS, *SCHEDULERS)


@pytest.mark.parametrize("launcher", [*LAUNCHERS, None], ids=lambda row: row.name if row else "none")
@pytest.mark.parametrize("scheduler", [*SCHEDULERS, None], ids=lambda row: row.name if row else "none")
def test_no_message_of_a_start_names_the_option_of_another_launcher(
    launcher: Launcher | None, scheduler: Scheduler | None
) -> None:
    own = set().union(*(options_of(row) for row in (launcher, scheduler) if row))
    foreign = set().union(*map(options_of, ROWS)) - own
    said = said_in_planning(launcher.name if launcher else "", scheduler.name if scheduler else "")
    assert len(said) == 12
    if scheduler is not None:
        said.append(memory_advice(scheduler.memory_use, scheduler.memory))
    for text in said:
        assert not {option for option in foreign if re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text)}, text
        assert scheduler is SLURM or "Slurm" not in text or find(
            "launch/too_few_gpus_from_slurm", text), text


def test_cray_mpich_is_told_of_cray_shasta_where_slurm_has_it() -> None:
    for library in (CRAY, CRAY_BUILT):
        for types, option in (((), "cray_shasta"), (("none", "pmix", "cray_shasta", "pmi2"), "cray_shasta"),
                              (("none", "pmi2"), "pmi2")):
            with pytest.raises(LaunchError) as caught:
                check_compatibility(read_launch_facts(STEP), library, types)
            assert caught.value.do.partition(";")[0] == f"use srun --mpi={option}"


@pytest.mark.parametrize(("kind", "step"), [
    ("srun cray_shasta 22", "7.0"), ("srun cray_shasta 24", "7.0"), ("psslurm pmi", "7.0"), ("flux simple", None),
    ("PALS cray", None)])
def test_the_step_of_ranks_that_srun_has_started(kind: str, step: str | None) -> None:
    assert find_slurm_step(SET[kind], read_launch_facts(SET[kind])) == step


@pytest.mark.parametrize("outer", [FLUX_SIMPLE, FLUX_PMIX])
@pytest.mark.parametrize("inner", [MPIRUN, HYDRA])
def test_a_launcher_in_a_task_of_flux(outer: dict[str, str], inner: dict[str, str]) -> None:
    one = {**outer, **inner, "FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"}
    found = read_launch_facts(one)
    assert found is not None
    assert (found.size, found.rank) == (4, 2)
    check_outer_tasks(found)
    check_world_size(found, 4, MPICH)
    with pytest.raises(LaunchError, match="nested-launcher") as caught:
        check_outer_tasks(read_launch_facts({**outer, **inner}))
    assert find("launch/launcher_in_each_task", caught.value.actual, outer="flux run", tasks=4)


@pytest.mark.parametrize("kind", ["srun cray_shasta 22", "flux pmix", "PALS cray"])
def test_a_single_task_that_is_offered_nothing_useful_is_a_world_of_one(kind: str) -> None:
    environ = {name: "1" if name in ("SLURM_STEP_NUM_TASKS", "FLUX_JOB_SIZE", "PMI_SIZE") else value
               for name, value in SET[kind].items()}
    check_compatibility(read_launch_facts(environ), MPICH)
    prefixes = list_hidden_prefixes(read_launch_facts(environ), MPICH)
    assert not [name for name in environ if name.startswith(("PMI", "PALS_")) and not name.startswith(prefixes)]


@pytest.mark.parametrize(("environ", "job"), [
    ({"SLURM_JOB_ID": "7"}, ("7", "")), ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, ("7", "2")),
    (FLUX_TASK, ("f6PMw2aL7", "fXGLLfH")), ({"FLUX_JOB_ID_PATH": "/ƒ5tczL6YX"}, ("f5tczL6YX", "")),
    ({"FLUX_ENCLOSING_ID": "ƒ6PMw2aL7"}, ("f6PMw2aL7", "")), ({"PBS_JOBID": "9.pbs01"}, ("9", "")),
    ({"PBS_JOBID": "9[3].pbs01"}, ("9_3", "")), ({"LSB_JOBID": "5", "LSB_JOBINDEX": "0"}, ("5", "")),
    ({"LSB_JOBID": "5", "LSB_JOBINDEX": "2"}, ("5_2", "")),
    ({"JOB_ID": "4", "SGE_ROOT": "/sge", "SGE_TASK_ID": "undefined"}, ("4", "")), ({"JOB_ID": "4"}, ("", "")),
    ({"_CONDOR_PROCNO": "1"}, ("", "")), ({"AWS_BATCH_JOB_ID": "a-b#1"}, ("a-b", "")), ({}, ("", "")),
])
def test_the_number_of_a_job(environ: dict[str, str], job: tuple[str, str]) -> None:
    assert schedulers.find_job(environ) == job


@pytest.mark.parametrize(("environ", "names"), [
    (FLUX_TASK, ("ƒ6PMw2aL7", "f6PMw2aL7", "f6PMw2aL7.fXGLLfH", "ƒ6PMw2aL7.ƒXGLLfH", "")),
    ({"PBS_JOBID": "9[3].pbs01"}, ("9[3].pbs01", "9[3]", "9_3")), ({"PBS_JOBID": "9.pbs01"}, ("9.pbs01", "9")),
    ({"LSB_JOBID": "5"}, ("5",))])
def test_a_job_is_found_by_what_its_scheduler_calls_it(
    environ: dict[str, str], names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in (name for scheduler in SCHEDULERS for name in scheduler.jobs):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    card = JobEndpoint("mpiddp-1", *find_job_number(), "n1", "127.0.0.1", 4000, "token", 2, "0")
    write_endpoint(card)
    assert {name: find_endpoint(name).run_id for name in names} == dict.fromkeys(names, "mpiddp-1")
    with pytest.raises(UnansweredError):
        find_endpoint("77.pbs01")


@pytest.mark.parametrize(("environ", "scheduler", "size"), [
    ({"PBS_JOBID": "9", "PBS_NODEFILE": "@"}, "PBS", "4 MPI processes"),
    ({"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "n1 16 n2 16"}, "LSF", "2 nodes"),
    ({"JOB_ID": "4", "SGE_ROOT": "/sge", "NHOSTS": "2", "NSLOTS": "8"}, "SGE", "2 nodes"),
    ({"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "3"}, "HTCondor", "3 nodes"),
    ({"AWS_BATCH_JOB_ID": "a", "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"}, "AWS Batch",
     "2 nodes"),
    ({"K_MPI_JOB_ROLE": "launcher"}, "Kubernetes' MPI Operator", "2 nodes"),
])
def test_a_process_alone_in_a_job_for_several(
    environ: dict[str, str], scheduler: str, size: str, tmp_path: Path
) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    environ = {name: value.replace("@", str(tmp_path / "nodes")) for name, value in environ.items()}
    assert warn_unlaunched(OPEN_MPI_5, *schedulers.find_intended_size(environ)) == [
        message("launch/no_launcher", scheduler=scheduler, size=size, start="Open MPI's mpirun")]


@pytest.mark.parametrize("environ", [
    {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "3"}, {"PBS_JOBID": "5", "PBS_NODEFILE": "@"},
    {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "n1 16 n2 16 n3 8"}, {"JOB_ID": "4", "SGE_ROOT": "/sge", "NHOSTS": "3"}])
def test_the_number_of_a_jobs_nodes(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\nn3\n")
    environ = {name: value.replace("@", str(tmp_path / "nodes")) for name, value in environ.items()}
    assert schedulers.count_unchosen_nodes(environ) == 3
    assert schedulers.count_unchosen_nodes({**environ, "MPIDDP_RESTART_COUNT": "0"}) == 0  # under mpiddp.supervise


@pytest.mark.parametrize("environ", [
    {"_CONDOR_PROCNO": "1", "_CONDOR_NPROCS": "3"}, {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "n1 16"},
    {"AWS_BATCH_JOB_ID": "a", "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "1"},
    {"JOB_ID": "4", "SGE_ROOT": "/sge", "NHOSTS": "1", "NSLOTS": "8"}, {"PBS_JOBID": "9", "PBS_NODEFILE": "/nowhere"},
    {"K_MPI_JOB_ROLE": "worker"}, {}])
def test_who_is_alone_by_right_or_is_not_to_speak(environ: dict[str, str]) -> None:
    assert warn_unlaunched(OPEN_MPI_5, *schedulers.find_intended_size(environ)) == []


PBS_PRO = """Job Id: 9.pbs01
    Resource_List.walltime = 01:00:00
    stime = Wed Nov 25 10:00:00 2026
    resources_used.walltime = 00:10:00
"""
GRID_ENGINE = """<detailed_job_info><djob_info><element><JB_hard_resource_list>
<qstat_l_requests><CE_name>h_vmem</CE_name><CE_doubleval>2147483648.000000</CE_doubleval></qstat_l_requests>
<qstat_l_requests><CE_name>h_rt</CE_name><CE_stringval>300</CE_stringval><CE_doubleval>300.000000</CE_doubleval>
</qstat_l_requests></JB_hard_resource_list><JB_submission_time>900</JB_submission_time>
<JB_ja_tasks><ulong_sublist><JAT_start_time>1000</JAT_start_time></ulong_sublist></JB_ja_tasks></element></djob_info>
"""
GRID_ENGINE_ARRAY = GRID_ENGINE.replace("</JB_ja_tasks>", "<JAT_start_time>1100</JAT_start_time></JB_ja_tasks>")
TORQUE = """Job Id: 9.torque
    Resource_List.walltime = 01:00:00
    start_time = Wed Nov 25 10:00:00 2026
    Walltime.Remaining = 1200
"""


@pytest.mark.parametrize(("scheduler", "text", "end_s"), [
    (SLURM, "2026-11-25T11:00:00\n", time.mktime((2026, 11, 25, 11, 0, 0, 0, 0, -1))),
    (PBS, PBS_PRO, time.mktime((2026, 11, 25, 11, 0, 0, 0, 0, -1))), (PBS, TORQUE, 2200),
    (FLUX, "600\n", 1600), (LSF, "0:42 L\n", 1000 + 42 * 60), (LSF, "25:00 X", 91000),
    (SGE, GRID_ENGINE, 1300),
])
def test_when_a_job_ends(scheduler: Scheduler, text: str, end_s: float) -> None:
    assert scheduler.parse_end(text, 1000) == end_s


@pytest.mark.parametrize(("scheduler", "text"), [
    (SLURM, "Unknown"), (SLURM, ""), (FLUX, "4294967295"), (FLUX, ""),
    (PBS, "Job Id: 9"), (PBS, ""), (LSF, "-"), (LSF, ""), (SGE, ""), (SGE, GRID_ENGINE_ARRAY),
    (SGE, GRID_ENGINE.replace("h_rt", "s_rt"))])
def test_a_job_whose_end_is_not_known(scheduler: Scheduler, text: str) -> None:
    with pytest.raises(ValueError):
        scheduler.parse_end(text, 1000)


@pytest.mark.process
@pytest.mark.parametrize("scheduler", [FLUX, PBS, LSF, SLURM],
                         ids=lambda scheduler: scheduler.name)
def test_the_schedulers_command_is_asked_by_one_rank(
    scheduler: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"Flux": "600", "PBS": TORQUE, "LSF": "0:10 L", "Slurm": "2026-11-25T11:00:00"}[scheduler.name]
    command = tmp_path / scheduler.ask_end[0]
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environ = {scheduler.jobs[0]: "9"}
    assert schedulers.find_end(environ, asks=False) is None
    found = schedulers.find_end(environ, asks=True)
    assert found is not None
    assert scheduler is SLURM or 0 < found - time.time() <= 1200
    command.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert schedulers.find_end(environ, asks=True) is None
    assert scheduler.ask_end[0] in schedulers.describe_unknown_end(environ)


def test_sges_slots_on_this_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1.site 8 all.q@n1 UNDEFINED\nn2.site 4 all.q@n2 UNDEFINED\n")
    environ = {"JOB_ID": "4", "SGE_ROOT": "/sge", "PE_HOSTFILE": str(tmp_path / "hosts")}
    assert read_grant(environ, "n2", by_mpirun=True) == CpuGrant(4, False, 4)
    assert read_grant(environ, "n3", by_mpirun=True) is None
