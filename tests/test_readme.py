"""README.md is short and true: its commands, its batch script, its messages, its tables."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pictures, processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.support import (
    EXAMPLES,
    MPIS,
    ROOT,
    Mpi,
    alone,
    check,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
    srun,
)

README = (ROOT / "README.md").read_text()
(FIRST,) = "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)).splitlines()
ACCURACY = re.compile(r"held-out accuracy (\d\.\d+) with (\d+) ranks")
REFUSAL, FAILURE = ("\n".join(line.removeprefix("    ") for line in block.splitlines()) for block in re.findall(
    r"(?:^    (?:mpiddp: (?:cannot start|failed)|  ).*\n)+", README, re.MULTILINE) if "mpiddp: " in block)
UNTRIED = "\N{EN DASH}"


def section(title: str) -> str:
    """Return what stands under a heading."""
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_first_screen_starts_a_training() -> None:
    screen = "\n".join(README.splitlines()[:40])
    assert FIRST in screen
    assert "sbatch job.sh" in screen
    assert "\nsrun " in screen


@pytest.mark.light
def test_the_pictures_are_drawn(tmp_path: Path, quick: Mpi) -> None:
    """The map as README shows it, and a trace of the same kind."""
    assert pictures.map_svg() == pictures.MAP.read_text()
    check(mpiexec(quick, 2, "--trace", tmp_path / "trace.json", EXAMPLES / "hello_world.py"))
    drawn = pictures.trace_svg(json.loads((tmp_path / "trace.json").read_text()))
    for words in (">rank 1 on ", ">import torch<", ">script<"):
        assert words in drawn
        assert words in pictures.TRACE.read_text()


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """Return a fresh copy of the sources: what git tracks, or, in an unpacked archive, all that .gitignore leaves."""
    copy = tmp_path / "mpiddp"
    if (ROOT / ".git").exists():
        listed = check(processes.run("git", "ls-files", "-z", timeout=60, cwd=ROOT)).stdout
        for name in filter(None, listed.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    else:
        ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*ignored))
    yield copy
    shutil.rmtree(copy)


@pytest.mark.process
@pytest.mark.thorough("once, when tests/run makes the environments")
def test_the_first_command_trains(clone: Path) -> None:
    """In an environment with nothing of this one but the way to Python and to packages.

    The list of problems is installed with the code, and so is the command `mpiddp`; both can be uninstalled.
    """
    kept = {name: value for name, value in os.environ.items() if name.startswith(("HOME", "PIP_", "LANG", "SSL_"))}
    kept["PIP_NO_COMPILE"] = "1"  # all of torch: the modules that the training needs are compiled by its import
    venvs = str(ROOT / ".venvs")
    path = ":".join(part for part in os.environ["PATH"].split(":") if not part.startswith(venvs))
    env = {**kept, "PATH": path}
    done = check(processes.run("sh", "-c", FIRST, timeout=600, cwd=clone, env=env))
    ((share, size),) = ACCURACY.findall(done.stdout)
    assert int(size) == 2
    assert float(share) >= 0.95
    assert len(list(clone.glob(".venv/lib/python*/site-packages/mpiddp/PROBLEMS.md"))) == 1
    command = ". .venv/bin/activate && mpiexec -n 2 mpiddp examples/hello_world.py && pip uninstall --yes mpiddp"
    done = check(processes.run("sh", "-c", command, timeout=300, cwd=clone, env=env))
    assert done.stdout.count("] hello from [") == 2
    assert list(clone.glob(".venv/lib/python*/site-packages/mpiddp*")) == [*clone.glob(".venv/bin/mpiddp")] == []


def test_the_batch_script_of_ten_lines(cluster: Cluster) -> None:
    """With this site's numbers of GPUs and cores; train.py is the example that was made distributed."""
    (script,) = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    assert len(script.splitlines()) <= 10
    folder = RUN / "readme"
    (folder / "modules").mkdir(parents=True)
    (folder / "modules/pytorch.lua").write_text(f'prepend_path("PATH", "{MPIS["openmpi4"].python.parent}")\n')
    shutil.copy(EXAMPLES / "distributed.py", folder / "train.py")
    script, changed = re.subn("(tasks-per-node|gpus-per-node|cpus-per-task)=[48]", r"\1=2", script)
    assert changed == 3
    (folder / "job.sh").write_text(script)
    env = {**MPIS["openmpi4"].environ(), "MODULEPATH": str(folder / "modules"), "USER": "root",
           "MPIDDP_DEVICE": "cpu"}  # Slurm gives GPUs that are files of no use
    submitted = check(cluster.run("sbatch", "--parsable", "job.sh", timeout=30, env=env, cwd=folder))
    facts = cluster.wait_for_job(submitted.stdout.strip(), timeout=200)
    text = "".join(path.read_text() for path in folder.glob("job.sh-*.out"))
    assert facts["JobState"] == "COMPLETED", (facts, text)
    assert re.search(r"^mpiddp \S+: 4 ranks on 2 nodes, ", text, re.MULTILINE), text
    assert len(re.findall(r"^epoch 9: loss 0\.0", text, re.MULTILINE)) == 4, text
    assert (folder / "model.pt").exists()


