"""A real Grid Engine on the nodes of the cluster: its master on the first of them, an execution daemon on each."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.processes import PATIENCE, run

from .cluster import NODES, RUN, START_TIMEOUT_S, Cluster

SPOOL, CELL = Path("/var/spool/gridengine"), Path("/var/lib/gridengine/default")  # which Debian's package has filled
COMMANDS = ("/usr/sbin/sge_qmaster", "/usr/sbin/sge_execd", "/usr/bin/qsub")
MASTER = NODES[0]
SLOTS_PER_NODE = 2
ENVIRONMENT = "export SGE_ROOT=/var/lib/gridengine SGE_CELL=default"

# Each node has copies of the folders, which lie in RUN: the machine's own stay as they are.
MOUNT = f"""
mount --bind {RUN}/grid-engine/spool {SPOOL}
mount --bind {RUN}/grid-engine/default {CELL}
mkdir -p {SPOOL}/execd /var/run/gridengine
chown sgeadmin: {SPOOL}/execd /var/run/gridengine
"""
# qconf ignores a file that its editor has not changed for a second.
EDITOR = """\
#!/bin/sh
sleep 1.1
sed -i -E "$EDITS" "$1"
"""
CONFIGURE = rf"""
export EDITOR={RUN}/grid-engine/editor
qconf -ah {",".join(NODES)}; qconf -as {MASTER}
EDITS='s/^(min_.id) .*/\1 0/' qconf -mconf
EDITS='s/^slots .*/slots 99/; s/^(allocation_rule) .*/\1 {SLOTS_PER_NODE}/; s/^(control_slaves) .*/\1 TRUE/
    s/^(job_is_first_task) .*/\1 FALSE/' qconf -ap mpi
EDITS='s/^hostlist .*/hostlist {" ".join(NODES)}/; s/^slots .*/slots {SLOTS_PER_NODE}/; s/^pe_list .*/pe_list mpi/
    s/^(load_thresholds) .*/\1 NONE/; s/^shell .*/shell \/bin\/bash/' qconf -aq all.q
"""


def missing_components() -> list[str]:
    """Return what this machine lacks for Grid Engine, in words; empty where it can run."""
    return [f"the command {name}" for name in COMMANDS if not Path(name).exists()]


class GridEngine:
    """Grid Engine, started on a running cluster, with which it ends."""

    def __init__(self, cluster: Cluster) -> None:
        """Start it; raise TimeoutError if its nodes do not come up."""
        self._cluster = cluster
        folder = RUN / "grid-engine"
        shutil.copytree(SPOOL, folder / "spool", copy_function=copy_with_owner)
        shutil.copytree(CELL, folder / "default", copy_function=copy_with_owner)
        for path in (SPOOL, *SPOOL.rglob("*")):
            copy_owner(path, folder / "spool" / path.relative_to(SPOOL))
        (folder / "editor").write_text(EDITOR)
        (folder / "editor").chmod(0o755)
        (folder / "default/common/act_qmaster").write_text(f"{MASTER}\n")
        for node in NODES:
            self.run(MOUNT, node)
        self.run("/usr/sbin/sge_qmaster >/dev/null 2>&1")
        self._wait_until(lambda: self.run("qconf -sh").returncode == 0)
        self.run(CONFIGURE)
        for node in NODES:
            self.run("/usr/sbin/sge_execd >/dev/null 2>&1", node)
        self._wait_until(lambda: self.run("qstat -f").stdout.count("lx-amd64") == len(NODES))

    def run(self, script: str, node: str = MASTER, cwd: Path | None = None,
            env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a script of the shell on a node."""
        return run(*self._cluster.at(node, cwd), "sh", "-c", f"{ENVIRONMENT}\n{script}", timeout=60, env=env)

    def submit(self, script: Path, env: Mapping[str, str]) -> str:
        """Submit a job with these variables; return its number."""
        done = self.run(f"qsub -V {script}", cwd=script.parent, env=env)
        found = re.match(r"Your job (\d+) ", done.stdout)
        assert found, (done.stdout, done.stderr)
        return found[1]

    def has(self, number: str) -> bool:
        """Return whether a job waits or runs."""
        return self.run(f"qstat -j {number}").returncode == 0

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE * START_TIMEOUT_S
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(self.run(f"qstat -f; qhost; tail {SPOOL}/qmaster/messages").stdout)
            time.sleep(0.3)


def copy_with_owner(source: str, target: str) -> None:
    """Copy a file with its owner, who is not root."""
    shutil.copy2(source, target)
    copy_owner(Path(source), Path(target))


def copy_owner(source: Path, target: Path) -> None:
    """Give a copy the owner of its source."""
    shutil.chown(target, source.owner(), source.group())
