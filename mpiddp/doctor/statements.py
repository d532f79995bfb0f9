"""The statements of a shell script: which variables they set and read, and which are needed no more."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tree_sitter import Node

from .shell import iterate_nodes, parse, read_text

# Commands that only look at something or print it: a statement of these alone has no other effect than its variables.
HARMLESS = frozenset((
    ":", "[", "[[", "awk", "basename", "cat", "cut", "date", "declare", "dirname", "echo", "export", "expr", "false",
    "getent", "grep", "head", "hostname", "local", "nslookup", "nvidia-smi", "printf", "readonly", "scontrol", "sed",
    "shuf", "sort", "tail", "test", "tr", "true", "uniq", "wc", "which",
))
REFERENCE = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
ARITHMETIC = re.compile(r"\(\((.*?)\)\)", re.DOTALL)
HIDDEN = ("command_substitution", "process_substitution")
LOOPS = ("for_statement", "c_style_for_statement", "while_statement")


@dataclass(frozen=True)
class Statement:
    """A statement, or a comment, at the outermost level; `begin` and `end` are its place in the text.

    It sets the variables `assigned`, besides those of its loops, `counters`, and exports some of them.
    """

    begin: int
    end: int
    text: str
    kind: str
    assigned: frozenset[str]
    counters: frozenset[str]
    exported: frozenset[str]
    commands: frozenset[str]
    function: str = ""
    writes: bool = False
    is_background: bool = False

    @property
    def is_comment(self) -> bool:
        """Whether it is a comment."""
        return self.kind == "comment"

    @property
    def is_report(self) -> bool:
        """Whether it only prints."""
        return bool(self.commands) and self.commands <= {"echo", "printf"} and not self.assigned and not self.writes

    def contains(self, text: str) -> bool:
        """Return whether another command is part of it."""
        return text in self.text


def read_statements(text: str) -> list[Statement]:
    """Return the outermost statements of a script; raise QuoteError if a quote is not closed."""
    data = text.encode()
    statements = []
    for node in parse(text).named_children:
        begin, end = len(data[:node.start_byte].decode()), len(data[:node.end_byte].decode())
        name = node.child_by_field_name("name") if node.type == "function_definition" else None
        sign, counters = node.next_sibling, frozenset(find_counters(node))
        statements.append(Statement(
            begin, end, text[begin:end].strip(), node.type, frozenset(find_assigned(node)) - counters, counters,
            frozenset(find_exported(node)), frozenset(find_commands(node)), read_text(name) if name is not None else "",
            any(map(writes_file, iterate_nodes(node))), sign is not None and sign.type == "&"))
    return statements


def writes_file(node: Node) -> bool:
    """Return whether a node is a redirection to a file, or to what a variable names."""
    target = node.child_by_field_name("destination") if node.type == "file_redirect" else None
    return target is not None and any(child.type in (">", ">>", "&>", "&>>", ">|") for child in node.children) and (
        read_text(target) != "/dev/null")


def find_counters(node: Node) -> Iterator[str]:
    """Yield the variables that loops set, `for NAME in …`."""
    for each in iterate_nodes(node):
        name = each.child_by_field_name("variable") if each.type == "for_statement" else None
        if name is not None:
            yield read_text(name)
        elif each.type == "c_style_for_statement":
            yield from (name for part in each.children_by_field_name("initializer") for name in find_assigned(part))


def find_exported(node: Node) -> Iterator[str]:
    """Yield the variables that a statement exports."""
    for each in iterate_nodes(node):
        if each.type == "declaration_command" and re.match(r"export\b|(declare|typeset)\s+-\w*x", read_text(each)):
            for child in each.named_children:
                if child.type in ("variable_name", "word"):
                    yield read_text(child)
                else:
                    yield from find_assigned(child)


def references(text: str) -> frozenset[str]:
    """Return the variables that a text reads, in quotes, too."""
    names = set(REFERENCE.findall(text))
    for part in ARITHMETIC.findall(text):
        names.update(re.findall(r"[A-Za-z_]\w*", part))
    return frozenset(names)


def find_assigned(node: Node) -> Iterator[str]:
    """Yield the variables that a statement sets or exports."""
    if node.type in HIDDEN:
        return
    name = node.child_by_field_name("name") or node.child_by_field_name("variable")
    if name is not None and node.type in ("variable_assignment", "for_statement", "c_style_for_statement"):
        yield re.split(r"\[", read_text(name))[0]
    for child in node.named_children:
        if node.type in ("declaration_command", "unset_command") and child.type in ("variable_name", "word"):
            yield read_text(child)
        yield from find_assigned(child)


def find_commands(node: Node) -> Iterator[str]:
    """Yield the names of the commands that a statement runs, without those whose output becomes a value."""
    if node.type in HIDDEN:
        return
    if node.type == "command":
        name = node.child_by_field_name("name")
        yield read_text(name) if name is not None else ""
    for child in node.named_children:
        yield from find_commands(child)


def find_unneeded(statements: Sequence[Statement], names: Iterable[str], rest: str) -> list[Statement]:
    """Return the statements that only serve to set some variables, or to print them, and that nothing else needs.

    `names` are the variables that are no longer used; `rest` is a text that stays beside the statements.
    """
    unused = set(names)
    unneeded: list[Statement] = []
    for statement in iterate(statements, unneeded):
        functions = {each.function for each in unneeded if each.function}
        if not statement.commands <= HARMLESS | functions or statement.is_comment or statement.writes:
            continue
        set_by_unneeded = {name for each in unneeded for name in each.assigned} | set(names)
        if statement.is_report:
            if references(statement.text) & set_by_unneeded:
                unneeded.append(statement)
        elif (statement.assigned & unused or statement.commands & functions) and statement.exported <= unused:
            unneeded.append(statement)
            unused |= references(statement.text)
    return keep_what_is_read(statements, unneeded, rest)


def iterate(statements: Sequence[Statement], unneeded: list[Statement]) -> Iterator[Statement]:
    """Yield the statements that are not `unneeded`, again and again until a round has added none."""
    while True:
        before = len(unneeded)
        yield from (statement for statement in statements if statement not in unneeded)
        if len(unneeded) == before:
            return


def keep_what_is_read(statements: Sequence[Statement], unneeded: list[Statement], rest: str) -> list[Statement]:
    """Return the `unneeded` statements whose variables and functions no other statement reads."""
    while True:
        kept = [statement for statement in statements if statement not in unneeded and not statement.is_comment]
        read = references(rest).union(*(references(each.text) | each.exported - each.assigned for each in kept))
        words = frozenset(word for statement in kept for word in re.findall(r"[\w-]+", statement.text))
        functions = {statement.function for statement in unneeded if statement.function}
        still = [statement for statement in unneeded if not (statement.assigned | statement.counters) & read
                 and statement.function not in words and statement.commands <= HARMLESS | functions]
        if len(still) == len(unneeded):
            return unneeded
        unneeded = still


def remove_exports(text: str, names: frozenset[str]) -> str:
    """Return a statement without its assignments to some variables, empty if nothing is left."""
    root = parse(text)
    node = root.named_children[0] if root.named_children else root
    if node.type not in ("declaration_command", "variable_assignments", "variable_assignment"):
        return text
    parts = [node] if node.type == "variable_assignment" else node.named_children
    kept = [part for part in parts if re.split(r"\+?=|\[", read_text(part))[0] not in names]
    if len(kept) == len(parts):
        return text
    words = [read_text(node.children[0])] if node.type == "declaration_command" else []
    return " ".join([*words, *map(read_text, kept)]) if kept else ""


def replace_spans(text: str, edits: Iterable[tuple[int, int, str]]) -> str:
    """Return a text in which places have new text."""
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def find_comments(statements: Sequence[Statement], removed: Sequence[Statement], text: str) -> list[Statement]:
    """Return the comments in the lines right above statements that are removed."""
    comments: list[Statement] = []
    for statement, following in reversed([*pairwise(statements)]):
        is_above = text[statement.end:following.begin].strip(" \t") in ("\n", "")
        is_plain = statement.is_comment and not re.match(
            r"#(!|#?SBATCH|#?PBS|#?BSUB|flux:| check:|\s*(export|module|srun|source)\s|\s*\w+=)", statement.text)
        if is_plain and is_above and (following in removed or following in comments):
            comments.append(statement)
    return comments


def remove_empty_lines(text: str, before: str) -> str:
    """Return a text without the lines that have become empty, and with one empty line where lines have gone."""
    old = before.rstrip("\n").split("\n")
    kept: list[str] = []
    new = text.split("\n")
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, _, _, begin, end in matcher.get_opcodes():
        lines = [line for line in new[begin:end] if kind == "equal" or line.strip()]
        while begin and lines and not lines[0].strip() and not "".join(kept[-1:]).strip():
            lines.pop(0)
        kept += lines
    return "\n".join(kept).rstrip("\n") + "\n"


def find_places(text: str, line: int, part: str) -> list[tuple[int, int]]:
    """Return where a command stands that begins in a line; the line's first command if it comes from an eval."""
    data = text.encode()
    commands = [node for node in iterate_nodes(parse(text)) if node.type == "command"]
    nodes = [node.parent if node.parent is not None and node.parent.type == "redirected_statement" else node
             for node in commands if node.start_point.row == line - 1]
    same = [node for node in nodes if read_text(node).strip() == part]
    same += sorted(nodes, key=lambda node: node.start_byte)[:1] if not same else []
    return [(len(data[:node.start_byte].decode()), len(data[:node.end_byte].decode())) for node in same]


