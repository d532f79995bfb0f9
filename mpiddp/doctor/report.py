"""Findings as text for a terminal, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from .batch_script import BatchScript
from .finding import Finding, Severity, format_severity

MIN_WIDTH = 40


def format_findings(script: BatchScript, findings: Sequence[Finding], width: int, has_colours: bool) -> str:
    """Return findings, each with its line, the reason and what to write; then what was not followed."""
    lines = []
    for position, finding in enumerate(findings, 1):
        later = {text for other in findings[position:] for text in other.suggestion.splitlines()}
        label = format_severity(finding.severity, has_colours)
        place = f"{script.path}:{finding.line}: " if finding.line else f"{script.path}: "
        lines.append(f"{place}{label}: {finding.message} [{finding.rule}]")
        if finding.line:
            lines.append(f"    {script.lines[finding.line - 1].strip()[:max(width, MIN_WIDTH) - 4]}")
        lines += wrap("why", finding.reason, width)
        lines += [f"  write  {text}" for text in finding.suggestion.splitlines() if text not in later]
    lines += [f"{script.path}:{note.line}: not followed: {note.text}" for note in script.not_followed]
    return "\n".join([*lines, summarize(script, findings)])


def wrap(label: str, text: str, width: int) -> list[str]:
    """Return a labelled text in lines."""
    return textwrap.wrap(text, max(width, MIN_WIDTH), initial_indent=f"  {label:<6} ", subsequent_indent=" " * 9,
                         break_long_words=False, break_on_hyphens=False)


def summarize(script: BatchScript, findings: Sequence[Finding]) -> str:
    """Return the last line: how many findings there are, and what was looked at."""
    counts = [f"{number} {severity.name.lower()}{'s' * (number != 1)}" for severity in sorted(Severity, reverse=True)
              if (number := sum(finding.severity is severity for finding in findings))]
    starts = ", ".join(f"line {launch.line}" for launch in script.trainings)
    seen = f"the training starts in {starts}" if starts else "no line that starts a training was found"
    return f"{script.path}: {', '.join(counts) or 'nothing found'}; {seen}"


def as_json(script: BatchScript, findings: Sequence[Finding]) -> str:
    """Return findings, and what was not followed, as JSON."""
    return json.dumps({
        "script": script.path, "scheduler": script.scheduler.value,
        "findings": [{**vars(finding), "severity": finding.severity.name.lower()} for finding in findings],
        "not_followed": [vars(note) for note in script.not_followed],
    }, indent=2, ensure_ascii=False)
