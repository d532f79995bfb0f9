"""Context managers that make one node of the cluster bad, and take every trace of it away again.

`out` is what the node sends to others, `in` what they send to it. Between two nodes this machine carries 1.3 to 2.3
GB/s in 20 to 70 us and back, and sends up to 1 % of the segments again although nothing is bad: only links that are
shaped (`slow_links`) lose next to none. Frames of up to 64 KiB pass the bridge uncut. This kernel has no netem.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import psutil

from .cluster import ADDRESSES, BRIDGE, NODES, RUN, Cluster, ip, namespace, read_pid, recorded_process, start_daemon

Direction = Literal["both", "out", "in"]
BURST, LIMIT = 68000, 2**20  # bytes: a frame of 64 KiB passes uncut; a queue that TCP fills but does not overflow
UNCUT = "65535"  # segments of a frame; the kernel's default
PERIOD_US = 20000  # of a limit of CPU time: short beside a step
POLL_S, START_S = 0.01, 10.0
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
HERE = Path(__file__).parent


@contextlib.contextmanager
def slow_link(cluster: Cluster, node: str, bytes_per_s: float, direction: Direction = "both") -> Iterator[None]:
    """Let a node's link carry so much, Ethernet's headers included: 4 % less for TCP's payload.

    The first 68 kB after a pause are quicker. A link that was shaped before is so again afterwards.
    """
    with contextlib.ExitStack() as undo:
        for place in ends(node, direction):
            before = tc(*place, "qdisc", "show", "dev", place[-1], "root").split()
            undo.callback(unshape, place, before[before.index("rate") + 1] if "tbf" in before else None)
            shape(place, f"{int(bytes_per_s * 8)}bit")
        yield


@contextlib.contextmanager
def slow_links(cluster: Cluster, bytes_per_s: float) -> Iterator[None]:
    """Let the links of all nodes carry so much; inside, `slow_link` makes one slower still."""
    with contextlib.ExitStack() as undo:
        for node in NODES:
            undo.enter_context(slow_link(cluster, node, bytes_per_s))
        yield


def ends(node: str, direction: Direction) -> list[tuple[str, ...]]:
    """Return where a node's traffic leaves a device: options of ip and tc that name a namespace, and the device."""
    both = {"out": ("-n", namespace(node), "eth0"), "in": (f"{BRIDGE}-{node}",)}
    return [place for way, place in both.items() if direction in ("both", way)]


def tc(*arguments: str) -> str:
    """Run iproute2's `tc`, with the namespace's options and the device first, and return its output."""
    at = [*arguments[:2]] if arguments[0] == "-n" else []
    rest = arguments[len(at) + 1:]
    return subprocess.run(["tc", *at, *rest], capture_output=True, text=True, timeout=20, check=True).stdout


def shape(place: tuple[str, ...], rate: str) -> None:
    """Let a device send at a rate in tc's words."""
    tc(*place, "qdisc", "replace", "dev", place[-1], "root", "tbf", "rate", rate, "burst", str(BURST),
       "limit", str(LIMIT))


def unshape(place: tuple[str, ...], before: str | None) -> None:
    """Let a device send at the rate that it had before, or without a limit."""
    if before:
        shape(place, before)
    else:
        tc(*place, "qdisc", "delete", "dev", place[-1], "root")


@contextlib.contextmanager
def delay(cluster: Cluster, node: str, seconds: float, direction: Direction = "both") -> Iterator[None]:
    """Hold every frame from or to a node for a time, in a process between its link and the bridge.

    The node itself shows nothing of it. At 5 ms the process carries 400 to 550 MB/s of one connection, in 64 MiB, and
    135 MB/s in messages of 1 MiB that are answered one by one.
    """
    veth, tap, bridge = f"{BRIDGE}-{node}", f"{BRIDGE}-d{node[4:]}", ("link", "set", BRIDGE)
    own = Path("/sys/class/net", veth, "address").read_text().strip()
    hold = [str(int(seconds * 1e9)) if direction in ("both", way) else "0" for way in ("out", "in")]
    program = compiled("delay.c", "-pthread")
    with contextlib.ExitStack() as undo:
        ip(*bridge, "address", Path("/sys/class/net", BRIDGE, "address").read_text().strip())  # else a port's
        undo.callback(ip, "link", "set", veth, "arp", "on", "address", own, "master", BRIDGE)
        undo.callback(end_daemon, tap)
        start_daemon(tap, str(program), tap, veth, *hold)
        await_path(Path("/sys/class/net", tap))
        # The machine itself must not answer what it now sees of the node outside of the bridge.
        ip("link", "set", veth, "nomaster", "arp", "off", "address", f"fe:ff:ff:ff:fe:{NODES.index(node):02x}")
        ip("link", "set", tap, "address", f"fe:ff:ff:ff:ff:{NODES.index(node):02x}", "txqueuelen", "32768")
        ip("link", "set", tap, "master", BRIDGE, "up")
        yield


def end_daemon(name: str) -> None:
    """End a process that start_daemon has started under a name."""
    record = RUN / "pids" / name
    if record.exists() and (process := recorded_process(record)):
        process.kill()
        process.wait(START_S)
    record.unlink(missing_ok=True)


def await_path(path: Path) -> None:
    """Return when there is something at a path; raise TimeoutError where nothing comes."""
    deadline = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {path} after {START_S} s")
        time.sleep(POLL_S)


def compiled(source: str, *options: str, libraries: Iterable[str] = (), folder: Path = RUN) -> Path:
    """Return what a C program of this folder is compiled to, in another folder: the running cluster's by default."""
    target = folder / Path(source).stem
    if not target.exists():
        command = ["gcc", "-O2", *options, "-o", str(target), str(HERE / source), *libraries]
        subprocess.run(command, check=True, timeout=60)
    return target


