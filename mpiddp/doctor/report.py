"""Findings as text for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import groupby

from ..discovery.site_profile import SiteProfile
from .batch_script import BatchScript, Program
from .findings import MIN_WIDTH, Action, Edit, Finding, count_severities, format_severity, wrap

CONVERTIBLE = (Program.TORCHRUN, Program.TORCH_LAUNCH, Program.ACCELERATE)
NOTHING = "nothing found by reading the script: whether the nodes have these cores and GPUs is not checked"


def format_findings(
    script: BatchScript, findings: Sequence[Finding], width: int, has_colours: bool, profile: SiteProfile | None = None,
) -> str:
    """Return findings, each with its line, the reason and what to do; then what was not followed.

    If there are findings and the centre has a profile, the last lines show how the centre starts a job.
    """
    lines: list[str] = []
    shown: set[Edit] = set()
    for finding in findings:
        label = format_severity(finding.severity, has_colours)
        place = f"{script.path}:{finding.line}: " if finding.line else f"{script.path}: "
        lines.append(f"{place}{label}: {finding.message} [{finding.rule}]")
        if finding.line:
            lines.append(f"    {script.lines[finding.line - 1].strip()[:max(width, MIN_WIDTH) - 4]}")
        lines += wrap(finding.reason, max(width, MIN_WIDTH), "  why: ")
        lines += format_edits(finding.edits, shown, len(script.lines) - (not script.lines[-1]))
        lines += wrap(finding.advice, max(width, MIN_WIDTH), "  note: " if finding.edits else "  do: ")
        shown.update(finding.edits)
    lines += [f"{script.path}:{note.line}: not followed: {note.text}" for note in script.not_followed]
    if findings and profile is not None:
        lines += [f"{profile.name}: {title} {text}" for title, text in (
            ("prefer its own launch line:", profile.launch_line),
            ("options of its jobs:", " ".join(profile.launch_options))) if text]
    if findings and any(launch.program in CONVERTIBLE for launch in script.launches):
        lines.append(f"to start it with mpiddp: python -m mpiddp.doctor --convert {script.path}")
    return "\n".join([*lines, summarize(script, findings)])


def format_edits(edits: Sequence[Edit], shown: Collection[Edit], end: int) -> list[str]:
    """Return edits, the last lines first, so that the numbers of the others stay; adjacent lines have one title.

    Edits that are shown before have no text. `end` is the number of the script's lines.
    """
    lines: list[str] = []
    groups = groupby(enumerate(edits), lambda entry: place_edit(*entry))
    for key, part in reversed([(key, [edit for _, edit in group]) for key, group in groups]):
        first, last = part[0].line, part[-1].line
        where = f"line {first}" if first == last else f"lines {first}-{last}"
        if key[0] is Action.INSERT:
            where = f"before {where}" if first <= end else "at the end"
        title = f"  {key[0].value} {where}"
        if key[0] is Action.REMOVE:
            lines.append(title)
        elif {*part} <= {*shown}:
            lines.append(f"{title}: as above")
        else:
            lines += [f"{title}:", *(f"    {edit.text}" for edit in part)]
    return lines


def place_edit(position: int, edit: Edit) -> tuple[Action, int]:
    """Return what edits of adjacent lines have in common, the `position` of each among all edits given."""
    return edit.action, edit.line - position * (edit.action is not Action.INSERT)


def summarize(script: BatchScript, findings: Sequence[Finding]) -> str:
    """Return the last line: how many findings there are, and what was looked at."""
    starts = ", ".join(f"line {launch.line}" for launch in script.trainings)
    start = f"the training starts in {starts}" if starts else "no line that starts a training was found"
    is_long = len({edit.line for finding in findings for edit in finding.edits}) > 1
    order = "; edit from the last line up, or apply the patch of --fix" if is_long else ""
    return f"{script.path}: {count_severities(findings) or NOTHING}; {start}{order}"


def as_json(script: BatchScript, findings: Sequence[Finding]) -> str:
    """Return findings, and what was not followed, as JSON."""
    return json.dumps({
        "script": script.path, "scheduler": script.scheduler.value,
        "findings": [finding.as_record() for finding in findings],
        "not_followed": [vars(note) for note in script.not_followed],
    }, indent=2, ensure_ascii=False)
