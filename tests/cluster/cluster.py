"""Start, use and stop a three-node Slurm cluster made of namespaces on this machine.

Each node is a network namespace on one bridge, with its own hostname, hosts file, /tmp and
/dev/shm, in which a real `slurmd` runs. `slurmctld` runs on a fourth host, the login node, where
`srun` and `sbatch` are started too; munge has a key and a socket of its own. What the machine itself
has (its hosts file, its munge, its /tmp) is left alone. All traces lie in RUN, so that a later
start finds and removes what a killed run left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.processes import PATIENCE, default_signals, end_processes, run

RUN = Path("/var/tmp/mpiddp-cluster")  # not under /tmp, which every node hides behind its own
BRIDGE = "mpiddp0"
LOGIN = "login"
NODES = ("node1", "node2", "node3")
ADDRESSES = {LOGIN: "10.77.0.1", "node1": "10.77.0.11", "node2": "10.77.0.12", "node3": "10.77.0.13"}
CPUS_PER_NODE, GPUS_PER_NODE = 8, 4  # as far as Slurm knows
REQUEUE_AFTER_S = 6  # a job that was requeued waits until its old credentials are void; two minutes by default
START_TIMEOUT_S = 60
COMMANDS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "ip", "nsenter", "unshare", "mount", "hostname")
QUEUED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")  # states of a job
SLURM_CONF = f"""\
ClusterName=mpiddp
SlurmctldHost={LOGIN}({ADDRESSES[LOGIN]})
AuthType=auth/munge
AuthInfo=socket={RUN}/munge/socket,cred_expire={REQUEUE_AFTER_S}
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={RUN}/state
SlurmdSpoolDir={RUN}/spool/%n
SlurmctldPidFile={RUN}/slurmctld.pid
SlurmdPidFile={RUN}/slurmd-%n.pid
KillWait=2
""" + "".join(
    f"NodeName={node} NodeAddr={ADDRESSES[node]} CPUs={CPUS_PER_NODE} CpuBind=none Gres=gpu:h100:{GPUS_PER_NODE} "
    "RealMemory=4096 State=UNKNOWN\n" for node in NODES
) + "PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=FORCE\n"

# Slurm 22.05's fences of the kind "tree" let ranks go before all have come: then some crash in MPI_Init.
MPI_CONF = "PMIxCollFence=ring\n"
GRES_CONF = f"Name=gpu Type=h100 File={RUN}/devices/nvidia[0-{GPUS_PER_NODE - 1}]\n"
HOSTS = "127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for host, address in ADDRESSES.items())

BECOME_HOST = """
set -e
mount --bind "$RUN/hosts" /etc/hosts
hostname "$HOST"
if [ "$HOST" != login ]; then
    mount -t tmpfs tmpfs /dev/shm
    mkdir -p "$RUN/visible-$HOST"
    for path in $VISIBLE; do mkdir -p "$RUN/visible-$HOST$path"; mount --bind "$path" "$RUN/visible-$HOST$path"; done
    mount -t tmpfs tmpfs /tmp
    for path in $VISIBLE; do mkdir -p "$path"; mount --bind "$RUN/visible-$HOST$path" "$path"; done
fi
exec "$@"
"""


def missing_components() -> list[str]:
    """Return what this machine lacks for the cluster, in words; empty where it can run."""
    missing = [f"the command {name}" for name in COMMANDS if shutil.which(name) is None]
    if os.geteuid() != 0:
        missing.append("root")
    return missing


class Cluster:
    """The running cluster, as a context manager; only one runs on a machine at a time.

    `visible` are the folders that jobs need on every node although they may lie under /tmp. `enter` is a prefix that
    each host's daemon is started by, as one that enters another root folder; `files` are further files of Slurm's
    configuration, by name.
    """

    def __init__(self, visible: Sequence[Path], enter: Sequence[str] = (),
                 files: Mapping[str, str] = MappingProxyType({})) -> None:
        self.visible = [path for path in visible if path.is_relative_to("/tmp")]
        self.enter, self.files = enter, files

    def __enter__(self) -> Cluster:  # noqa: PYI034 (Self needs Python 3.11)
        self._lock = lock()
        try:
            remove_remains()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        remove_remains()
        os.close(self._lock)

    def run(self, *command: str, timeout: float, env: Mapping[str, str] | None = None,
            cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command (`srun …`, `sbatch …`) on the login node and return status and output."""
        return run(*self.at(LOGIN, cwd), *command, timeout=timeout,
                   env={**(os.environ if env is None else env), "SLURM_CONF": f"{RUN}/slurm.conf"})

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a batch job."""
        done = self.run("scontrol", "--oneliner", "show", "job", number, timeout=30)
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait_for_job(self, number: str, timeout: float) -> dict[str, str]:
        """Return what Slurm knows of a batch job that has ended; `sbatch --wait` looks after 2, 6, 14, 30 and 62 s."""
        deadline = time.monotonic() + PATIENCE * timeout
        while (facts := self.job(number))["JobState"] in QUEUED:
            if time.monotonic() > deadline:
                self.run("scancel", number, timeout=30)
                raise TimeoutError(f"{facts}")
            time.sleep(0.3)
        return facts

    def at(self, host: str, cwd: Path | None = None) -> list[str]:
        """Return the prefix that runs a command in a host's namespaces."""
        pid = read_pid(host)
        return ["nsenter", f"--target={pid}", "--net", "--uts", "--mount", "--root", "env",
                f"--chdir={cwd or Path.cwd()}"]

    def restart(self, node: str) -> None:
        """Start a node again whose slurmd was ended."""
        self._start_host(node)
        self._await_nodes()

    def take_back(self, node: str) -> None:
        """Use a node again whose network was cut: by itself Slurm asks it for half a minute no more."""
        for state in ("DOWN", "RESUME"):
            self.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test", timeout=30)
        self._await_nodes()

    def _start(self) -> None:
        RUN.mkdir()
        for folder in ("pids", "munge", "state", "devices", "spool", *(f"spool/{node}" for node in NODES)):
            (RUN / folder).mkdir()
        files = {"hosts": HOSTS, "slurm.conf": SLURM_CONF, "gres.conf": GRES_CONF, "mpi.conf": MPI_CONF, **self.files}
        for name, text in files.items():
            (RUN / name).write_text(text)
        for number in range(GPUS_PER_NODE):
            os.mknod(RUN / f"devices/nvidia{number}", stat.S_IFCHR, os.makedev(1, 3))  # what /dev/null is
        start_munged()
        make_network()
        for host in (LOGIN, *NODES):
            self._start_host(host)
        self._await_nodes()

    def _start_host(self, host: str) -> None:
        daemon = ["slurmctld", "-D"] if host == LOGIN else ["slurmd", "-D", "-N", host]
        network = [] if host == LOGIN else ["nsenter", f"--net=/run/netns/{namespace(host)}"]
        visible = " ".join(map(str, self.visible))
        start_daemon(host, *network, "unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c",
                     BECOME_HOST, host, *self.enter, *daemon, env={**os.environ, "RUN": str(RUN), "HOST": host,
                     "VISIBLE": visible, "SLURM_CONF": f"{RUN}/slurm.conf"})

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (seen := self.run("sinfo", "-h", "-o", "%T %D", timeout=30)).stdout.split() != ["idle", str(len(NODES))]:
            if time.monotonic() > deadline:
                logs = "\n".join(f"{log}: {log.read_text()[-2000:]}" for log in RUN.glob("*.log"))
                raise TimeoutError(f"nodes not idle after {START_TIMEOUT_S} s: {seen.stdout}{seen.stderr}\n{logs}")
            time.sleep(0.2)


