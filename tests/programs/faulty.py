"""Run a script with a fault in its training loop: `faulty.py KIND RANK STEP NOTES SCRIPT [arguments]`.

STEP counts from the beginning of the training: a script that goes on from a checkpoint says at which step it does by
printing `resumed in epoch E …`. A line of the file NOTES tells the time of each attempt's first step, and of the fault.
The KIND `end` is a rank that stops after the last step.
"""

import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import mpiddp

KIND, RANK, STEP, NOTES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
STEPS_PER_EPOCH = 24  # of examples/train_digits.py
mine = int(os.environ["RANK"]) == RANK
calls = 0
asks = mpiddp.should_stop


def note(what: str) -> None:
    """Append a line to the notes, in one piece."""
    line = f"{time.time()} {mpiddp.restart_count} {what}\n".encode()
    file = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line)
    os.close(file)


def fail() -> None:
    """Come to a bad end, or wait for one."""
    note("fault")
    if KIND in ("once", "always"):
        raise ValueError("seven")
    if KIND == "device":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    if KIND == "SIGSEGV":
        ctypes.string_at(0)
    if KIND == "memory":
        if "FAULTY_GROUP" in os.environ:  # the cgroup whose memory it takes
            Path(os.environ["FAULTY_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20)) * 16)
    if KIND.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, KIND))
    time.sleep(600)


def should_stop() -> bool:
    """Count a step of the training, as mpiddp does; fail at the one that is asked for."""
    global calls
    if calls == 0 and os.environ["RANK"] == "0":
        note("first step")
    calls += 1
    is_turn = KIND == "always" or (KIND not in ("none", "end") and mpiddp.restart_count == 0)
    if mine and is_turn and begun() + calls == STEP:
        fail()
    return asks()


def begun() -> int:
    """Return how many steps the training had made when this attempt began."""
    return first_epoch * STEPS_PER_EPOCH


def epoch_of(path: str) -> int:
    """Return the epoch in which a checkpoint goes on, 0 if there is none."""
    import torch

    return int(torch.load(path, weights_only=True)["epoch"]) if Path(path).exists() else 0


mpiddp.should_stop = should_stop
sys.argv = sys.argv[5:]
first_epoch = epoch_of(sys.argv[sys.argv.index("--checkpoint") + 1])
runpy.run_path(sys.argv[0], run_name="__main__")
if KIND == "end" and mine and mpiddp.restart_count == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
