"""Follows a shell script without running it: which commands it starts, with which words.

tree-sitter-bash makes the syntax tree. Variables, arrays, simple arithmetic, functions, `eval` and tests of known
values are followed; of an `if` whose condition is unknown both branches are, and a variable that differs afterwards is
unknown. An unknown part of a word keeps its source text.
"""

from __future__ import annotations

import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_CALL_DEPTH = 20
MAX_STATEMENTS = 10_000  # that are followed, each call of a function anew
MAX_EXPANDED_CHARS = 1_000_000  # of all expansions of variables together
MAX_CUT_CHARS = 1_000  # of a value of which a part is cut
MAX_REPAIRS = 5  # of a text that the parser reads in a wrong way
MARK = re.compile("\ue000(\\d+)\ue001")  # stands for an unknown part of a value: its index in Shell.unknown
NAME = r"[A-Za-z_]\w*"
BLANK_BEHIND = re.compile(r"\\[ \t]+$")  # a backslash that continues no line
PARAMETER = re.compile("[1-9][0-9]{0,6}|[@*#]")
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod,
    "**": operator.pow,
}
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}
READING_COMMANDS = ("read", "mapfile", "readarray", "getopts")  # set variables from what only the job knows
SUBMISSION_FOLDER = re.compile(r"\$\{?(SLURM_SUBMIT_DIR|PBS_O_WORKDIR|LS_SUBCWD)\}?")
WHICH = re.compile(r"(?:which|command\s+-v|type\s+-P)\s+([\w./-]+)")
# The number of an array's job: Slurm, PBS Professional, Torque, LSF.
TASK_NUMBERS = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "LSB_JOBINDEX")
SHELLS = ("bash", "sh", "dash", "ksh", "zsh")

Value = str | list[str]


@dataclass(frozen=True, eq=False)
class Token:
    """A part of a command as it is written, such as `"$A"`, and the number of words that it becomes."""

    text: str
    count: int


class Word(str):
    """A word of a command, expanded; `unknown` are the parts that are not known, as they are written."""

    __slots__ = ("token", "unknown")
    unknown: tuple[str, ...]
    token: Token | None

    def __new__(cls, text: str, unknown: Iterable[str] = (), token: Token | None = None) -> Self:
        """Make a word; a str cannot be changed later."""
        word = super().__new__(cls, text)
        word.unknown, word.token = tuple(unknown), token
        return word

    @property
    def is_unknown(self) -> bool:
        """Return whether nothing of the word is known, so that it may be any number of words."""
        return self.unknown == (str(self),)


@dataclass(frozen=True)
class Note:
    """Something that was not followed."""

    line: int
    text: str


