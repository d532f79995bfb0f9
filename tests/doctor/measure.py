"""How well the doctor's rules find what a supporter finds: `python -m tests.doctor.measure`.

A finding is right if the expectation has its rule at one of its lines. A second finding for the same expectation, and
one that is optional there, count neither as right nor as false.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpiddp.doctor.batch_script import BatchScript, read_from_text
from mpiddp.doctor.context import Host
from mpiddp.doctor.findings import Finding
from mpiddp.doctor.rules import check

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent
SCRIPTS, FILES, FOLDERS = FOLDER / "scripts", FOLDER / "files", FOLDER / "folders"


@dataclass(frozen=True)
class Expected:
    """A finding that a supporter gives."""

    rule: str
    severity: str
    lines: Sequence[int]
    why: str
    optional: bool = False


class SubmissionHost(Host):
    """A login node on which a script is submitted; outside of its folder all paths exist except those `missing`."""

    def __init__(self, name: str, missing: Iterable[str]) -> None:
        super().__init__(str(find_folder(name)))
        self.missing = frozenset(missing)

    def is_elsewhere(self, path: str) -> bool:
        """Return whether a path leads out of the folder."""
        return path.startswith(("/", "~", "$")) and not path.startswith(self.folder)

    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists."""
        return path not in self.missing if self.is_elsewhere(path) else super().exists(path)

    def is_folder(self, path: str) -> bool:
        """Return whether a folder exists."""
        return path not in self.missing if self.is_elsewhere(path) else super().is_folder(path)

    def read(self, path: str) -> str | None:
        """Return a file's text, none in FILES: they only stand for training scripts."""
        return None if self.folder == str(FILES) or self.is_elsewhere(path) else super().read(path)


def find_folder(name: str) -> Path:
    """Return the folder from which a script is submitted: its own, or FILES if it has none."""
    return own if (own := FOLDERS / name).is_dir() else FILES


@dataclass
class Score:
    """The findings of one script or of all: those that are right, missed and false."""

    right: list[tuple[str, Expected, Finding]] = field(default_factory=list)
    missed: list[tuple[str, Expected]] = field(default_factory=list)
    false: list[tuple[str, Finding]] = field(default_factory=list)

    def add(self, other: Score) -> None:
        """Add another script's findings."""
        self.right += other.right
        self.missed += other.missed
        self.false += other.false

    def select(self, rule: str) -> Score:
        """Return the part that belongs to a rule."""
        return Score([entry for entry in self.right if entry[1].rule == rule],
                     [entry for entry in self.missed if entry[1].rule == rule],
                     [entry for entry in self.false if entry[1].rule == rule])

    @property
    def precision(self) -> float:
        """The share of findings that are right; 1 without findings."""
        return len(self.right) / (len(self.right) + len(self.false)) if self.right or self.false else 1

    @property
    def recall(self) -> float:
        """The share of expectations that are found; 1 without expectations."""
        return len(self.right) / (len(self.right) + len(self.missed)) if self.right or self.missed else 1


def read_expectations() -> tuple[dict[str, list[Expected]], list[str]]:
    """Return what is expected of each script, and the paths that do not exist on the host."""
    with (FOLDER / "expected.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)
    missing = table.pop("missing")
    return {name: [Expected(**entry) for entry in value["findings"]] for name, value in table.items()}, missing


def read_script(name: str) -> BatchScript:
    """Return a script as if it stood in the folder from which it is submitted."""
    return read_from_text(str(find_folder(name) / f"{name}.sh"), (SCRIPTS / f"{name}.sh").read_text())


def compare(name: str, expectations: Sequence[Expected], findings: Iterable[Finding]) -> Score:
    """Return which findings of a script are right, missed and false."""
    score = Score()
    met: list[Expected] = []
    for finding in findings:
        fitting = [entry for entry in expectations if entry.rule == finding.rule and finding.line in entry.lines]
        new = next((entry for entry in fitting if not entry.optional and entry not in met), None)
        if new is not None:
            met.append(new)
            score.right.append((name, new, finding))
        elif not fitting:
            score.false.append((name, finding))
    score.missed = [(name, entry) for entry in expectations if not entry.optional and entry not in met]
    return score


def measure() -> Score:
    """Return the findings of all scripts."""
    expectations, missing = read_expectations()
    total = Score()
    for name, expected in expectations.items():
        total.add(compare(name, expected, check(read_script(name), SubmissionHost(name, missing))))
    return total


def format_table(score: Score) -> str:
    """Return a line for each rule, and one for all."""
    rules = {entry[1].rule for entry in (*score.right, *score.missed, *score.false)}
    rows = [(rule, score.select(rule)) for rule in sorted(rules)]
    lines = [f"{'rule':<20} {'expected':>8} {'right':>6} {'missed':>6} {'false':>6} {'precision':>9} {'recall':>6}"]
    lines += [f"{rule:<20} {len(part.right) + len(part.missed):>8} {len(part.right):>6} {len(part.missed):>6} "
              f"{len(part.false):>6} {part.precision:>9.2f} {part.recall:>6.2f}"
              for rule, part in [*rows, ("all", score)]]
    return "\n".join(lines)


def main() -> None:
    """Print the table, and what is missed and false."""
    score = measure()
    print(format_table(score))
    same = sum(expected.severity == finding.severity.name.lower() for _, expected, finding in score.right)
    print(f"\n{same} of {len(score.right)} right findings have the severity that is expected")
    for name, expected in score.missed:
        print(f"missed  {name}:{expected.lines[0]} {expected.rule}: {expected.why}")
    for name, finding in score.false:
        print(f"false   {name}:{finding.line} {finding.rule} ({finding.severity.name.lower()}): {finding.message}")


if __name__ == "__main__":
    main()
