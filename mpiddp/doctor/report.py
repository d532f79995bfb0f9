"""Findings as text for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..discovery.site_schema import SiteProfile
from .batch_script import BatchScript
from .findings import MIN_WIDTH, Finding, count_severities, format_severity, wrap

NOTHING = "nothing found by reading the script: whether the nodes have these cores and GPUs is not checked"


def format_findings(
    script: BatchScript, findings: Sequence[Finding], width: int, has_colours: bool, profile: SiteProfile | None = None,
) -> str:
    """Return findings, each with its line, the reason and what to write; then what was not followed.

    If there are findings and the centre has a profile, the last lines show how the centre starts a job.
    """
    lines = []
    for position, finding in enumerate(findings, 1):
        later = {text for other in findings[position:] for text in other.suggestion.splitlines()}
        label = format_severity(finding.severity, has_colours)
        place = f"{script.path}:{finding.line}: " if finding.line else f"{script.path}: "
        lines.append(f"{place}{label}: {finding.message} [{finding.rule}]")
        if finding.line:
            lines.append(f"    {script.lines[finding.line - 1].strip()[:max(width, MIN_WIDTH) - 4]}")
        lines += wrap(finding.reason, max(width, MIN_WIDTH), "  why    ")
        lines += [f"  write  {text}" for text in finding.suggestion.splitlines() if text not in later]
    lines += [f"{script.path}:{note.line}: not followed: {note.text}" for note in script.not_followed]
    if findings and profile is not None:
        lines += [f"{profile.name}: {title} {text}" for title, text in (
            ("start with", profile.launch_line), ("options of a job", " ".join(profile.launch_options))) if text]
    return "\n".join([*lines, summarize(script, findings)])


def summarize(script: BatchScript, findings: Sequence[Finding]) -> str:
    """Return the last line: how many findings there are, and what was looked at."""
    starts = ", ".join(f"line {launch.line}" for launch in script.trainings)
    start = f"the training starts in {starts}" if starts else "no line that starts a training was found"
    return f"{script.path}: {count_severities(findings) or NOTHING}; {start}"


def as_json(script: BatchScript, findings: Sequence[Finding]) -> str:
    """Return findings, and what was not followed, as JSON."""
    return json.dumps({
        "script": script.path, "scheduler": script.scheduler.value,
        "findings": [{**vars(finding), "severity": finding.severity.name.lower()} for finding in findings],
        "not_followed": [vars(note) for note in script.not_followed],
    }, indent=2, ensure_ascii=False)
