"""Variables that came from elsewhere: from another scheduler, from the job that submitted this one, from the user."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mpiddp.discovery import schedulers
from mpiddp.discovery.devices import find_gpu_evidence
from mpiddp.discovery.launchers import read_launch_facts
from mpiddp.planning.compatibility import check_outer_tasks
from mpiddp.supervise.__main__ import read_launcher_version
from mpiddp.supervise.allocation import expand_nodelists
from mpiddp.systems.launchers import SRUN
from mpiddp.systems.schedulers import SCHEDULERS, SLURM, Scheduler
from mpiddp.where.client import UnansweredError, find_endpoint
from mpiddp.where.registry import JobEndpoint, write_endpoint
from tests.test_launchers import FLUX_PMIX, FLUX_SIMPLE, FLUX_TASK, HYDRA, MPIRUN, STEP

OF_SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize("inner", [MPIRUN, HYDRA])
def test_mpirun_in_a_job_of_slurm_that_a_task_of_flux_has_submitted(inner: dict[str, str]) -> None:
    """Slurm hands the task's variables on."""
    check_outer_tasks(read_launch_facts({**FLUX_SIMPLE, **OF_SLURM, **inner}))


def test_a_job_of_slurm_that_a_task_of_flux_has_submitted() -> None:
    environ = {**FLUX_TASK, **OF_SLURM}
    assert schedulers.find_job(environ) == ("7", "")
    assert schedulers.find_intended_size(environ) == (SLURM, 4)
    assert read_launch_facts(environ) is None
    found = read_launch_facts({**FLUX_PMIX, **STEP})
    assert found is not None
    assert found.launcher.name == "srun"


@pytest.mark.parametrize("number", ["..", "/..", "../../x", "/../../x", "/etc/../../x", "a/b", ".hidden"])
@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "FLUX_JOB_ID_PATH", "PBS_JOBID", "LSB_JOBID", "JOB_ID",
                                  "AWS_BATCH_JOB_ID"])
def test_logs_stay_in_their_folder_whatever_a_job_is_called(name: str, number: str) -> None:
    found = schedulers.name_logs({name: number, "SGE_ROOT": "/sge"})
    assert "/" not in found
    assert found not in (".", "..")


def command(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a scheduler's command of this script."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.process
def test_the_end_of_an_element_of_lsfs_array_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the number alone bjobs prints a line for each element."""
    command(tmp_path, "bjobs", 'case "$*" in *"5[2]"*) echo "0:01 L";; *) echo "9:00 L"; echo "0:01 L";; esac',
            monkeypatch)
    end_s = schedulers.find_end({"LSB_JOBID": "5", "LSB_JOBINDEX": "2"}, asks=True)
    assert end_s is not None
    assert end_s - time.time() <= 60
    end_s = schedulers.find_end({"LSB_JOBID": "5", "LSB_JOBINDEX": "0"}, asks=True)
    assert end_s is not None
    assert end_s - time.time() > 600


@pytest.mark.process
def test_the_users_time_format_does_not_reach_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SLURM_TIME_FORMAT=relative squeue prints "Tomr 11:00" or the like (man squeue)."""
    command(tmp_path, "squeue", 'if [ "$SLURM_TIME_FORMAT" ]; then echo "Tomr 11:00"; '
            "else echo 2030-01-01T11:00:00; fi", monkeypatch)
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    end_s = time.mktime((2030, 1, 1, 11, 0, 0, 0, 0, -1))
    assert schedulers.find_end({"SLURM_JOB_ID": "7"}, asks=True) == end_s


@pytest.mark.process
def test_a_job_that_was_given_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable keeps the former end."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) - 60)}
    end_s = int(time.time()) + 3600
    command(tmp_path, "squeue", f"date -d @{end_s} +%Y-%m-%dT%H:%M:%S", monkeypatch)
    assert schedulers.find_end(environ, asks=True) == end_s
    assert schedulers.find_end(environ, asks=False) is None
    command(tmp_path, "squeue", "exit 1", monkeypatch)
    assert schedulers.find_end(environ, asks=True) == float(environ["SLURM_JOB_END_TIME"])
    assert schedulers.find_end({**environ, "SLURM_JOB_END_TIME": str(end_s)}, asks=False) == end_s
    assert schedulers.find_end({"PBS_JOBID": "9", "SLURM_JOB_END_TIME": str(end_s)}, asks=False) is None


@pytest.mark.process
@pytest.mark.parametrize("script", ["printf '\\377\\376\\n'", "head -c 20000000 /dev/zero", "sleep 60", "exit 1"])
@pytest.mark.parametrize("scheduler", [row for row in SCHEDULERS if row.ask_end], ids=lambda row: row.name)
def test_a_command_that_says_nothing_useful(
    scheduler: Scheduler, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedulers, "COMMAND_TIMEOUT_S", 0.3)
    command(tmp_path, scheduler.ask_end[0], script, monkeypatch)
    assert schedulers.find_end({scheduler.jobs[0]: "9"}, asks=True) is None


@pytest.mark.mpi
def test_programs_whose_words_are_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "srun", "printf 'MPI plugin types are\\n\\tpmix\\n\\tn\\344chster\\n' >&2", monkeypatch)
    assert schedulers.list_mpi_interfaces(SRUN)[0] == "pmix"
    command(tmp_path, "mpiexec", "printf 'Open MPI \\344\\n'", monkeypatch)
    assert "Open MPI" in read_launcher_version(str(tmp_path / "mpiexec"), str(tmp_path / "mpiexec"))


@pytest.mark.parametrize("text", ["[warning] a module was not loaded\nn[1-3]", "n[1-", "n[x]"])
def test_what_flux_prints_is_no_list_of_nodes(text: str) -> None:
    assert expand_nodelists(text) == ()
    assert expand_nodelists("n[1-2]\nm7\n") == ("m7", "n1", "n2")


@pytest.mark.parametrize(("environ", "expected"), [
    ({"SLURM_JOB_ID": "7"}, ""), ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, "CUDA_VISIBLE_DEVICES=0"),
    ({"PBS_JOBID": "9"}, "CUDA_VISIBLE_DEVICES=0"), ({"FLUX_JOB_ID_PATH": "/f1"}, "CUDA_VISIBLE_DEVICES=0"),
    ({}, "CUDA_VISIBLE_DEVICES=0")])
def test_a_list_of_gpus_that_a_user_has_in_all_jobs(
    environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster without GPUs, Slurm sets no list."""
    monkeypatch.setattr("mpiddp.discovery.devices.describe_openable_gpus", str)
    assert find_gpu_evidence({**environ, "CUDA_VISIBLE_DEVICES": "0"}) == expected


@pytest.mark.parametrize(("number", "step", "asked"), [
    ("f6PMw2aL7", "fXGLLfH", "f6PMw2aL7.fOTHER"), ("", "", "."), ("", "", ".7")])
def test_another_job_is_not_asked(
    number: str, step: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_endpoint(JobEndpoint("mpiddp-1", number, False, step, "n1", "127.0.0.1", 4000, "token", 2, "0"))
    with pytest.raises(UnansweredError):
        find_endpoint(asked)
