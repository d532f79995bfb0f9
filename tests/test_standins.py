"""The stand-ins for commands that are not to be had here refuse what the real ones do not know."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.support import ROOT

STANDINS = ROOT / "tests/standins"


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
    ("LLsub", "batch.sh -N 2", "unknown argument: -N"),
    ("LLsub", "batch.sh [2,2]", "unknown argument: [2,2]"),
])
def test_what_the_real_one_does_not_know(name: str, arguments: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "batch.sh").touch()
    (tmp_path / "up").write_text("node[1-3]")
    logs = {f"{one}_STANDIN_LOG": str(tmp_path / "log") for one in ("APPTAINER", "ENROOT", "PYXIS")}
    logs |= {"FLUX_STANDIN": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = processes.run(str(STANDINS / name), *arguments.split(), timeout=20, env={**os.environ, **logs}, cwd=tmp_path)
    assert done.returncode != 0
    assert words in done.stderr
