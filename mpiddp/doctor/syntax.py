"""Whether bash can read a job script, by its own word: `bash -n` reads it without running anything."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator

from .batch_script import BatchScript
from .findings import Finding, Severity

TIMEOUT_S = 10.0
OTHER_SHELL = re.compile(r"#!.*\b(da|k|z|tc|c)sh\b")


def find_syntax_errors(script: BatchScript) -> Iterator[Finding]:
    """Yield the first thing that bash says of a script; nothing for another shell's, or where there is no bash."""
    if OTHER_SHELL.match(script.lines[0]):
        return
    try:
        done = subprocess.run(["bash", "-n"], input=script.text.encode(errors="surrogateescape"), capture_output=True,
                              timeout=TIMEOUT_S, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired):
        return
    match = re.search(r"line (\d+): (warning: )?(.*)", done.stderr.decode(errors="replace"))
    if match is not None:
        severity = Severity.WARNING if match[2] else Severity.ERROR
        yield Finding("shell-syntax", severity, int(match[1]), f"bash cannot read this: {match[3]}",
                      "the job ends when the shell comes here; the cause may stand in a line above")
