"""Writes the words of a command as the shell reads them, and as they were written where that is the same."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from .shell import Word, parse, read_text

LINE_LENGTH = 118


def read_tokens(source: str) -> list[str]:
    """Return the words of a simple command as they are written."""
    node = parse(source).named_children[0] if source.strip() else None
    while node is not None and node.type != "command":
        node = node.named_children[0] if node.named_children else None
    return [] if node is None else [read_text(child) for child in node.named_children if "assignment" not in child.type]


def format_words(words: Sequence[str], tokens: Sequence[str]) -> str:
    """Return words as the shell reads them; from the end on as they were written, as far as each token is one word."""
    written: list[str] = []
    for word, token in zip(reversed(words), reversed(tokens), strict=False):
        if token != word and not is_one_word(token, word):
            break
        written.insert(0, token)
    return " ".join([*map(format_word, map(as_word, words[:len(words) - len(written)])), *written])


def is_one_word(token: str, word: str) -> bool:
    """Return whether a token with quotes or variables surely makes this one word."""
    if re.fullmatch(r"\"[^\"@*]*\"|'[^']*'", token) or token in getattr(word, "unknown", ()):
        return True
    before, _, after = token.partition("$")
    name = re.match(r"\w+|\{\w+\}", after)
    return bool(before and name) and word.startswith(before) and word.endswith(after[name.end():] if name else "")


def as_word(text: str) -> Word:
    """Return a text as a word."""
    return text if isinstance(text, Word) else Word(text)


def format_word(word: Word) -> str:
    """Return a word as the shell reads it; what is not known of it is as it was written."""
    if word.is_unknown or (word.unknown and re.fullmatch(r"[\w$/.:=,@%+{}-]*", word) and "=" not in word):
        return f'"{word}"' if str(word) in ("$@", "${@}") else str(word)
    if word.unknown or re.fullmatch(r"[\w./:=,@%+-]*\$\{?\w+\}?[\w./:=,@%+-]*", word):
        return '"' + re.sub(r'(?<!\\)"', '\\"', word) + '"' if " " in word or word.unknown else str(word)
    return shlex.quote(word)


def break_lines(parts: Sequence[str]) -> str:
    """Return a command, with a line for each part and more if it is long."""
    whole = " ".join(parts)
    if len(whole) <= LINE_LENGTH or "\n" in whole:
        return whole if len(whole) <= LINE_LENGTH else " \\\n    ".join(parts)
    lines = [""]
    for word in " \0".join(parts).split(" "):
        is_new = word.startswith("\0") or len(lines[-1]) + len(word) > LINE_LENGTH - 6
        if is_new and lines[-1]:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word.lstrip("\0")
    return " \\\n    ".join(lines)
