"""Each batch script is copied, edited in its marked lines and submitted, as its users do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.support import EXAMPLES, MPIS, PROGRAMS, ROOT, check

BATCH = ROOT / "batch"
HELLO = f"python -m mpiddp {EXAMPLES / 'hello_world.py'}"
ACTIVATE = MPIS["openmpi4"].python.parent / "activate"
QUEUED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")


@dataclass(frozen=True)
class Job:
    """What became of a batch job: Slurm's word for its end, its exit code, its output file."""

    state: str
    exit_code: str
    output: str


class Submitted:
    """A batch job in the queue."""

    def __init__(self, cluster: Cluster, script: Path, *before: str) -> None:
        self.cluster, self.folder = cluster, script.parent
        environ = {**MPIS["openmpi4"].environ(), "MODULEPATH": str(self.folder / "modules")}
        done = check(cluster.run(*before, "sbatch", f"--chdir={self.folder}", str(script), timeout=30, env=environ))
        self.number = done.stdout.split()[-1]

    def facts(self) -> dict[str, str]:
        """Return what Slurm knows of the job."""
        shown = check(self.cluster.run("scontrol", "--oneliner", "show", "job", self.number, timeout=30)).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def output(self) -> str:
        """Return what the job has printed."""
        return "".join(path.read_text() for path in self.folder.glob("*.out"))

    def wait(self, timeout_s: float = 100) -> Job:
        """Return what became of the job."""
        deadline = time.monotonic() + timeout_s
        while (facts := self.facts())["JobState"] in QUEUED:
            if time.monotonic() > deadline:
                self.cluster.run("scancel", self.number, timeout=30)
                raise TimeoutError(f"{facts}\n{self.output()}")
            time.sleep(0.3)
        return Job(facts["JobState"], facts["ExitCode"], self.output())


@pytest.fixture
def folder(cluster: Cluster) -> Iterator[Path]:
    """Return a folder that all nodes see, with the module files of a site in it."""
    assert cluster
    found = RUN / f"batch-{time.monotonic_ns()}"
    (found / "modules/mpi").mkdir(parents=True)
    for name in ("pytorch", "mpi/openmpi"):
        (found / f"modules/{name}.lua").write_text(f'prepend_path("PATH", "{MPIS["openmpi4"].python.parent}")\n')
    return found


def edited(folder: Path, name: str, **values: object) -> Path:
    """Return a copy of a batch script in which marked lines have new values."""
    text = (BATCH / name).read_text()
    for key, value in values.items():
        option = key.replace("_", "-")
        text, options = re.subn(rf"^(#SBATCH --{option}=)\S+(?=.*# edit)", rf"\g<1>{value}", text, flags=re.MULTILINE)
        text, settings = re.subn(rf'^((?:export )?{key}=)".*"(?=.*# edit)', rf'\g<1>"{value}"', text, flags=re.MULTILINE)
        assert options + settings == 1, f"{name} has no marked line for {key}"
    (copy := folder / name).write_text(text)
    return copy


@pytest.mark.parametrize(("name", "values"), [
    ("llsub.sh", {"MODULES": "pytorch mpi/openmpi", "cpus_per_task": 2}),
    ("srun_pmix.sh", {"MODULES": "pytorch"}),
    ("requeue.sh", {"ENVIRONMENT": ACTIVATE}),
])
def test_a_script_says_hello(cluster: Cluster, folder: Path, name: str, values: dict[str, object]) -> None:
    done = Submitted(cluster, edited(folder, name, COMMAND=HELLO, **values)).wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert len(re.findall(r"hello from \[node[12]:gloo\] process \d/4$", done.output, re.MULTILINE)) == 4, done.output


def test_an_accelerate_script_with_its_configuration(cluster: Cluster, folder: Path) -> None:
    (config := folder / "config.yaml").write_text("mixed_precision: 'no'\ngradient_accumulation_steps: 2\n")
    script = edited(folder, "accelerate.sh", ENVIRONMENT=ACTIVATE, CONFIG=config,
                    COMMAND=f"python -m mpiddp {PROGRAMS / 'accelerated.py'}")
    done = Submitted(cluster, script).wait()
    assert (done.state, done.exit_code) == ("COMPLETED", "0:0"), done.output
    assert len(re.findall(r"^\d/4 DistributedDataParallel True$", done.output, re.MULTILINE)) == 4, done.output


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


def test_srun_without_mpi(cluster: Cluster, folder: Path) -> None:
    script = edited(folder, "srun_pmix.sh", MODULES="pytorch", COMMAND=HELLO)
    script.write_text(script.read_text().replace("srun --mpi=pmix ", "srun "))
    done = Submitted(cluster, script).wait()
    assert (done.state, done.exit_code) == ("FAILED", "3:0"), done.output
    assert "mpiddp: cannot start: no-pmix" in done.output


def test_every_script_is_short_and_told_of() -> None:
    told = (BATCH / "README.md").read_text()
    for script in BATCH.glob("*.sh"):
        assert f"`{script.name}`" in told
        lines = [line for line in script.read_text().splitlines() if re.match(r"\s*(#(SBATCH|PBS|BSUB)|[^\s#])", line)]
        assert len(lines) <= 25
