"""What strangers cost a job: a thousand connections a second against all its ports, half of them silent.

    python -m tests.benchmarks.flood [--quick]

Six ranks on three nodes of the cluster train for a while, with and without a flood in turn; beside them a second job
starts again and again, and its ports are flooded, too. The step is a sleep of 20 ms and an all-reduce: on two cores
the flood itself takes some of them.
"""

from __future__ import annotations

import argparse
import re
import secrets
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import ADDRESSES, LOGIN, NODES, namespace
from tests.support import EXAMPLES, MPIS, ROOT, check

RATE = 1000  # connections a second
LOOK_S = 0.2  # between two looks for ports
SETTLING_S = 1.0  # before a flood counts
LISTENING = "0A"  # (net/tcp_states.h)
MPI = MPIS["openmpi4"]


def listening(pid: int, address: str) -> Iterator[tuple[str, int]]:
    """Yield the ports of a process that can be reached at the address of its node."""
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            local, state = fields[1], fields[3]
            if state == LISTENING and f"socket:[{fields[9]}]" in inodes:
                host, port = local.split(":")
                if host in (hexadecimal(address), "0" * len(host)):
                    yield address, int(port, 16)


def hexadecimal(address: str) -> str:
    """Return an address of IPv4 as /proc/net/tcp has it."""
    return socket.inet_aton(address)[::-1].hex().upper()


def ports(mark: str) -> set[tuple[str, int]]:
    """Return where the processes of the jobs with a mark listen."""
    spaces = {Path("/run/netns", namespace(node)).stat().st_ino: ADDRESSES[node] for node in NODES}
    found: set[tuple[str, int]] = set()
    for process in processes.with_mark(mark):
        try:
            address = spaces.get(Path(f"/proc/{process.pid}/ns/net").stat().st_ino)
            found |= set(listening(process.pid, address)) if address else set()
        except OSError:  # it has ended
            continue
    return found


@contextmanager
def flood(cluster: Cluster, mark: str) -> Iterator[None]:
    """Flood all ports of the jobs with a mark during this block, and say how often."""
    over = threading.Event()
    with tempfile.NamedTemporaryFile("w") as file:
        def look() -> None:
            while not over.is_set():
                Path(file.name).write_text("".join(f"{address} {port}\n" for address, port in ports(mark)))
                over.wait(LOOK_S)

        looking = threading.Thread(target=look)
        looking.start()
        program = ROOT / "tests/benchmarks/flooding.py"
        command = [*cluster.at(LOGIN), str(MPI.python), str(program), file.name, str(RATE)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flooding:
            try:
                time.sleep(SETTLING_S)
                yield
            finally:
                over.set()
                looking.join()
                told, _ = flooding.communicate("\n", timeout=30)
                print(f"  {len(ports(mark))} ports, {told.strip()}", flush=True)


def start_s(cluster: Cluster, env: dict[str, str]) -> float:
    """Return the seconds from the start to the end of a small job."""
    start = time.monotonic()
    check(cluster.run("srun", f"--mpi={MPI.pmi}", "-N3", "-n3", str(MPI.python), "-m", "mpiddp",
                      str(EXAMPLES / "hello_world.py"), timeout=120, env=env, cwd=ROOT))
    return time.monotonic() - start


def measure(cluster: Cluster, rounds: int, starts: int) -> None:
    """Print steps a second and seconds of a start, with and without a flood."""
    mark = secrets.token_hex(8)
    env = {**MPI.environ(), processes.MARK: mark}
    windows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    started: dict[bool, list[float]] = {False: [], True: []}
    until = time.time() + 30 + rounds * (10 + 2 * starts * 12)
    with ThreadPoolExecutor(1) as pool:
        command = [str(MPI.python), "-m", "mpiddp", str(ROOT / "tests/benchmarks/steady.py"), str(until)]
        job = pool.submit(cluster.run, "srun", f"--mpi={MPI.pmi}", "-N3", "--ntasks-per-node=2", *command,
                          timeout=600, env=env, cwd=ROOT)
        while not ports(mark):
            time.sleep(LOOK_S)
        time.sleep(10)
        for _ in range(rounds):
            window(windows[False])
            started[False] += [start_s(cluster, env) for _ in range(starts)]
            with flood(cluster, mark):
                window(windows[True])
                started[True] += [start_s(cluster, env) for _ in range(starts)]
        done = check(job.result())
    steps = [float(one) for one in re.findall(r"STEP ([\d.]+)", done.stdout)]
    rates = {flooded: statistics.median(sum(a < at < b for at in steps) / (b - a) for a, b in found)
             for flooded, found in windows.items()}
    seconds = {flooded: statistics.median(found) for flooded, found in started.items()}
    for name, found in {"steps/s": rates, "start, s": seconds}.items():
        print(f"{name:9} {found[False]:6.2f} without, {found[True]:6.2f} with a flood, "
              f"ratio {found[True] / found[False]:.2f}")


def window(found: list[tuple[float, float]]) -> None:
    """Let the training train for a while, and note when."""
    begin = time.time()
    time.sleep(5)
    found.append((begin, time.time()))


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one round, to see that it works")
    quick = parser.parse_args().quick
    with Cluster(visible=[ROOT]) as cluster:
        measure(cluster, rounds=1 if quick else 4, starts=1 if quick else 2)


if __name__ == "__main__":
    main()
