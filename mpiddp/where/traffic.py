"""What processes receive and send by TCP, as the kernel counts it for each socket (man 7 sock_diag)."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from typing import NamedTuple

SOCK_DIAG, BY_FAMILY, DONE, ERROR = 4, 20, 3, 2  # (linux/netlink.h, linux/sock_diag.h)
REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
WITH_INFO, INFO = 2, 2  # what is asked for, and what has come: struct tcp_info (linux/inet_diag.h)
OPEN = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8  # states of TCP: ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT
HEADER = struct.Struct("=IHHII")  # of a message: its length with this, and its type
REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, what is asked for, states, any addresses
PORTS = struct.Struct("=HH")  # in the network's order
ANSWER_BYTES, PORTS_AT, INODE_AT = 72, 4, 68  # of a socket, before its attributes
ATTRIBUTE = struct.Struct("=HH")
COUNTS = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
COUNTS_AT = 120
MOST_BYTES = 2**16  # of an answer's part
ANSWER_S = 0.5


class Connection(NamedTuple):
    """A TCP socket: its port, that of its peer, and how many bytes it has received, and sent and been told so."""

    port: int
    peer_port: int
    moved_bytes: int


class Traffic:
    """Counts the bytes that a rank and its descendants have received and sent by TCP since it is looked at.

    What goes over the job's store, on `store_port`, does not count: NCCL threads look there each second, also those of
    ranks that wait. Rank 0 serves it by read() and write(), which the kernel counts with those of files: they are taken
    off.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._counts: dict[int, int] = {}  # by a socket's inode
        self._total = 0

    def see(self, pids: Collection[int]) -> tuple[int, str]:
        """Return how many bytes these processes have received and sent, and what cannot be seen, empty for nothing."""
        inodes: set[int] = set()
        try:
            for pid in pids:
                inodes |= sockets_of(pid)
            found = tcp_sockets() if inodes else {}
        except OSError as error:
            return self._total, f"its sockets cannot be seen ({error.strerror or error})"
        now = {inode: found[inode] for inode in inodes & found.keys()}
        for inode, one in now.items():
            more = max(0, one.moved_bytes - self._counts.get(inode, 0))
            if one.port == self._store_port:
                self._total -= more
            elif one.peer_port != self._store_port:
                self._total += more
        self._counts = {inode: one.moved_bytes for inode, one in now.items()}
        return self._total, ""


def sockets_of(pid: int) -> set[int]:
    """Return the inodes of a process's sockets; raise OSError where they cannot be seen."""
    folder, found = f"/proc/{pid}/fd", set()
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                kind, _, inode = os.readlink(f"{folder}/{name}").partition(":")
                if kind == "socket":
                    found.add(int(inode[1:-1]))
        if found and os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            raise OSError(0, f"process {pid} is in another network namespace")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return set()
    except PermissionError as error:
        if is_zombie(pid):
            return set()
        raise OSError(error.errno, f"those of process {pid}: {error.strerror}") from error
    return found


def is_zombie(pid: int) -> bool:
    """Tell whether a process has ended, and nobody has waited for it; it has no sockets any more."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    return True


def tcp_sockets() -> dict[int, Connection]:
    """Return the TCP sockets of this network namespace that are connected, by inode.

    Raises OSError where the kernel does not tell: before Linux 4.1, without its module tcp_diag, or where that is kept
    from a container.
    """
    found: dict[int, Connection] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as asked:
        asked.settimeout(ANSWER_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = REQUEST.pack(family, socket.IPPROTO_TCP, WITH_INFO, OPEN)
            asked.send(HEADER.pack(HEADER.size + len(request), BY_FAMILY, REQUEST_DUMP, 0, 0) + request)
            for message in answers(asked):
                port, peer_port = (socket.ntohs(one) for one in PORTS.unpack_from(message, PORTS_AT))
                inode = int.from_bytes(message[INODE_AT:INODE_AT + 4], sys.byteorder)
                if inode:  # a process has it; one that is closed may still wait for its peer
                    counts = COUNTS.unpack_from(attribute(message, INFO), COUNTS_AT)
                    found[inode] = Connection(port, peer_port, sum(counts))
    return found


def answers(asked: socket.socket) -> Iterator[bytes]:
    """Yield what the kernel tells of each socket."""
    while True:
        part, at = asked.recv(MOST_BYTES), 0
        while at < len(part):
            size, kind, *_ = HEADER.unpack_from(part, at)
            message = part[at + HEADER.size:at + size]
            if kind == DONE:
                return
            if kind == ERROR:
                number = -int.from_bytes(message[:4], sys.byteorder, signed=True)
                raise OSError(number, os.strerror(number))
            yield message
            at += size + 3 & ~3


def attribute(message: bytes, wanted: int) -> bytes:
    """Return an attribute of an answer; raise OSError if it is not there, or lacks the counts."""
    at = ANSWER_BYTES
    while at + ATTRIBUTE.size <= len(message):
        size, kind = ATTRIBUTE.unpack_from(message, at)
        if kind == wanted and size - ATTRIBUTE.size >= COUNTS_AT + COUNTS.size:
            return message[at + ATTRIBUTE.size:at + size]
        at += max(size, ATTRIBUTE.size) + 3 & ~3
    raise OSError(0, "the kernel does not count their bytes")
