"""The commands of a job script that start a training: launcher, its options, what stands between, and the program."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..options.table import FLAGS, OPTIONS, split_command
from ..systems import launchers, starters
from ..systems.launchers import NO_LAUNCHER, Launcher
from ..systems.starters import Starter
from .directives import getopt, is_value
from .shell import MAX_DEPTH, SHELLS, Document, Note, Shell, SimpleCommand, Word

CONTAINERS = ("apptainer", "singularity", "shifter", "podman-hpc", "podman", "docker", "ch-run", "enroot")
WRAPPERS = (*CONTAINERS, "env", "time", "nice", "nohup", "numactl", "taskset", "stdbuf", "timeout", "command", "exec",
            "setsid", "ionice", "conda", "mamba", "micromamba", "pixi", "uv", "poetry", "nsys", "ncu", "strace",
            "chrt", "catchsegv", "unbuffer", "hpcrun", "rocprof")
CONDA = ("conda", "mamba", "micromamba")
PYTHON = re.compile(r"(.*/)?python[\d.]*")
SHELL_SCRIPT = re.compile(r".*\.(sh|bash|slurm|sbatch)")
PYTHON_TOOLS = ("venv", "pip", "virtualenv", "ensurepip", "compileall", "json.tool", "zipfile", "mpi4py")
PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
REPEATED = ("setopt", "x", "mca", "genv", "env")  # options that may be given several times, each for something else
FOLDER_OPTIONS = ("--directory", "--chdir", "--cwd", "--pwd", "--workdir", "-C")  # of wrappers such as uv and env
MAX_FOLLOWED = 100  # shell scripts and texts that launches run


class Program(enum.Enum):
    """What a launch starts in the end."""

    MPIDDP = "mpiddp"
    STARTER = "a starter of processes"
    PYTHON = "python"
    OTHER = "another program"


@dataclass(frozen=True)
class Launch:
    """A command that starts a training.

    `launcher` is the launcher's name, empty without one, `row` its row in the book; `options` are its options by the
    names in the book, from word `begin` to word `end` of the command. If a word among them may be any number of
    options, it `has_unknown_options`. `wrapper_words` stand before the program: containers, numactl, env.

    The program stands in `inner`, the command itself or one in the text that it runs: the word `text_at`, or the file
    `followed`. It is the word `program_at` there, `program_options` follow it, then the word `script_at` and its
    arguments, which are `script_words`. `unknown` are the parts of the command that are not known, `early` those that
    the job script's shell expands in a text that a task's shell reads. `inner_launcher` is one that this one starts.
    """

    command: SimpleCommand
    inner: SimpleCommand
    launcher: str = ""
    row: Launcher = NO_LAUNCHER
    options: Mapping[str, str] = field(default_factory=dict)
    begin: int = 0
    end: int = 0
    has_unknown_options: bool = False
    wrapper_words: tuple[Word, ...] = ()
    program: Program = Program.OTHER
    starter: Starter | None = None
    program_at: int = 0
    program_options: tuple[Word, ...] = ()
    script_at: int = 0
    script_words: tuple[Word, ...] = ()
    is_module: bool = False
    followed: str = ""
    text_at: int = -1
    texts: tuple[SimpleCommand, ...] = ()
    early: tuple[str, ...] = ()
    inner_launcher: str = ""

    @property
    def line(self) -> int:
        """The line in which the command begins."""
        return self.command.line

    @property
    def words(self) -> tuple[Word, ...]:
        """The words of the command."""
        return self.command.words

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts of the command that are not known."""
        return self.command.unknown

    @property
    def name(self) -> str:
        """The name of what starts the processes."""
        return self.starter.name if self.starter is not None else self.program.value

    @property
    def script(self) -> str:
        """The file that the program runs, empty if there is none or it is not known."""
        if self.program is Program.OTHER:
            return self.followed if self.followed not in ("", "text") else ""
        known = [word for word in self.script_words[:1] if not self.is_module and not word.unknown]
        return known[0] if known else ""

    @property
    def is_mpirun(self) -> bool:
        """Return whether an MPI's own launcher starts the ranks."""
        return self.row.is_mpiexec

    @property
    def container(self) -> str:
        """The program that starts a container around the training, empty for none."""
        own = next((name for name in ("container-image", "environment") if name in self.options), "")
        return next((name for word in self.wrapper_words if (name := os.path.basename(word)) in CONTAINERS), own)

    @property
    def folder(self) -> str | None:
        """The folder in which the program runs, seen from that of the job; None if it is not known."""
        is_moved = "chdir" in self.options or any(
            word.partition("=")[0] in FOLDER_OPTIONS for word in self.wrapper_words)
        return None if is_moved else self.command.folder

    @property
    def is_training(self) -> bool:
        """Return whether the launch starts Python, as far as is known."""
        return self.program is not Program.OTHER


