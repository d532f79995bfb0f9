"""The launch line of mpiddp for a training that something else starts, if every word of the old line is understood."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..systems import starters
from ..systems.launchers import Launcher
from ..systems.variables import SET_BY_HAND
from .batch_script import BatchScript
from .context import Context, Host, Step
from .directives import read_number
from .launch_rules import choose_interface, choose_launcher, is_cray
from .launches import PYTHON, Launch, LauncherOption, Program, Reader, find_launchers, find_option, list_options
from .resource_rules import lacks_cores
from .shell import Part, Shell, Word

# A command's output is not the same a second time, nor an argument elsewhere.
OPAQUE = re.compile(r"\$\(|`|\$\{?[0-9@*]|\$\{\w+\W.*\}")
PLACES = ("nodelist", "nodefile", "exclude", "relative", "hosts", "hostfile", "multi-prog")
COUNTS = ("ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-task")
RANKS = re.compile(r"\$\{?\w*(RANK|PROCID|LOCALID|NODEID)\b")
PREFIXES = ("exec", "time", "nohup")  # of a command that needs no launcher
EXPANDED = "$ in a here document without quotes"


class NotUnderstoodError(ValueError):
    """A word of the old line is not understood; the text is the word."""


@dataclass(frozen=True)
class Suggestion:
    """What to write for a training in a line of a job script; `word` is what is not understood, empty if all is."""

    line: int
    launch: str = ""
    directives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    word: str = ""


def suggest_all(script: BatchScript, host: Host) -> list[Suggestion]:
    """Return the launch lines of mpiddp for a script, and for those that it submits."""
    suggestions = suggest(Context(script, host))
    for first, inner, is_literal in script.submitted:
        for suggestion in suggest_all(inner, host):
            line = first - 1 + suggestion.line
            is_same = is_literal or "$" not in suggestion.launch
            suggestions.append(replace(suggestion, line=line) if is_same else Suggestion(line, word=EXPANDED))
    return suggestions


def suggest(context: Context) -> list[Suggestion]:
    """Return the launch lines of mpiddp for the trainings of a script that something else starts."""
    tasks = [step for step in context.steps if step.launch.program is Program.PYTHON and step.launch.row.name
             and (step.processes_per_node or 0) > 1]
    suggestions = []
    for step in context.steps:
        if step.launch.starter is not None or step in tasks:
            try:
                suggestions.append(make_suggestion(context, step))
            except NotUnderstoodError as error:
                suggestions.append(Suggestion(step.launch.line, word=str(error)))
    return suggestions or find_unread(context)


def find_unread(context: Context) -> list[Suggestion]:
    """Return the first line that names a starter, or a shell script that does, in a script without any training."""
    names = [name for row in starters.STARTERS for name in (f"{row.program} {row.verb}".strip(), *row.modules) if name]
    starter = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, names))})(?![\w./-])")
    script = context.script
    if script.trainings:
        return []
    for launch in script.launches:
        text = context.host.read(os.path.join(launch.command.folder or "", launch.followed))
        if launch.followed and text and starter.search(text):
            return [Suggestion(launch.line, word=launch.followed)]
    return [Suggestion(number, word=f"how {match[0]} starts") for number, text in enumerate(script.lines, 1)
            if number not in script.documents and not text.lstrip().startswith(("#", "echo"))
            and (match := starter.search(text))][:1]


def make_suggestion(context: Context, step: Step) -> Suggestion:
    """Return the launch line of mpiddp for a training; raise NotUnderstoodError."""
    launch, script = step.launch, context.script
    check_words(launch)
    processes = step.processes_per_node
    if not processes:
        starter, options = launch.starter, launch.program_options
        names = (starter.per_node, starter.total, starter.nodes) if starter is not None else ()
        values = (f"--{name} {value}" for name in names if name and (value := find_option(options, name)))
        raise NotUnderstoodError(next(values, launch.name))
    row = launch.row if launch.launcher else choose_launcher(script)
    directives, notes = write_directives(context, step, row, processes)
    start = write_launcher(context, step, row, processes)
    ours, note = pass_local_rank(context, launch)
    notes += [note] if note else []
    text_at, first = launch.text_at, launch.begin
    if not launch.launcher:  # containers stand behind the launcher
        first = next(number for number, word in enumerate(launch.words) if word not in PREFIXES)
    begin = launch.end if launch.launcher else first
    if text_at >= 0:
        rest = [*spell(launch.words[begin:text_at]), write_text(launch, launch.words[text_at], ours),
                 *spell(launch.words[text_at + 1:])]
    else:
        rest = [*spell(launch.words[begin:launch.program_at]), *write_program(launch, ours),
                 *spell(launch.script_words)]
    line = " ".join(filter(None, [launch.command.prefix, *spell(launch.words[:first]), *start, *rest]))
    check_line(launch, line)
    if launch.command.redirects or launch.command.after in ("|", "|&", "&&", "||"):
        notes.append("keep what follows in the line: redirections, pipes")
    own = dict.fromkeys(name for text in script.lines for name in SET_BY_HAND
                        if re.match(rf"\s*(export\s+|declare\s+-x\s+)?{name}=", text))
    notes += [f"leave out what sets {', '.join(own)}: mpiddp sets them"] if own else []
    return Suggestion(launch.line, line, tuple(directives), tuple(notes))


def check_words(launch: Launch) -> None:
    """Raise NotUnderstoodError for a word of a launch that cannot be translated."""
    if launch.followed not in ("", "text"):
        raise NotUnderstoodError(launch.followed)
    if launch.has_unknown_options:
        raise NotUnderstoodError(next((word for word in launch.words if word.is_unknown), launch.launcher))
    if launch.inner_launcher or not launch.script_words:
        raise NotUnderstoodError(launch.inner_launcher or launch.name)
    others = [command.text for command in launch.texts if command is not launch.inner]
    if others or (launch.followed and launch.text_at < 0):
        raise NotUnderstoodError(next(iter(others), launch.name))
    starter, position = launch.starter, 0
    while starter is not None and position < len(launch.program_options):
        word = launch.program_options[position]
        name, has_value, _ = word.lstrip("-").replace("_", "-").partition("=")
        known = (starter.nodes, starter.per_node, starter.total, starter.node_rank, *starter.addresses,
                 *starter.replaced)
        if name not in known:
            raise NotUnderstoodError(word.spelling)
        position += 1 if has_value or name in starter.flags else 2
    ranks = [word for word in launch.script_words if any(map(RANKS.match, word.unknown))]
    if ranks:
        raise NotUnderstoodError(ranks[0].spelling)


def spell(words: Sequence[Word]) -> list[str]:
    """Return words as they are written; raise NotUnderstoodError for one that would be another one elsewhere."""
    for word in words:
        if word.begin < 0 and any(map(OPAQUE.match, word.unknown)):
            raise NotUnderstoodError(word.spelling)
    return [word.spelling for word in words]


def write_program(launch: Launch, options: Sequence[str]) -> list[str]:
    """Return the words that start mpiddp in place of the program, up to the script."""
    words = launch.inner.words
    first = words[launch.program_at]
    if launch.program is Program.PYTHON and PYTHON.fullmatch(first):
        python = spell([first, *launch.program_options])
    elif PYTHON.fullmatch(first):  # python … -m torch.distributed.run
        rest = words[launch.program_at + 1:launch.script_at]
        own = next((number for number, word in enumerate(rest) if not word.startswith("-") or word == "-m"), 0)
        python = spell([first, *rest[:own]])
    else:
        folder = os.path.dirname(first) if launch.starter is not None else ""
        python = [os.path.join(folder, "python")]
    return [*python, "-m", "mpiddp", *options, *(["-m"] if launch.is_module else [])]


def write_text(launch: Launch, word: Word, options: Sequence[str]) -> str:
    """Return the text that a shell runs, with mpiddp in place of the program; raise NotUnderstoodError."""
    for text in ([*Shell().expand(word.raw, 0)] if word.raw else []) + [word]:
        inner = read_launch(text)
        if inner is None or (inner.program, inner.starter) != (launch.program, launch.starter) or (
                not inner.script_words):
            continue
        begin, end = inner.words[inner.program_at].begin, inner.script_words[0].begin
        if begin < 0 or end < 0 or any(each.is_unknown for each in inner.words[inner.program_at:inner.script_at]) or (
                text is word and any(map(OPAQUE.match, word.unknown))):
            continue
        new = " ".join([*write_program(replace(inner, inner=inner.command), options), ""])
        return quote_text([*cut(text.parts, 0, begin), Part(new), *cut(text.parts, end, len(text))])
    raise NotUnderstoodError(word.spelling)


def cut(parts: Sequence[Part], begin: int, end: int) -> Iterator[Part]:
    """Yield the parts of a word from one place to another."""
    place = 0
    for part in parts:
        text = part.text[max(begin - place, 0):max(end - place, 0)]
        place += len(part.text)
        if text:
            yield part._replace(text=text)


def quote_text(parts: Sequence[Part]) -> str:
    """Return a text in quotes, in which the shell expands only the parts that are not known."""
    whole = "".join(part.text for part in parts)
    lines = re.sub(r"\\\n\s*", " ", whole).strip()
    if "\n" in lines:
        raise NotUnderstoodError(lines.partition("\n")[0])
    if "'" not in whole and not any(part.is_unknown for part in parts):
        return f"'{lines}'"
    return '"' + "".join(part.text if part.is_unknown else re.sub(r"([\\\"$`])", r"\\\1", re.sub(
        r"\\\n\s*", " ", part.text)) for part in parts).strip() + '"'


def check_line(launch: Launch, line: str) -> None:
    """Raise NotUnderstoodError if the line that is to be shown does not start mpiddp as it should."""
    new = read_launch(line)
    if new is None or new.program is not Program.MPIDDP or not new.script_words or new.is_module != launch.is_module:
        raise NotUnderstoodError(launch.name)


def read_launch(text: str) -> Launch | None:
    """Return the launch that a text is, None if it is none, or several commands."""
    shell = Shell()
    shell.read(text)
    launches = [Reader({}, lambda _: None, {}).read(command) for command in shell.commands]
    return launches[0] if len(launches) == 1 and not shell.notes else None


def write_launcher(context: Context, step: Step, row: Launcher, processes: int) -> list[str]:
    """Return the launcher with its options for one rank in each process."""
    launch, script, nodes = step.launch, context.script, step.request.nodes
    if not launch.launcher:
        nodes = script.request.nodes or 1
        number = [row.counts[0], str(processes * nodes)] if row.system is None else []
        return [row.command, *number, *add_options(context, launch, row)]
    first, has_count = launch.begin + len(row.words), launch.starter is None or row.system == script.scheduler
    start, words = spell(launch.words[launch.begin:first]), []
    start += add_options(context, launch, row)
    rows = find_launchers(launch.words, launch.begin)
    for option in list_options(rows, launch.words, launch.begin):
        own, name = launch.words[option.begin:option.end], option.name or ""
        is_moved = launch.starter is not None and (name in PLACES or "sets" in row.names.values())
        if is_moved or not is_known(row, rows, name, own[0]):
            raise NotUnderstoodError(own[0].spelling)
        if name == row.interface_option and option.value == "none":
            words.append(choose_interface(context, launch))
        elif launch.starter is None or name not in COUNTS or (name == "cpus-per-task" and "$" in own[-1].spelling):
            words += spell(own)
        else:
            has_count |= name in ("ntasks", "ntasks-per-node")
            words.append(write_count(step, own, option, processes, nodes))
    if not has_count:
        raise NotUnderstoodError(launch.launcher)
    return [*start, *words]


def write_count(
    step: Step, own: Sequence[Word], option: LauncherOption, processes: int, nodes: int | None
) -> str:
    """Return an option with the number of tasks, or of a task's cores or GPUs, for one rank in each process."""
    given, tasks = read_number(option.value), step.request.tasks_per_node
    share = given and tasks and given * tasks // processes
    if option.name == "cpus-per-task":
        share = share and max(1, share)
    elif share and given and tasks and share * processes != given * tasks:
        share = None
    new = {"ntasks": nodes and nodes * processes, "ntasks-per-node": processes}.get(option.name or "", share)
    if given is None or not new:
        raise NotUnderstoodError(" ".join(word.spelling for word in own))
    name = own[0].partition("=")[0]
    is_long = name.startswith("--") and "=" in own[0]
    return f"{name}={new}" if is_long else f"{re.sub(r'(?<=^-[A-Za-z])[0-9]+$', '', name)} {new}"


