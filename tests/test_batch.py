"""Each batch script is copied, edited in its marked lines and submitted, as users do."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN, ip, namespace
from tests.messages import message
from tests.support import EXAMPLES, MPIS, PROGRAMS, ROOT, check, first_of, single_node_environ, srun

pytestmark = pytest.mark.light

BATCH = ROOT / "batch"
PYTHON, STANDINS = MPIS["openmpi4"].python.parent, ROOT / "tests/standins"
HELLO = f"python -m mpiddp {PROGRAMS / 'two_words.py'} 'two words'"
ACTIVATE = PYTHON / "activate"


@dataclass(frozen=True)
class Job:
    """A finished batch job: Slurm's state, exit code, output."""

    state: str
    exit_code: str
    output: str


class Submitted:
    """A batch job in the queue."""

    def __init__(self, cluster: Cluster, script: Path, *command: str) -> None:
        """Submit a script by a command, sbatch without one."""
        self.cluster, self.folder = cluster, script.parent
        environ = {
            **MPIS["openmpi4"].environ(), "MODULEPATH": str(self.folder / "modules"), "USER": "root",
            "MPIDDP_DEVICE": "cpu",  # the GPUs that Slurm assigns here are plain files
            "APPTAINER_STANDIN_LOG": str(self.folder / "log"), "ENROOT_STANDIN_LOG": str(self.folder / "log"),
            "PYXIS_STANDIN_LOG": str(self.folder / "log"),
        }
        done = check(cluster.run(*(command or ("sbatch", str(script))), timeout=30, env=environ, cwd=self.folder))
        self.told, self.number = done.stdout, done.stdout.split()[-1]

    def output(self) -> str:
        """Return what the job has printed."""
        return "".join(path.read_text(errors="replace") for path in self.folder.glob("*.out"))

    def wait_for(self, pattern: str, timeout_s: float = 300) -> None:
        """Wait until the job has printed this."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.output(), re.DOTALL):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {pattern} in\n{self.output()}\n{self.cluster.job(self.number)}")
            time.sleep(0.1)

    def wait(self, timeout_s: float = 100) -> Job:
        """Wait until the job has ended."""
        try:
            facts = self.cluster.wait_for_job(self.number, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.output()}") from None
        return Job(facts["JobState"], facts["ExitCode"], self.output())


@pytest.fixture
def folder(cluster: Cluster) -> Iterator[Path]:
    """Return a folder that all nodes see, with the module files of a site in it."""
    assert cluster
    found = RUN / f"batch-{time.monotonic_ns()}"
    (found / "modules/mpi").mkdir(parents=True)
    for name, path in (("pytorch", PYTHON), ("mpi/openmpi", PYTHON), ("standins", STANDINS),
                       ("pyxis", STANDINS / "pyxis")):
        (found / f"modules/{name}.lua").write_text(f'prepend_path("PATH", "{path}")\n')
    (found / "modules/cray.lua").write_text('setenv("SLURM_MPI_TYPE", "pmix")\n')  # a site whose srun needs no --mpi
    return found


def edited(folder: Path, name: str, **values: object) -> Path:
    """Return a copy of a batch script in which marked lines have new values."""
    text = (BATCH / name).read_text()
    for key, value in values.items():
        option = key.replace("_", "-")
        text, options = re.subn(rf"^(#(?:SBATCH|flux:) --{option}=)\S+(?=.*# edit)", rf"\g<1>{value}", text,
                                flags=re.MULTILINE)
        text, settings = re.subn(rf'^((?:export )?{key}=)(?:".*?"|\d+)(?=.*# edit)', rf'\g<1>"{value}"', text,
                                 flags=re.MULTILINE)
        assert options + settings == 1, f"{name} has no marked line for {key}"
    (copy := folder / name).write_text(text)
    shutil.copymode(BATCH / name, copy)
    return copy


@pytest.mark.thorough("other tests submit these scripts, or similar ones")
@pytest.mark.parametrize(("name", "values"), [
    ("llsub.sh", {"MODULES": "pytorch mpi/openmpi", "cpus_per_task": 2, "gres": "gpu:2"}),
    ("srun_pmix.sh", {"MODULES": "pytorch"}), ("requeue.sh", {"ENVIRONMENT": ACTIVATE}),
    ("cray.sh", {"MODULES": "pytorch cray", "ntasks_per_node": 2, "gpus_per_node": 2, "cpus_per_task": 4}),
    ("supervise.sh", {"ENVIRONMENT": ACTIVATE}),
])
def test_a_script_says_hello(cluster: Cluster, folder: Path, name: str, values: dict[str, object]) -> None:
    check_hello_of_four(Submitted(cluster, edited(folder, name, COMMAND=HELLO, **values)).wait())


def check_hello_of_four(done: Job) -> None:
    """Fail unless two ranks on each of two nodes said hello."""
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert len(re.findall(r"hello from \[node[12]:gloo\] process \d/4$", done.output, re.MULTILINE)) == 4, done.output


@pytest.mark.parametrize("arguments", [
    pytest.param((), marks=pytest.mark.thorough), pytest.param(("-s", "8"), marks=pytest.mark.thorough), ("[2,2,2]",)])
def test_llsub(cluster: Cluster, folder: Path, arguments: tuple[str, ...]) -> None:
    """With a stand-in for LLsub, which only SuperCloud has."""
    script = edited(folder, "llsub.sh", COMMAND=HELLO, MODULES="pytorch mpi/openmpi", cpus_per_task=2, gres="gpu:2")
    job = Submitted(cluster, script, str(STANDINS / "LLsub"), str(script), *arguments)
    assert job.told.startswith("Submission command: sbatch ")
    check_hello_of_four(job.wait())


@pytest.mark.thorough("Enroot with Pyxis")
def test_apptainer(cluster: Cluster, folder: Path) -> None:
    """With a stand-in for apptainer, which logs its arguments."""
    (image := folder / "image.sif").touch()
    script = edited(folder, "srun_pmix.sh", MODULES="pytorch standins", CONTAINER=image, COMMAND=HELLO)
    check_hello_of_four(Submitted(cluster, script).wait())
    told = (folder / "log").read_text().splitlines()
    said = HELLO.replace("'", "")
    assert told == [f"apptainer exec --nv --bind /tmp,{folder} {image} {said}"] * 4


@pytest.mark.thorough("Enroot with Pyxis")
def test_enroot_without_pyxis(cluster: Cluster, folder: Path) -> None:
    """With a stand-in for enroot, which passes only the variables named in its options."""
    (image := folder / f"image{folder.name}.sqsh").touch()
    modules = "pytorch standins; export NCCL_SAID='seven eight'"
    script = loading(edited(folder, "enroot.sh", IMAGE=image, COMMAND=HELLO), modules)
    check_hello_of_four(done := Submitted(cluster, script).wait())
    assert done.output.count("has NCCL_SAID") == 4
    told = (folder / "log").read_text().splitlines()
    assert sorted(line.split()[0] for line in told if " create " in line) == ["node1", "node2"]
    assert len([line for line in told if " start " in line]) == 4


def test_enroot_under_pyxis(cluster: Cluster, folder: Path) -> None:
    """With a stand-in for the plugin, which adds options to srun."""
    (image := folder / "image.sqsh").touch()
    script = loading(edited(folder, "enroot.sh", IMAGE=image, COMMAND=HELLO), "pytorch pyxis")
    check_hello_of_four(Submitted(cluster, script).wait())
    assert (folder / "log").read_text().splitlines() == [
        f"pyxis --container-image={image}", f"pyxis --container-mounts={folder}", f"pyxis --container-workdir={folder}"]


@pytest.mark.mpi
def test_folders_with_odd_names(tmp_path: Path) -> None:
    """Their names are never run as shell code."""
    (where := tmp_path / "it's; touch pwned; \"$(id)\"").mkdir()
    (image := where / "image").touch()
    (tools := tmp_path / "tools").mkdir()
    says = '[ "$1" = --help ] && echo --container-image; printf "%s\\n" "$@"'
    (srun := tools / "srun").write_text(f"#!/bin/sh\n{says}\n")
    srun.chmod(0o755)
    for name, key in (("enroot.sh", "IMAGE"), ("srun_pmix.sh", "CONTAINER")):
        text = (BATCH / name).read_text().replace('MODULES="pytorch"', 'MODULES=""')
        named = re.sub(rf'^((export )?{key}=)".*?"', r'\g<1>"$PWD/image"', text, flags=re.MULTILINE)
        (script := tmp_path / name).write_text(named)
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "2"}
        told = check(processes.run("bash", str(script), timeout=30, env=env, cwd=where)).stdout.splitlines()
        assert any(line.endswith(str(image)) for line in told), told
        assert any(line.endswith((f"mounts={where}", f"/tmp,{where}")) for line in told), told
        assert told[-4:] == ["python", "-m", "mpiddp", "train.py"]
    assert not (where / "pwned").exists()


def loading(script: Path, modules: str) -> Path:
    """Return the script with a line that loads modules first."""
    script.write_text(script.read_text().replace("\n[ -e", f"\nmodule load {modules}\n[ -e", 1))
    return script


@pytest.mark.torch
@pytest.mark.thorough("test_readme_comparison.py runs a script with Accelerate")
def test_an_accelerate_script_with_its_configuration(cluster: Cluster, folder: Path) -> None:
    """The model is compiled as configured; the configured nodes, processes and ports are ignored."""
    (config := folder / "config.yaml").write_text(CONFIGURATION + "distributed_type: MULTI_CPU\nuse_cpu: true\n")
    script = edited(folder, "accelerate.sh", ENVIRONMENT=ACTIVATE, CONFIG=config,
                    COMMAND=f"python -m mpiddp {PROGRAMS / 'accelerated.py'}")
    done = Submitted(cluster, script).wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert len(re.findall(r"^\d/4 OptimizedModule True$", done.output, re.MULTILINE)) == 4, done.output


CONFIGURATION = """\
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
mixed_precision: 'no'
num_machines: 2
num_processes: 8
dynamo_config:
  dynamo_backend: EAGER
