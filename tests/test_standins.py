"""The stand-ins for commands that are not to be had here refuse what the real ones do not know."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.support import ROOT, Mpi, check, need, single_node_environ

STANDINS = ROOT / "tests/standins"
LOGGED = ("APPTAINER", "ENROOT", "FLUX", "JSRUN", "PALS", "PYXIS")


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "arguments", "words"), [
    ("apptainer", "exec --gpu image.sif true", "unknown flag: --gpu"),
    ("apptainer", "execute image.sif true", 'unknown command "execute"'),
    ("enroot", "start --volume /tmp image true", "unknown option of start: --volume"),
    ("enroot", "create --tag image image.sqsh", "unknown option of create: --tag"),
    ("enroot", "list --all", "unknown option of list: --all"),
    ("enroot", "run image true", "unknown command: run"),
    ("pyxis/srun", "--container-images=image.sqsh true", "unrecognized option '--container-images=image.sqsh'"),
    ("pyxis/srun", "--container-image true", "unrecognized option '--container-image'"),
    *[("flux-supervise/flux", arguments, words) for arguments, words in (
        ("resource list -s up -no {nodes}", "unknown command or option: resource list"), ("batch f.sh", "batch f.sh"),
        ("run --nodes=1 --ntasks=2 --hosts=node1 true", "the following arguments are required: --requires, --job-name"),
        ("run --nodes=2 --ntasks=2 --requires=hosts:node1 --job-name=s true", "unsatisfiable request"),
        ("run --nodes=1 --ntasks=2 --requires=hosts:node9 --job-name=s true", "unsatisfiable request"),
    )],
    ("launchers/flux", "run --nodes=1 --tasks=2 true", "unknown: --tasks=2"),
    ("launchers/flux", "mini run true", "unknown: mini run true"),
    ("launchers/flux", "batch directives.sh", "unknown: ## --queue=NAME"),
    ("launchers/mpiexec", "-np 2 true", "unrecognized option '-np 2'"),
    ("launchers/jsrun", "--tasks 2 true", "unrecognized option '--tasks 2'"),
    ("LLsub", "batch.sh -N 2", "unknown argument: -N"),
    ("LLsub", "batch.sh [2,2]", "unknown argument: [2,2]"),
])
def test_what_the_real_one_does_not_know(name: str, arguments: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "batch.sh").touch()
    (tmp_path / "up").write_text("node[1-3]")
    (tmp_path / "directives.sh").write_text("##flux: --queue=NAME\n")
    logs = {f"{one}_STANDIN_LOG": str(tmp_path / "log") for one in LOGGED}
    logs |= {"FLUX_STANDIN": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = processes.run(str(STANDINS / name), *arguments.split(), timeout=20, env={**os.environ, **logs}, cwd=tmp_path)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(("command", "rank", "size"), [
    ("flux run --nodes=1 --ntasks=2 --cores-per-task=1 env", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("mpiexec -n 2 --ppn 2 --cpu-bind none env", "PALS_RANKID", "PMI_SIZE"),
    ("jsrun --nrs 2 --rs_per_host 2 env", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
])
def test_a_launcher_sets_the_variables_of_the_real_one_alone(
    command: str, rank: str, size: str, quick: Mpi, tmp_path: Path
) -> None:
    """Of MPICH's own those are left by which its library meets it."""
    need(quick.missing())
    env = single_node_environ(quick)
    logs = {f"{one}_STANDIN_LOG": str(tmp_path / "log") for one in LOGGED}
    done = check(processes.run(*command.split(), timeout=20, env={
        **env, **logs, "PATH": f"{STANDINS / 'launchers'}:{env['PATH']}"}))
    assert {f"{rank}=0", f"{rank}=1", f"{size}=2"} <= set(done.stdout.splitlines())
    assert not re.search("^(MPI_LOCAL|HYDI_)", done.stdout, re.MULTILINE)
