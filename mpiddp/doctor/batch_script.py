"""Reads a job script: its directives, its commands, and the lines that start a training. Nothing of it is run."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ..base.files import parse_stream_path
from ..systems.directives import Directives
from ..systems.schedulers import NO_SCHEDULER, Scheduler
from .directives import COMPONENT, Directive, Request, list_forms, read_directives, read_request
from .launches import Launch, Program, Reader
from .shell import SHELLS, Note, Selection, Shell, SimpleCommand
from .tokens import find_quoted_lines

MAX_BYTES = 1_000_000
MAX_TRAININGS = 100
MAX_SUBMISSIONS = 3  # of job scripts in job scripts
PLAIN_VARIABLES = ("USER", "LOGNAME")  # of the user's shell, beside those whose values are paths: others may be secret
PYTHON_LINE = re.compile(r"(import [\w.]+( as \w+)?|from [\w.]+ import [\w.*, ]+|def \w+\(.*:)\s*$")
# Files that set up a shell: environments of Python, conda, modules.
SETUP_FILES = re.compile(r"activate$|(profile|bashrc|bash_profile|conda\.sh|mamba\.sh|/init/\w+|lmod\S*|modules?\.sh|"
                         r"setvars\.sh)$|conda|^/etc/")


class NotABatchScript(ValueError):  # noqa: N818
    """The file is no job script; the text is the reason, in one line."""


@dataclass(frozen=True)
class BatchScript:
    """A job script.

    `form` is how its scheduler reads it, None without directives. `documents` and `inside` are the lines of its here
    documents, and those that begin inside of a word. `selections` are elements of arrays, one for each job of a job
    array. `submitted` are the job scripts that it gives to a scheduler as here documents.
    """

    path: str
    text: str
    lines: tuple[str, ...]
    scheduler: Scheduler
    form: Directives | None
    directives: tuple[Directive, ...]
    options: Mapping[str, str]
    option_lines: Mapping[str, int]
    request: Request
    commands: tuple[SimpleCommand, ...]
    launches: tuple[Launch, ...]
    variables: Mapping[str, str]
    variable_lines: Mapping[str, int]
    exported: frozenset[str]
    not_followed: tuple[Note, ...]
    documents: frozenset[int] = frozenset()
    inside: frozenset[int] = frozenset()
    selections: tuple[Selection, ...] = ()
    submitted: tuple[Submitted, ...] = ()

    @property
    def trainings(self) -> tuple[Launch, ...]:
        """The launches that start Python, as far as is known."""
        return tuple(launch for launch in self.launches if launch.is_training)


class Submitted(NamedTuple):
    """A job script in a here document: its first line there, and whether the shell leaves it as it is written."""

    line: int
    script: BatchScript
    is_literal: bool


def read(path: str, environ: Mapping[str, str] = {}) -> BatchScript:
    """Return a job script; raise NotABatchScript if the file is none. `environ` are the variables of the submission."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise NotABatchScript("is a folder, not a job script") from None
    except OSError as error:
        raise NotABatchScript(f"cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise NotABatchScript(f"is no job script: it has more than {MAX_BYTES // 10**6} MB")
    if not data.strip():
        raise NotABatchScript("is empty")
    if b"\0" in data:
        raise NotABatchScript("is a binary file, not a job script")
    if b"\r\n" in data:
        raise NotABatchScript("has Windows line ends (CR LF), which no batch system and no shell accepts; convert it "
                              "with dos2unix, or with sed -i 's/\\r$//' and its name")
    return read_from_text(path, data.decode(errors="surrogateescape"), environ)


def read_from_text(path: str, text: str, environ: Mapping[str, str] = {}, depth: int = 0) -> BatchScript:
    """Return the job script of a text; raise NotABatchScript if it is none."""
    lines = tuple(text.split("\n"))
    check_language(path, lines)
    documents, inside = find_quoted_lines(text)
    scheduler, directives = read_directives(lines, documents | inside)
    form = scheduler.directives if scheduler is not None else None
    options: dict[str, str] = {}
    option_lines: dict[str, int] = {}
    for directive in directives:
        if COMPONENT.match(directive.text):
            break
        if not directive.is_late:
            options |= directive.options
            option_lines |= dict.fromkeys(directive.options, directive.line)
    request = read_request(form, options)
    paths = {name: value for name, value in environ.items() if name in PLAIN_VARIABLES or value.startswith("/")}
    shell = Shell({**paths, **list_job_variables(form, options, request)}, form.array_numbers if form else (),
                  form.folder if form else "")
    shell.read(text)
    exported = {name: value for name in shell.exported if (value := shell.known(name)) is not None}
    reader = Reader(exported, lambda name: open_script(path, name), shell.documents)
    all_launches = tuple(filter(None, map(reader.read, shell.commands)))
    trainings = (number for number, launch in enumerate(all_launches) if launch.is_training)
    launches = all_launches[:next(islice(trainings, MAX_TRAININGS, None), None)]
    submitted, unread = read_submitted(path, shell.commands, environ, depth)
    if not (directives or submitted or any(launch.is_training for launch in launches)):
        sentinels = ", ".join(other.sentinels[0] for _, other in list_forms())
        raise NotABatchScript(f"is no job script: it has no directives ({sentinels}) and starts no Python")
    notes = (*shell.notes, *reader.notes, *unread,
             *(Note(directive.line, "the options of the job's other components") for directive in directives
               if COMPONENT.match(directive.text)),
             *note_unread(shell.commands, launches),
             *(Note(launch.line, f"the launches after {MAX_TRAININGS} trainings")
               for launch in all_launches[len(launches):][:1]))
    variables = {name: value for name in shell.lines if (value := shell.known(name)) is not None}
    return BatchScript(
        path, text, lines, scheduler or NO_SCHEDULER, form, directives, options, option_lines, request,
        tuple(shell.commands), launches, variables, shell.lines, frozenset(shell.exported),
        tuple(sorted(set(notes))), documents, inside, tuple(dict.fromkeys(shell.selections)), tuple(submitted))


def read_submitted(
    path: str, commands: list[SimpleCommand], environ: Mapping[str, str], depth: int
) -> tuple[list[Submitted], list[Note]]:
    """Return the job scripts that commands submit as here documents, and notes on those that are not read."""
    scripts: list[Submitted] = []
    notes: list[Note] = []
    for command in commands:
        if not submits(command) or any("$0" in word.raw or "BASH_SOURCE" in word.raw for word in command.words):
            continue
        document = command.document
        try:
            if document is None or depth >= MAX_SUBMISSIONS:
                raise NotABatchScript
            inner = read_from_text(path, document.word, environ, depth + 1)
            scripts.append(Submitted(document.line, inner, document.is_literal))
        except NotABatchScript:
            notes.append(Note(command.line, "the job that this line submits"))
    return scripts, notes


def submits(command: SimpleCommand) -> bool:
    """Return whether a command submits a job."""
    line = " ".join(command.words[:2])
    return any(f"{line} ".startswith(f"{scheduler.submit} ") for scheduler, _ in list_forms())


def check_language(path: str, lines: tuple[str, ...]) -> None:
    """Raise NotABatchScript for a script in another language than the shell's."""
    first = lines[0] if lines[0].startswith("#!") else ""
    interpreter = next((word for word in first[2:].replace("/", " ").split()[::-1]
                        if not word.startswith("-") and word != "env"), "")
    if re.fullmatch(r"python[\d.]*", interpreter) or (not first and path.endswith(".py")):
        raise NotABatchScript("is a Python script; the doctor reads the shell script that starts it")
    if interpreter and interpreter not in SHELLS:
        raise NotABatchScript(f"is a script for {interpreter}; the doctor reads those for bash and sh")
    if not first and any(PYTHON_LINE.match(line) for line in lines):
        raise NotABatchScript("is a Python script; the doctor reads the shell script that starts it")


def list_job_variables(form: Directives | None, options: Mapping[str, str], request: Request) -> dict[str, str]:
    """Return the variables that a scheduler sets in a script, as far as its options give their values."""
    if form is None:
        return {}
    numbers = {"nodes": request.nodes if "nodes" in options else None,  # else sbatch's own option may set it
               "ntasks": request.tasks if {"nodes", "ntasks"} & set(options) else None,
               "gpus-per-node": request.gpus_per_node}
    values = {**{name: text for name, text in options.items() if name not in numbers},
              **{name: str(value) for name, value in numbers.items() if value is not None}}
    known = {variable: values[name] for variable, name in form.variables.items() if values.get(name)}
    return {**known, **({form.folder: "."} if form.folder else {})}


def open_script(path: str, name: str) -> str | None:
    """Return the text of a shell script that a job script starts, None if it cannot be read."""
    for folder in ("", os.path.dirname(path)):
        text = read_file(os.path.join(folder, name))
        if text is not None:
            return text if "\0" not in text else None
    return None


def read_file(path: str) -> str | None:
    """Return the text of a file; None for what may block or never end, is too long or cannot be read."""
    try:
        if parse_stream_path(path) >= 0 or not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError):
        return None
    return text if len(text) <= MAX_BYTES else None


def note_unread(commands: list[SimpleCommand], launches: tuple[Launch, ...]) -> Iterator[Note]:
    """Yield notes on what may change the training and is not read: files, commands and options that are not known."""
    for command in commands:
        name, target = command.words[0], next(iter(command.words[1:2]), "")
        if name in ("source", ".") and target and not SETUP_FILES.search(target):
            yield Note(command.line, f"{target}, which may set variables")
        elif name.is_unknown and "conda" not in name:
            first = name.splitlines()[0]
            yield Note(command.line, f"the command {first}{' …' * (first != name)}")
    for launch in launches:
        if launch.has_unknown_options:
            yield Note(launch.line, f"{launch.unknown[0]}: the options of the launcher are not known")
        elif launch.program is Program.OTHER and launch.followed not in ("", "text"):
            yield Note(launch.line, f"what {launch.followed} starts")
