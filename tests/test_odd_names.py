"""Names that are no text: of files, and of processes, which the kernel cuts after 15 bytes, in a letter perhaps."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from mpiddp.discovery.mpi import find_library_file
from mpiddp.discovery.runtime import STEP_DAEMON, find_ancestor
from mpiddp.reporting.trace import read_process_age_ns

SET_NAME, GET_NAME = 15, 16  # PR_SET_NAME, PR_GET_NAME (linux/prctl.h)


def test_a_mapped_file_whose_name_is_no_text(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path / "m") + b"\xfcller"
    Path(os.fsdecode(name)).write_bytes(bytes(mmap.PAGESIZE))
    with Path(os.fsdecode(name)).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert find_library_file("extension")


def test_a_process_whose_name_is_no_text() -> None:
    kernel, name = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    kernel.prctl(GET_NAME, name)
    try:
        kernel.prctl(SET_NAME, "ueber-15-bytesä".encode())
        assert find_ancestor(os.getpid(), [STEP_DAEMON]) >= 0
        assert read_process_age_ns(os.getpid()) > 0
    finally:
        kernel.prctl(SET_NAME, name)
