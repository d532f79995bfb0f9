"""A centre's site profile under the launchers of a Slurm cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.cluster.impair import compiled
from tests.messages import message
from tests.support import DEADLINE_S, MPIS, ROOT, check, need, on_path

pytestmark = pytest.mark.light

PRINTS = "import os; print('in the script:', os.environ['FROM_SITE'], os.environ['OWN'])"
PROFILE = """
name = "Testbed"
contact = "help@example.org"
[variables]
FROM_SITE = {value = "the centre's", reason = "jobs need it"}
OWN = {value = "the centre's", reason = "it is better", harmful_if_different = true}
"""


@pytest.fixture
def profile(cluster: Cluster) -> Iterator[Path]:
    """Return a profile that all nodes see."""
    assert cluster
    (file := RUN / "site.toml").write_text(PROFILE)
    yield file
    file.unlink()


@pytest.mark.parametrize(("mpi", "launcher", "ranks"), [
    ("openmpi4", "srun --mpi=pmix -N3 -n3", 3), ("impi", "srun --mpi=pmi2 -N3 -n3", 3),
    ("mpich", "srun --mpi=cray_shasta -n1", 1), ("openmpi4", "mpirun -n 3", 3),
])
def test_variables_arrive_before_mpi_init(
    mpi: str, launcher: str, ranks: int, cluster: Cluster, profile: Path
) -> None:
    """Those of the user stay; both are explained."""
    library = MPIS[mpi]
    need(library.missing())
    start = launcher.replace("mpirun", str(library.mpiexec))
    env = {**library.environ(), **on_path(), "MPIDDP_SITE": str(profile), "OWN": "mine",
           "LD_PRELOAD": str(compiled("at_init.c", "-shared", "-fPIC"))}
    program = f"{start} {library.python} -m mpiddp"
    command = f'{program} -c "{PRINTS}" && {program} --explain -c pass'
    allocation = ("salloc", "--quiet", "-N3", "--ntasks-per-node=1") if launcher.startswith("mpirun") else ()
    done = check(cluster.run(*allocation, "sh", "-c", command, timeout=DEADLINE_S, env=env, cwd=ROOT))
    assert done.stderr.count("in MPI_Init: the centre's\n") == 2 * ranks
    assert done.stdout.count("in the script: the centre's mine\n") == ranks
    assert done.stderr.count(message("site/different_variable", item="OWN", value="mine", site="Testbed",
                                     needed="the centre's", reason="it is better")) == 2
    assert message("site/explained", item="FROM_SITE", value="the centre's", file=profile,
                   reason="jobs need it") in done.stdout
    assert message("site/explained_difference", item="OWN", value="mine", other="the centre's", file=profile,
                   reason="it is better") in done.stdout
