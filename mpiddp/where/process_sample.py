"""What the kernel shows of processes: state, resource usage, descendants, signals, TCP traffic."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ..base.files import read_stat

STATE, MINOR, MAJOR, USER, CHILDREN_SYSTEM, STARTED = 0, 7, 9, 11, 14, 19  # of /proc/PID/stat after the name (man 5)
MAX_DESCENDANTS = 1000
HANDLER_RUN_S = 0.1  # a main thread that has run for longer has called a pending signal handler
IO_COUNTERS = ("rchar", "wchar", "read_bytes", "write_bytes")  # some file systems update the last two during a call
READ_AHEAD = 128 * 1024  # default number of bytes read for a major page fault, and per wait within a read()
RECEIVING = ("unix_stream_", "skb_wait_")  # in wait functions of Unix and UDP sockets; the kernel counts no bytes there
PACKET = 1000  # least bytes assumed for each wake-up of a process that waits for such a socket
SIGNAL_TURNS = 4  # of a main thread between two samples, spent on ASK_SIGNAL


class ProcSample(NamedTuple):
    """A process as /proc shows it; `busy_s`, `moved_bytes`, `faults` include all threads and ended children."""

    state: str  # a letter (man 5 proc)
    wchan: str  # the kernel function in which its main thread sleeps; empty if not shown
    main_s: float  # time that its main thread has run or waited for a core
    ran_s: float  # time that its main thread has run
    turns: int  # how often the scheduler has run its main thread
    busy_s: float  # CPU time
    moved_bytes: int  # read and written, also for major page faults, but without recv() and send()
    faults: int = 0  # minor page faults
    unseen: str = ""  # why the kernel does not show some of this; empty if it shows all

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger."""
        return self.state in "Tt"

    @property
    def is_held(self) -> bool:
        """Whether it is stopped, or in an uninterruptible call of the kernel."""
        return self.state in "TtD"

    def has_slept(self, before: ProcSample) -> bool:
        """Return whether the main thread has slept since `before`; False if the kernel does not count turns."""
        return self.state == before.state == "S" and 0 < self.turns == before.turns

    def could_answer(self, before: ProcSample) -> bool:
        """Return whether the main thread has run long enough since `before` for its interpreter to answer."""
        return self.ran_s - before.ran_s > HANDLER_RUN_S

    def fed_bytes(self, before: ProcSample) -> int:
        """Return the least number of bytes received since `before` by a main thread that waited at both times.

        /proc/PID/io counts a long read() when it returns. Until then the process sleeps, and wakes up for each part.
        """
        turns = self.turns - before.turns
        if self.state == before.state == "D":
            return turns * READ_AHEAD
        is_receiving = all(any(part in sample.wchan for part in RECEIVING) for sample in (self, before))
        return max(0, turns - SIGNAL_TURNS) * PACKET if is_receiving else 0


def sample_process(pid: int) -> ProcSample | None:
    """Return a sample of a process; None if it does not exist."""
    try:
        _, fields = read_stat(pid)
    except OSError:
        return None
    wchan, ran_ns, waited_ns, turns, moved_bytes, unseen = "", 0, 0, 0, 0, ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="utf-8") as file:
        wchan = file.read()
    try:
        with open(f"/proc/{pid}/io", encoding="utf-8") as file:
            moved_bytes = sum(int(value) for name, value in (line.split(":") for line in file) if name in IO_COUNTERS)
    except OSError as error:
        if fields[STATE] not in "ZX" and os.path.exists(f"/proc/{pid}"):
            unseen = f"/proc/{pid}/io cannot be read ({error.strerror})"
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/schedstat", "rb") as stats:  # (sched-stats.rst)
        ran_ns, waited_ns, turns = map(int, stats.read().split())
    busy_s = sum(map(int, fields[USER:CHILDREN_SYSTEM + 1])) / os.sysconf("SC_CLK_TCK")
    main_s = (ran_ns + waited_ns) / 1e9 or busy_s
    minor, major = (int(fields[field]) + int(fields[field + 1]) for field in (MINOR, MAJOR))  # and of ended children
    return ProcSample(fields[STATE], wchan if wchan != "0" else "", main_s, ran_ns / 1e9, turns, busy_s,
                      moved_bytes + major * READ_AHEAD, minor, unseen)


