"""A script that closes nothing: `open_files.py FOLDER END` ends as END says."""

# ruff: noqa: PTH123, SIM115 (files as most scripts open them, which nobody closes)

import atexit
import csv
import gzip
import logging
import os
import signal
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, TextIO

folder, end = sys.argv[1:]
rank = os.environ["RANK"]


def path(kind: str) -> str:
    return f"{folder}/{kind}.{rank}"


class Tee:
    """Stands in the place of sys.stdout."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.file = stream, open(path("tee"), "w")

    def write(self, text: str) -> int:
        self.file.write(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


class Last:
    """Says that it is destroyed, and uses globals for that."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __del__(self) -> None:
        print(f"{self.where} of rank {rank} is destroyed", file=sys.__stdout__)


class Raises:
    def __del__(self) -> None:
        raise ValueError("raised at the end")


def work() -> None:
    """Hold in a frame what a failure keeps alive by its traceback."""
    local = open(path("local"), "w")
    local.write("kept")
    inner = Last("local")
    if end == "exit":
        sys.exit(0)
    while end == "raise on rank 0" and rank == "0" and not Path(folder, "local.1").exists():
        time.sleep(0.01)
    if end == "raise" or (end == "raise on rank 0" and rank == "0"):
        raise ValueError("seven")
    if end == "raise on rank 0":
        time.sleep(600)
    del inner


sys.stdout = Tee(sys.stdout)  # type: ignore[assignment]
print("kept")
text = open(path("text"), "w")
print("kept", file=text)
rows = csv.writer(open(path("csv"), "w"))
rows.writerow(["kept"])
zipped = gzip.open(path("gz"), "wt")
zipped.write("kept")
archive: Any = zipfile.ZipFile(path("zip"), "w")
archive.writestr("kept", "kept")
temporary = tempfile.NamedTemporaryFile(dir=folder, suffix=".temporary")
logging.held = open(path("library"), "w")  # type: ignore[attr-defined]
print("kept", file=logging.held)  # type: ignore[attr-defined]
last, raises = Last("global"), Raises()
if end == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if end == "raise on rank 0" and rank == "0":
    atexit.register(time.sleep, 2)
work()
