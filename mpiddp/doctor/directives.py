"""The directives of a job script, and the resources for which they ask."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..systems import schedulers
from ..systems.directives import Directives
from ..systems.schedulers import Scheduler

PLAIN_CHARACTERS = str.maketrans("\u201c\u201d\u2018\u2019\u00a0", "\"\"'' ")  # for those of text processors
# A value in quotes, which may have such characters; or a dash, a quoted value or a space of a text processor.
TYPOGRAPHIC = re.compile(
    "(?P<plain>\"[^\"]*\"|'[^']*')|(?<!\\S)-*[\u2013\u2014]+-*(?=(?P<short>[A-Za-z](?![\\w-]*[A-Za-z-]))|\\w)|"
    "(?P<other>(?<=[=\\s])[\u201c\u201d\u2018\u2019][^\"'\u201c\u201d\u2018\u2019]*[\"'\u201c\u201d\u2018\u2019]|\u00a0)")
COMPONENT = re.compile(r"#\w+\s+(het|pack)job\b")  # what follows is for another component of the job
MISSPELLING_RATIO = 0.85  # of difflib, from which on a name is taken for a misspelling
GPU_RESOURCE = r"gres[/:]gpu[:=]([^,]+)"  # of --tres-per-task


@dataclass(frozen=True)
class Directive:
    """A line of options for the scheduler; one that `is_late` stands behind the first command and is not read.

    `meant` is the line with the right beginning and plain dashes, quotes and spaces.
    """

    line: int
    text: str
    meant: str
    options: Mapping[str, str]
    is_late: bool = False


@dataclass(frozen=True)
class Request:
    """The resources of a job or a step; None is unknown. `tasks_per_node` may follow from a default."""

    nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    walltime_s: int | None = None
    unreadable: frozenset[str] = field(default_factory=frozenset)


def list_forms() -> Iterator[tuple[Scheduler, Directives]]:
    """Yield the schedulers that read job scripts, and how."""
    for scheduler in schedulers.SCHEDULERS:
        if scheduler.directives is not None:
            yield scheduler, scheduler.directives


def read_directives(
    lines: Sequence[str], quoted: Container[int] = ()
) -> tuple[Scheduler | None, tuple[Directive, ...]]:
    """Return a script's scheduler and its directives; those of another one, and `quoted` lines, are left out."""
    all_directives: list[tuple[Scheduler, Directive]] = []
    has_command = False
    for number, line in enumerate(lines, 1):
        if number in quoted:
            continue
        for scheduler, form in list_forms():
            meant = correct_directive(form, line)
            sentinel = next(filter(meant.startswith, form.sentinels), None)
            if sentinel is not None:
                options = dict(read_options(form, split_words(meant[len(sentinel):])))
                is_late = has_command and form.ignores_late
                all_directives.append((scheduler, Directive(number, line.rstrip(), meant, options, is_late)))
                break
        has_command |= bool(line.strip()) and not line.lstrip().startswith("#")
    if not all_directives:
        return None, ()
    first = next((scheduler for scheduler, directive in all_directives if not directive.is_late), all_directives[0][0])
    return first, tuple(directive for scheduler, directive in all_directives if scheduler is first)


def correct_directive(form: Directives, line: str) -> str:
    """Return a directive as it is meant: with its right beginning, and with the dashes, quotes and spaces of a shell.

    A command in a comment, `#sbatch --array=1-4 job.sh`, is none.
    """
    meant = line
    for sentinel in form.sentinels[:1]:
        word = re.match(r"[ \t]*#\w+:?(?=\s+-|-)", line)
        if (word and not line.startswith(sentinel) and is_misspelt(word[0].strip(), sentinel)) or (
                word and word[0] == sentinel and line[len(sentinel):len(sentinel) + 1] == "-"):
            meant = f"{sentinel} {line[word.end():].lstrip()}"
    if not meant.startswith(form.sentinels):
        return line
    if meant != line:
        words = split_words(meant[len(form.sentinels[0]):])
        if form.split is None and getopt(words, form.names, form.flags)[1] < len(words):
            return line
    return TYPOGRAPHIC.sub(lambda match: match[0] if match["plain"] else match["other"].translate(
        PLAIN_CHARACTERS) if match["other"] else "-" if match["short"] else "--", meant)


def is_misspelt(word: str, sentinel: str) -> bool:
    """Return whether a word is a sentinel in other letters' case, with two letters swapped, or behind blanks."""
    return word.upper() == sentinel.upper() or (sorted(word.upper()) == sorted(sentinel.upper())
                                                and len(word) > 4) or word == sentinel


def split_words(text: str) -> list[str]:
    """Return the words of a directive, without a comment."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def read_options(form: Directives, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options in a directive's words, by their names in the book, and their values."""
    options = form.split(words) if form.split else iter(getopt(words, form.names, form.flags)[0])
    for name, value in options:
        yield find_meant_option(form, name) or name, value