class Reader:
    """Reads the launches of commands.

    `open_script` returns the text of a shell script that they start, or None; `documents` are those that the job script
    writes itself.
    """

    def __init__(self, variables: Mapping[str, str], open_script: Callable[[str], str | None],
                 documents: Mapping[str, Document]) -> None:
        self._variables, self._open_script, self._documents = variables, open_script, documents
        self.notes: list[Note] = []
        self._followed = 0

    def read(self, command: SimpleCommand, depth: int = 0) -> Launch | None:
        """Return the launch that a command is, None if it is none."""
        words = command.words
        starts_unknown = words[0].is_unknown and len(words) > 1
        begin = skip_supervise(words, skip_wrappers(words, int(starts_unknown)))
        if begin >= len(words):
            return None
        base = Launch(command, command, begin=begin, end=begin, wrapper_words=words[:begin])
        if rows := find_launchers(words, begin):
            options, end, has_unknown = read_launcher_options(rows, words, begin)
            if end >= len(words) and not has_unknown:
                return None
            base = replace(base, launcher=os.path.basename(words[begin]), row=rows[0], options=options, end=end,
                           has_unknown_options=has_unknown)
            return self._read_program(base, end, depth)
        if starts_unknown:
            base = replace(base, launcher=words[0], has_unknown_options=True)
        launch = self._read_program(base, begin, depth)
        is_tool = launch.is_module and launch.script_words[:1] and launch.script_words[0] in PYTHON_TOOLS
        is_launch = launch.is_training and not is_tool and (launch.program is not Program.PYTHON or launch.script_words)
        return launch if is_launch else None

    def _read_program(self, base: Launch, begin: int, depth: int) -> Launch:
        """Return a launch with what it starts."""
        words = base.command.words
        place = skip_wrappers(words, begin)
        base = replace(base, wrapper_words=(*base.wrapper_words, *words[begin:place]), program_at=place)
        if place >= len(words):
            return base
        if base.launcher and (rows := find_launchers(words, place)):
            inner = self._read_program(base, read_launcher_options(rows, words, place)[1], depth)
            return replace(inner, inner_launcher=inner.inner_launcher or os.path.basename(words[place]))
        name = os.path.basename(words[place])
        if name in SHELLS or SHELL_SCRIPT.fullmatch(words[place]) or self._find_document(base, words[place]):
            return self._follow(base, place, depth)
        launch = read_program(base, place)
        if launch.program is Program.OTHER and base.launcher:  # a wrapper that is not known may run a shell's text
            text = next((number for number in range(place + 1, len(words) - 1)
                         if os.path.basename(words[number]) in SHELLS and words[number + 1].startswith("-")), 0)
            return self._follow(base, text, depth) if text else replace(
                launch, followed=words[place] if "/" in words[place] and not words[place].unknown else "")
        return launch

    def _follow(self, base: Launch, place: int, depth: int) -> Launch:
        """Return a launch of a shell, with the program that its text or file starts."""
        words, command = base.command.words, base.command
        text_at, file_at = find_shell_text(words, place)
        file = words[file_at] if file_at >= 0 else None
        name = file if file is not None and not file.unknown else ""
        base = replace(base, followed=name)
        document = command.document if file is None else self._find_document(base, file)
        word = words[text_at] if text_at >= 0 else document.word if document else None
        text: str | None = word
        if word is None and name:
            text = self._open_script(os.path.join(command.folder or "", name))
        early = word.unknown if word is not None else ()
        self._followed += 1
        if text is None or depth >= MAX_DEPTH or self._followed > MAX_FOLLOWED:
            return base
        shell = Shell(self._variables, parameters=words[text_at + 2 if text_at >= 0 else file_at + 1:] if (
            text_at >= 0 or file_at >= 0) else ())
        shell.read(text)
        self.notes += [Note(command.line, f"the text that {words[place]} runs: {note.text}") for note in shell.notes]
        inner_launches = [launch for each in shell.commands if (launch := self.read(each, depth + 1)) is not None]
        trainings = [launch for launch in inner_launches if launch.is_training]
        if not trainings:
            return base
        last = trainings[-1]
        return replace(
            base, inner=last.inner, program=last.program, starter=last.starter, program_at=last.program_at,
            program_options=last.program_options, script_at=last.script_at, script_words=last.script_words,
            is_module=last.is_module, followed=name or "text", text_at=text_at if last.inner is last.command else -1,
            texts=tuple(shell.commands), early=(*command.unknown, *early), inner_launcher=last.launcher,
            wrapper_words=(*base.wrapper_words, *last.wrapper_words))

    def _find_document(self, base: Launch, name: str) -> Document | None:
        """Return a shell script that the job script writes itself, None if it does not."""
        return self._documents.get(os.path.normpath(os.path.join(base.command.folder or "", name)))


