"""A job in containers: Charliecloud, with Slurm's PMIx across the container's wall."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.support import DEADLINE_S, EXAMPLES, MPIS, ROOT, VENVS, check_hello, need

ETC = ("group", "hosts", "ld.so.cache", "ld.so.conf", "nsswitch.conf", "passwd", "resolv.conf")


@pytest.fixture
def image(cluster: Cluster) -> Path:
    """Return a root file system with this machine's programs, into which what lies elsewhere is mounted."""
    assert cluster
    need([] if shutil.which("ch-run") else ["the command ch-run"])
    found = RUN / f"image-{time.monotonic_ns()}"
    for name in ("dev", "etc", "home", "mnt", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp", *mounts()):
        (found / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (found / name).symlink_to(f"usr/{name}")
    for name in ETC:
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), found / "etc")
    shutil.copytree("/etc/alternatives", found / "etc/alternatives", symlinks=True)
    return found


def mounts() -> list[str]:
    """Return the folders with programs and the checkout."""
    return list(dict.fromkeys(["/usr", str(ROOT), str(VENVS.resolve()), str(RUN), sys.base_prefix]))


PLAIN = {"OMPI_MCA_pml": "ob1"}  # with what it takes by itself, no message of Debian's Open MPI 4.1 gets through


@pytest.mark.parametrize(("name", "env"), [("openmpi4", PLAIN), ("openmpi5", {})])
def test_hello_from_containers_on_two_nodes(cluster: Cluster, image: Path, name: str, env: dict[str, str]) -> None:
    mpi = MPIS[name]
    binds = [f"--bind={path}:{path}" for path in mounts()]
    done = cluster.run("srun", "--mpi=pmix", "-N2", "--ntasks-per-node=2", "ch-run", *binds, f"--cd={ROOT}", str(image),
                       "--", str(mpi.python), "-m", "mpiddp", str(EXAMPLES / "hello_world.py"),
                       timeout=DEADLINE_S, env={**mpi.environ(), **env, "USER": "root"}, cwd=ROOT)
    assert {one["host"] for one in check_hello(done, 4)} == {"node1", "node2"}
