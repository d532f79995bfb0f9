"""The rules: what an experienced supporter sees in a job script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from . import argument_rules, file_rules, launch_rules, resource_rules, shell_rules, signal_rules, time_rules
from .batch_script import BatchScript
from .context import Change, Context, Host, Rule, Suggestion
from .directives import read_request
from .findings import Finding

RULES = {value.name: value for module in (
    launch_rules, argument_rules, file_rules, resource_rules, time_rules, signal_rules, shell_rules)
         for value in vars(module).values() if isinstance(value, Rule)}
Edits = Mapping[int, Iterable[tuple[str, str]]]


def check(script: BatchScript, host: Host) -> list[Finding]:
    """Return what all rules find in a script, by line."""
    context = Context(include_late_directives(script), host)
    problems = [(rule.name, problem) for rule in RULES.values() for problem in rule.find(context)]
    edits: dict[int, dict[tuple[str, str], None]] = {}
    for _, problem in problems:
        if isinstance(problem.suggestion, Change):
            edits.setdefault(problem.suggestion.position, {}).update(dict.fromkeys(problem.suggestion.edits))
    findings = {Finding(name, *problem[:-1], write_suggestion(script, problem.suggestion, edits)): None
                for name, problem in problems}
    return sorted(findings, key=lambda finding: (finding.line or 0, -finding.severity))


def include_late_directives(script: BatchScript) -> BatchScript:
    """Return the script as it is when its late directives stand above the first command, as a rule advises."""
    late = [directive for directive in script.directives if directive.is_late]
    options, lines = {**script.options}, {**script.option_lines}
    for directive in late:
        options |= directive.options
        lines |= dict.fromkeys(directive.options, directive.line)
    return replace(script, options=options, option_lines=lines, request=read_request(script.scheduler, options))


def write_suggestion(script: BatchScript, suggestion: Suggestion, edits: Edits) -> str:
    """Return the lines to write; a line that is changed has the edits of all findings."""
    if not isinstance(suggestion, Change):
        return suggestion or ""
    line = script.lines[suggestion.position].strip()
    for pattern, replacement in edits[suggestion.position]:
        line = re.sub(pattern, replacement.replace("\\", r"\\"), line, count=1)
    return "\n".join(filter(None, (suggestion.above, line)))
