"""Reads a job script: its directives, its commands, and the lines that start a training. Nothing of it is run."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from ..base.files import parse_stream_path
from .directives import COMPONENT, Directive, Request, Scheduler, read_directives, read_request
from .launches import Launch, Program, Reader
from .shell import (
    SHELLS,
    Command,
    Note,
    QuoteError,
    Selection,
    Shell,
    find_document_lines,
    find_string_lines,
    parse_statements,
)

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["BatchScript", "Command", "Directive", "Launch", "NotABatchScript", "Note", "Program", "Request",
           "Scheduler", "read", "read_file", "read_from_text"]

MAX_BYTES = 1_000_000
MAX_TRAININGS = 100
TOO_DEEP = "is nested too deeply to be read"
SCHEDULER_VARIABLES = ("SLURM", "SBATCH_", "PBS_", "LSB_", "LS_", "FLUX_", "PMI", "OMPI_", "PALS_", "NCPUS")
JOB_VARIABLES = ("HOSTNAME", "TMPDIR", "PWD", "OLDPWD", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "RANDOM",
                 "CONDA_PREFIX", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_SCRATCH", "JOB_TMPDIR")
# Variables of the user's shell that may be followed, beside those whose values are paths: others may hold secrets.
PLAIN_VARIABLES = ("USER", "LOGNAME")
CONDA_MODULES = re.compile(r"(\w*/)?(ana|mini)?conda|mini(forge|mamba)|mambaforge", re.IGNORECASE)
PYTHON_LINE = re.compile(r"(import [\w.]+( as \w+)?|from [\w.]+ import [\w.*, ]+|def \w+\(.*:)\s*$")
# Files that set up a shell: environments of Python, conda, modules.
SETUP_FILES = re.compile(r"activate$|(profile|bashrc|bash_profile|conda\.sh|mamba\.sh|/init/\w+|lmod\S*|modules?\.sh|"
                         r"setvars\.sh)$|conda|^/etc/")
# Variables that Slurm sets in a batch script only if the option was given (man sbatch, OUTPUT ENVIRONMENT VARIABLES).
SLURM_VARIABLES = {
    "SLURM_CPUS_PER_TASK": "cpus-per-task", "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_PER_NODE": "gpus-per-node", "SLURM_GPUS_PER_TASK": "gpus-per-task", "SLURM_GPUS": "gpus",
    "SLURM_NTASKS_PER_GPU": "ntasks-per-gpu",
}


class NotABatchScript(ValueError):  # noqa: N818
    """The file is no job script; the text is the reason, in one line."""


@dataclass(frozen=True)
class BatchScript:
    """A job script; `variables` are the values at its end, `exported` the names that programs get.

    `document_lines` are the lines of its here documents, `string_lines` those that begin in quotes; `selections` are
    elements of arrays, one for each job of a job array.
    """

    path: str
    text: str
    lines: tuple[str, ...]
    scheduler: Scheduler
    directives: tuple[Directive, ...]
    options: dict[str, str]
    option_lines: dict[str, int]
    launches: tuple[Launch, ...]
    variables: dict[str, str]
    variable_lines: dict[str, int]
    commands: tuple[Command, ...]
    not_followed: tuple[Note, ...]
    exported: frozenset[str] = field(default_factory=frozenset)
    request: Request = field(default_factory=Request)
    document_lines: frozenset[int] = frozenset()
    string_lines: frozenset[int] = frozenset()
    selections: tuple[Selection, ...] = ()

    @property
    def trainings(self) -> tuple[Launch, ...]:
        """The launches that start Python, as far as is known."""
        return tuple(launch for launch in self.launches if launch.is_training)


def read(path: str, environ: Mapping[str, str] = {}) -> BatchScript:
    """Return a job script; raise NotABatchScript if the file is none. `environ` are the variables of the submission."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise NotABatchScript("is a folder, not a job script") from None
    except OSError as error:
        raise NotABatchScript(f"cannot be read: {error.strerror}") from None
    check_data(data)
    return read_from_text(path, data.decode(errors="surrogateescape"), environ)


def check_data(data: bytes) -> None:
    """Raise NotABatchScript for data that can be no job script."""
    if len(data) > MAX_BYTES:
        raise NotABatchScript(f"is no job script: it has more than {MAX_BYTES // 10**6} MB")
    if not data.strip():
        raise NotABatchScript("is empty")
    if b"\0" in data:
        raise NotABatchScript("is a binary file, not a job script")
    if b"\r\n" in data:
        raise NotABatchScript("has Windows line ends (CR LF), which no batch system and no shell accepts; convert it "
                              "with dos2unix, or with sed -i 's/\\r$//' and its name")