def test_a_script_for_one_gpu_needs_the_lines_that_the_diff_shows() -> None:
    (shown,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("single_gpu.py", "distributed.py"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    code = [line[0] + line[2:] for line in changed if line[2:4] != '""']
    assert sorted(shown.splitlines()) == sorted(code)
    assert len([line for line in code if re.match(r"\+(?!import |from )", line)]) == 6


def test_a_refusal_reads_as_it_is_shown(quick: Mpi) -> None:
    """Open MPI's mpirun, and MPICH's library."""
    other = MPIS["openmpi4"]
    need([*quick.missing(), *other.missing()])
    command = [*mpiexec_command(other, 2)[:-1], str(quick.python), "-m", "mpiddp", str(EXAMPLES / "hello_world.py")]
    done = check(processes.run(*command, timeout=100, env=single_node_environ(other), cwd=ROOT), 3)
    assert masked(REFUSAL) in masked(done.stderr), done.stderr


@pytest.mark.light
def test_a_failure_reads_as_it_is_shown(cluster: Cluster) -> None:
    script = RUN / "train.py"
    script.write_text("import torch.distributed as dist, time\n" + "\n" * 39 +
                      "if dist.get_rank() == 5:\n    raise ValueError('seven')\ntime.sleep(60)\n")
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", script), 1)
    assert masked(FAILURE) in masked(done.stderr), done.stderr


def masked(text: str) -> str:
    """Return a message without paths, process numbers and times."""
    return re.sub(r"/\S+/|pid \d+|\d+\.\d s", "…", text)


def test_the_options_are_there(quick: Mpi) -> None:
    """Each is one that `--help` tells of."""
    rows = re.findall(r"^\| (`--.*?) \| ", section("Output and logs"), re.MULTILINE)
    shown = {option for row in rows for option in re.findall(r"--[a-z][a-z-]+", row)}
    assert shown >= {"--prefix", "--show", "--log-dir"}
    assert shown <= set(re.findall(r"^  (--[a-z-]+)", alone(quick, "-m", "mpiddp", "--help").stdout, re.MULTILINE))


def test_the_names_of_problems_are_told_of() -> None:
    """PROBLEMS.md and the code name the same ones."""
    sources = "\n".join(path.read_text() for path in (ROOT / "mpiddp").rglob("*.py"))
    errors = set(re.findall(r'LaunchError\(\s*"([a-z0-9-]+)"', sources))
    warnings = {line.split(":")[0] for line in re.findall(r'f?"([a-z]+(?:-[a-z]+)+: )', sources)}
    told = (ROOT / "mpiddp/PROBLEMS.md").read_text().split("\n## ")[1:]
    assert [set(re.findall(r"^### ([a-z0-9-]+)$", part, re.MULTILINE)) for part in told] == [errors, warnings]
    assert min(len(errors), len(warnings)) >= 9


def test_the_times_are_those_of_the_benchmarks() -> None:
    document = (ROOT / "tests/benchmarks/README.md").read_text()
    beside = document.split("\n## Beside torchrun\n")[1].split("\n## ")[0]
    rows = {row[0]: row[1:] for line in beside.splitlines() if (row := line.strip("| ").split(" | "))}
    costs = json.loads((ROOT / "tests/benchmarks/startup.json").read_text())
    for row, job in (("start to end, 1 rank", "1 rank"), ("6 ranks, 3 nodes, `srun`", "6 ranks on 3 nodes, srun")):
        peers = ("mpiddp", "torchrun", "accelerate launch", "plain recipe")
        found = [f"{costs[job][peer]['wall_s']:.2f} s" if peer in costs[job] else UNTRIED for peer in peers]
        assert rows[row][:4] == found
    table = document.split("\n## Failure\n")[1].split("\n## ")[0]
    for row, column in (("a rank raises: end, 1 node", 1), ("a rank raises: end, 3 nodes", 2)):
        cells = [line.strip("| ").split(" | ")[column] for line in table.splitlines() if re.match(r"\| \w", line)]
        own, torchrun, plain = (one.split(" s ")[0].removesuffix(" s").replace("cut off", "> 60") for one in cells)
        assert rows[row][:4] == [f"{own} s", f"{torchrun} s", UNTRIED, f"{plain} s"]
