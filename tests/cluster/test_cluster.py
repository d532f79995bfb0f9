"""The cluster itself: it comes up over what a killed run left, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.cluster import Cluster, missing_components
from tests.cluster.cluster import BRIDGE, NODES, RUN, namespace
from tests.support import ROOT, check, need

KILLED_RUN = """
import time
from tests.cluster import Cluster
Cluster([]).__enter__()
print('up', flush=True)
time.sleep(600)
"""


def traces() -> list[str]:
    """Return what is there of a cluster on this machine: files, bridge, namespaces, processes."""
    paths = [RUN, Path("/sys/class/net", BRIDGE), *(Path("/run/netns", namespace(node)) for node in NODES)]
    here = Path("/proc/self/ns/net").stat().st_ino
    found = [str(path) for path in paths if path.exists()]
    for process in psutil.process_iter(["name", "status"]):
        try:
            inside = Path(f"/proc/{process.pid}/ns/net").stat().st_ino != here
        except OSError:
            continue
        daemon = process.info["name"] in ("slurmctld", "slurmd", "slurmstepd", "munged")
        if process.info["status"] != psutil.STATUS_ZOMBIE and (daemon or (inside and is_ours(process))):
            found.append(str(process))
    return found


def is_ours(process: psutil.Process) -> bool:
    """Tell whether a process runs with the cluster's configuration."""
    try:
        return process.environ().get("SLURM_CONF") == f"{RUN}/slurm.conf"
    except psutil.Error:
        return False


def test_it_starts_over_what_a_killed_run_left_and_leaves_nothing() -> None:
    need(missing_components())
    with Cluster([]):  # waits for one that runs, and removes what a killed run of the tests left
        pass
    assert traces() == []
    with subprocess.Popen([sys.executable, "-c", KILLED_RUN], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n"
        run.send_signal(signal.SIGKILL)
    assert len(traces()) > 5
    with Cluster([]) as cluster:
        done = check(cluster.run("srun", "-N3", "sh", "-c", "hostname; ls /tmp | wc -l", timeout=60))
        assert sorted(done.stdout.split()) == ["0"] * 3 + list(NODES)
    assert traces() == []
