"""A plain model of a shell script: its simple commands, each with its words. Nothing is run.

Known values of variables stand in the words; what is not known stays as it is written. Where the model cannot read on,
a note says so.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .tokens import ASSIGNMENT, NAME, Token, UnreadableError, skip_nested, split_tokens

SHELLS = ("bash", "sh", "dash", "ksh", "zsh")
MAX_DEPTH = 5  # of texts in texts: eval, bash -c
MAX_BLOCKS = 100  # in each other
MAX_COMMANDS = 10_000
MAX_VALUE = 5000  # characters of a variable's value
MAX_CHARACTERS = 2_000_000  # of all words
REFERENCE = re.compile(rf"\$({NAME})|\$\{{({NAME})\}}")
ELEMENT = re.compile(rf"\$\{{({NAME})\[([^\]]*)\]\}}")
DEFAULT = re.compile(rf"\$\{{({NAME}):?-[\w./:-]*\}}")
COMMAND_PATH = re.compile(r"(?:\$\(|`)\s*(?:which|command\s+-v|type\s+-p)\s+([\w.-]+)\s*[)`]")
DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
READERS = ("read", "mapfile", "readarray", "getopts")
OPENERS = ("if", "while", "until", "{")
CLOSERS = ("fi", "done", "esac", "}")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b"}
ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod}


class Part(NamedTuple):
    """A part of a word: literal characters, or an expansion whose value is not known, as it is written."""

    text: str
    is_unknown: bool = False
    is_quoted: bool = False


class Word(str):
    """A word's value, with its parts; `raw` is the word as it is written, empty for one that comes from a variable.

    `begin` and `end` are its place in the text that was read, -1 for a word that comes from a variable.
    """

    parts: tuple[Part, ...]
    raw: str
    begin: int
    end: int

    def __new__(cls, parts: Sequence[Part], raw: str = "", begin: int = -1, end: int = -1) -> Word:  # noqa: PYI034
        """Make a word of its parts."""
        word = super().__new__(cls, "".join(part.text for part in parts))
        word.parts, word.raw, word.begin, word.end = tuple(parts), raw, begin, end
        return word

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts whose value is not known."""
        return tuple(part.text for part in self.parts if part.is_unknown)

    @property
    def is_unknown(self) -> bool:
        """Return whether it may be any number of words."""
        if len(self.parts) != 1 or not self.parts[0].is_unknown:
            return False
        return not self.parts[0].is_quoted or "@" in self

    @property
    def spelling(self) -> str:
        """The word as a shell reads it."""
        return self.raw or "".join(
            part.text if part.is_unknown else shlex.quote(part.text) for part in self.parts) or "''"


class Document(NamedTuple):
    """A here document; the shell expands it, and removes backslashes before dollar signs, unless it `is_literal`."""

    word: Word
    line: int
    is_literal: bool


class Redirect(NamedTuple):
    """A redirection: its operator and its file."""

    operator: str
    file: Word


class Selection(NamedTuple):
    """An element of an array that a job of a job array takes: its number is the job's plus `offset`."""

    line: int
    text: str
    name: str
    length: int
    offset: int


@dataclass(frozen=True)
class SimpleCommand:
    """A simple command; `text` is it as it is written, on one line, `folder` that of the last cd, None if unknown.

    `after` is the operator behind it; `assignments` are those before its first word, `prefix` the same as written.
    `place` is the index, in the text, of its end.
    """

    line: int
    last_line: int
    words: tuple[Word, ...]
    text: str = ""
    prefix: str = ""
    assignments: Mapping[str, str] = field(default_factory=dict)
    redirects: tuple[Redirect, ...] = ()
    document: Document | None = None
    after: str = ""
    in_loop: bool = False
    folder: str | None = ""

    @property
    def is_background(self) -> bool:
        """Return whether the shell does not wait for it."""
        return self.after == "&"

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts of its words that are not known."""
        return tuple(part for word in self.words for part in word.unknown)


class Note(NamedTuple):
    """What is not followed."""

    line: int
    text: str


def calculate(text: str) -> int | None:
    """Return the value of an arithmetic expression with plain numbers, None if it has none."""
    if len(text) > 200 or not re.fullmatch(r"[\d\s()+*/%-]+", text):
        return None
    try:
        return calculate_node(ast.parse(re.sub(r"\b0+(?=\d)", "", text.strip()), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def calculate_node(node: ast.expr) -> int:
    """Return the value of a node of an arithmetic expression; raise ValueError for what is not known here."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -calculate_node(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](calculate_node(node.left), calculate_node(node.right))
    raise ValueError


