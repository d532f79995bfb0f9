"""Print what the first argument says, on each rank: for --show fold."""

import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
KIND, *REST = sys.argv[1:]


def say(*words: object) -> None:
    print(*words, flush=True)


if KIND == "same":
    import torch.distributed as dist

    dist.barrier()  # many ranks on few cores come one after the other
    for number in range(1000):
        print("line", number)
        if (RANK, number) == (17 % int(os.environ["WORLD_SIZE"]), 500):
            print("an odd line")
elif KIND == "numbers":
    for step in range(1, 4):
        say(f"step {step} loss {0.25 + RANK / 1000}")
    say(f"Hello from rank {RANK} of {os.environ['WORLD_SIZE']}")
    print(f"{RANK % 2} errors", file=sys.stderr)
elif KIND == "crash":
    for number in range(100_000):
        print("line", number, "of", RANK)
    sys.stdout.flush()
    if RANK == 1:
        os.write(1, b"last word")
        time.sleep(0.1)
        os.write(2, b"last word on stderr")
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(600)
elif KIND == "raise":
    say("before")
    time.sleep(0.3)
    if RANK == 1:
        raise ValueError("seven")
    while True:
        say("working")
        time.sleep(0.01)
elif KIND == "bar":
    for number in range(int(REST[0])):
        sys.stderr.write(f"\r{number}% of rank {RANK}")
        sys.stderr.flush()
        time.sleep(0.05)
    sys.stderr.write("\r100%\n")
elif KIND == "alone":
    for number in range(int(REST[0])):
        if RANK == 1:
            print("only rank 1 says", "x" * (number % 70))
elif KIND == "redirects":
    if RANK == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
    for number in range(300):
        say("line", number, "x" * 200)
        time.sleep(0.01)
elif KIND == "waits":
    say("before")
    while not Path(REST[0]).exists():
        time.sleep(0.05)
    say("after")