@dataclass(frozen=True)
class Command:
    """A simple command.

    `assignments` stand before it (`A=1 srun …`), `outputs` are the files that it writes by `>`. `folder` is where `cd`
    has led to before: relative to the folder of the start, "." for that of the submission, None if unknown.
    `input_text` is its here document, expanded if its delimiter has no quotes. `tokens` are the words as written.
    """

    line: int
    text: str
    words: tuple[Word, ...]
    assignments: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[Word, ...] = ()
    is_background: bool = False
    in_loop: bool = False
    folder: str | None = ""
    input_text: Word | None = None
    tokens: tuple[Token, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts of the words that are not known."""
        return tuple(dict.fromkeys(part for word in self.words for part in word.unknown))


@dataclass(frozen=True)
class Selection:
    """An array's element whose index is the number of a job's task, plus `offset`; the array has `length` elements."""

    line: int
    text: str
    name: str
    length: int
    offset: int


class QuoteError(ValueError):
    """A quote is not closed; `line` is where it begins."""

    def __init__(self, line: int, quote: str) -> None:
        super().__init__(line, quote)
        self.line, self.quote = line, quote


def parse(text: str) -> Node:
    """Return the syntax tree's root, whose places are those of the text; raise QuoteError if a quote is not closed."""
    root = Parser(Language(tree_sitter_bash.language())).parse(text.encode()).root_node
    for node in find_errors(root):
        for part in (node, *node.children):
            quote = read_text(part).lstrip()[:1]
            if quote in ("'", '"', "`") and (part.type == quote or part.type == "ERROR" or part.is_missing):
                raise QuoteError(part.start_point.row + 1, quote)
    return root


def parse_statements(text: str) -> Node:
    """Return the root of a syntax tree in which each line's assignments are its own; its lines are those of the text.

    The parser sometimes takes `A=1 B=2` at the end of a line for the beginning of the next line's command: a semicolon
    in the text that it reads separates them.
    """
    root = parse(text)
    for _ in range(MAX_REPAIRS):
        source = text.encode()
        ends = sorted(find_joined_lines(root), reverse=True)
        if not ends:
            break
        for end in ends:
            source = source[:end] + b";" + source[end:]
        text = source.decode()
        root = parse(text)
    return root


def find_joined_lines(node: Node) -> Iterator[int]:
    """Yield the ends of assignments that the parser takes for the beginning of the next line's command."""
    if node.type == "command":
        for left, right in pairwise(node.children):
            between = (node.text or b"")[left.end_byte - node.start_byte:right.start_byte - node.start_byte]
            if left.type == "variable_assignment" and re.search(rb"(?<!\\)\n", between):
                yield left.end_byte
    for child in node.children:  # named_children takes quadratic time
        yield from find_joined_lines(child)


def find_document_lines(root: Node) -> Iterator[int]:
    """Yield the lines of the here documents."""
    for node in iterate_nodes(root):
        if node.type == "heredoc_body":
            yield from range(node.start_point.row + 1, node.end_point.row + 2)


def find_string_lines(root: Node) -> Iterator[int]:
    """Yield the lines that begin within a text in quotes."""
    for node in iterate_nodes(root):
        if node.type in ("string", "raw_string", "ansi_c_string", "translated_string"):
            yield from range(node.start_point.row + 2, node.end_point.row + 2)


def iterate_nodes(root: Node) -> Iterator[Node]:
    """Yield a node and all below it."""
    nodes = [root]
    while nodes:
        yield (node := nodes.pop())
        nodes += node.children


def find_errors(node: Node) -> Iterator[Node]:
    """Yield the nodes at which the parser could not read the text."""
    if not node.has_error:
        return
    if node.is_error or node.is_missing:
        yield node
    for child in node.children:
        yield from find_errors(child)


def read_text(node: Node) -> str:
    """Return a node's source text."""
    return (node.text or b"").decode(errors="replace")


class Shell:
    """Follows a script: `commands` are the simple commands in their order, `variables` the values at the end.

    `environment` are the variables that are set before it, `parameters` its own, None if they are not known.
    `is_empty` returns whether an unset variable is empty, so that `${NAME:-default}` is its default.
    """

    def __init__(self, environment: Mapping[str, str], is_empty: Callable[[str], bool],
                 parameters: Sequence[str] | None = None) -> None:
        self.variables: dict[str, Value] = dict(environment)
        self.lines: dict[str, int] = {}
        self.exported: set[str] = set(environment)
        self.commands: list[Command] = []
        self.notes: list[Note] = []
        self.documents: dict[str, Word] = {}  # files that here documents are written to
        self.selections: list[Selection] = []
        self.unknown: list[str] = []
        self._is_empty = is_empty
        self._functions: dict[str, Node] = {}
        self._calls: list[str] = []
        self._parameters = None if parameters is None else [
            self._mark(word) if getattr(word, "unknown", ()) else str(word) for word in parameters]
        self._folder: str | None = ""
        self._line: int | None = None  # of the eval whose text is followed
        self._loops = self._backgrounds = 0
        self._statements = self._expanded_chars = 0
        self._has_ended = False

    def follow(self, root: Node) -> None:
        """Follow all statements of a script."""
        self._visit_all(root.children)

    # --- statements

    def _visit_all(self, nodes: Sequence[Node]) -> None:
        for position, node in enumerate(nodes):
            if self._has_ended:
                return
            if node.is_named:
                is_background = position + 1 < len(nodes) and nodes[position + 1].type == "&"
                self._backgrounds += is_background
                self._visit(node)
                self._backgrounds -= is_background

    def _visit(self, node: Node) -> None:
        self._statements += 1
        if self._statements > MAX_STATEMENTS:
            if self._statements == MAX_STATEMENTS + 1:
                self._note(node, f"the rest of a script with more than {MAX_STATEMENTS} statements")
            self._has_ended = True
            return
        handler = getattr(self, f"_visit_{node.type}", None)
        if node.type in ("command", "redirected_statement"):
            self._visit_command(node)
        elif handler is not None:
            handler(node)
        elif node.type == "ERROR":
            self._note(node, "the shell syntax here could not be read")
        else:
            self._visit_all(node.children)

    def _visit_comment(self, node: Node) -> None:
        pass

    _visit_test_command = _visit_comment

    def _visit_variable_assignment(self, node: Node) -> None:
        name, value = self._read_assignment(node)
        if name:
            self._assign(name, value, node)

    def _assign(self, name: str, value: Value, node: Node) -> None:
        self.variables[name] = value
        self.lines[name] = self._line_of(node)

    def _visit_declaration_command(self, node: Node) -> None:
        is_export = node.children[0].type == "export" or "-x" in [read_text(child) for child in node.children]
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._visit_variable_assignment(child)
            if is_export and child.type in ("variable_assignment", "variable_name"):
                self.exported.add(re.split(r"\+?=|\[", read_text(child))[0])

    def _visit_unset_command(self, node: Node) -> None:
        for child in node.named_children:
            self._set_unknown(read_text(child))

    def _visit_function_definition(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self._functions[read_text(name)] = body

    def _visit_if_statement(self, node: Node) -> None:
        """Visit the branch that is taken, or all that may be."""
        branches: list[list[Node]] = []
        is_complete = False
        for tests, body in split_branches(node):
            self._visit_all([test for test in tests if test.is_named])
            result = True if not tests else self._test([test for test in tests if test.is_named])
            if result is not False:
                branches.append(body)
            if result:
                is_complete = True
                break
        if is_complete and len(branches) == 1:
            self._visit_all(branches[0])
        else:
            self._visit_branches(branches, is_complete)

    def _visit_case_statement(self, node: Node) -> None:
        subject = node.child_by_field_name("value")
        value = self._join(subject) if subject is not None else ""
        branches = []
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = [read_text(pattern).strip("\"'") for pattern in item.children_by_field_name("value")]
            body = item.children[[child.type for child in item.children].index(")") + 1:]
            if MARK.search(value):
                branches.append(body)
            elif any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
                self._visit_all(body)
                return
        self._visit_branches(branches, is_complete=False)

    def _visit_branches(self, branches: Sequence[Sequence[Node]], is_complete: bool) -> None:
        """Visit each branch with the variables as they are now; afterwards a variable that differs is unknown."""
        before, folder = dict(self.variables), self._folder
        ends = [] if is_complete else [(before, folder)]
        for branch in branches:
            self.variables, self._folder = dict(before), folder
            self._visit_all(branch)
            if not self._has_ended:
                ends.append((self.variables, self._folder))
            self._has_ended = False
        self._has_ended = not ends
        self.variables, self._folder = ends[0] if ends else (before, folder)
        for variables, other in ends[1:]:
            self._folder = self._folder if self._folder == other else None
            for name in variables.keys() | self.variables.keys():
                if variables.get(name) != self.variables.get(name):
                    self._set_unknown(name)

    def _visit_list(self, node: Node) -> None:
        """Visit `a && b` and `a || b`."""
        left, right = node.children[0], node.children[-1]
        self._visit(left)
        is_and = any(child.type == "&&" for child in node.children)
        result = self._test([left])
        if result is None:
            self._visit_branches([[right]], is_complete=False)
        elif result == is_and:
            self._visit(right)

    def _visit_subshell(self, node: Node) -> None:
        variables, folder = dict(self.variables), self._folder
        self._visit_all(node.children)
        self.variables, self._folder, self._has_ended = variables, folder, False

    def _visit_for_statement(self, node: Node) -> None:
        names = [read_text(name) for name in node.children_by_field_name("variable")]
        values = [word for value in node.children_by_field_name("value") for word in self._expand(value)]
        self._visit_loop(node)
        if names and len(values) == 1 and not MARK.search(values[0]):
            self.variables[names[0]] = values[0]

    def _visit_loop(self, node: Node) -> None:
        """Visit a loop's body once; what the loop sets is unknown."""
        for name in find_assigned(node):
            self._set_unknown(name)
        self._loops += 1
        self._visit_branches([node.children_by_field_name("condition") + node.children_by_field_name("body")],
                             is_complete=False)
        self._loops -= 1

    _visit_while_statement = _visit_c_style_for_statement = _visit_loop

    # --- commands

    def _visit_command(self, node: Node) -> None:
        """Record a simple command with its redirections, and follow what it starts in this shell."""
        document: str | None = None
        written: list[tuple[Word, bool]] = []
        statement = node
        if node.type == "redirected_statement":
            body = node.child_by_field_name("body")
            for redirect in node.children_by_field_name("redirect"):
                written += self._read_outputs(redirect)
                document = self._read_document(redirect) if redirect.type == "heredoc_redirect" else document
            if body is None:
                return
            if body.type != "command":
                self._visit(body)
                return
            node = body
        assignments = [self._read_assignment(child) for child in node.children if child.type == "variable_assignment"]
        names = [node.child_by_field_name("name"), *node.children_by_field_name("argument")]
        parts = [(read_text(part), self._expand(part)) for part in names if part is not None]
        words = [word for _, expanded in parts for word in expanded]
        if not words:
            return
        tokens = tuple(Token(text, len(expanded)) for text, expanded in parts)
        command = Command(self._line_of(statement), read_text(statement).strip(),
                          tuple(self._word(word, token) for token, (_, expanded) in zip(tokens, parts, strict=True)
                                for word in expanded),
                          {name: self.show(value if isinstance(value, str) else " ".join(value))
                           for name, value in assignments},
                          tuple(file for file, is_appended in written if not is_appended),
                          self._backgrounds > 0, self._loops > 0, self._folder,
                          None if document is None else self._word(document), tokens)
        self._write_document(command, written)
        self._run(command, words, node, document)

    def _write_document(self, command: Command, written: Sequence[tuple[Word, bool]]) -> None:
        """Keep the text of a here document that `cat` or `tee` writes to files."""
        name, document = os.path.basename(command.words[0]), command.input_text
        if document is None or name not in ("cat", "tee") or self._folder is None:
            return
        is_appended = "-a" in command.words
        files = [*written, *((word, is_appended) for word in command.words[1:] if name == "tee" and word[0] != "-")]
        for file, is_added in files:
            path = os.path.normpath(os.path.join(self._folder, file))
            before = self.documents.get(path) if is_added else None
            self.documents[path] = document if before is None else Word(
                before + document, (*before.unknown, *document.unknown))

    def _run(self, command: Command, words: list[str], node: Node, document: str | None) -> None:
        """Follow a command that acts on the shell itself, and record any other."""
        name = words[0]
        if name == "eval":
            self._follow_text(" ".join(command.words[1:]), command, node)
        elif name in self._functions:
            self._call(name, words[1:], node)
        elif name == "shift" and self._parameters is not None:
            self._parameters = self._parameters[as_number((words[1:] or ["1"])[0]) or 0:]
        elif name == "set" and words[1:2] == ["--"]:
            self._parameters = words[2:]
        elif name == "read" and document is not None and "-d" in words:  # up to the end of the here document
            self._assign(words[-1], document.strip(), node)
        elif name in READING_COMMANDS:
            for word in words[1:]:
                if re.fullmatch(NAME, word):
                    self._set_unknown(word)
        else:
            self.commands.append(command)
            if name == "cd":
                self._change_folder(words)
            elif name == "exit" or (name == "exec" and len(words) > 1):
                self._has_ended = True

    def _call(self, name: str, arguments: list[str], node: Node) -> None:
        """Visit a function's body with its arguments as parameters."""
        if name in self._calls or len(self._calls) > MAX_CALL_DEPTH:
            self._note(node, f"the function {name} calls itself")
            return
        parameters, self._parameters = self._parameters, arguments
        self._calls.append(name)
        self._visit_all(self._functions[name].children)
        self._calls.pop()
        self._parameters = parameters

    def _follow_text(self, text: str, command: Command, node: Node) -> None:
        """Follow the text of an `eval`."""
        try:
            root = parse_statements(text)
        except QuoteError:
            self._note(node, f"the text of this eval could not be read: {command.text}")
            return
        if len(self._calls) > MAX_CALL_DEPTH:
            return
        before, self._line = self._line, self._line_of(node)
        self._calls.append("eval")
        self._visit_all(root.children)
        self._calls.pop()
        self._line = before

    def _change_folder(self, words: list[str]) -> None:
        target = words[1] if len(words) > 1 else self._text_of("HOME")
        if SUBMISSION_FOLDER.fullmatch(self.show(target)):
            self._folder = "."
        elif MARK.search(target) or target == "-" or (self._folder is None and not target.startswith("/")):
            self._folder = None
        else:
            self._folder = os.path.normpath(os.path.join(self._folder or "", target))

    def _read_outputs(self, redirect: Node) -> list[tuple[Word, bool]]:
        """Return the files that a redirection writes, each with whether it is appended to."""
        files = [redirect] if redirect.type == "file_redirect" else redirect.children_by_field_name("redirect")
        targets: list[tuple[Word, bool]] = []
        for file in files:
            sign = next((child.type for child in file.children if child.type.startswith(("&>", ">"))), "")
            target = file.child_by_field_name("destination")
            if sign in (">", "&>", ">|", ">>", "&>>") and target is not None and target.type != "number":
                targets += ((self._word(text), sign.endswith(">>")) for text in self._expand(target))
        return targets

    def _read_document(self, redirect: Node) -> str | None:
        """Return the text of a here document; the shell expands it if its delimiter has no quotes."""
        body = next((child for child in redirect.named_children if child.type == "heredoc_body"), None)
        if body is None:
            return None
        delimiter = next((read_text(child) for child in redirect.children if child.type == "heredoc_start"), "")
        if re.search(r"[\"'\\]", delimiter):
            return read_text(body)
        text, source, position = "", body.text or b"", body.start_byte
        for child in body.children:
            text += unescape_document(source[position - body.start_byte:child.start_byte - body.start_byte].decode(
                errors="replace"))
            text += unescape_document(read_text(child)) if child.type == "heredoc_content" else self._join(child)
            position = child.end_byte
        return text + unescape_document(source[position - body.start_byte:].decode(errors="replace"))

    # --- words

    def show(self, text: str) -> str:
        """Return a value in which each unknown part is as it is written."""
        return MARK.sub(lambda match: self.unknown[int(match[1])], text)

    def _word(self, text: str, token: Token | None = None) -> Word:
        return Word(self.show(text), (self.unknown[int(index)] for index in MARK.findall(text)), token)

    def _mark(self, source: str) -> str:
        """Return what stands in a value for an unknown part."""
        self.unknown.append(source)
        return f"\ue000{len(self.unknown) - 1}\ue001"

    def _set_unknown(self, name: str) -> None:
        if re.fullmatch(NAME, name):
            self.variables[name] = self._mark(f"${name}")

    def _text_of(self, name: str) -> str:
        """Return a variable's value as one text; what is not known is marked."""
        value = self.variables.get(name)
        if value is None:
            return self._mark(f"${name}")
        return value if isinstance(value, str) else " ".join(value)

    def _read_assignment(self, node: Node) -> tuple[str, Value]:
        """Return the name and value of an assignment; a name that is an array's element is empty."""
        target, value_node = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None or target.type != "variable_name":
            if target is not None:
                self._set_unknown(re.split(r"\[", read_text(target))[0])
            return "", ""
        name = read_text(target)
        is_appended = any(child.type == "+=" for child in node.children)
        value: Value = ""
        if value_node is not None and value_node.type == "array":
            value = [word for child in value_node.named_children for word in self._expand(child)]
            if is_appended:
                value = [*as_list(self.variables.get(name, [])), *value]
        elif value_node is not None:
            text = self._join(value_node)
            value = self._text_of(name) + text if is_appended else text
        return name, value

    def _expand(self, node: Node) -> list[str]:
        """Return the words that a node makes, as the shell splits them."""
        fields: list[str] = []
        current: str | None = None
        pieces = [*self._pieces(node)]
        if [text for text, _ in pieces if text] == [] and any(isinstance(text, list) for text, _ in pieces):
            return []  # "$@" or "${array[@]}" without elements
        for text, is_quoted in pieces:
            if isinstance(text, list):  # "${array[@]}": its elements are words
                for number, element in enumerate(text):
                    if number:
                        fields.append(current or "")
                    current = element if number else (current or "") + element
                continue
            if is_quoted:
                current = (current or "") + text
                continue
            parts = text.split()
            if text[:1].isspace() and current is not None:
                fields.append(current)
                current = None
            for number, part in enumerate(parts):
                if number:
                    fields.append(current or "")
                current = part if number else (current or "") + part
            if text[-1:].isspace() and current is not None:
                fields.append(current)
                current = None
        return fields if current is None else [*fields, current]

    def _join(self, node: Node) -> str:
        """Return a node's value where the shell does not split it, as in an assignment."""
        return "".join(text if isinstance(text, str) else " ".join(text) for text, _ in self._pieces(node))

    def _pieces(self, node: Node) -> Iterator[tuple[Value, bool]]:
        """Yield the parts of a word, and whether each is quoted, so that it is not split."""
        kind, text = node.type, read_text(node)
        if kind in ("word", "number", "extglob_pattern", "regex", "test_operator", "variable_name"):
            yield self._unescape(text), True
        elif kind == "command_name":
            for child in node.named_children:
                yield from self._pieces(child)
        elif kind == "raw_string":
            yield text[1:-1], True
        elif kind == "ansi_c_string":
            yield re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[0]), text[2:-1]), True
        elif kind in ("string", "translated_string"):
            yield "", True
            yield from self._string_pieces(node)
        elif kind == "concatenation":
            for child in node.children:
                yield from self._pieces(child) if child.is_named else [(read_text(child), True)]
        elif kind in ("simple_expansion", "expansion"):
            yield self._expand_variable(node), False
        elif kind == "arithmetic_expansion":
            yield self._expand_arithmetic(node), False
        elif kind == "command_substitution" and (match := WHICH.fullmatch(text.strip("$()`").strip())):
            yield match[1], True
        elif kind == "command_substitution" and (document := self._find_cat(node)) is not None:
            yield document.rstrip("\n"), False
        elif kind == "brace_expression" or not node.is_named:
            yield text, True
        else:
            yield self._mark(text), False

    def _find_cat(self, node: Node) -> str | None:
        """Return the here document that `$(cat <<EOF …)` is, None for another substitution."""
        statements = node.named_children
        if len(statements) != 1 or statements[0].type != "redirected_statement":
            return None
        body = statements[0].child_by_field_name("body")
        redirects = statements[0].children_by_field_name("redirect")
        if body is None or read_text(body) != "cat" or [each.type for each in redirects] != ["heredoc_redirect"]:
            return None
        return self._read_document(redirects[0])

    def _string_pieces(self, node: Node) -> Iterator[tuple[Value, bool]]:
        """Yield the parts of a string in double quotes; the parser leaves some white space to no node."""
        source, start = node.text or b"", node.start_byte
        position = node.children[0].end_byte
        for child in node.children[1:]:
            yield source[position - start:child.start_byte - start].decode(errors="replace"), True
            position = child.end_byte
            text = read_text(child)
            if child.type == "string_content":
                yield re.sub(r"\\([$`\"\\])", r"\1", text.replace("\\\n", "")), True
            elif child.is_named:
                yield text[:len(text) - len(text.lstrip())], True
                for piece, _ in self._pieces(child):
                    yield piece, True
            elif child.type != '"':
                yield text, True

    def _unescape(self, text: str) -> str:
        if text == "~" or text.startswith("~/"):
            return self._text_of("HOME") + text[1:]
        return re.sub(r"\\(.)", r"\1", text.replace("\\\n", ""), flags=re.DOTALL)

    def _expand_variable(self, node: Node) -> Value:
        """Return the value of `$NAME`, `${NAME}` or `${NAME…}`, which is unknown if all values are too long."""
        text = read_text(node).strip()
        value = self._find_value(node, text)
        self._expanded_chars += sum(len(element) + 1 for element in as_list(value))
        return value if self._expanded_chars <= MAX_EXPANDED_CHARS else self._mark(text)

    def _find_value(self, node: Node, text: str) -> Value:
        if match := re.fullmatch(r"\$(\w+|[@*#?!$-])|\$\{(\w+|[@*#?!$-])\}", text):
            return self._value_of(match[1] or match[2], text)
        if match := re.fullmatch(rf"\$\{{(#?)({NAME})\[([@*]|[0-9]{{1,7}})\]\}}", text):
            return self._element_of(match[2], match[3], bool(match[1]), text)
        if match := re.fullmatch(rf"\$\{{({NAME})\[(.+)\]\}}", text):
            self._note_selection(node, match[1], match[2])
        if match := re.match(r"\$\{(\w+)(:?[-=+?])", text):
            return self._default_of(node, match[1], match[2], text)
        if (match := re.fullmatch(rf"\$\{{({NAME})(##?|%%?)([^$`\"']*)\}}", text)) and match[1] in self.variables:
            return self._cut(self._text_of(match[1]), match[2], match[3], text)
        return self._mark(text)

    def _value_of(self, name: str, source: str) -> Value:
        if self._parameters is not None and PARAMETER.fullmatch(name):
            if name == "#":
                return str(len(self._parameters))
            if name == "@":
                return list(self._parameters)
            return " ".join(self._parameters) if name == "*" else "".join(self._parameters[int(name) - 1:int(name)])
        value = self.variables.get(name)
        if value is None:
            return self._mark(source)
        return value if isinstance(value, str) else "".join(value[:1])

    def _element_of(self, name: str, index: str, is_length: bool, source: str) -> Value:
        value = self.variables.get(name)
        if value is None or any(MARK.fullmatch(element) for element in as_list(value)):
            return self._mark(source)
        elements = as_list(value)
        if is_length:
            return str(len(elements))
        return elements if index in "@*" else "".join(elements[int(index):int(index) + 1])

    def _note_selection(self, node: Node, name: str, index: str) -> None:
        """Keep an array and its index if all elements are known and the index is the number of the job's task."""
        elements = self.variables.get(name)
        variable, offset = split_index(index)
        if variable not in TASK_NUMBERS and variable in self.variables:
            variable, more = split_index(self.show(self._text_of(variable)))
            offset += more
        if variable in TASK_NUMBERS and isinstance(elements, list) and not any(map(MARK.search, elements)):
            self.selections.append(Selection(self._line_of(node), read_text(node), name, len(elements), offset))

    def _default_of(self, node: Node, name: str, sign: str, source: str) -> Value:
        """Return the value of `${NAME:-default}` and its relatives."""
        names = [child.type for child in node.children]
        position = names.index(sign) if sign in names else len(names)
        default = "".join(self._join(child) for child in node.children[position + 1:-1])
        is_parameter = self._parameters is not None and name[0].isdigit()
        is_known = name in self.variables or is_parameter or self._is_empty(name)
        if not is_known:
            return self._mark(source)
        value = self._value_of(name, source) if name in self.variables or is_parameter else ""
        if isinstance(value, str) and MARK.fullmatch(value):
            return self._mark(source)
        if "+" in sign:
            return default if value else ""
        return value or (self._mark(source) if "?" in sign else default)

    def _cut(self, value: str, sign: str, pattern: str, source: str) -> str:
        """Return a value without the part at its begin (#) or end (%) that matches a pattern."""
        if MARK.search(value) or len(value) > MAX_CUT_CHARS:
            return self._mark(source)
        lengths = [length for length in range(len(value) + 1) if fnmatch.fnmatchcase(
            value[:length] if sign[0] == "#" else value[len(value) - length:], pattern)]
        if not lengths:
            return value
        cut = max(lengths) if len(sign) > 1 else min(lengths)
        return value[cut:] if sign[0] == "#" else value[:len(value) - cut]

    def _expand_arithmetic(self, node: Node) -> str:
        inner = node.named_children
        value = self._calculate(inner[0]) if len(inner) == 1 else None
        return self._mark(read_text(node)) if value is None else str(value)

    def _calculate(self, node: Node) -> int | None:
        """Return the value of an arithmetic expression, None if it is not known."""
        if node.type == "parenthesized_expression" and node.named_children:
            return self._calculate(node.named_children[0])
        if node.type == "binary_expression" and len(node.children) == 3:
            left, sign, right = node.children
            calculate = ARITHMETIC.get(read_text(sign))
            first, second = self._calculate(left), self._calculate(right)
            if calculate is None or first is None or second is None or (second == 0 and sign.type in "/%"):
                return None
            return calculate(first, second) if max(abs(first), abs(second)) < 2**31 and sign.type != "**" else None
        if node.type in ("variable_name", "word") and re.fullmatch(NAME, read_text(node)):
            return as_number(self._text_of(read_text(node)))
        return as_number(self._join(node))

    # --- conditions

    def _test(self, nodes: Sequence[Node]) -> bool | None:
        """Return whether a condition is true, None if that is not known."""
        if len(nodes) != 1:
            return None
        node = nodes[0]
        if node.type == "negated_command":
            result = self._test(node.named_children)
            return None if result is None else not result
        if node.type == "command":
            return {"true": True, ":": True, "false": False}.get(read_text(node))
        if node.type != "test_command" or len(node.named_children) != 1:
            return None
        return self._test_expression(node.named_children[0])

    def _test_expression(self, node: Node) -> bool | None:
        if node.type == "unary_expression" and len(node.children) == 2:
            sign, operand = read_text(node.children[0]), node.children[1]
            if sign == "!":
                result = self._test_expression(operand)
                return None if result is None else not result
            value = self._join(operand)
            if MARK.search(value) or sign not in ("-n", "-z"):
                return True if sign == "-n" and MARK.sub("", value) else None
            return bool(value) == (sign == "-n")
        if node.type == "binary_expression" and len(node.children) == 3:
            left, sign, right = (self._join(node.children[0]), read_text(node.children[1]),
                                 self._join(node.children[2]))
            return compare(left, sign, right)
        return None

    # --- places

    def _line_of(self, node: Node) -> int:
        return self._line or node.start_point.row + 1

    def _note(self, node: Node, text: str) -> None:
        self.notes.append(Note(self._line_of(node), text))


