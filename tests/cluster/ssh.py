"""Sshd on the nodes of the cluster, and a user who is not root, has a home on each node, and one folder on all."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.processes import PATIENCE, end_processes, run, start
from tests.support import ROOT, VENVS

from .cluster import ADDRESSES, HOSTS, LOGIN, NODES, RUN, START_TIMEOUT_S, Cluster, start_daemon

USER, UID = "trainee", 6001
FOLDER = RUN / "ssh"
WORK = FOLDER / "work"  # on all nodes
SSHD = Path("/usr/sbin/sshd")
LAUNCHERS = ("mpirun", "mpirun.openmpi", "prterun", "mpiexec", "mpiexec.hydra")  # names of their processes

# All hosts share the machine's user names: a daemon sees its own, as all that it starts.
OWN_FILES = {
    "/etc/passwd": f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/bash\n", "/etc/group": f"{USER}:x:{UID}:\n",
    "/etc/shadow": f"{USER}:*:19000:0:99999:7:::\n",
}
CONFIG = f"""\
HostKey {FOLDER}/host_key
AuthorizedKeysFile {FOLDER}/key.pub
PidFile none
StrictModes no
UsePAM no
MaxStartups 100
"""
CLIENT = f"""\
IdentityFile {FOLDER}/key
User {USER}
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
BECOME = f"""
set -e
for file in passwd group shadow hosts ssh/ssh_config; do mount --bind {FOLDER}/$file /etc/$file; done
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount -t tmpfs tmpfs /home
mkdir /home/{USER}
chown {USER}: /home/{USER}
for path in $NEEDED; do mkdir -p "$KEPT$path"; mount --rbind "$path" "$KEPT$path"; done
for path in $CLOSED; do mount -t tmpfs -o mode=755 tmpfs "$path"; done
for path in $NEEDED; do mkdir -p "$path"; mount --rbind "$KEPT$path" "$path"; done
chmod 1777 /tmp /dev/shm
exec {SSHD} -D -e -f {FOLDER}/config
"""


def missing_components() -> list[str]:
    """Return what this machine lacks, in words; empty where it has sshd."""
    lacks = [f"the command {name}" for name in (str(SSHD), "ssh", "ssh-keygen") if shutil.which(name) is None]
    is_taken = any(user.pw_uid == UID for user in pwd.getpwall())  # the tests end this user's processes
    return [*lacks, *[f"a free user number {UID}"] * is_taken]


class Ssh:
    """Sshd on each node of a running cluster, with which it ends."""

    def __init__(self, cluster: Cluster) -> None:
        """Start it; raise TimeoutError if a node does not answer."""
        self._cluster = cluster
        (FOLDER / "ssh").mkdir(parents=True)
        WORK.mkdir()
        for path, lines in OWN_FILES.items():
            copy = FOLDER / Path(path).name
            copy.touch(0o600 if copy.name == "shadow" else 0o644)
            copy.write_text(Path(path).read_text() + lines)
        others = "".join(f"{ADDRESSES[node]} fabric-{node}.cluster fabric-{node}\n" for node in NODES)
        for name, text in {"config": CONFIG, "ssh/ssh_config": CLIENT, "hosts": HOSTS + others}.items():
            (FOLDER / name).write_text(text)
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(FOLDER / name)], check=True,
                           timeout=20)
        for path in (FOLDER / "key", WORK):
            os.chown(path, UID, UID)
        for node in NODES:
            needed, closed = find_closed([ROOT, VENVS, Path(sys.base_prefix), *cluster.visible])
            start_daemon(f"sshd-{node}", *cluster.at(node, Path("/")), "unshare", "--mount", "--propagation", "private",
                         "sh", "-c", BECOME, env={**os.environ, "KEPT": f"{FOLDER}/kept-{node}",
                                                  "NEEDED": " ".join(needed), "CLOSED": " ".join(closed)})
        deadline = time.monotonic() + PATIENCE * START_TIMEOUT_S
        for node in NODES:
            while (seen := self.run("true", node)).returncode:
                if time.monotonic() > deadline:
                    raise TimeoutError(seen.stderr + (RUN / f"sshd-{node}.log").read_text())
                time.sleep(0.2)

    def command(self, script: str, node: str = NODES[0]) -> list[str]:
        """Return the command that runs a script of the shell as the user, on a node, in the folder of all nodes."""
        return [*self._cluster.at(LOGIN, Path("/")), "ssh", "-F", str(FOLDER / "ssh/ssh_config"), ADDRESSES[node],
                f"cd {WORK} && {script}"]

    def run(self, script: str, node: str = NODES[0], timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a script of the shell as the user, on a node, in the folder of all nodes."""
        return run(*self.command(script, node), timeout=timeout)

    def start(self, script: str, node: str = NODES[0]) -> subprocess.Popen[str]:
        """Start a script as run() does."""
        return start(self.command(script, node), None, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def find_closed(paths: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return which of these paths lie in a folder that others may not enter, and those folders."""
    needed, closed = [], []
    for path in {path.resolve() for path in paths}:
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                needed.append(str(path))
                closed.append(str(parent))
                break
    return needed, sorted(set(closed))


def processes_of_user() -> list[psutil.Process]:
    """Return the user's processes on all nodes, but for the connections by ssh."""
    return [process for process in psutil.process_iter(["uids", "name", "status"])
            if process.info["uids"].real == UID and process.info["status"] != psutil.STATUS_ZOMBIE
            and process.info["name"] not in ("sshd", "bash")]


def signal_launcher(number: signal.Signals) -> None:
    """Send a signal to the launcher of the one job that the user runs."""
    (launcher,) = [process for process in processes_of_user() if process.info["name"] in LAUNCHERS]
    launcher.send_signal(number)


def end_users_processes() -> list[str]:
    """Return the command lines of the user's processes that do not end by themselves soon, and end them."""
    deadline = time.monotonic() + PATIENCE * 10
    while (found := processes_of_user()) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = [f"{process.pid} {process.info['name']}" for process in found]
    end_processes(found)
    return lines
