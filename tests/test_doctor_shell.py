"""The doctor's model of the shell: commands, words, values, and where it stops."""

from __future__ import annotations

import random
import subprocess

import pytest

from mpiddp.doctor.shell import Shell
from mpiddp.doctor.tokens import find_quoted_lines
from tests.support import DEADLINE_S


def read(text: str, **variables: str) -> Shell:
    """Return a shell that has read a text."""
    shell = Shell(variables, ("JOB_INDEX",))
    shell.read(text)
    return shell


def words(text: str) -> list[tuple[str, ...]]:
    """Return the words of all commands of a text."""
    return [command.words for command in read(text).commands]


@pytest.mark.parametrize(("text", "commands"), [
    ("a b; c && d || e | f & g\nh", [("a", "b"), ("c",), ("d",), ("e",), ("f",), ("g",), ("h",)]),
    ("a \\\n  b # c\n# d\n", [("a", "b")]),
    ("a 'b c' \"d e\" f\\ g $'h\\ti'", [("a", "b c", "d e", "f g", "h\ti")]),
    ("a > out 2>&1 < in >> log b", [("a", "b")]),
    ("a $(b; c | d) `e f` ${G:-h i} $((1 + j)) <(k l)", [
        ("a", "$(b; c | d)", "`e f`", "${G:-h i}", "$((1 + j))", "<(k l)")]),
    ("a \"$(b \"c d\" 'e')\" ${F##*/}", [("a", "$(b \"c d\" 'e')", "${F##*/}")]),
    ("a $A/run_$B.log", [("a", "$A/run_$B.log")]),
    ("for f in `ls | grep .sh$`; do a; done", [("a",)]),
    ("for ((i = 0; i < 3; i++)); do a $i; done", [("a", "$i")]),
    ("if a; then b; elif c\nthen d; else e; fi; f", [("a",), ("b",), ("c",), ("d",), ("e",), ("f",)]),
    ("case $A in\n  b|c) d ;;\n  (*) e;;\nesac\nf", [("d",), ("e",), ("f",)]),
    ("f() { a; }\nfunction g {\n  b\n}\nfunction h() { c; }; f", [("a",), ("b",), ("c",), ("f",)]),
    ("while read -r x; do a; done < file; until b; do c; done", [("read", "-r", "x"), ("a",), ("b",), ("c",)]),
    ("(cd a && b) & [[ $C == d && -n $E ]] && f; ((g++)); { h; }", [("cd", "a"), ("b",), ("f",), ("h",)]),
    ("a <<E b\nc $D\nE\ne <<'F'\ng\nF\nh <<-I\n\tj\n\tI\nk", [("a", "b"), ("e",), ("h",), ("k",)]),
    ("! a; time b; exit 1; c", [("a",), ("time", "b"), ("exit", "1")]),
    ("[ -n \"$A\" ] || exit 1\na", [("[", "-n", "$A", "]"), ("exit", "1"), ("a",)]),
])
def test_commands(text: str, commands: list[tuple[str, ...]]) -> None:
    assert words(text) == commands


@pytest.mark.parametrize(("text", "last"), [
    ("A=b; c $A ${A} \"$A d\" '$A' $AB", ("c", "b", "b", "b d", "$A", "$AB")),
    ("export A='b c'; d $A \"$A\"", ("d", "b", "c", "b c")),
    ("A=(b 'c d' $E); f \"${A[@]}\" ${A[1]} ${A[9]}", ("f", "b", "c d", "$E", "c", "d", "${A[9]}")),
    ("A=(b 'c d'); e ${A[@]} \"${A[*]}\" ${A[*]}", ("e", "b", "c", "d", "b c d", "b", "c", "d")),
    ("A=(b); A+=(c d); E=f; E+=g; h \"${A[@]}\" $E", ("h", "b", "c", "d", "fg")),
    ("N=4; a $((N * 2 + 1)) $(( ${N} / 3 )) $((N % X))", ("a", "9", "1", "$((N % X))")),
    ("A=$(b); C=d/$A; e $C", ("e", "d/$(b)")),
    ("A=b; if c; then A=d; fi; e $A", ("e", "$A")),
    ("if c; then A=d; e $A; fi", ("e", "d")),
    ("A=b; for i in 1 2; do A=$i; done; e $A $i", ("e", "$A", "$i")),
    ("A=b; f() { A=c; }; e $A", ("e", "$A")),
    ("A=b; c && A=d; e $A", ("e", "$A")),
    ("A=b; (A=c); e $A", ("e", "$A")),
    ("A=b; read -r A; e $A", ("e", "$A")),
    ("A=b c; d $A", ("d", "$A")),
    ("A=''; if [ -n \"$A\" ]; then B=c; e; else B=d; fi; f $B", ("f", "$B")),
    ("A=''; B=c; if [ -n \"$A\" ]; then B=d; fi; f $B", ("f", "c")),
    ("A=x; B=c; if [ -z \"$A\" ]; then B=d; fi; f $B", ("f", "c")),
    ("eval 'A=b; c $A'", ("c", "b")),
    ("A='b \\$c'; d \"$A\"", ("d", "b \\$c")),
    ("A=\"b \\$c\"; d \"$A\"", ("d", "b $c")),
    ("read -r -d '' A <<'E'\nb c\nE\nd \"$A\"", ("d", "b c\n")),
    ("a $(which torchrun) `command -v python`", ("a", "torchrun", "python")),
])
def test_known_values_stand_in_words(text: str, last: tuple[str, ...]) -> None:
    assert words(text)[-1] == last


