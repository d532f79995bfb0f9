"""All rules: what an experienced supporter sees in a job script."""

from __future__ import annotations

from dataclasses import replace

from . import directive_rules, file_rules, launch_rules, resource_rules, signal_rules
from .batch_script import BatchScript
from .context import RULES, Context, Host
from .directives import read_request
from .findings import Finding

__all__ = ["RULES", "check", "directive_rules", "file_rules", "launch_rules", "resource_rules", "signal_rules"]


def check(script: BatchScript, host: Host) -> list[Finding]:
    """Return what all rules find in a script, and in those that it submits, by line."""
    context = Context(include_late_directives(script), host)
    findings = {replace(finding, rule=rule.name): None for rule in RULES for finding in rule.find(context)}
    for first, inner, _ in script.submitted:
        for finding in check(inner, host):
            findings[replace(finding, line=first - 1 + (finding.line or 1))] = None
    return sorted(findings, key=lambda finding: (finding.line or 0, -finding.severity))


def include_late_directives(script: BatchScript) -> BatchScript:
    """Return a script as it is meant, if its scheduler reads some of its directives only once they have moved up."""
    late = [directive for directive in script.directives if directive.is_late]
    options = {**script.options, **{name: value for each in late for name, value in each.options.items()}}
    lines = {**script.option_lines, **{name: each.line for each in late for name in each.options}}
    return replace(script, options=options, option_lines=lines, request=read_request(script.form, options))