def find_launchers(words: Sequence[str], place: int) -> list[Launcher]:
    """Return the rows of the launchers that a command may start at a place; several MPIs call theirs alike."""
    name, following = os.path.basename(words[place]), words[place + 1:place + 2]
    return [row for row in launchers.LAUNCHERS if row.program and re.fullmatch(row.program, name) and (
        len(row.words) < 2 or (bool(following) and following[0] in (*row.words[1:], *row.verbs)))]


def find_shell_text(words: Sequence[Word], place: int) -> tuple[int, int]:
    """Return the places of a shell's text after -c, and of the file that it runs; -1 for none."""
    if os.path.basename(words[place]) not in SHELLS:
        return -1, place
    place += 1
    while place < len(words) and words[place].startswith(("-", "+")):
        if re.fullmatch(r"-[a-z]*c", words[place]):
            return (place + 1, -1) if place + 1 < len(words) else (-1, -1)
        place += 2 if words[place] in ("-o", "+o", "--rcfile", "--init-file") else 1
    return -1, place if place < len(words) and words[place] not in ("-", "/dev/stdin") else -1


def skip_supervise(words: Sequence[Word], place: int) -> int:
    """Return the place of the command that mpiddp.supervise starts; the place itself if it is not there."""
    begin = next((number + 1 for number, word in enumerate(words) if word == "mpiddp.supervise"), 0)
    if not begin:
        return place
    return next((number for number in range(begin, len(words)) if is_program(words, number)), len(words))


def skip_wrappers(words: Sequence[Word], place: int) -> int:
    """Return the place of the program behind wrappers.

    Options of a wrapper are not read: the program is the next word that looks like a program.
    """
    while place < len(words) and (name := os.path.basename(words[place])) in WRAPPERS:
        if name in CONDA and "run" not in words[place:place + 3]:
            break
        rest = range(place + 1, len(words))
        end = next((number for number in rest if is_program(words, number)), -1)
        if end < 0 and name not in CONTAINERS:
            end = next((number for number in rest if not words[number].startswith("-") and "=" not in words[number]),
                       -1)
        if end < 0:
            break
        place = end
    return place


def is_program(words: Sequence[str], place: int) -> bool:
    """Return whether a word is the name of a program that is known here, or a script's."""
    word, name = words[place], os.path.basename(words[place])
    if word.startswith("-"):
        return False
    return name in (*SHELLS, *WRAPPERS, "mpiddp") or bool(find_launchers(words, place)) or (
        re.fullmatch(r"[^=]*\.(py|sh|bash)", word) is not None or PYTHON.fullmatch(word) is not None
        or any(row.program == name for row in starters.STARTERS))


