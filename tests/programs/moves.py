"""Let rank 1 do for some seconds what shows in one counter of the kernel alone: moves.py KIND SECONDS FOLDER."""

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

KIND, SECONDS, FOLDER = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
RECEIVE = """import socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while end.recv(65536): pass"""
HOLD = "import socket, time\nend = socket.socket()\ntime.sleep(600)"


def beside(do: Callable[[], object]) -> None:
    """Call a function in a process that does not descend from this one."""
    if os.fork() == 0:
        if os.fork() == 0:
            do()
        os._exit(0)
    os.wait()


def served(bytes_each: int, pause_s: float, seconds: float = SECONDS) -> int:
    """Return the port of a server that sends so much after each pause."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        end = time.monotonic() + seconds
        connection, _ = listener.accept()
        while time.monotonic() < end:
            connection.send(b"x" * bytes_each)
            time.sleep(pause_s)

    beside(serve)
    port = int(listener.getsockname()[1])
    listener.close()
    return port


def tcp() -> None:
    with socket.create_connection(("127.0.0.1", served(20_000, 0.1))) as end:
        while end.recv(65536):
            pass


def child() -> None:
    subprocess.run([sys.executable, "-c", RECEIVE, str(served(20_000, 0.1))], check=True)


def unix() -> None:
    ours, its = socket.socketpair()

    def send() -> None:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            its.send(b"x" * 20_000)
            time.sleep(0.02)

    beside(send)
    its.close()
    while ours.recv(65536):
        pass


def touch() -> None:
    memory, end = mmap.mmap(-1, 2**30), time.monotonic() + SECONDS
    for page in range(0, 2**30, mmap.PAGESIZE):
        memory[page] = 1
        time.sleep(0.01)
        if time.monotonic() > end:
            return


def mapped() -> None:
    with (FOLDER / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        bytes(memory)


def read() -> None:
    with (FOLDER / "file").open("rb", buffering=0) as file:
        file.readall()


def idle() -> None:
    """Stand still, while threads do what some do for ever: log a line, and answer one who asks how this rank is."""
    def log() -> None:
        while True:
            print("epoch 3: still here", flush=True)
            time.sleep(1)

    def hear() -> None:
        with socket.create_connection(("127.0.0.1", served(100, 0.2, 600))) as end:
            while end.recv(100):
                end.send(b"x" * 100)

    for do in (log, hear):
        threading.Thread(target=do, daemon=True).start()
    time.sleep(600)


def hidden() -> None:
    """Wait for a child that has a socket in a network namespace of its own."""
    with subprocess.Popen(["unshare", "--net", sys.executable, "-c", HOLD]) as held:
        time.sleep(SECONDS)
        held.kill()


dist.barrier()
if os.environ["RANK"] == "1":
    {"tcp": tcp, "child": child, "unix": unix, "touch": touch, "mapped": mapped, "read": read, "idle": idle,
     "hidden": hidden}[KIND]()
dist.barrier()
