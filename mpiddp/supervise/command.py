"""The command that starts a job: which launcher it has, and how it runs on other nodes. Pure functions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..command.options import split
from ..config import STANDARD_INPUT
from .launchers import NONE, LauncherCommand, Placement, launcher_of


class Command(NamedTuple):
    """A command in parts: the words that begin the launcher's, `program`, its `options`, and what it starts, `rest`.

    `tasks` is the number of ranks that the options ask for, and `tasks_per_node` that of each node; None if they don't.
    `error_file` and `abort_grace` are the values of mpiddp's options, empty where they are not given; the first one is
    not in `rest`.
    """

    launcher: LauncherCommand
    program: tuple[str, ...]
    options: tuple[str, ...]
    rest: tuple[str, ...]
    tasks: int | None = None
    tasks_per_node: int | None = None
    error_file: str = ""
    abort_grace: str = ""


class CommandError(ValueError):
    """A command that cannot be started on nodes of our choice; the text says why, and what to do."""


def read(command: Sequence[str], version: str, is_program: Callable[[str], object] = shutil.which,
         path: str = "") -> Command:
    """Return a command in parts; its program lies at `path`, links followed, and prints `version` for --version.

    A launcher's options end where the name of a program stands. Raises CommandError.
    """
    launcher = launcher_of(command[0], path, version)
    if launcher is NONE:
        rest, error_file, abort_grace = own_options(command)
        return Command(launcher, (), (), rest, None, None, error_file, abort_grace)
    length = len(launcher.words)
    if tuple(command[1:length]) != launcher.words[1:]:
        raise CommandError(f"{' '.join(command[:2])}: mpiddp.supervise starts jobs by {launcher.name}")
    begin = begin_of_program(command, length, launcher.values, is_program)
    options = command[length:begin]
    rest, error_file, abort_grace = own_options(command[begin:])
    for option in options:
        if name_option(option, launcher) in launcher.chooses:
            raise CommandError(f"{option}: mpiddp.supervise chooses the nodes of {launcher.name}; leave it out, and "
                               "say --nodes N before the command")
    if not rest:
        raise CommandError(f"{' '.join(command)}: starts no program that is found")
    if launcher.is_mpiexec and ":" in rest:
        raise CommandError("':' between programs: mpiddp.supervise gives all nodes as many ranks of one program")
    options, tasks = take_number(options, launcher, launcher.counts)
    options, tasks_per_node = take_number(options, launcher, launcher.per_node)
    return Command(launcher, tuple(command[:length]), tuple(options), rest, tasks, tasks_per_node, error_file,
                   abort_grace)


def begin_of_program(
    command: Sequence[str], at: int, values: Mapping[str, int], is_program: Callable[[str], object]
) -> int:
    """Return where in a launcher's command, from `at` on, the program stands that it starts; the end, if nowhere.

    `values` are the options that take so many words, of which one may be called as a program is: -p test.
    """
    while at < len(command):
        if command[at][:1] == "-":
            at += values.get(command[at], 0)
        elif is_program(command[at]):
            break
        at += 1
    return min(at, len(command))


def own_options(words: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """Return the words without mpiddp's --error-file, the value of that, and --abort-grace's; empty if not given.

    The options stand between `-m mpiddp`, or `mpiddp`, and the script: what follows is the script's own. Raises
    CommandError for a script on standard input.
    """
    by_module = [at + 2 for at, pair in enumerate(pairwise(words)) if pair == ("-m", "mpiddp")]
    begins = by_module or [at + 1 for at, word in enumerate(words) if os.path.basename(word) == "mpiddp"]
    if not begins:
        return tuple(words), "", ""
    ours, script = split(words[begins[0]:])
    if script[:1] == [STANDARD_INPUT]:
        raise CommandError("-: standard input cannot be read a second time; save the script in a file, and name that")
    found = {"--error-file": "", "--abort-grace": ""}
    left = []
    while ours:
        name, is_given, value = ours.pop(0).partition("=")
        if name in found:
            found[name] = value if is_given or not ours else ours.pop(0)
        if name != "--error-file":
            left.append(f"{name}={found[name]}" if name in found else name + is_given + value)
    return (*words[:begins[0]], *left, *script), found["--error-file"], found["--abort-grace"]


def name_option(word: str, launcher: LauncherCommand) -> str:
    """Return the name of the option that a launcher's word is or begins with: -N of -N2, --nodes of --nodes=2."""
    return word[:2] if not launcher.is_mpiexec and not word.startswith("--") else word.partition("=")[0]


def take_number(
    options: Sequence[str], launcher: LauncherCommand, names: Sequence[str]
) -> tuple[Sequence[str], int | None]:
    """Return a launcher's options without those called so, and the number that the last of them gives, None for none.

    Raises CommandError if it is no number, or 0.
    """
    left, number = [], None
    words = iter(options)
    for word in words:
        name = name_option(word, launcher)
        if name not in names:
            left.append(word)
            continue
        value = word[len(name):].removeprefix("=") or next(words, "")
        if not value.isdecimal() or int(value) == 0:
            raise CommandError(f"{name} {value}: must be a number of ranks")
        number = int(value)
    return left, number


def on_nodes(command: Command, where: Placement) -> list[str]:
    """Return the words that start a command somewhere."""
    return [*command.program, *command.launcher.place(where), *command.options, *command.rest]