@dataclass
class Block:
    """A part of a script between a keyword and its end: its first command, and the variables that it sets.

    `is_met` is whether a condition holds, None if that is not known; the branch `is_dead` if it is not taken.
    """

    kind: str
    first: int
    names: set[str] = field(default_factory=set)
    is_met: bool | None = None
    is_dead: bool = False


class Shell:
    """Reads texts, in their order, and keeps the commands and the values of variables.

    A variable's value is its parts, an array its words, None is unknown. `task_numbers` are the variables with the
    number of a job in a job array, `home` is the one with the folder from which paths count. `parameters` are $1
    and those behind it, None if they are not known.
    """

    def __init__(
        self, variables: Mapping[str, str] = {}, task_numbers: Sequence[str] = (), home: str = "",
        parameters: Sequence[Word] | None = None,
    ) -> None:
        self.values: dict[str, tuple[Part, ...] | list[Word] | None] = {
            name: (Part(text),) for name, text in variables.items()}
        self.lines: dict[str, int] = {}
        self.exported: set[str] = set()
        self.commands: list[SimpleCommand] = []
        self.notes: list[Note] = []
        self.documents: dict[str, Document] = {}
        self.selections: list[Selection] = []
        self.folder: str | None = ""
        self.spent = 0  # characters of words
        self._home, self._parameters = home, None if parameters is None else [*parameters]
        self._task_numbers = "|".join(task_numbers)
        self._blocks: list[Block] = []
        self._line = 0

    def known(self, name: str) -> str | None:
        """Return the value of a variable, None if it is not known."""
        value = self.values.get(name)
        if not isinstance(value, tuple) or any(part.is_unknown for part in value):
            return None
        return "".join(part.text for part in value)

    def read(self, text: str, line: int = 0, depth: int = 0) -> None:
        """Read the commands of a text; `line` is that of the command that runs it, 0 for the script itself."""
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        reading = Reading(self, text, lambda place: line or bisect(starts, place), depth)
        blocks = len(self._blocks)
        try:
            for token in split_tokens(text):
                is_long = len(self.commands) >= MAX_COMMANDS or self.spent > MAX_CHARACTERS
                if is_long or len(self._blocks) > MAX_BLOCKS:
                    kind = "too long" if is_long else "nested too deeply"
                    self.notes.append(Note(reading.find_line(token.begin), f"the rest of a script that is {kind}"))
                    break
                reading.take(token)
            reading.finish("")
        except UnreadableError as error:
            where = reading.find_line(error.place)
            self.notes.append(Note(where, f"the script from line {where} on: {error}"))
        del self._blocks[blocks:]

    def open_block(self, kind: str) -> None:
        """Begin a loop, a branch, a function or a subshell."""
        self._blocks.append(Block(kind, len(self.commands)))

    def meet(self) -> None:
        """Look at the condition of a branch: a single test whether a known text is empty."""
        block = self.block
        words = self.commands[block.first].words if block.first == len(self.commands) - 1 else ()
        if block.kind == "if" and len(words) > 2 and words[0] in ("[", "test") and words[1] in ("-n", "-z") and not (
                words[2].unknown) and words[3:] in ((), ("]",)):
            block.is_met = bool(words[2]) == (words[1] == "-n")
            block.is_dead = not block.is_met

    @property
    def is_dead(self) -> bool:
        """Return whether commands here are not reached."""
        return any(block.is_dead for block in self._blocks)

    def change_branch(self) -> None:
        """Forget what the branch before has set."""
        self.block.is_dead = self.block.is_met is True
        self.values |= dict.fromkeys(self.block.names)

    def close_block(self) -> int:
        """End a loop, a branch, a function or a subshell; return its first command."""
        self.change_branch()
        first = self.block.first
        del self._blocks[-1:]
        return first

    def put_in_background(self, first: int) -> None:
        """Set that the shell does not wait for the commands from `first` on, in a pipe or a block."""
        for number in range(first, len(self.commands)):
            self.commands[number] = replace(self.commands[number], after="&")

    @property
    def block(self) -> Block:
        """The innermost branch, loop, function or subshell; one without a kind if there is none."""
        return self._blocks[-1] if self._blocks else Block("", len(self.commands))

    @property
    def in_loop(self) -> bool:
        """Return whether commands here may run several times."""
        return any(block.kind in ("for", "while", "until") for block in self._blocks)

    def set(self, name: str, value: tuple[Part, ...] | list[Word] | None, line: int) -> None:
        """Set a variable."""
        length = sum(map(len, (part.text for part in value) if isinstance(value, tuple) else value or ()))
        self.values[name] = value if length <= MAX_VALUE else None
        self.lines[name] = line
        for block in self._blocks:
            block.names.add(name)

    def assign(self, token: str, line: int, is_certain: bool = True) -> tuple[str, str]:
        """Make the assignment that a token is; return the variable's name, and its value as far as it is known."""
        match = ASSIGNMENT.match(token)
        assert match is not None
        name, rest, old = match[1], token[match.end():], self.values.get(match[1])
        self._line = line
        value: tuple[Part, ...] | list[Word] | None
        if rest.startswith("(") and rest.endswith(")"):
            words: list[Word] = []
            for inner in split_tokens(rest[1:-1]):
                words += self.expand(inner.text, line) if inner.kind == "word" else ()
            value = words
        else:
            value = tuple(part for word in self.expand(rest, line, splits=False) for part in word.parts)
        if match[2]:
            value = None
        elif match[3]:
            value = old + value if isinstance(old, tuple) and isinstance(value, tuple) else (
                [*old, *value] if isinstance(old, list) and isinstance(value, list) else None)
        self.set(name, value if is_certain else None, line)
        shown = self.values[name]
        return name, "".join(part.text for part in shown) if isinstance(shown, tuple) else rest

    def expand(self, token: str, line: int, splits: bool = True, begin: int = -1) -> list[Word]:
        """Return the words that a token becomes."""
        self._line = line
        array, index = self._find_array(token[1:-1]) if token[:1] == token[-1:] == '"' else (None, "")
        if array is not None and index == "@":
            return [*array]
        fields: list[list[Part]] = [[]]
        has_quote, length = False, 0
        for part in self._read_parts(token):
            has_quote |= part.is_quoted
            length += len(part.text)
            if length > 4 * MAX_VALUE and length > len(token):
                break
            is_plain = splits and not part.is_quoted and not part.is_unknown
            pieces = re.split(r"[ \t\n]+", part.text) if is_plain else [part.text]
            for number, piece in enumerate(pieces):
                if number:
                    fields.append([])
                if piece or part.is_quoted:
                    fields[-1].append(part._replace(text=piece))
        self.spent += length
        kept = [parts for parts in fields if parts] if splits else fields[:1]
        if len(kept) == 1 and (len(fields) == 1 or not splits):
            return [Word(kept[0], token, begin, begin + len(token) if begin >= 0 else -1)]
        return [Word(parts) for parts in kept] or ([Word([Part("")], token)] if has_quote else [])

    @property
    def parameters(self) -> list[Word] | None:
        """The positional parameters, None if they are not known: in a function, they are its own."""
        return None if any(block.kind == "{" for block in self._blocks) else self._parameters

    def _find_array(self, piece: str) -> tuple[list[Word] | None, str]:
        """Return the known words of an array, or the parameters, and the index of the elements; None for none."""
        element = ELEMENT.fullmatch(piece)
        if element is None:
            return (self.parameters, piece[-1]) if piece in ("$@", "$*") else (None, "")
        value = self.values.get(element[1])
        return (value, element[2]) if isinstance(value, list) else (None, "")

    def _read_parts(self, text: str, is_quoted: bool = False) -> Iterator[Part]:
        """Yield the parts of a token, or of the inside of double quotes."""
        place, plain = 0, ""
        while place < len(text):
            sign, rest = text[place], text[place:place + 2]
            if sign not in "\\'\"`$<>" or (sign in "'<>" and is_quoted) or (
                    sign in "<>" and rest not in ("<(", ">(")):
                plain += sign
                place += 1
                continue
            if sign == "\\":
                follows = text[place + 1:place + 2]
                keeps = is_quoted and follows not in ('"', "\\", "$", "`", "\n")
                if plain:
                    yield Part(plain, is_quoted=is_quoted)
                plain = ""
                if follows != "\n":
                    yield Part(sign + follows if keeps else follows, is_quoted=True)
                place += 2
                continue
            end = place + 1
            if rest in ("$(", "${", "<(", ">(") or sign in "'\"`" or (rest == "$'" and not is_quoted):
                end = skip_nested(text, place)
            elif match := re.compile(rf"\$({NAME}|[0-9@*#?$!-])").match(text, place):
                end = match.end()
            piece = text[place:end]
            place = end
            if piece == "$" or piece in "<>":
                plain += piece
                continue
            if plain:
                yield Part(plain, is_quoted=is_quoted)
            plain = ""
            yield from self._read_piece(piece, is_quoted)
        if plain:
            yield Part(plain, is_quoted=is_quoted)

    def _read_piece(self, piece: str, is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of a quoted text or an expansion."""
        if piece.startswith("'"):
            yield Part(piece[1:-1], is_quoted=True)
        elif piece.startswith("$'"):
            yield Part(re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), piece[2:-1]), is_quoted=True)
        elif piece.startswith('"'):
            yield from self._read_parts(piece[1:-1], is_quoted=True) if len(piece) > 2 else [Part("", is_quoted=True)]
        elif match := COMMAND_PATH.fullmatch(piece):
            yield Part(match[1], is_quoted=is_quoted)
        elif piece.startswith("$((") and piece.endswith("))"):
            value = calculate(re.sub(rf"\$\{{?({NAME})\}}?|({NAME})",
                                     lambda match: self.known(match[1] or match[2]) or match[0], piece[3:-2]))
            yield Part(piece if value is None else str(value), value is None, is_quoted)
        else:
            yield from self._read_variable(piece, is_quoted)

    def _read_variable(self, piece: str, is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of a variable's value, or the expansion as it is written."""
        reference, default = REFERENCE.fullmatch(piece), DEFAULT.fullmatch(piece)
        name = (reference[1] or reference[2]) if reference else default[1] if default else ""
        value, (words, index) = self.values.get(name), self._find_array(piece)
        parts: Sequence[Part] | None = value if isinstance(value, tuple) and (value or reference) else None
        if words is not None and index in ("@", "*"):
            parts = [part for place, word in enumerate(words) for part in ([Part(" ")] * (place > 0) + [*word.parts])]
        elif words is not None and index.isdigit() and int(index) < len(words):
            parts = words[int(index)].parts
        elif words is not None:
            self._note_selection(piece, words, index)
        elif (number := re.fullmatch(r"\$\{?([1-9])\}?", piece)) and self.parameters is not None:
            parts = [part for word in self.parameters[int(number[1]) - 1:int(number[1])] for part in word.parts]
        if parts is None:
            yield Part(piece, is_unknown=True, is_quoted=is_quoted)
        else:
            yield from (part._replace(is_quoted=is_quoted) for part in parts)

    def _note_selection(self, text: str, words: Sequence[Word], index: str) -> None:
        """Keep an element that a job of a job array takes, unless bash may make several of one word of the array."""
        inner = re.sub(rf"(?<![\w$]){NAME}", lambda match: "".join(part.text for part in value) if isinstance(
            value := self.values.get(match[0]), tuple) else match[0], index.removeprefix("$((").removesuffix("))"))
        match = re.fullmatch(rf"\$?\{{?({self._task_numbers})\}}?\s*(?:([-+])\s*(\d{{1,7}}))?", inner.strip())
        is_plain = not any(re.search(r"[*?\[{]", part.text) or part.is_unknown for word in words for part in word.parts
                           if not part.is_quoted)
        if match and self._task_numbers and is_plain:
            offset = int(f"{match[2]}{match[3]}") if match[3] else 0
            self.selections.append(Selection(self._line, text, text[2:].partition("[")[0], len(words), offset))

    def read_document(self, token: Token, line: int) -> Document:
        """Return a here document with the known values of the variables in it."""
        if token.kind == "literal":
            return Document(Word([Part(token.text, is_quoted=True)]), line, is_literal=True)
        self._line = line
        try:
            parts = [*self._read_parts(token.text.replace('"', '\\"'), is_quoted=True)]
        except UnreadableError:
            parts = [Part(token.text, is_quoted=True)]
        return Document(Word(parts), line, is_literal=False)

    def run(self, command: SimpleCommand, tokens: Sequence[str], depth: int, is_certain: bool = True) -> None:
        """Do what a command does to the shell's own state."""
        words = command.words
        name, line = words[0], command.line
        if name in DECLARATIONS:
            exports = name == "export" or any(re.fullmatch(r"-\w*x\w*", word) for word in words[1:3])
            for token in tokens[1:]:
                match = ASSIGNMENT.match(token)
                own = self.assign(token, line, is_certain)[0] if match else token
                self.exported |= {own} if exports else set()
        elif name == "unset":
            for word in words[1:]:
                self.set(word, None, line)
        elif name in READERS:
            doc = command.document
            for word in words[1:]:
                if re.fullmatch(NAME, word):
                    is_text = doc is not None and name == "read" and "-d" in words
                    self.set(word, doc.word.parts if is_text and doc else None, line)
        elif name == "printf" and words[1:2] == ("-v",) and len(words) > 2:
            self.set(words[2], None, line)
        elif name == "cd":
            target = words[1] if len(words) == 2 and not words[1].unknown else None
            base = "" if target is not None and self._home and self._home in words[1].raw else self.folder
            is_known = target and base is not None and not target.startswith(("~", "-"))
            self.folder = os.path.normpath(os.path.join(base or "", target or "")) if is_known else None
        elif name in ("shift", "set") and (name == "shift" or "--" in words):
            known = None if self._blocks or name == "set" or words[1:] else self.parameters
            self._parameters = None if known is None else known[1:]
        elif name == "eval" and depth < MAX_DEPTH:
            self.read(" ".join(words[1:]), line, depth + 1)
        elif name == "cat" and command.document:
            for redirect in command.redirects:
                if redirect.operator in (">", ">>", ">|"):
                    place = os.path.normpath(os.path.join(self.folder or "", redirect.file))
                    old = self.documents.get(place) if redirect.operator == ">>" else None
                    doc = command.document
                    self.documents[place] = old._replace(
                        word=Word([*old.word.parts, *doc.word.parts])) if old else doc


class Reading:
    """The state of reading one text: the command that is being read."""

    def __init__(self, shell: Shell, text: str, find_line: Callable[[int], int], depth: int) -> None:
        self.shell, self.text, self.find_line, self.depth = shell, text, find_line, depth
        self.before = ""  # the operator before the command
        self.first = 0  # the first command of the pipe, or of the block that has ended
        self.skips_to = ""  # a token up to which nothing is a command
        self.ended = False
        self.pending: tuple[int, list[str]] | None = None  # a command that waits for its here document
        self._reset()

    def _reset(self) -> None:
        self.words: list[Token] = []
        self.assignments: list[Token] = []
        self.redirects: list[tuple[str, Token | None]] = []

    def take(self, token: Token) -> None:
        """Take the next token."""
        if token.kind in ("document", "literal"):
            self._add_document(token)
        elif self.ended:
            return
        elif self.skips_to:
            self._skip(token)
        elif token.kind == "redirect":
            self.redirects.append((token.text, None))
        elif token.kind == "operator":
            self._take_operator(token)
        elif self.redirects and self.redirects[-1][1] is None and self.redirects[-1][0] not in ("<<", "<<-"):
            self.redirects[-1] = (self.redirects[-1][0], token)
        elif not self.words and not self.assignments and self._take_keyword(token):
            return
        elif not self.words and ASSIGNMENT.match(token.text):
            self.assignments.append(token)
        elif token.text == "{" and self.words[:1] and self.words[0].text == "function":
            self.words = []
            self.shell.open_block("{")
        else:
            self.words.append(token)

    def _skip(self, token: Token) -> None:
        """Leave out the head of a loop, the patterns of a case, or a condition."""
        if self.skips_to == "pattern" and token.text == "esac":
            self.skips_to = ""
            self._take_keyword(token)
        elif token.text in (self.skips_to, {"pattern": ")", "loop": "do"}.get(self.skips_to)) or (
                self.skips_to == "do" and token.text in (";", "\n")):
            is_case = self.skips_to == "in"
            self.skips_to = "pattern" if is_case else ""

    def _take_keyword(self, token: Token) -> bool:
        """Return whether a token is a word of the shell's grammar, not a command."""
        word, shell = token.text, self.shell
        if word in OPENERS:
            shell.open_block(word)
        elif word in ("for", "select", "case"):
            shell.open_block("case" if word == "case" else "for")
            rest = self.text[token.begin + len(word):]
            name = re.match(rf"[ \t]+({NAME})", rest)
            if name and word != "case" and not shell.is_dead:
                shell.set(name[1], None, self.find_line(token.begin))
            self.skips_to = "in" if word == "case" else "loop" if re.match(r"\s*\(\(", rest) else "do"
        elif word in CLOSERS:
            self.first = shell.close_block()
        elif word in ("else", "elif"):
            shell.change_branch()
        elif word == "[[":
            self.skips_to = "]]"
        elif word == "function":
            self.words = [token]
        elif word == "then":
            shell.meet()
        elif word not in ("do", "!"):
            return False
        self.before = self.before if word == "!" else ""
        return True

    def _take_operator(self, token: Token) -> None:
        """Take an operator: it ends the command."""
        shell = self.shell
        if token.text == "(":
            if self.words and re.match(r"\(\s*\)", self.text[token.begin:token.begin + 20]):
                self.words = []  # a function's name
                self.skips_to = ")"
            elif not self.words and self.text.startswith("((", token.begin):
                self.skips_to = ")"
            elif not self.words:
                shell.open_block("(")
            return
        if self.words[:1] and self.words[0].text == "function":
            self.words = []
        self.finish(token.text)
        if token.text == ")" and shell.block.kind == "(":
            self.first = shell.close_block()
        elif token.text in (";;", ";&", ";;&"):
            shell.change_branch()
            self.skips_to = "pattern" if shell.block.kind == "case" else ""

    def finish(self, operator_: str) -> None:
        """End the command that was read."""
        shell, before = self.shell, self.before
        self.before = operator_
        if shell.is_dead or (not self.words and not self.assignments):
            self.before = before if operator_ == "\n" and before in ("&&", "||", "|") else operator_
            if operator_ == "&" and not shell.is_dead:
                shell.put_in_background(self.first)
            self._reset()
            return
        first = (self.assignments or self.words)[0]
        line, is_certain = self.find_line(first.begin), before not in ("&&", "||")
        words = [word for token in self.words for word in shell.expand(token.text, line, begin=token.begin)]
        saved = {}
        if words:
            saved = {match[1]: shell.values.get(match[1]) for token in self.assignments
                     if (match := ASSIGNMENT.match(token.text))}
        known = dict(shell.assign(token.text, self.find_line(token.begin), is_certain) for token in self.assignments)
        for name, value in saved.items():
            shell.values[name] = value
        if before not in ("|", "|&"):
            self.first = len(shell.commands)
        if words:
            redirects = [Redirect(sign, next(iter(shell.expand(token.text, line)), Word([])))
                         for sign, token in self.redirects if token is not None]
            last = (self.words or [first])[-1]
            command = SimpleCommand(
                line, self.find_line(last.begin + len(last.text)), tuple(words),
                " ".join(token.text for token in (*self.assignments, *self.words)),
                " ".join(token.text for token in self.assignments), known, tuple(redirects), None, operator_,
                shell.in_loop, shell.folder)
            shell.commands.append(command)
            if operator_ == "&":
                shell.put_in_background(self.first)
            tokens = [token.text for token in self.words]
            if any(sign in ("<<", "<<-") for sign, _ in self.redirects):
                self.pending = len(shell.commands) - 1, tokens
            else:
                shell.run(shell.commands[-1], tokens, self.depth, is_certain)
            is_plain = {before, operator_} <= {"\n", ";", ""} and not shell.block.kind
            self.ended = is_plain and (words[0] == "exit" or (words[0] == "exec" and len(words) > 1))
        self._reset()

    def _add_document(self, token: Token) -> None:
        """Give a here document to the command that it belongs to."""
        if self.pending is None:
            return
        (position, tokens), shell = self.pending, self.shell
        self.pending = None
        document = shell.read_document(token, self.find_line(token.begin))
        shell.commands[position] = replace(shell.commands[position], document=document)
        shell.run(shell.commands[position], tokens, self.depth)