def find_line(text: str, place: int) -> tuple[int, str]:
    """Return where the line with a place begins, with the lines that it continues, and its indentation."""
    begin = text.rfind("\n", 0, place) + 1
    while text[:begin].endswith("\\\n"):
        begin = text.rfind("\n", 0, begin - 1) + 1
    line = text[begin:]
    return begin, line[:len(line) - len(line.lstrip(" \t"))]


def find_removals(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int, str]]:
    """Return the edits that remove statements, each with a semicolon that has nothing left to separate."""
    edits: list[tuple[int, int, str]] = []
    for begin, end in sorted(spans):
        last = edits[-1][1] if edits else 0
        behind = re.compile(r"[ \t]*;(?!;)[ \t]*").match(text, end)
        before = re.search(r"[ \t]*;[ \t]*$", text[last:begin])
        edits.append((begin, behind.end(), "") if behind else (begin - len(before[0]) if before else begin, end, ""))
    return edits


@dataclass(frozen=True)
class Span:
    """The place of a launch that stands alone, or of the loop of which it is a statement.

    `others` are the statements of the loop that do more than print or set variables, `assigned` the variables that it
    sets.
    """

    begin: int
    end: int
    others: tuple[str, ...] = ()
    assigned: frozenset[str] = frozenset()
    is_loop: bool = False


def find_span(text: str, begin: int, end: int) -> Span | None:
    """Return the place of the launch at a place, None if it is part of another command, a branch or a function."""
    data = text.encode()
    first, last = len(text[:begin].encode()), len(text[:end].encode())
    nodes = iterate_nodes(parse(text))
    node = next((node for node in nodes if (node.start_byte, node.end_byte) == (first, last)), None)
    parent = node.parent if node is not None else None
    if node is None or parent is None:
        return None
    if parent.type == "program":
        return Span(begin, end)
    loop = parent.parent
    if parent.type != "do_group" or loop is None or loop.type not in LOOPS or loop.parent is None or (
            loop.parent.type not in ("program", "do_group")):
        return None
    others = [read_text(child) for child in parent.named_children if child.start_byte != first and (
        child.type in ("declaration_command", "redirected_statement")
        or re.search(r"\$!|\bsed\s+-\w*i", read_text(child))
        or not set(find_commands(child)) <= {*HARMLESS, "sleep"})]
    return Span(len(data[:loop.start_byte].decode()), len(data[:loop.end_byte].decode()), tuple(others),
                frozenset(find_assigned(loop)), is_loop=True)
