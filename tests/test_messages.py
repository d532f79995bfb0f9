"""The files of messages: each message is used by a test, and how a test finds one."""

from __future__ import annotations

import re

import pytest

from tests import messages
from tests.messages import find, message
from tests.support import ROOT

COMMANDS = sorted(file.stem for file in messages.FOLDER.iterdir())


def test_every_message_is_named_by_a_test_and_every_name_is_a_message() -> None:
    text = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    named = {match for match in re.findall(r'"(\w+/\w+)"', text) if match.partition("/")[0] in COMMANDS}
    assert named == {f"{command}/{key}" for command in COMMANDS for key in messages.load(command)}


def test_a_message_has_all_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "load", {"a": {"late": "rank {rank} on {node}: late"}}.__getitem__)
    assert message("a/" + "late", rank=3, node="n07") == "rank 3 on n07: late"
    for fields in ({"rank": 3}, {"rank": 3, "node": "n07", "job": 1}):
        with pytest.raises(KeyError):
            message("a/" + "late", **fields)


def test_the_fields_of_a_message_are_found_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "load", {"a": {"late": "rank {rank} on {node}: late by {seconds}"}}.__getitem__)
    text = "rank 3 on n07: late by 5 s\nrank 4 on n08: early\nrank 5 on n08: late by 7 s\n"
    assert find("a/" + "late", text) == [{"rank": "3", "node": "n07", "seconds": "5 s"},
                                         {"rank": "5", "node": "n08", "seconds": "7 s"}]
    assert find("a/" + "late", text, rank=5) == [{"node": "n08", "seconds": "7 s"}]
    assert find("a/" + "late", text, rank=4) == []
