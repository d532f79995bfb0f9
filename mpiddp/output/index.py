"""The index of a job's logs, ranks.json: one record per rank, which the rank's own processes update.

It is valid JSON at any moment, without locks: rank 0 writes the file once, with padded records of equal size; values
that become known later overwrite the padding.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from functools import partial

from ..base.files import find_risk, open_checked, open_for_writing
from ..base.ranks import LogPlan
from ..base.stderr import write_all

INDEX_NAME = "ranks.json"
RECORD_BYTES = 512  # 2,000 ranks make 1 MB
# The bytes of each value but the last, and the key after it; the values: null, 255; null, true; null, 2**63.
FIELDS = ((4, b', "first": '), (4, b', "lost": '), (20, b', "last": '))
END = b"},\n"
TAIL_BYTES = 4096  # of the output, in which the last line is searched
REPORT = "mpiddp: failed: "  # the first words of failure/report.py's report
LINE_END = re.compile(r"[\r\n]+")


def write_index(path: str, logs: Sequence[LogPlan]) -> None:
    """Write the index of these logs, one per rank; raise OSError."""
    records = b"".join(map(make_record, logs))
    descriptor = open_for_writing(path, job_folder=True)
    try:
        write_all(descriptor, b"[\n" + records[:-2] + b"\n]\n")
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def make_record(log: LogPlan) -> bytes:
    """Return the initial record of a rank."""
    record = make_head(log)
    for size, key in FIELDS:
        record += b"null".ljust(size) + key
    return (record + b"null").ljust(RECORD_BYTES - len(END)) + END


def make_head(log: LogPlan) -> bytes:
    """Return a record up to the exit status."""
    values = {"rank": log.rank, "host": log.host, "job": log.job, "file": os.path.basename(log.path)}
    return json.dumps(values)[:-1].encode() + b', "status": '


def update_record(log: LogPlan, status: int | None = None, lost: int | None = None, tail: bytes | None = None,
                  overwrite: bool = True, is_first: bool = False) -> None:
    """Update a rank's record: its exit status, the first lost byte, the last line in the `tail` of its output.

    `is_first` means that it was the first rank to fail. Existing values are replaced only if `overwrite`. Does nothing
    if there is no index, or if it belongs to another job.
    """
    if not log.ranks_file:
        return
    with contextlib.suppress(OSError):
        # Without O_DSYNC, NFS later sends whole pages, with outdated records of other ranks.
        descriptor = open_checked(log.ranks_file, os.O_RDWR | os.O_DSYNC, partial(find_risk, job_folder=True))
        try:
            write_fields(descriptor, log, (status, b"true" if is_first else None, lost), tail, overwrite)
        finally:
            os.close(descriptor)


def write_fields(index: int, log: LogPlan, values: Sequence[int | bytes | None], tail: bytes | None, overwrite: bool
                 ) -> None:
    """Write a record's `values` that are not None, and the last line; see update_record()."""
    start, head = len(b"[\n") + log.rank * RECORD_BYTES, make_head(log)
    if os.pread(index, len(head), start) != head:
        return
    position = start + len(head)
    for value, (size, key) in zip(values, FIELDS, strict=True):
        write_field(index, position, size, b"%d" % value if isinstance(value, int) else value, overwrite)
        position += size + len(key)
    size = start + RECORD_BYTES - len(END) - position
    write_field(index, position, size, None if tail is None else format_last_line(tail, size), overwrite)


def write_field(index: int, position: int, size: int, value: bytes | None, overwrite: bool) -> None:
    """Write a value, unless it is None, to its place in the index."""
    if value is not None and (overwrite or os.pread(index, 4, position) == b"null"):
        os.pwrite(index, value.ljust(size), position)


def format_last_line(tail: bytes, max_bytes: int) -> bytes:
    """Return the last line that is not empty, as JSON of at most `max_bytes`; unprintable characters are escaped.

    A failure report is skipped; if there is nothing before it, its first line is returned.
    """
    text = tail.decode(errors="replace")
    before, report, after = text.rpartition(REPORT)
    if before.strip() or not report:
        last = LINE_END.split((before if report else text).rstrip())[-1]
    else:
        last = report + LINE_END.split(after)[0]
    encoded, left = b"", max_bytes - len(b'""')
    for character in last.strip():
        piece = json.dumps(character, ensure_ascii=not character.isprintable())[1:-1].encode()
        left -= len(piece)
        if left < 0:
            break
        encoded += piece
    return b'"%b"' % encoded
