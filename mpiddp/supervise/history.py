"""What became of each attempt: as a table, as JSON, and the nodes that were left out, for the site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..plan.words import columns, duration, folded, shortened
from ..show.files import write_json
from .decision import Attempt, Decision

WIDEST = 80  # characters of a reason
HEAD = ("attempt", "nodes", "time", "steps", "ended by", "then")


class Record(NamedTuple):
    """An attempt, when it began (seconds since the epoch), what followed, and its number in the job."""

    began: float
    attempt: Attempt
    decision: Decision
    number: int


def table(records: Sequence[Record]) -> list[str]:
    """Return a line for each attempt, below a head."""
    return ["mpiddp.supervise: the attempts", *columns([HEAD, *map(row, records)])]


def row(record: Record) -> tuple[str, ...]:
    """Return the cells of an attempt."""
    _, attempt, decision, number = record
    out = f" without {folded(decision.without)}" if decision.without else ""
    steps = f"{attempt.steps:,}" if attempt.steps else ""
    return (str(number), folded(attempt.nodes) if attempt.nodes else "this one", duration(attempt.seconds), steps,
            shortened(attempt.reason, WIDEST), f"{decision.action.value}{out}")


def write(path: str, records: Sequence[Record]) -> None:
    """Write all attempts as JSON: for each the fields of Attempt, and `number`, `began`, `action`, `why`."""
    write_json(path, {"attempts": [
        {"number": one.number, "began": round(one.began, 3), **one.attempt._asdict(),
         "action": one.decision.action.value, "why": one.decision.why, "without": one.decision.without}
        for one in records]})
