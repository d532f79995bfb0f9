"""The rules: what an experienced supporter sees in a job script, and what he changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import (
    argument_rules,
    file_rules,
    launch_rules,
    lightning_rules,
    resource_rules,
    shell_rules,
    signal_rules,
    time_rules,
    variable_rules,
)
from .batch_script import BatchScript, read_from_text
from .context import Context, Host, Problem, Rule
from .directives import read_request
from .edits import Draft, apply_edits
from .findings import Finding

RULES = {value.name: value for module in (
    launch_rules, lightning_rules, variable_rules, argument_rules, file_rules, resource_rules, time_rules,
    signal_rules, shell_rules)
         for value in vars(module).values() if isinstance(value, Rule)}
MAX_ROUNDS = 3  # of fixes: one may uncover another problem
EXCLUDED = "other edits exclude the one for this: make them, and check again"


def check(script: BatchScript, host: Host) -> list[Finding]:
    """Return what all rules find in a script, by line."""
    return join_fixes(script, find_problems(script, host))


def find_problems(script: BatchScript, host: Host) -> list[tuple[str, Problem]]:
    """Return the problems that all rules find, with the rules' names."""
    context = Context(include_late_directives(script), host)
    return [(rule.name, problem) for rule in RULES.values() for problem in rule.find(context)]


def join_fixes(script: BatchScript, problems: Sequence[tuple[str, Problem]]) -> list[Finding]:
    """Return the findings of problems; a line that several of them change has all changes, the worst one's first."""
    draft = Draft(script.lines)
    worst_first = sorted(problems, key=lambda entry: -entry[1].severity)
    is_made = [draft.make(problem.fix.changes) for _, problem in worst_first]
    findings = {
        Finding(name, *problem[:-1], problem.fix.advice if made else EXCLUDED,
                draft.list_edits(problem.fix.changes) if made else ()): None
        for (name, problem), made in zip(worst_first, is_made, strict=True)}
    return sorted(findings, key=lambda finding: (finding.line or 0, -finding.severity))


def fix(script: BatchScript, host: Host, environ: Mapping[str, str]) -> BatchScript:
    """Return the script after all edits that are certain, those that need no advice in words."""
    for _ in range(MAX_ROUNDS):
        problems = [entry for entry in find_problems(script, host) if not entry[1].fix.advice]
        edits = [edit for finding in join_fixes(script, problems) for edit in finding.edits]
        if not edits:
            break
        script = read_from_text(script.path, apply_edits(script.lines, edits), environ)
    return script


def include_late_directives(script: BatchScript) -> BatchScript:
    """Return the script as it is when its late directives stand above the first command, as a rule advises."""
    late = [directive for directive in script.directives if directive.is_late]
    options, lines = {**script.options}, {**script.option_lines}
    for directive in late:
        options |= directive.options
        lines |= dict.fromkeys(directive.options, directive.line)
    return replace(script, options=options, option_lines=lines, request=read_request(script.scheduler, options))