class LauncherOption(NamedTuple):
    """An option of a launcher by its name in the book, and its words; a `name` of None may be any number of options."""

    name: str | None
    value: str
    begin: int
    end: int


def list_options(rows: Sequence[Launcher], words: Sequence[Word], begin: int) -> Iterator[LauncherOption]:
    """Yield the options of a launcher; `rows` are those of its program, which stands at word `begin`."""
    names = {name: kind for row in rows for name, kind in row.names.items()}
    names |= {name.lstrip("-"): kind for row in rows for kind, group in (
        ("ntasks", row.counts), ("ntasks-per-node", row.per_node)) for name in group}
    values = {name: length for row in reversed(rows) for name, length in row.values.items()}
    values |= dict.fromkeys((name for row in rows for name in (*row.counts, *row.per_node, *row.chooses)), 1)
    position = begin + len(rows[0].words)
    while position < len(words):
        word = words[position]
        if word.is_unknown and not word.startswith("-") and has_program(words, position + 1):
            yield LauncherOption(None, word, position, position + 1)
            position += 1
            continue
        if not word.startswith("-") or word == "-":
            return
        read = read_mpi_option if rows[0].is_mpiexec else read_option
        own, length = read(words, position, names, rows[0].flags, values)
        yield from (LauncherOption(name, value, position, position + length) for name, value in own)
        position += length


def read_launcher_options(
    rows: Sequence[Launcher], words: Sequence[Word], begin: int
) -> tuple[dict[str, str], int, bool]:
    """Return a launcher's options by their names in the book, where its program begins, and whether a word is unknown.

    A word that is unknown as a whole may be any number of options.
    """
    options: dict[str, str] = {}
    end, has_unknown = begin + len(rows[0].words), False
    for option in list_options(rows, words, begin):
        end = option.end
        if option.name is None:
            has_unknown = True
        elif option.name in REPEATED and option.name in options:
            options[option.name] += f",{option.value}"
        else:
            options[option.name] = option.value
    return options, end, has_unknown


def read_option(words: Sequence[Word], position: int, names: Mapping[str, str], flags: frozenset[str],
                values: Mapping[str, int]) -> tuple[list[tuple[str, str]], int]:
    """Return an option as GNU's getopt reads it, and its number of words."""
    word, following = words[position], words[position + 1:position + 2]
    bare = word.lstrip("-").partition("=")[0]
    is_known = bare in names or bare in names.values() or bare[:1] in names or word in values
    takes_next = following and is_value(following[0]) and (is_known or not is_program(words, position + 1))
    return getopt([word, *(following if takes_next else ())], names, flags)


def read_mpi_option(words: Sequence[Word], position: int, names: Mapping[str, str], flags: frozenset[str],
                    values: Mapping[str, int]) -> tuple[list[tuple[str, str]], int]:
    """Return an option of an MPI's launcher, and its number of words; an unknown one may have a plain value."""
    name, has_value, value = words[position].partition("=")
    length = 0 if name.lstrip("-") in flags else values.get(name)
    if length is None:
        following = words[position + 1:position + 2]
        length = int(bool(following) and (following[0].isdigit() or not (
            following[0].startswith("-") or is_program(words, position + 1) or "/" in following[0])))
    if has_value:
        length = 0
    else:
        value = " ".join(words[position + 1:position + 1 + length])
    bare = name.lstrip("-")
    options = [(names.get(bare, bare), value)]
    if bare == "map-by" and (match := re.match(r"ppr:(\d+):node", value)):
        options.append(("ntasks-per-node", match[1]))
    return options, 1 + length


def has_program(words: Sequence[Word], begin: int) -> bool:
    """Return whether options or a program follow, so that the word before them is no program."""
    return any(is_program(words, place) or words[place].is_unknown for place in range(begin, len(words))) or any(
        word.startswith("-") for word in words[begin:begin + 1])


