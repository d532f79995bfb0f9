"""Why a test of CPython's has another result in a rank: what is not explained here is a fault."""

from __future__ import annotations

import re
from typing import NamedTuple


class Reason(NamedTuple):
    """Explains why those tests of a module have another result in a rank whose whole name a pattern matches."""

    module: str
    tests: str
    why: str


REASONS: list[Reason] = []


def explain(module: str, test: str) -> Reason | None:
    """Return why a test has another result in a rank, None if nobody knows."""
    found = (reason for reason in REASONS if reason.module == module and re.fullmatch(reason.tests, test))
    return next(found, None)
