"""The doctor's rules against fifty job scripts with the findings of a supporter."""

from __future__ import annotations

from tests.doctor.measure import SCRIPTS, format_table, measure, read_expectations

ENOUGH = 0.9


def test_the_doctor_finds_what_a_supporter_finds() -> None:
    score = measure()
    assert score.precision >= ENOUGH, format_table(score)
    assert score.recall >= ENOUGH, format_table(score)


def test_every_script_has_expectations_and_a_source() -> None:
    expectations, _ = read_expectations()
    scripts = {script.stem: script.read_text().splitlines() for script in SCRIPTS.iterdir()}
    assert scripts.keys() == expectations.keys()
    assert len(scripts) == 50
    assert [name for name, lines in scripts.items() if not lines[1].startswith("# after the shape of: ")] == []
    without = [name for name, expected in expectations.items() if not expected]
    assert 15 <= len(without) <= 20
    assert [name for name, expected in expectations.items()
            if any(line > len(scripts[name]) for entry in expected for line in entry.lines)] == []
