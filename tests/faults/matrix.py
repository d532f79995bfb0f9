"""Run one fault under one launcher and tell what became of the job."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import MPIS, ROOT, Mpi, mpiexec_command, single_node_environ

CHILD = "sleep 1000"  # which fault.py starts
FAULT = Path(__file__).parent / "fault.py"
DEADLINE_S = 120  # for a whole job on a busy machine
HANG_S = 25  # from the fault to the end
MOMENTS = ("import", "before", "loop", "end")
STATUSES = {
    "raise": 1, "exit": 7, "message": 1, "thread": 7, "_exit": 7, "native-exit": 7, "interrupt": 130, "loader": 1,
    "atexit": 0, "SIGTERM": 143, "SIGHUP": 129, "SIGUSR1": 138, "SIGUSR2": 140, "SIGSEGV": 139, "SIGABRT": 134,
    "SIGBUS": 135, "SIGFPE": 136, "SIGKILL": 137, "SIGSTOP": 1,
}
CAUSES = {  # what the report says of the rank
    "raise": "ValueError: seven", "exit": "sys.exit(7)", "message": "seven in words", "thread": "sys.exit(7)",
    "_exit": "os._exit(7)", "native-exit": message("launch/native_exit", status=7), "interrupt": "KeyboardInterrupt",
    "loader": "ValueError: seven in a worker (in DataLoader worker process",
    "SIGSTOP": message("launch/stopped_process"), "SIGKILL": message("launch/killed_by_sigkill"),
}


@dataclass(frozen=True)
class Launcher:
    """A way to start ranks: under srun one on each of three nodes, else two on this machine; `whole` doubles them.

    `count` is another number.
    """

    name: str
    mpi: Mpi
    srun: bool
    whole: bool = False
    count: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.count or (3 if self.srun else 2) * (2 if self.whole else 1)

    def environ(self) -> dict[str, str]:
        """Return the environment for its jobs."""
        return self.mpi.environ() if self.srun else single_node_environ(self.mpi)


LAUNCHERS = [
    Launcher("Open MPI 4.1 mpirun", MPIS["openmpi4"], False), Launcher("Open MPI 5 mpirun", MPIS["openmpi5"], False),
    Launcher("MPICH mpiexec", MPIS["mpich"], False), Launcher("srun pmix", MPIS["openmpi4"], True),
    Launcher("srun pmi2", MPIS["impi"], True),
]
WHOLE = [replace(launcher, whole=True) for launcher in LAUNCHERS]


@dataclass(frozen=True)
class Outcome:
    """What became of a job: seconds from the fault to its end, exit status, what was said and left."""

    launcher: Launcher
    kind: str
    moment: str
    rank: int | None
    seconds: float
    status: int
    stderr: str
    left: list[str]

    @property
    def expected(self) -> int:
        """The exit status that the job should have."""
        return STATUSES[self.kind]

    @property
    def named(self) -> bool:
        """Tell whether the report names the rank, its host and the cause, and is the only one."""
        if self.kind == "atexit":  # as in plain Python, the error is printed and the status stays 0
            return "ValueError: seven" in self.stderr
        known = {} if self.rank is None else {"rank": self.rank}
        reports = find("launch/failed_rank", self.stderr, **known)
        return len(REPORT.findall(self.stderr)) == 1 and any(
            CAUSES.get(self.kind, self.kind) in report["cause"] for report in reports)

    @property
    def lost(self) -> list[str]:
        """The processes that should not be left: a script's own children may live on only after a success."""
        return [line for line in self.left if self.expected != 0 or line != CHILD]

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        found = []
        if self.seconds > HANG_S:
            found.append("hang")
        if self.lost:
            found.append(f"left {self.lost}")
        if self.status != self.expected:
            found.append(f"status {self.status}, not {self.expected}")
        if not self.named:
            found.append("cause not named, or not once")
        return found


REPORT = re.compile(r"mpiddp: (?:failed|ended): ")


def run(launcher: Launcher, kind: str, moment: str, rank: int | None, cluster: Cluster | None) -> Outcome:
    """Run a job with a fault; `rank` -1 is the last one, None all."""
    number = launcher.ranks - 1 if rank == -1 else rank
    options = ["--exit-timeout", "4"] if kind == "SIGSTOP" else []
    arguments = ["-m", "mpiddp", *options, str(FAULT), kind, moment, "all" if number is None else str(number)]
    env = processes.marked(launcher.environ())
    done = start(launcher, arguments, cluster, env)
    ended = time.time()
    said = re.search(r"FAULT ([\d.]+)", done.stderr)
    return Outcome(launcher, kind, moment, number, ended - float(said[1]) if said else DEADLINE_S, done.returncode,
                   done.stderr, processes.leftovers(env))


def start(launcher: Launcher, arguments: list[str], cluster: Cluster | None,
          env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments under a launcher, for DEADLINE_S at most."""
    mpi = launcher.mpi
    try:
        if not launcher.srun:
            command = mpiexec_command(mpi, launcher.ranks, *arguments)
            return processes.run(*command, timeout=DEADLINE_S, env=env, cwd=ROOT)
        assert cluster
        return cluster.run("srun", f"--mpi={mpi.pmi}", "-N3", f"-n{launcher.ranks}", str(mpi.python), *arguments,
                           timeout=DEADLINE_S, env=env, cwd=ROOT)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(arguments, -1, str(late.stdout), str(late.stderr))