def other_program_name(pid: int, reference: int) -> str:
    """Return the name of a process's program; empty if process `reference` runs the same, or if it is unknown."""
    try:
        if os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{reference}/exe"):
            return ""
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().removesuffix(b"\n").decode(errors="replace")
    except OSError:
        return ""


def list_descendants(pid: int) -> list[int]:
    """Return the descendants of all threads of a process; none if the kernel does not show them."""
    descendants: list[int] = []
    queue = [pid]
    while queue and len(descendants) < MAX_DESCENDANTS:
        with contextlib.suppress(OSError):
            parent = queue.pop(0)
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    queue += (children := list(map(int, file.read().split())))
                    descendants += children
    return descendants


def explain_unseen(descendants: Iterable[int]) -> str:
    """Return why some descendants of a process are not visible; empty if all are."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return "its child processes are not visible (the kernel lacks CONFIG_PROC_CHILDREN)"
    for pid in descendants:
        if not os.path.exists(f"/proc/{pid}"):
            try:
                os.kill(pid, 0)
            except PermissionError:  # another user's process
                return f"its child process {pid} is not visible (hidden by the mount options of /proc)"
            except ProcessLookupError:  # it has ended
                continue
    return ""


def can_handle_signal(pid: int, number: int, descriptor: int, pipe: int, min_age_s: float) -> bool:
    """Return whether a process handles a signal by writing to `pipe` through its `descriptor`.

    The signal would kill any other process. So False for a process younger than `min_age_s`, which may be about to
    execute another program, and for a stopped one or one in state D, where the signal would stay pending.
    """
    try:
        _, fields = read_stat(pid)
        has_pipe = os.stat(f"/proc/{pid}/fd/{descriptor}").st_ino == os.fstat(pipe).st_ino
        with open(f"/proc/{pid}/status", "rb") as file:  # a process name may be invalid UTF-8
            masks = {name: int(value, 16) for name, _, value in (line.partition(b":") for line in file)
                     if name in (b"SigPnd", b"ShdPnd", b"SigBlk", b"SigCgt")}
    except OSError:
        return False
    bit = 1 << number - 1
    started_s = int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
    is_old = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s > min_age_s
    return (has_pipe and is_old and fields[STATE] not in "TtDZX" and bool(masks[b"SigCgt"] & bit)
            and not (masks[b"SigPnd"] | masks[b"ShdPnd"] | masks[b"SigBlk"]) & bit)


# The kernel counts the bytes of each TCP socket (man 7 sock_diag).
SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLMSG_DONE, NLMSG_ERROR = 4, 20, 3, 2  # (linux/netlink.h, linux/sock_diag.h)
REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
WITH_INFO, INET_DIAG_INFO = 2, 2  # requested, and the attribute: struct tcp_info (linux/inet_diag.h)
CONNECTED = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8  # states of TCP: ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT
HEADER = struct.Struct("=IHHII")  # of a message: its length with this, and its type
REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, wanted attributes, states, any addresses
PORTS = struct.Struct("=HH")  # in the network's order
REPLY_BYTES, PORTS_OFFSET, QUEUE_OFFSET, INODE_OFFSET = 72, 4, 60, 68  # of a socket, before its attributes
ATTRIBUTE = struct.Struct("=HH")
COUNTERS = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
COUNTERS_OFFSET = 120
MAX_REPLY_BYTES = 2**16
REPLY_TIMEOUT_S = 0.5


class TcpSocket(NamedTuple):
    """A connected TCP socket; `moved_bytes` are those received, or sent and acknowledged."""

    port: int
    peer_port: int
    moved_bytes: int
    unacked_bytes: int


class TcpCount(NamedTuple):
    """What processes have moved by TCP; `unseen` is why some sockets are not visible, empty if all are."""

    moved_bytes: int
    unacked_bytes: int
    unseen: str = ""


class TcpCounter:
    """Counts the bytes that a rank and its descendants have received and sent by TCP since the first count.

    Omits traffic of the job's store, on `store_port`: NCCL's threads poll it every second, even in ranks that wait.
    Rank 0 serves it by read() and write(), which the kernel counts like those of files: this traffic is subtracted.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._counts: dict[int, int] = {}  # by a socket's inode
        self._total = 0

    def count(self, pids: Collection[int]) -> TcpCount:
        """Return the bytes that these processes have moved since the first count, and those on their way now."""
        inodes: set[int] = set()
        try:
            for pid in pids:
                inodes |= list_socket_inodes(pid)
            sockets = read_tcp_sockets() if inodes else {}
        except OSError as error:
            return TcpCount(self._total, 0, f"its sockets are not visible ({error.strerror or error})")
        own = {inode: sockets[inode] for inode in inodes & sockets.keys()}
        for inode, connection in own.items():
            more = max(0, connection.moved_bytes - self._counts.get(inode, 0))
            if connection.port == self._store_port:
                self._total -= more
            elif connection.peer_port != self._store_port:
                self._total += more
        self._counts = {inode: connection.moved_bytes for inode, connection in own.items()}
        return TcpCount(self._total, sum(connection.unacked_bytes for connection in own.values()))