def read_from_text(path: str, text: str, environ: Mapping[str, str] = {}) -> BatchScript:
    """Return the job script of a text; raise NotABatchScript if it is none."""
    lines = tuple(text.split("\n"))
    check_language(path, lines)
    root = parse_script(text)
    document_lines = frozenset(find_document_lines(root))
    string_lines = frozenset(find_string_lines(root))
    scheduler, directives = read_directives(lines, document_lines | string_lines)
    options: dict[str, str] = {}
    option_lines: dict[str, int] = {}
    for directive in directives:
        if COMPONENT.match(directive.text):
            break
        if not directive.is_late:
            options |= directive.options
            option_lines |= dict.fromkeys(directive.options, directive.line)
    request = read_request(scheduler, options)

    def is_empty(name: str) -> bool:
        is_unset = name not in environ and is_empty_if_unset(name)
        return is_unset or (scheduler is Scheduler.SLURM and name in SLURM_VARIABLES)

    own = {name: value for name, value in environ.items()
           if is_empty_if_unset(name) and (name in PLAIN_VARIABLES or value.startswith("/"))}
    shell = Shell({**own, **scheduler_variables(scheduler, options, request)}, is_empty)
    try:
        shell.follow(root)
    except RecursionError:
        raise NotABatchScript(TOO_DEEP) from None
    exported = {name: value for name, value in shell.variables.items()
                if name in shell.exported and isinstance(value, str)}
    reader = Reader({name: value for name, value in exported.items() if shell.show(value) == value},
                    is_empty, lambda name: open_script(path, name), shell.documents)
    all_launches = tuple(filter(None, map(reader.read, shell.commands)))
    trainings = (number for number, launch in enumerate(all_launches) if launch.is_training)
    late = next(islice(trainings, MAX_TRAININGS, None), None)
    launches = all_launches[:late]
    if not directives and not launches:
        raise NotABatchScript("is no job script: it has no directives (#SBATCH, #PBS, #BSUB, #flux:) and starts no "
                              "Python")
    components = (Note(directive.line, "the options of the job's other components") for directive in directives
                  if COMPONENT.match(directive.text))
    notes = (*shell.notes, *components, *(Note(*note) for note in reader.notes), *note_unread(shell.commands, launches),
             *(Note(launch.line, f"the launches after {MAX_TRAININGS} trainings")
               for launch in all_launches[len(launches):][:1]))
    return BatchScript(
        path, text, lines, scheduler, directives, options, option_lines, launches,
        {name: text for name, value in shell.variables.items() if name in shell.lines
         and shell.show(text := value if isinstance(value, str) else " ".join(value)) == text},
        dict(shell.lines), tuple(shell.commands), tuple(sorted(set(notes), key=lambda note: note.line)),
        frozenset(shell.exported), request, document_lines, string_lines,
        tuple(dict.fromkeys(shell.selections)))


def parse_script(text: str) -> Node:
    """Return the root of a job script's syntax tree; raise NotABatchScript if it has none."""
    try:
        return parse_statements(text.encode(errors="replace").decode())
    except QuoteError as error:
        raise NotABatchScript(f"line {error.line} has a quote ({error.quote}) that is not closed") from None
    except RecursionError:
        raise NotABatchScript(TOO_DEEP) from None


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


def scheduler_variables(scheduler: Scheduler, options: Mapping[str, str], request: Request) -> dict[str, str]:
    """Return the variables that a batch system sets in a script, as far as its options give their values."""
    if scheduler is not Scheduler.SLURM:
        return {}
    names = {name: options[option] for name, option in SLURM_VARIABLES.items() if options.get(option)}
    names |= {"SLURM_JOB_NAME": options["job-name"]} if "job-name" in options else {}
    numbers = {"SLURM_NNODES": request.nodes, "SLURM_JOB_NUM_NODES": request.nodes, "SLURM_NTASKS": request.tasks,
               "SLURM_NPROCS": request.tasks, "SLURM_GPUS_ON_NODE": request.gpus_per_node}
    return {**names, **{name: str(value) for name, value in numbers.items() if value is not None}}


def is_empty_if_unset(name: str) -> bool:
    """Return whether a variable that the script does not set is empty: none of the batch system's or the node's."""
    return not name.startswith(SCHEDULER_VARIABLES) and name not in JOB_VARIABLES


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


def note_unread(commands: Sequence[Command], launches: Sequence[Launch]) -> Iterator[Note]:
    """Yield notes on what may change the training and is not read: files, jobs, unknown options."""
    conda = ""
    for command in commands:
        name, target = command.words[0], next(iter(command.words[1:2]), "")
        if name in ("sbatch", "qsub", "bsub") and not any("$0" in word for word in command.words):
            yield Note(command.line, "the job that this line submits")
        elif name in ("source", ".") and not SETUP_FILES.search(target):
            yield Note(command.line, f"{target}, which may set variables")
        elif name.is_unknown and "conda" not in name:
            first = name.splitlines()[0]
            yield Note(command.line, f"the command {first}{' …' * (first != name)}")
        if name in ("module", "ml"):
            conda = next((word for word in command.words if CONDA_MODULES.match(word)), conda)
        elif name in ("source", ".") or "hook" in command.text:
            conda = ""
        elif conda and command.words[:2] == ("conda", "activate"):
            yield Note(command.line, f"the module {conda}, of which conda activate needs a function: not all define "
                       'it, but source "$(conda info --base)/etc/profile.d/conda.sh" does')
            conda = ""
    for launch in launches:
        if launch.has_unknown_options:
            yield Note(launch.line, f"{launch.unknown[0]}: the options of the launcher are not known")
        elif launch.program is Program.OTHER and launch.script:
            yield Note(launch.line, f"what {launch.script} starts")
