"""The tokens of a shell script: words as they are written, operators, redirections and here documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(\[[^\]]*\])?(\+?)=")
REDIRECT = re.compile(r"(\d*)(<<<|<<-|<<|<&|<>|&>>|&>|>>|>&|>\||>|<)")
OPERATOR = re.compile(r"&&|\|\||\|&|;;&|;;|;&|[;&|()\n]")
QUOTE = re.compile(r"'[^']*'|\$'(?:[^'\\]|\\.)*'", re.DOTALL)
BRACKETS = {"$(": ")", "${": "}", "`": "`", '"': '"', "(": ")", "<(": ")", ">(": ")"}


class Token(NamedTuple):
    """A word as it is written, an operator, a redirection, or the text of a here document."""

    kind: str  # "word", "operator", "redirect", "document"
    text: str
    begin: int


class UnreadableError(ValueError):
    """A quote or a bracket that is not closed; `place` is where it opens."""

    def __init__(self, sign: str, place: int) -> None:
        super().__init__(f"{sign} is not closed")
        self.place = place


def skip_nested(text: str, place: int) -> int:
    """Return the place behind the quote, expansion or bracket that opens at a place; raise UnreadableError."""
    stack: list[tuple[str, int]] = []
    while True:
        inner = stack[-1][0] if stack else ""
        rest = text[place:place + 2]
        if not rest:
            raise UnreadableError(*stack[-1] if stack else ("", place))
        if rest[0] == "\\":
            place += 2
        elif inner and rest[0] == BRACKETS[inner]:
            place += 1
            stack.pop()
        elif (rest[0] == "'" or rest == "$'") and inner != '"':
            match = QUOTE.match(text, place)
            if match is None:
                raise UnreadableError("'", place)
            place = match.end()
        elif rest in ("$(", "${") or (rest in ("<(", ">(") and inner != '"'):
            stack.append((rest, place))
            place += 2
        elif rest[0] in '"`' or (rest[0] == "(" and inner not in ('"', "`", "${")):
            stack.append((rest[0], place))
            place += 1
        elif rest[0] == "#" and inner in ("$(", "(") and text[place - 1] in " \t\n;(":
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
        else:
            place += 1
        if not stack:
            return place


def find_word_end(text: str, place: int) -> int:
    """Return the place behind the word that begins at a place."""
    begin = place
    while place < len(text):
        rest = text[place:place + 2]
        is_array = rest[0] == "(" and ASSIGNMENT.fullmatch(text, begin, place)
        if rest[0] == "\\":
            place += 2
        elif is_array or rest[0] in "'\"`" or rest in ("$(", "${", "$'", "<(", ">("):
            place = skip_nested(text, place)
        elif rest[0] in " \t\n;&|()<>":
            break
        else:
            place += 1
    return min(place, len(text))


def split_tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of a text, a here document at the end of its line; raise UnreadableError."""
    place = 0
    documents: list[tuple[str, bool]] = []  # delimiters, and whether tabs are removed
    while place < len(text):
        if text[place] in " \t\r":
            place += 1
        elif text.startswith("\\\n", place):
            place += 2
        elif text[place] == "#":
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
        elif text[place:place + 2] not in ("<(", ">(") and (match := REDIRECT.match(text, place)):
            place = match.end()
            yield Token("redirect", match[2], match.start())
            if match[2] in ("<<", "<<-"):
                begin = re.compile(r"[ \t]*").match(text, place).end()  # type: ignore[union-attr]
                place = find_word_end(text, begin)
                documents.append((text[begin:place], match[2] == "<<-"))
        elif match := OPERATOR.match(text, place):
            place = match.end()
            yield Token("operator", match[0], match.start())
            while match[0] == "\n" and documents:
                delimiter, has_tabs = documents.pop(0)
                begin, end, place = find_document(text, place, re.sub(r"[\"'\\]", "", delimiter), has_tabs)
                body = text[begin:end]
                yield Token("literal" if re.search(r"[\"'\\]", delimiter) else "document",
                            re.sub(r"(?m)^\t+", "", body) if has_tabs else body, begin)
        else:
            end = find_word_end(text, place)
            yield Token("word", text[place:end], place)
            place = end


def find_document(text: str, place: int, delimiter: str, has_tabs: bool) -> tuple[int, int, int]:
    """Return where a here document begins and ends, and where the text goes on."""
    begin = place
    while place < len(text):
        end = text.find("\n", place)
        end = len(text) if end < 0 else end
        line = text[place:end]
        if (line.lstrip("\t") if has_tabs else line) == delimiter:
            return begin, place, end
        place = end + 1
    return begin, len(text), len(text)


def find_quoted_lines(text: str) -> tuple[frozenset[int], frozenset[int]]:
    """Return the lines of here documents, and those that begin inside of a word, such as a text in quotes."""
    documents: set[int] = set()
    words: set[int] = set()
    try:
        for token in split_tokens(text):
            line = text.count("\n", 0, token.begin) + 1
            if token.kind in ("document", "literal"):
                documents.update(range(line, line + token.text.count("\n") + 1))
            elif token.kind == "word":
                words.update(range(line + 1, line + token.text.count("\n") + 1))
    except UnreadableError:
        pass
    return frozenset(documents), frozenset(words)
