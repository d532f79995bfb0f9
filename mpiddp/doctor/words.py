"""Writes the words of a command as the shell reads them, and as they were written where that is the same."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from .shell import Token, Word, parse, read_text

LINE_LENGTH = 118


def read_tokens(source: str) -> list[str]:
    """Return the words of a simple command as they are written."""
    node = parse(source).named_children[0] if source.strip() else None
    while node is not None and node.type != "command":
        node = node.named_children[0] if node.named_children else None
    return [] if node is None else [read_text(child) for child in node.named_children if "assignment" not in child.type]


def format_words(words: Sequence[str], tokens: Sequence[Token], has_variables: bool = True) -> str:
    """Return words as they were written in a command of these tokens, with those between them that become no word.

    What a token with other words in it, too, becomes is written as the shell reads it; so are variables, unless the
    place of the new text `has_variables` of that command.
    """
    written: list[str] = []
    own = [token for word in words if (token := getattr(word, "token", None)) in tokens]
    if not own:
        return " ".join(map(format_word, map(as_word, words)))
    end = tokens.index(own[-1]) + 1
    while end < len(tokens) and not tokens[end].count:
        end += 1
    for token in tokens[tokens.index(own[0]):end]:
        parts = [word for word in words if getattr(word, "token", None) is token]
        is_whole = len(parts) == token.count and (has_variables or "$" not in token.text)
        written += [token.text] if is_whole else map(format_word, map(as_word, parts))
    return " ".join(written)


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