def lock() -> int:
    """Return a descriptor that only one cluster on this machine holds; raise TimeoutError where it stays taken.

    It locks the folder that RUN is made in, so that no lock file is left behind.
    """
    folder = os.open(RUN.parent, os.O_RDONLY)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another cluster runs on this machine: {RUN.parent} stays locked") from None
            time.sleep(0.5)
        else:
            return folder


def start_munged() -> None:
    """Start a munged with its own key and socket, as the user that munge requires."""
    folder = RUN / "munge"
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    for path in (folder, key):
        shutil.chown(path, "munge", "munge")
    start_daemon("munged", "munged", "--foreground", f"--key-file={key}", f"--socket={folder}/socket",
                 f"--pid-file={folder}/pid", f"--seed-file={folder}/seed", f"--log-file={folder}/log",
                 user="munge", group="munge", extra_groups=[])
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (folder / "socket").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"munged made no socket: {(RUN / 'munged.log').read_text()}")
        time.sleep(0.05)


def make_network() -> None:
    """Make the bridge, which is the login node's network, and a namespace for each node on it."""
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("address", "add", f"{ADDRESSES[LOGIN]}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    for node in NODES:
        inside = ("-n", namespace(node))
        ip("netns", "add", namespace(node))
        ip("link", "add", f"{BRIDGE}-{node}", "type", "veth", "peer", "name", "eth0", "netns", namespace(node))
        ip("link", "set", f"{BRIDGE}-{node}", "master", BRIDGE, "up")
        ip(*inside, "address", "add", f"{ADDRESSES[node]}/24", "dev", "eth0")
        ip(*inside, "link", "set", "eth0", "up")
        ip(*inside, "link", "set", "lo", "up")


def remove_remains() -> None:
    """End every process of this or an earlier cluster and remove its namespaces, bridge and files."""
    processes = [process for record in RUN.glob("pids/*") if (process := recorded_process(record))]
    for node in NODES:
        if Path("/run/netns", namespace(node)).exists():
            pids = ip("netns", "pids", namespace(node)).split()
            processes += [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    end_processes(processes)
    for node in NODES:
        if Path("/run/netns", namespace(node)).exists():
            ip("netns", "delete", namespace(node))
    for link in (BRIDGE, *(f"{BRIDGE}-{node}" for node in NODES)):  # a connection that closes keeps its namespace's
        if Path("/sys/class/net", link).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # the kernel was faster
                ip("link", "delete", link)
    shutil.rmtree(RUN, ignore_errors=True)


def start_daemon(name: str, *command: str, **options: object) -> None:
    """Start a process in a session of its own and record its id, so that it can be ended later."""
    with (RUN / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,  # type: ignore[call-overload]
                                   start_new_session=True, preexec_fn=default_signals, **options)
    (RUN / "pids" / name).write_text(f"{process.pid} {psutil.Process(process.pid).create_time()}")


def recorded_process(record: Path) -> psutil.Process | None:
    """Return the process of a record while it is still the same one, and None after."""
    pid, created = record.read_text().split()
    try:
        process = psutil.Process(int(pid))
    except psutil.NoSuchProcess:
        return None
    return process if process.create_time() == float(created) else None


def read_pid(host: str) -> int:
    """Return the id of the daemon that holds a host's namespaces."""
    return int((RUN / "pids" / host).read_text().split()[0])


def namespace(node: str) -> str:
    """Return the name of a node's network namespace."""
    return f"mpiddp-{node}"


def ip(*arguments: str) -> str:
    """Run iproute2's `ip` and return its output."""
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
