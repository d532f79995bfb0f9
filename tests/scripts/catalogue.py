"""The scripts, from catalogue.txt.

There `=== SUBJECT` begins the scripts of a subject, `--- NAME: what it does` a script, `+++ FILE` a module beside it.
Each script gets the lines of PROLOGUE before its own, except a `(bare)` one: it has a folder of its rank's own, `here`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Plain Python, which sets no RANK, is rank 0.
PROLOGUE = """\
import os, sys
here = os.environ.get("RANK", "0") + "/"
"""
HEAD = re.compile(r"(?P<name>[\w-]+)(?P<bare> \(bare\))?: (?P<does>.*)")


class Script(NamedTuple):
    """A script: its subject and name, what it does in words, its text, and the modules beside it by their names."""

    subject: str
    name: str
    does: str
    text: str
    modules: dict[str, str]


def parse(text: str) -> Iterator[Script]:
    """Yield the scripts of a catalogue."""
    for section in re.split(r"^=== ", text, flags=re.M)[1:]:
        title, *scripts = re.split(r"^--- ", section, flags=re.M)
        for script in scripts:
            head, _, rest = script.partition("\n")
            code, *modules = re.split(r"^\+\+\+ ", rest, flags=re.M)
            match = HEAD.fullmatch(head)
            assert match, head
            beside = {name: PROLOGUE + lines for name, _, lines in (module.partition("\n") for module in modules)}
            lines = code if match["bare"] else PROLOGUE + code
            yield Script(title.strip(), match["name"], match["does"], lines, beside)


SCRIPTS = list(parse(Path(__file__).with_name("catalogue.txt").read_text()))
