"""Parses the command that starts a job, and makes the same command for other nodes. Pure functions."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..options.table import split_command
from ..systems import launchers
from ..systems.launchers import NO_LAUNCHER, JobStep, Launcher


def identify_launcher(program: str, path: str, version: str) -> Launcher:
    """Return the launcher of a program at `path` (links resolved) whose output for --version is `version`.

    A row with a path counts before one with a version, and that before one with neither. It is NO_LAUNCHER if none
    starts steps on chosen nodes.
    """
    name = program.rpartition("/")[2]
    rows = [row for row in launchers.LAUNCHERS if row.step_options and re.fullmatch(row.program, name)
            and re.search(row.path, path) and re.search(row.version, version)]
    return max(rows, key=lambda row: (bool(row.path), bool(row.version)), default=NO_LAUNCHER)


class Command(NamedTuple):
    """A parsed command: the launcher's first words (`program`) and `options`, and what it starts (`rest`).

    The launcher's options set `tasks` ranks in all and `tasks_per_node` on each node, None if they do not.
    `error_file` and `abort_grace` are the values of mpiddp's options, empty if not given; `rest` lacks --error-file.
    """

    launcher: Launcher
    program: tuple[str, ...]
    options: tuple[str, ...]
    rest: tuple[str, ...]
    tasks: int | None = None
    tasks_per_node: int | None = None
    error_file: str = ""
    abort_grace: str = ""


class CommandError(ValueError):
    """The command cannot be started on chosen nodes; the text is the message for the user."""


def parse_command(command: Sequence[str], version: str, is_program: Callable[[str], object] = shutil.which,
                  path: str = "") -> Command:
    """Return a parsed command; its program at `path` (links resolved) prints `version` for --version.

    A launcher's options end at the first word that is a program. Raises CommandError.
    """
    launcher = identify_launcher(command[0], path, version)
    if launcher is NO_LAUNCHER:
        rest, error_file, abort_grace = take_our_options(command)
        return Command(launcher, (), (), rest, None, None, error_file, abort_grace)
    length = len(launcher.words)
    if tuple(command[1:length]) != launcher.words[1:]:
        raise CommandError(f"{' '.join(command[:2])} is not supported; use {launcher.name}")
    begin = find_program(command, length, launcher.values, is_program)
    options = command[length:begin]
    rest, error_file, abort_grace = take_our_options(command[begin:])
    check_options(command[0], options, launcher)
    if not rest:
        raise CommandError(f"no program found after the launcher's options: {' '.join(command)}")
    if launcher.is_mpiexec and ":" in rest:
        raise CommandError("':' between programs is not supported: all nodes must run the same program with the same "
                           "number of ranks")
    options, tasks = take_number(options, launcher, launcher.counts)
    options, tasks_per_node = take_number(options, launcher, launcher.per_node)
    return Command(launcher, tuple(command[:length]), tuple(options), rest, tasks, tasks_per_node, error_file,
                   abort_grace)


def check_options(program: str, options: Sequence[str], launcher: Launcher) -> None:
    """Raise CommandError if the launcher's options choose nodes."""
    for position, option in enumerate(options):
        name = name_option(option, launcher)
        if name in launcher.hostfiles:
            file = option[len(name):].removeprefix("=") or next(iter(options[position + 1:]), "FILE")
            raise CommandError(f"move {option} before {program}, as --hostfile: mpiddp.supervise chooses the nodes for "
                               f"{launcher.name}; write python -m mpiddp.supervise --hostfile {file} {program}")
        if name in launcher.chooses:
            others = ("" if not launcher.hostfiles else "; without a batch system, list them in a file, one line for "
                      "each rank, and give --hostfile FILE there")
            raise CommandError(f"remove {option}: mpiddp.supervise chooses the nodes for {launcher.name}; to set their "
                               f"number, give --nodes N before the command{others}")


def find_program(
    command: Sequence[str], position: int, values: Mapping[str, int], is_program: Callable[[str], object]
) -> int:
    """Return the index, from `position` on, of the program that a launcher's command starts; the end if there is none.

    `values` has the number of words that follow an option; such a word may be the name of a program, as in -p test.
    """
    while position < len(command):
        if command[position][:1] == "-":
            position += values.get(command[position], 0)
        elif is_program(command[position]):
            break
        position += 1
    return min(position, len(command))


def find_our_options(words: Sequence[str]) -> int:
    """Return the index behind `-m mpiddp` or `mpiddp`, 0 if there is none."""
    by_module = [position + 2 for position, pair in enumerate(pairwise(words)) if pair == ("-m", "mpiddp")]
    begins = by_module or [position + 1 for position, word in enumerate(words) if os.path.basename(word) == "mpiddp"]
    return next(iter(begins), 0)


def runs_job(words: Sequence[str]) -> bool:
    """Return whether these words run a script through `python -m mpiddp`; other options only print something."""
    begin = find_our_options(words)
    return begin > 0 and not {"-h", "--help", "--version", "--dry-run"} & {*split_command(words[begin:])[0]}


def take_our_options(words: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """Return the words without mpiddp's --error-file, and the values of it and of --abort-grace, empty if not given.

    mpiddp's options are between `-m mpiddp` or `mpiddp` and the script.
    """
    begin = find_our_options(words)
    if not begin:
        return tuple(words), "", ""
    ours, script = split_command(words[begin:])
    values = {"--error-file": "", "--abort-grace": ""}
    left = []
    while ours:
        name, is_given, value = ours.pop(0).partition("=")
        if name in values:
            values[name] = value if is_given or not ours else ours.pop(0)
        if name != "--error-file":
            left.append(f"{name}={values[name]}" if name in values else name + is_given + value)
    return (*words[:begin], *left, *script), values["--error-file"], values["--abort-grace"]


def name_option(word: str, launcher: Launcher) -> str:
    """Return the option's name in a word: -N in -N2, --nodes in --nodes=2."""
    return word[:2] if not launcher.is_mpiexec and not word.startswith("--") else word.partition("=")[0]


def take_number(
    options: Sequence[str], launcher: Launcher, names: Sequence[str]
) -> tuple[Sequence[str], int | None]:
    """Return a launcher's options without those in `names`, and the value of the last of these, None for none.

    Raises CommandError if a value is not a number greater than 0.
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
            raise CommandError(f"{name} {value}: must be a number greater than 0")
        number = int(value)
    return left, number


def make_command(command: Command, step: JobStep) -> list[str]:
    """Return the words that start a command as this step."""
    options = command.launcher.step_options(step) if command.launcher.step_options else ()
    return [*command.program, *options, *command.options, *command.rest]
