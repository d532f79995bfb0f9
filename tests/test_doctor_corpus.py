"""The doctor's rules against 74 job scripts with the findings of a supporter."""

from __future__ import annotations

import pytest

from tests.doctor.measure import (
    SCRIPTS,
    SubmissionHost,
    format_table,
    measure,
    read_expectations,
    read_script,
)
from tests.test_doctor import assert_edits_end

ENOUGH = 0.9
SOURCES = ("# after the shape of: ", "# by an author who did not know the doctor's rules")


def test_the_doctor_finds_what_a_supporter_finds() -> None:
    score = measure()
    assert score.precision >= ENOUGH, format_table(score)
    assert score.recall >= ENOUGH, format_table(score)


@pytest.mark.parametrize("name", [file.stem for file in sorted(SCRIPTS.iterdir())])
def test_the_edits_come_to_an_end(name: str) -> None:
    assert_edits_end(read_script(name), SubmissionHost(name, read_expectations()[1]))


def test_every_script_has_expectations_and_a_source() -> None:
    expectations, _ = read_expectations()
    scripts = {script.stem: script.read_text().splitlines() for script in SCRIPTS.iterdir()}
    assert scripts.keys() == expectations.keys()
    assert len(scripts) == 74
    assert [name for name, lines in scripts.items() if not lines[1].startswith(SOURCES)] == []
    without = [name for name, expected in expectations.items() if not expected]
    assert 20 <= len(without) <= 30
    assert [name for name, expected in expectations.items()
            if any(line > len(scripts[name]) for entry in expected for line in entry.lines)] == []
