"""The rules: what an experienced supporter sees in a job script, and what he changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
from .batch_script import BatchScript, NotABatchScript, parse_script, read_from_text
from .context import Context, Host, Problem, Rule
from .directives import read_request
from .edits import Draft, apply_edits
from .findings import Finding, Severity
from .shell import find_errors

RULES = {value.name: value for module in (
    launch_rules, lightning_rules, variable_rules, argument_rules, file_rules, resource_rules, time_rules,
    signal_rules, shell_rules)
         for value in vars(module).values() if isinstance(value, Rule)}
MAX_ROUNDS = 3  # of fixes: one may uncover another problem
EXCLUDED = "this clashes with an edit above: make that, then check again"


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
    """Return the script after all certain edits: those of errors and warnings that need no advice in words.

    Edits that the shell could not read, or after which there is still the same finding, are not made.
    """
    refused: set[tuple[str, str]] = set()
    for _ in range(MAX_ROUNDS):
        all_problems = find_problems(script, host)
        while True:
            problems = keep_readable(script, [entry for entry in all_problems if is_certain(entry, refused)])
            text = apply_problems(script, problems)
            if text == script.text:
                return script
            fixed = read_from_text(script.path, text, environ)
            left = count_names(find_problems(fixed, host))
            before = count_names(all_problems)
            useless = {name for name in count_names(problems) if left[name] >= before[name]}
            if not useless:
                break
            refused |= useless
        script = fixed
    return script


def is_certain(entry: tuple[str, Problem], refused: Collection[tuple[str, str]]) -> bool:
    """Return whether a problem has edits that need no advice and are not refused; a note breaks nothing."""
    name, problem = entry
    is_guess = problem.severity is Severity.NOTE or problem.fix.advice or not problem.fix.changes
    return not is_guess and (name, problem.message) not in refused


def count_names(problems: Sequence[tuple[str, Problem]]) -> Counter[tuple[str, str]]:
    """Return how often each message of a rule is among problems."""
    return Counter((name, problem.message) for name, problem in problems)


def keep_readable(script: BatchScript, problems: Sequence[tuple[str, Problem]]) -> list[tuple[str, Problem]]:
    """Return the problems after whose edits the shell reads the script as well as before."""
    errors = count_errors(script.text)
    if count_errors(apply_problems(script, problems)) <= errors:
        return [*problems]
    kept: list[tuple[str, Problem]] = []
    for entry in problems:
        if count_errors(apply_problems(script, [*kept, entry])) <= errors:
            kept.append(entry)
    return kept


def apply_problems(script: BatchScript, problems: Sequence[tuple[str, Problem]]) -> str:
    """Return the script's text after the edits of problems."""
    return apply_edits(script.lines, [edit for finding in join_fixes(script, problems) for edit in finding.edits])


def count_errors(text: str) -> float:
    """Return the number of places that the parser cannot read, infinity if it reads nothing."""
    try:
        return sum(1 for _ in find_errors(parse_script(text)))
    except NotABatchScript:
        return math.inf


def include_late_directives(script: BatchScript) -> BatchScript:
    """Return the script as it is when its late directives stand above the first command, as a rule advises."""
    late = [directive for directive in script.directives if directive.is_late]
    options, lines = {**script.options}, {**script.option_lines}
    for directive in late:
        options |= directive.options
        lines |= dict.fromkeys(directive.options, directive.line)
    return replace(script, options=options, option_lines=lines, request=read_request(script.scheduler, options))
