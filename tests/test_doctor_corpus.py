"""The doctor's rules against 74 job scripts with the findings of a supporter."""

from __future__ import annotations

import pytest

from mpiddp.doctor.findings import Severity
from mpiddp.doctor.suggestion import suggest_all
from tests.doctor.measure import (
    SCRIPTS,
    SubmissionHost,
    format_table,
    measure,
    read_expectations,
    read_script,
)

ENOUGH = 0.9
SOURCES = ("# after the shape of: ", "# by an author who did not know the doctor's rules")


def test_the_doctor_finds_what_a_supporter_finds() -> None:
    score = measure()
    assert score.precision >= ENOUGH, format_table(score)
    assert score.recall >= ENOUGH, format_table(score)


def test_no_error_is_false() -> None:
    assert [finding for _, finding in measure().false if finding.severity is Severity.ERROR] == []


@pytest.mark.parametrize("name", [file.stem for file in sorted(SCRIPTS.iterdir())])
def test_the_launch_line_is_one_line_or_a_word_is_not_understood(name: str) -> None:
    for suggestion in suggest_all(read_script(name), SubmissionHost(name, read_expectations()[1])):
        assert bool(suggestion.word) != ("python" in suggestion.launch and " -m mpiddp " in suggestion.launch)
        assert "\n" not in suggestion.launch + suggestion.word


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
