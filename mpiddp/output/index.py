"""The index of a job's logs, ranks.json: a record for each rank, in which its own processes fill in their places.

It is JSON at any moment, and nobody waits for anybody: rank 0 writes the file once, each record padded to the same
size, and what is known later overwrites spaces that were left for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Sequence
from functools import partial

from ..base.files import find_risk, open_checked, open_for_writing
from ..failure.rank import LogPlan

NAME = "ranks.json"
RECORD_BYTES = 512  # 2,000 ranks make 1 MB
STATUS_BYTES, FIRST_BYTES, LOST_BYTES = 4, 4, 20  # of the values: null, 255; null, true; null, 2**63
SUFFIX_BYTES = len(".zst")  # by which a log's name is longer when it is compressed
STATUS, FIRST, LOST, LAST = b', "status": ', b', "first": ', b', "lost": ', b', "last": '  # between the values
END = b"},\n"  # after them
NOTING_S = 0.5
TAIL_BYTES = 4096  # of a log, in which its last line is looked for
REPORT = "mpiddp: failed: "  # the beginning of failure/report.py's block
LINE_END = re.compile(r"[\r\n]+")


def write_index(path: str, logs: Sequence[LogPlan]) -> None:
    """Write the index of these logs, one of each rank; raise OSError where that fails."""
    records = b"".join(map(record, logs))
    descriptor = open_for_writing(path, job_folder=True)
    try:
        rest = b"[\n" + records[:-2] + b"\n]\n"
        while rest:
            rest = rest[os.write(descriptor, rest):]
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def record(log: LogPlan) -> bytes:
    """Return the record of a rank of which nothing is known yet."""
    begun = head(log)
    for (room, words), value in zip(places(log), (name_of(log.path), b"null", b"null", b"null"), strict=True):
        begun += value.ljust(room) + words
    return (begun + b"null").ljust(RECORD_BYTES - len(END)) + END


def head(log: LogPlan) -> bytes:
    """Return a record up to the name of its file."""
    known = {"rank": log.rank, "host": log.host, "job": log.job}
    return json.dumps(known)[:-1].encode() + b', "file": '


def name_of(path: str) -> bytes:
    """Return a file's name as JSON."""
    return json.dumps(os.path.basename(path)).encode()


def places(log: LogPlan) -> list[tuple[int, bytes]]:
    """Return the room that each value of a record has but the last one's, and what stands after it."""
    return [(len(name_of(log.path)) + SUFFIX_BYTES, STATUS), (STATUS_BYTES, FIRST), (FIRST_BYTES, LOST),
            (LOST_BYTES, LAST)]


def note(log: LogPlan, status: int | None = None, lost: int | None = None, tail: bytes | None = None,
         again: bool = True, is_first: bool = False, file: str | None = None) -> None:
    """Fill in what is known of a rank: its exit status, the first byte lost, the last line in the `tail` of its output.

    `is_first` tells that it was the first one to fail. Its log is in another `file` now, unless that is None.

    A value that is there already is replaced if `again`. Where there is no index, or one of another job, nothing is
    done.
    """
    if not log.ranks_file:
        return
    with contextlib.suppress(OSError):
        # NFS sends whole pages, with others' places as they were before, unless each write goes to the server at once.
        descriptor = open_checked(log.ranks_file, os.O_RDWR | os.O_DSYNC, partial(find_risk, job_folder=True))
        try:
            values = [None if file is None else name_of(file), status, b"true" if is_first else None, lost]
            fill_in(descriptor, log, values, tail, again)
        finally:
            os.close(descriptor)


def fill_in(index: int, log: LogPlan, values: Sequence[int | bytes | None], tail: bytes | None, again: bool) -> None:
    """Fill in what note() says: the first `values`, each None for none, and the last line."""
    begins, known = len(b"[\n") + log.rank * RECORD_BYTES, head(log)
    if os.pread(index, len(known), begins) != known:
        return
    at = begins + len(known)
    for value, (room, words) in zip(values, places(log), strict=True):
        put(index, at, room, b"%d" % value if isinstance(value, int) else value, again)
        at += room + len(words)
    room = begins + RECORD_BYTES - len(END) - at
    put(index, at, room, None if tail is None else last_line(tail, room), again)


def put(index: int, at: int, room: int, value: bytes | None, again: bool) -> None:
    """Write a value, None for none, into its place in the index."""
    if value is not None and (again or os.pread(index, 4, at) == b"null"):
        os.pwrite(index, value.ljust(room), at)


def last_line(tail: bytes, room: int) -> bytes:
    """Return the last line that is not empty, as JSON of at most `room` bytes; what is no text is escaped.

    The report of a failure says no more than the line before it; without that its own first line counts.
    """
    text = tail.decode(errors="replace")
    before, report, after = text.rpartition(REPORT)
    if before.strip() or not report:
        last = LINE_END.split((before if report else text).rstrip())[-1]
    else:
        last = report + LINE_END.split(after)[0]
    found, left = b"", room - len(b'""')
    for character in last.strip():
        piece = json.dumps(character, ensure_ascii=not character.isprintable())[1:-1].encode()
        left -= len(piece)
        if left < 0:
            break
        found += piece
    return b'"%b"' % found


def note_end(log: LogPlan, status: int | None = None, again: bool = True, is_first: bool = False,
             lost: int | None = None) -> None:
    """Fill in how a rank or its log ends, as note() does, but wait not long for a file system that hangs."""
    if log.ranks_file:
        how = {"status": status, "again": again, "is_first": is_first, "lost": lost}
        noting = threading.Thread(target=note, args=(log,), kwargs=how, daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            noting.start()
            noting.join(NOTING_S)


def exit_status(wait_status: int | None) -> int | None:
    """Return what a shell makes of a wait status (man 2 wait): 128+N for signal N; None for an unknown one."""
    if wait_status is None:
        return None
    return 128 + number if (number := wait_status & 0x7F) else wait_status >> 8