def split_branches(node: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield the tests and the body of each branch of an `if`; those of `else` have no tests."""
    clauses = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
    own = [child for child in node.children if child not in clauses]
    for children in (own, *(clause.children for clause in clauses)):
        types = [child.type for child in children]
        if "then" in types:
            middle = types.index("then")
            yield [child for child in children[1:middle] if child.type != ";"], children[middle + 1:]
        else:
            yield [], children[1:]


def unescape_document(text: str) -> str:
    """Return a text of a here document without its backslashes."""
    return re.sub(r"\\([$`\\\n])", lambda match: match[1].strip("\n"), text)


def split_index(text: str) -> tuple[str, int]:
    """Return the variable that an array's index is, and what is added to it; empty for another index."""
    match = re.fullmatch(rf"({NAME})([+-][0-9]{{1,7}})?", re.sub(r"[${}()\s]", "", text))
    return (match[1], int(match[2] or 0)) if match else ("", 0)


def find_assigned(node: Node) -> Iterator[str]:
    """Yield the names of the variables that a statement sets."""
    if node.type == "variable_assignment" or node.type == "for_statement":
        name = node.child_by_field_name("name") or node.child_by_field_name("variable")
        if name is not None:
            yield read_text(name)
    for child in node.named_children:
        yield from find_assigned(child)


def compare(left: str, sign: str, right: str) -> bool | None:
    """Return the result of a test of two values, None if it is not known."""
    if MARK.search(left + right):
        return None
    first, second = as_number(left), as_number(right)
    if sign in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) == (sign != "!=")
    if sign in COMPARISONS and first is not None and second is not None:
        return COMPARISONS[sign](first, second)
    return None


def as_number(text: str) -> int | None:
    """Return a whole number, None if the text is none."""
    return int(text) if re.fullmatch(r"-?\d{1,15}", text) else None


def as_list(value: Value) -> list[str]:
    """Return a value's elements; a plain variable has one."""
    return [value] if isinstance(value, str) else value

