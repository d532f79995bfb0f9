"""The rules: what an experienced supporter sees in a job script."""

from __future__ import annotations

from . import file_rules, launch_rules, resource_rules, signal_rules
from .batch_script import BatchScript
from .findings import RULES, Context, Finding, Host, Rule, Severity

__all__ = ["RULES", "Finding", "Host", "Rule", "Severity", "check"]

MODULES = (resource_rules, launch_rules, signal_rules, file_rules)  # each adds its rules to RULES


def check(script: BatchScript, host: Host) -> list[Finding]:
    """Return what all rules find in a script, by line."""
    context = Context(script, host)
    findings = {Finding(rule.name, *problem): None for rule in RULES.values() for problem in rule.find(context)}
    return sorted(findings, key=lambda finding: (finding.line or 0, -finding.severity))