"""
FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 2000
  fsdp_version: 2
"""


DEEPSPEED = """\
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  zero3_init_flag: true
  zero_stage: 3
"""


@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.parametrize(("told", "arrives"), [
    (FSDP, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_MIN_NUM_PARAMS": "2000",
            "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "ACCELERATE_DYNAMO_BACKEND": "EAGER"}),
    pytest.param(DEEPSPEED, {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_CONFIG_DS_FIELDS": "gradient_accumulation_steps,zero3_init_flag,zero_stage,mixed_precision",
    }, marks=pytest.mark.thorough),
])
def test_what_an_accelerate_configuration_says_arrives(tmp_path: Path, told: str, arrives: dict[str, str]) -> None:
    """The script's own lines, with a shell instead of Slurm: FSDP and DeepSpeed need GPUs."""
    (config := tmp_path / "config.yaml").write_text(CONFIGURATION + told)
    script = (BATCH / "accelerate.sh").read_text()
    lines = script[script.index("settings=$("):script.index("eval \"exec")].replace("$CONFIG", str(config))
    env = {**single_node_environ(MPIS["openmpi4"]), "OMP_NUM_THREADS": "3"}
    found = dict(line.split("=", 1) for line in check(processes.run(
        "bash", "-c", f"{lines}\nenv", timeout=60, env=env)).stdout.splitlines() if "=" in line)
    expected = {**arrives, "ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "3", "MASTER_ADDR": None,
                "WORLD_SIZE": None}
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(("name", "values", "reason"), [
    ("srun_pmix.sh", {"MODULES": "nonsense"}, '"nonsense"'),
    ("srun_pmix.sh", {"MODULES": "", "CONTAINER": "/nowhere.sif"}, "no such container image: /nowhere.sif"),
    ("enroot.sh", {"IMAGE": "/nowhere.sqsh"}, "no such container image: /nowhere.sqsh"),
    ("requeue.sh", {"ENVIRONMENT": "/nowhere/activate"}, "/nowhere/activate: No such file or directory"),
    ("accelerate.sh", {"ENVIRONMENT": ACTIVATE, "CONFIG": "/nowhere.yaml"}, "no such configuration: /nowhere.yaml"),
])
def test_what_a_user_got_wrong_stands_at_the_end_of_the_output(
    cluster: Cluster, folder: Path, name: str, values: dict[str, object], reason: str
) -> None:
    done = Submitted(cluster, edited(folder, name, **values)).wait()
    assert done.state == "FAILED"
    assert reason in "\n".join(done.output.splitlines()[-12:])


def train(epochs: int, checkpoint: object) -> str:
    """Return the script that trains, with its arguments."""
    return f"{EXAMPLES / 'train_digits.py'} --epochs {epochs} --checkpoint {checkpoint}"


@functools.cache
def uninterrupted(cluster: Cluster, epochs: int) -> dict[str, torch.Tensor]:
    """Return the weights of a training that was never stopped, with the ranks and threads of the script."""
    file = RUN / f"uninterrupted-{epochs}.pt"
    check(srun(cluster, MPIS["openmpi4"], "-N2 --ntasks-per-node=2 --cpus-per-task=4", *train(epochs, file).split(),
               timeout=600))
    return weights(file)


def weights(file: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint."""
    found: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["model"]
    return found


@pytest.mark.torch
@pytest.mark.thorough("other tests queue a job again and compare weights")
@pytest.mark.parametrize(("why", "epochs"), [("drain", 30), ("scancel", 30), ("walltime", 200)])
def test_a_training_that_is_stopped_and_requeued_comes_to_the_same_weights(
    cluster: Cluster, folder: Path, why: str, epochs: int
) -> None:
    """The walltime is two minutes, and the ranks stop 50 seconds before its end."""
    minutes, signal = (2, "USR1@10") if why == "walltime" else (10, "USR1@120")
    near, signalled = message("launch/walltime_near"), message("launch/time_to_stop", signal="SIGUSR1")
    script = edited(folder, "requeue.sh", ENVIRONMENT=ACTIVATE, time=minutes, signal=signal,
                    COMMAND=f"python -m mpiddp {train(epochs, 'checkpoint.pt')}",
                    SUPERVISE="python -m mpiddp.supervise --stop-before 50")
    job = Submitted(cluster, script)
    try:
        if why != "walltime":
            job.wait_for(f"epochs: +[0-9]+%.* [1-9]/{epochs}")
            if why == "drain":
                cluster.run("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=test", timeout=30)
            cluster.run("scancel", "--signal=USR1", job.number, timeout=30)
        job.wait_for(near if why == "walltime" else signalled)
        done = job.wait(timeout_s=300)
    finally:
        cluster.run("scontrol", "update", "NodeName=node2", "State=RESUME", timeout=30)
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert re.search("^resumed in epoch \\d+ after \\d+ steps$", done.output, re.MULTILINE), done.output
    found, expected = weights(folder / "checkpoint.pt"), uninterrupted(cluster, epochs)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_job_is_queued_again_when_its_walltime_is_near_and_not_when_it_is_cancelled(
    cluster: Cluster, folder: Path
) -> None:
    """The walltime is a minute, and the ranks stop 48 seconds before its end; scancel stops them by SIGTERM."""
    script = edited(folder, "requeue.sh", ENVIRONMENT=ACTIVATE, time=1, signal="USR1@10",
                    COMMAND=f"python -m mpiddp {PROGRAMS / 'stops.py'}",
                    SUPERVISE="python -m mpiddp.supervise --stop-before 48")
    job = Submitted(cluster, script)
    job.wait_for(message("launch/walltime_near"))
    job.wait_for("(READY.*){8}")
    cluster.run("scancel", job.number, timeout=30)
    done = job.wait()
    assert len(re.findall(r"^rank \d stopped at step \d+, restart 0 ", done.output, re.MULTILINE)) == 4, done.output
    assert done.state == "CANCELLED"
    time.sleep(2)  # for the script to end
    assert ((facts := cluster.job(job.number))["JobState"], facts["Restarts"]) == ("CANCELLED", "1")


def test_a_signal_to_the_batch_shell_is_passed_on(cluster: Cluster, folder: Path) -> None:
    """All ranks stop at the same step, and the job is requeued."""
    script = edited(folder, "requeue_mpirun.sh", ENVIRONMENT=ACTIVATE, MODULES="pytorch mpi/openmpi",
                    COMMAND=f"python -m mpiddp {PROGRAMS / 'stops.py'}")
    job = Submitted(cluster, script)
    job.wait_for("(READY.*){4}")
    cluster.run("scancel", "--signal=USR1", "--batch", job.number, timeout=30)
    job.wait_for("(stopped at step.*){4}")
    deadline = time.monotonic() + 60
    while cluster.job(job.number)["Restarts"] != "1" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert cluster.job(job.number)["Restarts"] == "1"
    cluster.run("scancel", job.number, timeout=30)
    stopped = re.findall(r"^rank \d stopped at step (\d+), restart 0 ", job.wait().output, re.MULTILINE)
    assert len(stopped) == 4
    assert len(set(stopped)) == 1


def test_a_job_whose_first_node_is_lost_is_requeued(cluster: Cluster, folder: Path) -> None:
    """With it the batch script is gone, but by --no-kill the job keeps the other nodes: the second requeues the job."""
    script = edited(folder, "supervise.sh", ENVIRONMENT=ACTIVATE, COMMAND=f"python -m mpiddp {PROGRAMS / 'stops.py'}",
                    SUPERVISE="python -m mpiddp.supervise --nodes 2")
    script.write_text(script.read_text().replace("sleep 60", "sleep 5"))
    job = Submitted(cluster, script)
    try:
        job.wait_for("(READY.*){4}")
        deadline = time.monotonic() + processes.PATIENCE * 60
        while "guard" not in cluster.run("squeue", "--steps", "--jobs", job.number, timeout=30).stdout:
            assert time.monotonic() < deadline, "the guard's step has not begun"
            time.sleep(0.2)
        for pid in map(int, ip("netns", "pids", namespace("node1")).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        check(cluster.run("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=test", timeout=30))
        deadline = time.monotonic() + processes.PATIENCE * 60
        while (facts := cluster.job(job.number))["Restarts"] != "1":
            steps = cluster.run("squeue", "--steps", "--jobs", job.number, timeout=30)
            assert time.monotonic() < deadline, (steps.stdout, facts)
            time.sleep(0.2)
    finally:
        cluster.run("scancel", job.number, timeout=30)
        cluster.restart("node1")


@pytest.mark.parametrize(("tasks", "gpus", "reason"), first_of([(1, 4, "idle-gpus"), (4, 2, "too-few-gpus")]))
def test_tasks_and_gpus_that_do_not_fit(cluster: Cluster, folder: Path, tasks: int, gpus: int, reason: str) -> None:
    script = edited(folder, "srun_pmix.sh", MODULES="pytorch", COMMAND=f"env -u MPIDDP_DEVICE {HELLO}",
                    ntasks_per_node=tasks, gpus_per_node=gpus, cpus_per_task=1)
    done = Submitted(cluster, script).wait()
    assert (done.state, done.exit_code) == ("FAILED", "3:0"), done.output
    assert f"mpiddp: cannot start: {reason}" in "\n".join(done.output.splitlines()[-12:])


def test_srun_without_mpi(cluster: Cluster, folder: Path) -> None:
    script = edited(folder, "srun_pmix.sh", MODULES="pytorch", SRUN="srun", COMMAND=HELLO)
    done = Submitted(cluster, script).wait()
    assert (done.state, done.exit_code) == ("FAILED", "3:0"), done.output
    assert "mpiddp: cannot start: no-pmix" in done.output


NO_RECIPE = ("cray.sh", "flux.sh", "jsrun.sh", "pals.sh", "pbs.sh", "sge.sh")  # the project did not begin with one


def test_every_script_is_short_and_told_of() -> None:
    told = (BATCH / "README.md").read_text()
    for script in BATCH.glob("*.sh"):
        assert f"| `{script.name}` |" in told
        lines = [line for line in script.read_text().splitlines()
                 if re.match(r"\s*(#(SBATCH|PBS|BSUB|\$|flux: -)|[^\s#])", line)]
        assert len(lines) <= 30
        assert f"| `{script.name}`, {len(lines)}" in told or script.name in NO_RECIPE


def test_each_centre_has_a_script_and_a_source() -> None:
    section = (BATCH / "README.md").read_text().split("\n## Your centre's line, and ours\n")[1]
    rows = [row for line in section.splitlines() if line.startswith("| ") and "**" not in line
            for row in [line.strip("| ").split(" | ")]][2:]
    assert len(rows) == 21
    assert {name for name in re.findall(r"`(\w+\.sh)`", section) if not (BATCH / name).exists()} == set()
    assert [row[0] for row in rows if "`" not in row[2] or not re.search(r"read|beginning", row[3])] == []
    assert set(re.findall(r"\]\[([\w-]+)\]", section)) == set(re.findall(r"^\[([\w-]+)\]: http", section, re.MULTILINE))


def test_srun_is_told_the_cores_of_a_task() -> None:
    """It does not inherit them from the batch job (man sbatch, since 22.05)."""
    starts = [line for script in BATCH.glob("*.sh") for line in script.read_text().splitlines()
              if re.search(r"(exec|SUPERVISE) (\$SRUN|srun) ", line)]
    assert len(starts) == 7
    assert [line for line in starts if ' --cpus-per-task=$SLURM_CPUS_PER_TASK ' not in line.replace('"', "")] == []


def test_a_script_that_asks_for_a_requeue_is_the_one_that_is_said_to() -> None:
    assert [script.name for script in sorted(BATCH.glob("*.sh")) if "scontrol requeue" in script.read_text()] == [
        "requeue.sh", "requeue_mpirun.sh", "supervise.sh"]
    assert "it does not requeue" in next(
        line for line in (BATCH / "README.md").read_text().splitlines() if line.startswith("| `accelerate.sh` |"))
