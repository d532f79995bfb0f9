"""Findings as text for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..discovery.site_profile import SiteProfile
from .batch_script import BatchScript
from .findings import MIN_WIDTH, Finding, count_severities, format_severity, wrap
from .suggestion import Suggestion

NOTHING = "nothing found by reading the script: whether the nodes have these cores and GPUs is not checked"
STEPS = "take the six steps of batch/README.md, Convert a recipe"


def format_findings(
    script: BatchScript, findings: Sequence[Finding], width: int, has_colours: bool, profile: SiteProfile | None = None,
    suggestions: Sequence[Suggestion] = (),
) -> str:
    """Return findings, each with its line, the reason and what to write; what was not followed; mpiddp's launch lines.

    If there are findings and the centre has a profile, the last lines show how the centre starts a job.
    """
    lines: list[str] = []
    width = max(width, MIN_WIDTH)
    for finding in findings:
        label = format_severity(finding.severity, has_colours)
        place = f"{script.path}:{finding.line}: " if finding.line else f"{script.path}: "
        lines.append(f"{place}{label}: {finding.message} [{finding.rule}]")
        if finding.line:
            lines.append(f"    {script.lines[finding.line - 1].strip()[:width - 4]}")
        lines += wrap(finding.reason, width, "  why: ")
        lines += [f"  write: {text}" for text in finding.write]
        lines += wrap(finding.advice, width, "  note: " if finding.write else "  do: ")
    lines += [f"{script.path}:{note.line}: not followed: {note.text}" for note in script.not_followed]
    for suggestion in suggestions:
        lines += format_suggestion(script.path, suggestion, width)
    if findings and profile is not None:
        lines += [f"{profile.name}: {title} {text}" for title, text in (
            ("prefer its own launch line:", profile.launch_line),
            ("options of its jobs:", " ".join(profile.launch_options))) if text]
    starts = ", ".join(f"line {launch.line}" for launch in script.trainings)
    start = f"the training starts in {starts}" if starts else "no line that starts a training was found"
    return "\n".join([*lines, f"{script.path}: {count_severities(findings) or NOTHING}; {start}"])


def format_suggestion(path: str, suggestion: Suggestion, width: int) -> list[str]:
    """Return how to start a training with mpiddp, or which word was not understood."""
    place = f"{path}:{suggestion.line}: with mpiddp"
    if suggestion.word:
        return [f"{place}: did not understand {suggestion.word}; {STEPS}"]
    return [f"{place}:", *(f"    {text}" for text in (*suggestion.directives, suggestion.launch)),
            *(line for text in suggestion.notes for line in wrap(text, width, "  note: "))]


def as_json(script: BatchScript, findings: Sequence[Finding], suggestions: Sequence[Suggestion] = ()) -> str:
    """Return findings, what was not followed, and mpiddp's launch lines, as JSON."""
    return json.dumps({
        "script": script.path, "scheduler": script.scheduler.name,
        "findings": [finding.as_record() for finding in findings],
        "not_followed": [note._asdict() for note in script.not_followed],
        "launches": [vars(suggestion) for suggestion in suggestions],
    }, indent=2, ensure_ascii=False)