PIECES = ("a", "b c", " ", "'d e'", '"f  g"', "${A}", "${B}", '"$C"', "${C}", "x=1", "\\ ", "\\\"", "'\"'", '"\'"',
          "$'t\\tu'", "${L[@]}", "${L[1]}", "--o=$A/p_$B.q", "$((N * 2 + 1))", "\\\n", "#h", "k#l", "''", '""',
          '"\\$A"', '"\\n"', "\\$A", '"${L[*]}"', "[m]")
VALUES = "A=aa; B='b1 b2'; C=' c1  c2 '; L=(l1 'l2 l3' $B); N=5; set -f\n"


@pytest.mark.process
def test_words_are_those_of_bash() -> None:
    """Whatever quotes, escapes, values and arrays stand side by side."""
    chance = random.Random(0)
    texts = ["".join(chance.choices(PIECES, k=chance.randint(1, 8))) for _ in range(500)]
    lines = VALUES + "".join(f"printf '%s\\0' X {text}\nprintf '\\1'\n" for text in texts)
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    ours = [command.words[2:] for command in read(lines).commands if len(command.words) > 2]
    assert ours == [tuple(each.split("\0")[:-1]) for each in done.stdout.split("\1")[:-1]]


def test_what_is_not_known_is_kept_apart() -> None:
    (command,) = read("a $B/c$D \"$E\" '$F' \"\\$G\" \"$@\"").commands
    assert [word.unknown for word in command.words] == [(), ("$B", "$D"), ("$E",), (), (), ("$@",)]
    assert [word.is_unknown for word in command.words] == [False, False, False, False, False, True]
    assert [word.spelling for word in command.words] == ["a", "$B/c$D", '"$E"', "'$F'", '"\\$G"', '"$@"']


def test_a_word_of_a_variable_is_spelled_as_the_shell_reads_it() -> None:
    command = read("A=\"-x $B 'c;d'\"\na $A").commands[-1]
    assert [word.spelling for word in command.words] == ["a", "-x", "$B", "''\"'\"'c;d'\"'\"''"]


def test_a_here_document_has_the_values_of_its_place() -> None:
    shell = read("A=b\ncat > dir/file <<E\n$A \\$A $C \"d\"\nE\ncat >> dir/file <<'E'\n$A\nE\n")
    document = shell.documents["dir/file"]
    assert (document.word, document.line) == ("b $A $C \"d\"\n$A\n", 3)
    assert document.word.unknown == ("$C",)


def test_commands_in_the_background() -> None:
    text = "a &\nb | c &\n(d; e) &\nfor i in 1; do f; done &\ng; h && i"
    assert [(command.words[0], command.is_background) for command in read(text).commands] == [
        ("a", True), ("b", True), ("c", True), ("d", True), ("e", True), ("f", True), ("g", False), ("h", False),
        ("i", False)]


def test_lines_folders_and_loops() -> None:
    text = "cd a\nb \\\n  c\nwhile d; do\n  cd ../e; f\ndone\ncd $G; h\n"
    assert [(command.words[0], command.line, command.last_line, command.in_loop, command.folder)
            for command in read(text).commands] == [
        ("cd", 1, 1, False, ""), ("b", 2, 3, False, "a"), ("d", 4, 4, True, "a"), ("cd", 5, 5, True, "a"),
        ("f", 5, 5, True, "e"), ("cd", 7, 7, False, "e"), ("h", 7, 7, False, None)]


@pytest.mark.parametrize(("index", "offset"), [("$JOB_INDEX", 0), ("JOB_INDEX", 0), ("$((JOB_INDEX - 1))", -1),
                                               ("I+2", 2)])
def test_an_element_that_a_job_takes(index: str, offset: int) -> None:
    (selection,) = set(read(f"A=(x y)\nI=$JOB_INDEX\nb ${{A[{index}]}}").selections)
    assert (selection.line, selection.name, selection.length, selection.offset) == (3, "A", 2, offset)


@pytest.mark.parametrize(("text", "line", "reason"), [
    ("a\nb 'c\nd", 2, "'"), ("a\nb \"c", 2, '"'), ("a $(b\nc", 1, "$("), ("a ${b", 1, "${"), ("a\nb `c", 2, "`"),
    ("a=(b\nc", 1, "("), ("a $'b", 1, "'"),
])
def test_where_reading_stops(text: str, line: int, reason: str) -> None:
    (note,) = read(text).notes
    assert (note.line, note.text) == (line, f"the script from line {line} on: {reason} is not closed")


def test_lines_that_are_no_commands() -> None:
    assert find_quoted_lines("a <<E\nb\nE\nc 'd\ne\nf'\ng") == (frozenset({2, 3}), frozenset({5, 6}))
