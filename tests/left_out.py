"""What `tests/run` leaves out: `python -m tests.left_out` prints the tests that are marked `thorough`, or `light`."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from tests.support import ROOT, is_light

CASES_SHOWN = 3  # of those that run in tests/run: the others are counted


class Collector:
    """A plugin of pytest that keeps what was collected."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep the tests."""
        self.items = session.items


@functools.cache
def collect() -> list[pytest.Item]:
    """Return all tests."""
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", str(ROOT / "tests")], [collector])
    if status:
        sys.exit(output.getvalue())
    return collector.items


def rows(items: Iterable[pytest.Item]) -> Iterator[tuple[str, int, int, str]]:
    """Yield each test that tests/run does not run, or not wholly.

    A row has its name, its number of cases in tests/run and in all, and what tests/run has instead: the marker's
    argument, or the names of the cases.
    """
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.nodeid.partition("::")[0], item.originalname), []).append(item)
    for (_, name), cases in tests.items():
        markers = [marker for case in cases if (marker := case.get_closest_marker("thorough"))]
        quick = [case.name.removeprefix(name).strip("[]") for case in cases if not case.get_closest_marker("thorough")]
        if markers:
            reason = next((marker.args[0] for marker in markers if marker.args), "")
            names = ", ".join(quick[:CASES_SHOWN]) + ", …" * (len(quick) > CASES_SHOWN)
            yield name, len(quick), len(cases), reason or names


def main() -> None:
    """Print the table, and how many tests of each file have no torch."""
    items = collect()
    print("| test | cases in `tests/run` | with `--all` | `tests/run` has instead |\n| --- | --- | --- | --- |")
    for name, quick, cases, instead in rows(items):
        print(f"| `{name}` | {quick} | {cases} | {instead} |")
    light = Counter(item.nodeid.partition("::")[0] for item in items if is_light(item))
    print("\n| file | tests whose jobs have a stand-in for torch |\n| --- | --- |")
    for file, number in light.items():
        print(f"| `{file}` | {number} |")


if __name__ == "__main__":
    main()