def find_meant_option(form: Directives, name: str) -> str | None:
    """Return the option for which a name is a misspelling, None if it is one, or begins one, or is like none.

    An option of a site's plugin is mostly like none.
    """
    if any(option.startswith(name) for option in form.options):
        return None
    return next(iter(difflib.get_close_matches(name, form.options, 1, MISSPELLING_RATIO)), None)


def getopt(
    words: Sequence[str], names: Mapping[str, str], flags: Container[str]
) -> tuple[list[tuple[str, str]], int]:
    """Return options as GNU's getopt reads them, by their names in the book, and the position of the first other word.

    The cores and GPUs of --tres-per-task stand behind it as options of their own.
    """
    options: list[tuple[str, str]] = []
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "-":
        word = words[position]
        position += 1
        if word == "--":
            break
        name, has_value, value = word[2:].partition("=")
        if not word.startswith("--"):
            name, value = word[1], word[2:].removeprefix("=")
            has_value = value
            while value[:1] in names and names.get(name, name) in flags:  # -lu: two flags
                options.append((names[name], ""))
                name, value = value[0], value[1:]
                has_value = value
        name = names.get(name, name)
        if not has_value and name not in flags and position < len(words) and is_value(words[position]):
            value = words[position]
            position += 1
        options.append((name, value))
        if name == "tres-per-task":
            options += [("cpus-per-task", cores) for cores in re.findall(r"\bcpu[:=](\d+)", value)]
            options += [("gpus-per-task", gpus) for gpus in re.findall(GPU_RESOURCE, value)]
    return options, position


def is_value(word: str) -> bool:
    """Return whether a word may be the value of the option before it."""
    return not word.startswith("--") and not re.match(r"-[A-Za-z]", word)


def read_request(form: Directives | None, options: Mapping[str, str]) -> Request:
    """Return the resources that options of a scheduler ask for."""
    unreadable = frozenset(name for name in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
                           if name in options and number(options, name) is None)
    nodes, tasks, per_node = (number(options, name) for name in ("nodes", "ntasks", "ntasks-per-node"))
    gpus_per_node = parse_gpus(options.get("gpus-per-node"))
    if gpus_per_node is None:
        gres = [part.partition(":")[2] for part in options.get("gres", "").split(",") if re.match(r"gpu(:|$)", part)]
        gpus_per_node = parse_gpus(gres[0] or "1") if gres else None
    if form is not None and form.has_one_task:
        if "nodes" not in options and "ntasks" not in options:
            nodes = 1
        if not {"ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket"} & set(options) and (
                "nodes" not in unreadable):
            per_node = 1
    if tasks is not None and nodes and per_node is not None and tasks < nodes * per_node:
        per_node = tasks // nodes if tasks % nodes == 0 else None  # --ntasks wins, and --ntasks-per-node is a limit
    gpus, per_gpu = parse_gpus(options.get("gpus")), number(options, "ntasks-per-gpu")
    if gpus is not None and gpus_per_node is None and nodes and gpus % nodes == 0:
        gpus_per_node = gpus // nodes
    if per_node is None and per_gpu is not None and gpus_per_node is not None:
        per_node = per_gpu * gpus_per_node
    walltime_s = form.time.read(options["walltime"]) if form is not None and "walltime" in options else None
    return complete(Request(nodes, tasks, per_node, number(options, "cpus-per-task"), gpus_per_node,
                            parse_gpus(options.get("gpus-per-task")), walltime_s, unreadable))


def complete(request: Request) -> Request:
    """Return a request with the numbers that follow from the others."""
    nodes, tasks, per_node = request.nodes, request.tasks, request.tasks_per_node
    if tasks is None and nodes is not None and per_node is not None:
        tasks = nodes * per_node
    if per_node is None and nodes and tasks is not None and tasks % nodes == 0:
        per_node = tasks // nodes
    if nodes is None and per_node and tasks is not None and tasks % per_node == 0:
        nodes = tasks // per_node
    gpus = request.gpus_per_node
    if gpus is None and request.gpus_per_task is not None and per_node is not None:
        gpus = request.gpus_per_task * per_node
    return replace(request, nodes=nodes, tasks=tasks, tasks_per_node=per_node, gpus_per_node=gpus)


def number(options: Mapping[str, str], name: str) -> int | None:
    """Return an option's value as a number, None if it is not given or is none."""
    return read_number(options.get(name, ""))


def read_number(text: str) -> int | None:
    """Return the number that a text is, None if it is none or has more than seven digits."""
    return int(text) if re.fullmatch(r"[0-9]{1,7}", text) else None


def parse_gpus(text: str | None) -> int | None:
    """Return a number of GPUs: 4, a100:4, or a100, which is one."""
    if text is None:
        return None
    last = re.sub(r"\(.*\)$", "", text).rpartition(":")[2]
    if (given := read_number(last)) is not None:
        return given
    return 1 if re.fullmatch(r"[a-zA-Z][\w.-]*", text) else None
