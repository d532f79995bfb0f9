"""Start processes in every way, from a rank that notes signals and from its worker: none of them blocks a signal."""

import multiprocessing
import multiprocessing.util
import os
import pty
import signal
import subprocess
import sys
from signal import signal as install

import mpiddp

PROGRAM = [sys.executable, "-c", "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"]


def by_fork(fork):
    """Fork, run PROGRAM in the child, and return its wait status."""
    pid = fork()
    if pid == 0:
        os.execv(sys.executable, PROGRAM)
    return os.waitpid(pid, 0)[1]


def by_spawn():
    """Run PROGRAM in a process that multiprocessing spawns, and return its exit status."""
    process = multiprocessing.get_context("spawn").Process(target=os.execv, args=(sys.executable, PROGRAM))
    process.start()
    process.join()
    return process.exitcode


WAYS = {
    "Popen": lambda: subprocess.call(PROGRAM),
    "Popen, close_fds": lambda: subprocess.call(PROGRAM, close_fds=False),
    "Popen, preexec_fn": lambda: subprocess.call(PROGRAM, preexec_fn=os.setsid),
    "system": lambda: os.system(f"exec {sys.executable} -c '{PROGRAM[2]}'"),
    "posix_spawn": lambda: os.waitpid(os.posix_spawn(sys.executable, PROGRAM, os.environ), 0)[1],
    "fork": lambda: by_fork(os.fork),
    "pty": lambda: by_fork(lambda: pty.fork()[0]),
    "spawn": by_spawn,
}


def try_all(where):
    """Fail if a program blocks signals, or if SIGTERM does not end it."""
    blocked = {name: status for name, way in WAYS.items() if (status := way())}
    assert not blocked, f"{where}: {blocked}"
    for options in ({}, {"preexec_fn": os.setsid}):
        process = subprocess.Popen(["sleep", "1000"], **options)
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    for _ in range(50):
        if (pid := os.fork()) == 0:
            signal.pause()
        os.kill(pid, signal.SIGTERM)
        assert os.waitpid(pid, 0)[1] == signal.SIGTERM
    print(f"{where}: all end", flush=True)


def handle(ready, install_it):
    """Exit with status 5 at SIGTERM, in a worker."""
    install_it(signal.SIGTERM, lambda *_: os._exit(5))
    ready.set()
    while True:
        signal.pause()


if __name__ == "__main__":
    mpiddp.should_stop()
    multiprocessing.set_start_method("fork")
    try_all("rank")
    worker = multiprocessing.Process(target=try_all, args=("worker",))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    for install_it in (signal.signal, install):
        ready = multiprocessing.Event()
        worker = multiprocessing.Process(target=handle, args=(ready, install_it))
        worker.start()
        ready.wait()
        subprocess.run(["kill", str(worker.pid)], check=True)
        worker.join()
        assert worker.exitcode == 5
    for target, arguments in ((os.execvp, ("sleep", ["sleep", "1000"])), (signal.pause, ())):
        for _ in range(20):
            worker = multiprocessing.Process(target=target, args=arguments)
            worker.start()
            worker.terminate()
            worker.join()
            assert worker.exitcode == -signal.SIGTERM
    print("ended", flush=True)