def read_program(base: Launch, place: int) -> Launch:
    """Return a launch with the program that begins at a place, and its options, script and arguments."""
    words = base.command.words
    name = os.path.basename(words[place])
    base = replace(base, program_at=place)
    if name == "mpiddp":
        return split_mpiddp(base, place + 1)
    for row in starters.STARTERS:
        has_verb = not row.verb or words[place + 1:place + 2] == (row.verb,)
        if name and row.program == name and has_verb:
            return split_options(base, row, place + 1 + bool(row.verb))
    if PYTHON.fullmatch(name):
        return split_python(base, place)
    if words[place].endswith(".py"):
        return replace(base, program=Program.PYTHON, script_at=place, script_words=words[place:])
    return base


def split_python(base: Launch, begin: int) -> Launch:
    """Return a launch with what a command of Python starts."""
    words = base.command.words
    place = begin + 1
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-m", "-c", "-"):
        place += 2 if words[place] in PYTHON_VALUES else 1
    rest = words[place:]
    launch = replace(base, program=Program.PYTHON, program_options=words[begin + 1:place])
    if not rest or rest[0] == "-c":
        return launch
    module = rest[1] if rest[0] == "-m" and len(rest) > 1 else ""
    row = next((row for row in starters.STARTERS if module in row.modules or (
        not module and row.program and os.path.basename(rest[0]) == row.program)), None)
    if row is not None:
        begin = place + 1 + bool(module)
        skips = not module and row.verb and words[begin:begin + 1] and words[begin] == row.verb
        return split_options(base, row, begin + bool(skips))
    if module == "mpiddp":
        return split_mpiddp(base, place + 2)
    return replace(launch, script_at=place + bool(module), script_words=rest[bool(module):], is_module=bool(module))


def split_mpiddp(base: Launch, begin: int) -> Launch:
    """Return a launch of mpiddp with its options and its script; an option that it does not have may have a value."""
    words = base.command.words[begin:]
    ours, rest = split_command(words)
    while ours and not is_our_option(ours[-1]) and "=" not in ours[-1] and rest and not re.fullmatch(
            r".*\.py|-.*", rest[0]) and any(word == "-m" or word.endswith(".py") for word in rest[1:]):
        ours, rest = split_command(rest[1:])
    length = len(words) - len(rest)
    is_module = rest[:1] == ["-m"]
    skipped = int(is_module or rest[:1] == ["--"])
    has_script = bool(rest) and rest[0] != "-c"
    return replace(base, program=Program.MPIDDP, program_options=words[:length], is_module=is_module,
                   script_at=begin + length + skipped, script_words=words[length + skipped:] if has_script else ())


def is_our_option(word: str) -> bool:
    """Return whether mpiddp has an option."""
    name = word.partition("=")[0].replace("_", "-").removeprefix("--")
    return not word.startswith("-") or word == "-h" or name in {*OPTIONS, *FLAGS, "help", "version"}


def split_options(base: Launch, starter: Starter, begin: int) -> Launch:
    """Return a launch of a starter with its options, and the script that it starts."""
    words, place = base.command.words, begin
    base = replace(base, program=Program.STARTER, starter=starter)
    while place < len(words) and words[place].startswith("-"):
        name, has_value, _ = words[place].lstrip("-").replace("_", "-").partition("=")
        place += 1
        if name in ("m", "module"):
            return replace(base, program_options=words[begin:place - 1], script_at=place, script_words=words[place:],
                           is_module=True)
        if not has_value and name not in starter.flags and place < len(words) and not words[place].endswith(".py"):
            place += 1
    return replace(base, program_options=words[begin:place], script_at=place, script_words=words[place:])


def find_option(words: Sequence[str], name: str) -> str | None:
    """Return the value of a long option, with dashes or underscores, None if it is not given."""
    for position, word in enumerate(words):
        own, has_value, value = word.partition("=")
        if own.startswith("-") and own.lstrip("-").replace("_", "-") == name:
            return value if has_value else next(iter(words[position + 1:position + 2]), "")
    return None