def list_socket_inodes(pid: int) -> set[int]:
    """Return the inodes of a process's sockets; raise OSError if they are not visible."""
    folder, inodes = f"/proc/{pid}/fd", set()
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                kind, _, inode = os.readlink(f"{folder}/{name}").partition(":")
                if kind == "socket":
                    inodes.add(int(inode[1:-1]))
        if inodes and os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            raise OSError(0, f"process {pid} is in another network namespace")
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return set()
    except PermissionError as error:
        if is_zombie(pid):
            return set()
        raise OSError(error.errno, f"process {pid}: {error.strerror}") from error
    return inodes


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended, and so has closed its sockets."""
    with contextlib.suppress(OSError):
        return read_stat(pid)[1][STATE] in "ZX"
    return True


def read_tcp_sockets() -> dict[int, TcpSocket]:
    """Return the connected TCP sockets of this network namespace, by inode.

    Raises OSError if the kernel does not show them: before Linux 4.1, without the module tcp_diag, or in a container
    without permission.
    """
    sockets: dict[int, TcpSocket] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as netlink:
        netlink.settimeout(REPLY_TIMEOUT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = REQUEST.pack(family, socket.IPPROTO_TCP, WITH_INFO, CONNECTED)
            netlink.send(HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 0, 0) + request)
            for reply in receive_replies(netlink):
                port, peer_port = map(socket.ntohs, PORTS.unpack_from(reply, PORTS_OFFSET))
                unacked_bytes, inode = (int.from_bytes(reply[offset:offset + 4], sys.byteorder)
                                        for offset in (QUEUE_OFFSET, INODE_OFFSET))
                if inode:  # else the socket is closed and waits for its peer
                    counters = COUNTERS.unpack_from(find_attribute(reply, INET_DIAG_INFO), COUNTERS_OFFSET)
                    sockets[inode] = TcpSocket(port, peer_port, sum(counters), unacked_bytes)
    return sockets


def receive_replies(netlink: socket.socket) -> Iterator[bytes]:
    """Yield the kernel's reply about each socket."""
    while True:
        data, start = netlink.recv(MAX_REPLY_BYTES), 0
        while start < len(data):
            size, kind, *_ = HEADER.unpack_from(data, start)
            reply = data[start + HEADER.size:start + size]
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                number = -int.from_bytes(reply[:4], sys.byteorder, signed=True)
                raise OSError(number, os.strerror(number))
            yield reply
            start += size + 3 & ~3


def find_attribute(reply: bytes, wanted: int) -> bytes:
    """Return an attribute of a reply; raise OSError if it is missing, or lacks the counters."""
    start = REPLY_BYTES
    while start + ATTRIBUTE.size <= len(reply):
        size, kind = ATTRIBUTE.unpack_from(reply, start)
        if kind == wanted and size - ATTRIBUTE.size >= COUNTERS_OFFSET + COUNTERS.size:
            return reply[start + ATTRIBUTE.size:start + size]
        start += max(size, ATTRIBUTE.size) + 3 & ~3
    raise OSError(0, "the kernel does not count the bytes of sockets")