def is_known(row: Launcher, rows: Sequence[Launcher], name: str, word: str) -> bool:
    """Return whether an option is one of a launcher's that the book has."""
    form = row.system.directives if row.system is not None else None
    if form is not None and form.options:
        return name in form.options
    option = word.partition("=")[0]
    return any(name in (*each.flags, *each.names, *each.names.values(), *COUNTS)
               or option in (*each.values, *each.chooses) for each in rows)


def add_options(context: Context, launch: Launch, row: Launcher) -> list[str]:
    """Return the options of a launcher for MPI's interface and for the job's number of cores."""
    form, added = context.script.form, []
    interface = choose_interface(context, replace(launch, row=row)) if row.interface else ""
    if interface and row.interface_option not in launch.options and not is_cray(context):
        added.append(interface)
    variable = next((name for name, option in form.variables.items() if option == "cpus-per-task"), "") if form else ""
    if row.cores_variable and variable and "cpus-per-task" in context.script.options and lacks_cores(
            context, replace(launch, row=row)):
        added.append(f"{row.cores}=${variable}")
    return added


def write_directives(context: Context, step: Step, row: Launcher, processes: int) -> tuple[list[str], list[str]]:
    """Return the directives for one task in each process, and notes on those that go."""
    launch, options = step.launch, context.script.options
    form, job = context.script.form, context.script.request
    if launch.starter is None or form is None or row.system not in (None, context.script.scheduler):
        return [], []
    if row.system is None:
        nodes = (step.request.nodes if launch.launcher else job.nodes) or 1
        is_placed = "ntasks-per-node" in launch.options or job.tasks_per_node == processes
        name, number = ("ntasks", processes * nodes) if form.slots_are_cores else ("ntasks-per-node", processes)
        return [] if is_placed or (job.tasks or 0) >= processes * nodes else [context.directive(name, str(number))], []
    lines, notes, tasks = [], [], job.tasks_per_node
    if tasks is None:
        raise NotUnderstoodError(context.directive("ntasks", options["ntasks"]) if "ntasks" in options else launch.name)
    if tasks != processes:
        lines.append(context.directive("ntasks-per-node", str(processes)))
        if "ntasks" in options:
            notes.append(f"leave {context.directive('ntasks', options['ntasks'])} out")
    cores = job.cpus_per_task
    if cores and tasks and tasks != processes and "cpus-per-task" in options:
        lines.append(context.directive("cpus-per-task", str(max(1, cores * tasks // processes))))
    if job.gpus_per_task and tasks != processes and job.gpus_per_node and "gpus-per-task" in options:
        lines.append(context.directive("gpus-per-node", str(job.gpus_per_node)))
        notes.append(f"leave {context.directive('gpus-per-task', options['gpus-per-task'])} out")
    return lines, notes


def pass_local_rank(context: Context, launch: Launch) -> tuple[list[str], str]:
    """Return mpiddp's option for a script that gets its local rank as an argument, and a note if it may need it."""
    starter = launch.starter
    if starter is None or not starter.gets_local_rank or any(
            find_option(launch.program_options, name) is not None for name in starter.gets_local_rank):
        return [], ""
    text = context.read_training(launch)
    for option in ("--local-rank", "--local_rank"):
        if option in text:
            return ["--pass-local-rank" + f"={option}" * (option != "--local-rank")], ""
    return [], "" if text else "if the script parses --local_rank: python -m mpiddp --pass-local-rank=--local_rank"
