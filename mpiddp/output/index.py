"""The index of a job's logs, ranks.json, with a line for each rank: written at the start, replaced at the end."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..base.files import format_os_error, open_for_reading, replace_file
from ..base.ranks import LogPlan

INDEX_NAME = "ranks.json"
TAIL_BYTES = 4096  # of the output, in which the last line is searched
MAX_LINE_CHARS = 200
REPORT = "mpiddp: failed: "  # the first words of failure/report.py's report
LINE_END = re.compile(r"[\r\n]+")

Record = dict[str, int | str | bool | None]  # what is not known yet is None


class RankEnd(NamedTuple):
    """How a rank has ended: its exit status, the first byte that its log has lost, -1 for none, and its last line."""

    status: int
    log_lost: int
    last_line: str


def write_index(path: str, logs: Sequence[LogPlan]) -> None:
    """Write the index of these logs, one per rank; raise OSError."""
    write_records(path, [{"rank": log.rank, "host": log.host, "job": log.job, "file": os.path.basename(log.path),
                          "status": None, "first": None, "lost": None, "last": None} for log in logs])


def complete_index(path: str, ends: Mapping[int, RankEnd], first: int) -> str:
    """Write how the ranks have ended, by rank; `first` is the rank that failed first, -1 for none.

    Returns why that failed, empty if it did not.
    """
    try:
        with open(open_for_reading(path), encoding="utf-8") as file:
            records: list[Record] = json.load(file)
        for rank, record in enumerate(records):
            record["first"] = rank == first
            if rank in ends:
                status, lost, last = ends[rank]
                record.update(status=status, lost=None if lost < 0 else lost, last=last)
        write_records(path, records)
        return ""
    except OSError as error:
        return f"mpiddp: cannot write {path}: {format_os_error(error, path)}"
    except Exception as error:  # somebody has changed it
        return f"mpiddp: cannot update {path}: {type(error).__name__}: {error}"


def write_records(path: str, records: Sequence[Record]) -> None:
    """Write an index, in place of the one that there is; raise OSError."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    with replace_file(path, f"{path}.part", job_folder=True) as file:
        file.write(f"[\n{lines}\n]\n".encode(errors="backslashreplace"))


def find_last_line(tail: bytes) -> str:
    """Return the last line that is not empty, up to MAX_LINE_CHARS; unprintable characters are escaped.

    A failure report is skipped; if there is nothing before it, its first line is returned.
    """
    text = tail.decode(errors="replace")
    before, report, after = text.rpartition(REPORT)
    if before.strip() or not report:
        last = LINE_END.split((before if report else text).rstrip())[-1]
    else:
        last = report + LINE_END.split(after)[0]
    shown = (character if character.isprintable() else character.encode("unicode_escape").decode()
             for character in last.strip())
    return "".join(shown)[:MAX_LINE_CHARS]