@contextlib.contextmanager
def drop(cluster: Cluster, node: str, share: float, direction: Direction = "both") -> Iterator[None]:
    """Lose a share of the TCP packets between a node and the other nodes, not those to and from the login node.

    They are lost where they arrive: what is dropped where it leaves is an error to the sender, who sends it again
    without counting it. Frames to the nodes where they arrive are cut into packets, so that each is lost by itself;
    that costs them speed (1 GB/s is left).
    """
    others = [other for other in NODES if other != node]
    lossy = {"out": [(node, other) for other in others], "in": [(other, node) for other in others]}
    ways = [pair for way, pairs in lossy.items() if direction in ("both", way) for pair in pairs]
    with contextlib.ExitStack() as undo:
        for receiver in {receiver for _, receiver in ways}:
            link = ("link", "set", f"{BRIDGE}-{receiver}", "gso_max_segs")
            undo.callback(ip, *link, UNCUT)
            ip(*link, "1")
        for sender, receiver in ways:
            rule = ("INPUT", "-p", "tcp", "-s", ADDRESSES[sender], "-m", "statistic", "--mode", "random",
                    "--probability", str(share), "-j", "DROP")
            iptables(receiver, "-A", *rule)
            undo.callback(iptables, receiver, "-D", *rule)
        yield


def iptables(node: str, *arguments: str) -> None:
    """Run `iptables` in a node's network namespace."""
    subprocess.run(["nsenter", f"--net=/run/netns/{namespace(node)}", "iptables", "-w", *arguments],
                   capture_output=True, timeout=20, check=True)


@contextlib.contextmanager
def half_cpu(cluster: Cluster, node: str, cores: float) -> Iterator[Path]:
    """Let a node's slurmd and all that it starts use so many cores' time; yield the cgroup.

    Raise OSError where no cgroup can be made, FileNotFoundError where it has no controller of CPU time.
    """
    parent, quota = (V1, "cpu.cfs_quota_us") if V1.is_dir() else (V2, "cpu.max")
    group = parent / f"mpiddp-test-{node}-{os.getpid()}"
    slurmd = psutil.Process(read_pid(node))
    home = parent / own_group(slurmd.pid).lstrip("/")
    with contextlib.ExitStack() as undo:
        group.mkdir()
        undo.callback(remove_group, group, home)
        if not (group / quota).exists():
            raise FileNotFoundError(f"no {quota} in {group}: its parent hands on no controller of CPU time")
        if parent == V1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / quota).write_text(str(int(cores * PERIOD_US)) + ("" if parent == V1 else f" {PERIOD_US}"))
        move([slurmd.pid, *(child.pid for child in slurmd.children(recursive=True))], group)
        yield group


def own_group(pid: int) -> str:
    """Return the cgroup of a process, below the root of the hierarchy that limits CPU time."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or (not V1.is_dir() and not controllers):
            return path
    raise ValueError(f"process {pid} is in no cgroup of CPU time")


def move(pids: Iterable[int], group: Path) -> None:
    """Put processes into a cgroup, but those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def remove_group(group: Path, home: Path) -> None:
    """Give a cgroup's processes back, and remove it."""
    deadline = time.monotonic() + START_S
    while pids := (group / "cgroup.procs").read_text().split():
        move(map(int, pids), home)
        if time.monotonic() > deadline:
            break
    group.rmdir()


@contextlib.contextmanager
def small_shm(cluster: Cluster, node: str, size: int) -> Iterator[None]:
    """Make a node's /dev/shm so small, in bytes; what lies there must fit."""
    remount = [*cluster.at(node), "mount", "-o"]
    seen = subprocess.run([*cluster.at(node), "stat", "-f", "-c", "%b %S", "/dev/shm"], capture_output=True, text=True,
                          timeout=20, check=True)
    blocks, block = map(int, seen.stdout.split())
    try:
        subprocess.run([*remount, f"remount,size={size}", "/dev/shm"], timeout=20, check=True)
        yield
    finally:
        subprocess.run([*remount, f"remount,size={blocks * block}", "/dev/shm"], timeout=20, check=True)


@contextlib.contextmanager
def wrong_clock(cluster: Cluster, node: str, seconds: float) -> Iterator[dict[str, str]]:
    """Yield the variables with which a job's processes see the time of day so much later, on one node alone.

    MPI sets its timeouts by a clock that stays as it is.
    """
    yield {"LD_PRELOAD": str(compiled("clock.c", "-shared", "-fPIC", "-lm", "-ldl")), "WRONG_CLOCK_HOST": node,
           "WRONG_CLOCK_S": str(seconds)}


def pythons(node: str) -> list[psutil.Process]:
    """Return the Python processes on a node."""
    found = []
    for pid in map(int, ip("netns", "pids", namespace(node)).split()):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if Path(process.exe()).name.startswith("python"):
                found.append(process)
    return found


@contextlib.contextmanager
def frozen(node: str, when: Callable[[], bool]) -> Iterator[list[psutil.Process]]:
    """Stop a node's Python processes as soon as `when` returns True, and kill them at the end.

    The list that it yields holds those that have been stopped.
    """
    stopped: list[psutil.Process] = []
    over = threading.Event()

    def stop() -> None:
        while not when():
            if over.wait(POLL_S * 5):
                return
        for process in pythons(node):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGSTOP)
                stopped.append(process)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        yield stopped
    finally:
        over.set()
        thread.join(START_S)
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.kill()
