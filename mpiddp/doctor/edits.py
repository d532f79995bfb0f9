"""The changes that rules suggest: options of directives and launches, lines, variables; and how changes are joined."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence

from .batch_script import Command, Launch, Program, Scheduler
from .context import Change, Context, Fix, Step, count, find_mpi, is_lone, is_mpirun
from .directives import (
    BEGINNINGS,
    FLUX_ALIASES,
    FLUX_FLAGS,
    FLUX_NAMES,
    LSF_NAMES,
    SLURM_ALIASES,
    SLURM_FLAGS,
    SLURM_NAMES,
    find_directives_end,
    number,
)
from .findings import Action, Edit
from .launches import JSRUN_NAMES, MPI_NAMES
from .shell import QuoteError
from .statements import remove_exports

VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'])+"
EMPTY_DIRECTIVE = re.compile(r"(#SBATCH|#PBS( -l)?|#BSUB|#flux:)\s*(#.*)?")
OPENS_BODY = re.compile(r"(\b(then|do|else)|\{|(?<!=)\()(\s+#.*)?$")
ENDS_BODY = re.compile(r"(fi|done|else|elif|esac)\b|\}|\)|;;")
TORCHRUN = r"\b(torchrun|torch\.distributed\.(run|launch))\b(?=\s)"
CONTINUES = re.compile(r"(\\|&&|\|)$")
BEGINS_STATEMENT = re.compile(r"((if|!|time|exec|eval|[A-Za-z_]\w*=\S*)\s+)*[\"']?")  # before a launch in its line
LAST_EXIT = re.compile(r"exit(\s+\S+)?\s*;?\s*(#.*)?")


def advise(text: str) -> Fix:
    """Return advice in words."""
    return Fix(advice=text)


def insert_line(line: int, text: str) -> Fix:
    """Return the insertion of a line before another one."""
    return Fix((Change(line, text),))


def insert_before(context: Context, launch: Launch, *texts: str) -> Fix:
    """Return the insertion of statements before the one that a launch is in; advice if that begins in its line."""
    line = launch.line
    before, is_there, _ = context.script.lines[line - 1].partition(launch.text.split("\n")[0])
    if is_there and not BEGINS_STATEMENT.fullmatch(before.lstrip()):
        return advise(f"write before this command: {'; '.join(texts)}")
    while line > 1 and CONTINUES.search(context.script.lines[line - 2].rstrip()):
        line -= 1
    indent = context.script.lines[line - 1][:-len(context.script.lines[line - 1].lstrip()) or None]
    return Fix(tuple(Change(line, f"{indent}{text}") for text in texts))


def append_line(context: Context, text: str) -> Fix:
    """Return the insertion of a line at the end of the script, or before an exit there."""
    lines = context.script.lines
    last = max((number for number, line in enumerate(lines, 1) if is_content(line)), default=0)
    if last > 1 and LAST_EXIT.fullmatch(lines[last - 1]) and not CONTINUES.search(lines[last - 2].rstrip()):
        return insert_line(last, text)
    return insert_line(len(lines) + bool(lines[-1].strip()), text)


def replace_text(context: Context, line: int | None, pattern: str, text: str) -> Fix:
    """Return the change of what a pattern matches in a line, nothing if it matches nothing."""
    is_there = line is not None and re.search(pattern, context.script.lines[line - 1])
    return Fix((Change(line, text, pattern),)) if line is not None and is_there else Fix()


def remove_line(context: Context, line: int) -> Fix:
    """Return the removal of a line."""
    return replace_text(context, line, ".*", "")


def move_line(context: Context, line: int, before: int, text: str) -> Fix:
    """Return the move of a line, which must have no other text, above another one."""
    if context.script.lines[line - 1].strip() != text:
        return advise(f"move {text} above line {before}")
    return remove_line(context, line) + insert_line(before, text)


def remove_assignments(context: Context, line: int, *names: str) -> Fix:
    """Return the change of a line that sets variables to one that does not."""
    text = context.script.lines[line - 1].strip()
    try:
        rest = remove_exports(text, frozenset(names))
    except (QuoteError, UnicodeEncodeError):
        rest = text
    if rest == text or text.endswith("\\"):
        return advise(f"remove {' and '.join(names)} from line {line}")
    return replace_text(context, line, r"\S.*", rest) if rest else remove_line(context, line)


def set_variable(context: Context, line: int | None, name: str, value: str) -> Fix:
    """Return the change of the value that a line gives to a variable."""
    pattern = rf"(?<![\w-]){name}=(?:\"[^\"]*\"|'[^']*'|[^\s\"';()]*)(?=[\s;]|$)"
    return replace_text(context, line, pattern, f"{name}={value}").otherwise(f"set {name}={value}")


def set_option(context: Context, name: str, value: str = "") -> Fix:
    """Return the change that gives a directive's option a value: where it stands, or behind the last directive."""
    scheduler, text = context.script.scheduler, format_option(context.script.scheduler, name, value)
    if name in context.script.options:
        return replace_option(context, None, name, text)
    beginning = f"{BEGINNINGS[scheduler]} {'-l ' * (scheduler is Scheduler.PBS)}"
    return insert_line(find_directives_end(context.script.lines) + 1, f"{beginning}{text}")


def remove_options(context: Context, *names: str) -> Fix:
    """Return the change that leaves options out of the directives."""
    fix = Fix()
    for directive in context.script.directives:
        for name in names:
            if name in directive.options:
                pattern = rf"\s+{option_pattern(context.script.scheduler, name)}"
                fix += replace_text(context, directive.line, pattern, "").otherwise(f"leave out --{name}")
    return fix


def replace_option(context: Context, launch: Launch | None, name: str, text: str) -> Fix:
    """Return the change of an option where it stands: in the launch, if that has it, or else in the directives."""
    begin = r"\s+" * (not text)
    if launch is not None and name in launch.launcher_options:
        pattern = begin + option_pattern(None if is_mpirun(launch) else Scheduler.FLUX if launch.launcher == "flux"
                                         else Scheduler.SLURM, name)
        return change_line(context, launch, pattern, text).otherwise(
            f"write {launch.launcher} {text}" if text else f"leave --{name} out of {launch.launcher}'s options")
    pattern = begin + option_pattern(context.script.scheduler, name)
    return replace_text(context, context.option_line(name), pattern, text).otherwise(f"write {text or 'no --' + name}")


def format_option(scheduler: Scheduler, name: str, value: str) -> str:
    """Return an option as a directive has it."""
    if scheduler is Scheduler.LSF:
        return f"-{next(short for short, long in LSF_NAMES.items() if long == name)} {value}".rstrip()
    if scheduler is Scheduler.PBS:
        return f"{name}={value}"
    return f"--{name}={value}" if value else f"--{name}"


def option_pattern(scheduler: Scheduler | None, name: str) -> str:
    """Return the pattern of an option with its value, by each of its names; without a scheduler, of mpirun."""
    if scheduler is Scheduler.PBS:
        return rf"\b{name}=[^\s,]+"
    if scheduler is None or scheduler is Scheduler.LSF:
        names = MPI_NAMES if scheduler is None else LSF_NAMES
        spelled = [re.escape(short) for short, long in names.items() if long == name]
        spelled += [re.escape(name)] if scheduler is None else []
        return rf"(?<![\w-])--?(?:{'|'.join(spelled)})(?:=|\s+){VALUE}"
    if scheduler is Scheduler.FLUX:
        return getopt_pattern(name, FLUX_NAMES, FLUX_ALIASES, FLUX_FLAGS)
    return getopt_pattern(name, SLURM_NAMES, SLURM_ALIASES, SLURM_FLAGS)


def getopt_pattern(
    name: str, names: Mapping[str, str], aliases: Mapping[str, str] = {}, flags: Container[str] = (),
) -> str:
    """Return the pattern of an option as GNU's getopt reads it."""
    long_names = "|".join([name, *(alias for alias, long in aliases.items() if long == name)])
    short_names = "|".join(short for short, long in names.items() if long == name) or "(?!)"
    if name in flags:
        return rf"(?<![\w-])(?:--(?:{long_names})(?:=\S+)?|-(?:{short_names}))(?!\S)"
    return rf"(?<![\w-])(?:--(?:{long_names})(?:=|\s+)|-(?:{short_names})[\s=]*){VALUE}"


def insert_option(context: Context, launch: Launch, option: str) -> Fix:
    """Return the change that gives the launcher another option; nothing if no line names it."""
    name = "flux run" if launch.launcher == "flux" else launch.launcher
    return insert_words(context, launch, rf"(?<![\w/.-]){re.escape(name)}(?=\s|[\"')]|$)", option)


def insert_words(context: Context, launch: Launch, pattern: str, words: str) -> Fix:
    """Return the change of a launch's line that inserts words behind what a pattern matches; nothing for no line."""
    fix = change_line(context, launch, pattern, words)
    return Fix(tuple(change._replace(text=f"{read_match(context, change)} {words}", adds_words=True)
                     for change in fix.changes))


def read_match(context: Context, change: Change) -> str:
    """Return what a change's pattern matches in the script."""
    match = re.search(change.pattern, context.script.lines[change.line - 1])
    return match[0] if match else ""


def change_line(context: Context, launch: Launch | Command, pattern: str, text: str) -> Fix:
    """Return the change of a command's line, or else of the only line that a pattern matches; nothing for none."""
    last = launch.line + launch.text.count("\n")
    places = [number for number, line in enumerate(context.script.lines, 1)
              if re.search(pattern, line) and not line.lstrip().startswith("#")]
    own = [number for number in places if launch.line <= number <= last]
    return Fix((Change((own or places)[0], text, pattern),)) if own or len(places) == 1 else Fix()


def append_words(context: Context, launch: Launch, words: str) -> Fix:
    """Return the change that writes words behind a launch; nothing if other words follow it in its line."""
    last = launch.line + launch.text.count("\n")
    end = launch.text.split("\n")[-1].strip()
    is_last = end and context.script.lines[last - 1].rstrip().endswith(end) and launch.followed != "text"
    return Fix((Change(last, f"{end} {words}", rf"{re.escape(end)}\s*$"),)) if is_last else Fix()


def set_tasks(context: Context, step: Step, tasks: int) -> Fix:
    """Return the change of the number of tasks per node, which share the cores and GPUs of those before."""
    launch, own = step.launch, step.launch.launcher_options
    if launch.launcher == "jsrun":
        return set_resource_sets(context, step, tasks)
    is_counted = not {"ntasks", "ntasks-per-node"}.isdisjoint(own)
    if is_mpirun(launch) and (is_counted or context.script.scheduler is not Scheduler.SLURM):
        return set_ranks(context, step, tasks, is_counted)
    if is_counted or launch.launcher == "flux":
        fix = set_own_tasks(context, step, tasks)
    elif context.script.scheduler is Scheduler.SLURM:
        fix = set_job_tasks(context, tasks)
        others = [each for each in context.steps if each.launch.text != launch.text
                  and {"ntasks", "ntasks-per-node"}.isdisjoint(each.launch.launcher_options)]
        fix += advise("other launches of the script have these tasks, too") if others and launch.launcher else Fix()
    else:
        return advise(f"start {count(tasks, 'task')} per node")
    return fix + share_gpus(context, step, tasks) + share_cores(context, step, tasks)


def set_resource_sets(context: Context, step: Step, tasks: int) -> Fix:
    """Return the change of jsrun's resource sets to one for each task, with a GPU and its share of the cores."""
    launch, own, nodes = step.launch, step.launch.launcher_options, step.request.nodes
    cores, sets = step.request.cpus_per_task, number(own, "rs_per_host")
    values = {"nrs": nodes and nodes * tasks, "rs_per_host": tasks, "tasks_per_rs": 1, "gpu_per_rs": 1,
              "cpu_per_rs": cores and sets and max(1, cores * sets // tasks)}
    fix = Fix()
    for name, value in values.items():
        if name in own:
            fix += change_line(context, launch, getopt_pattern(name, JSRUN_NAMES),
                               f"--{name} {value}" if value else "").otherwise(f"write jsrun --{name} {value}")
        elif value and name != "nrs":
            fix += insert_option(context, launch, f"--{name} {value}").otherwise(f"write jsrun --{name} {value}")
    return fix


def set_starter_processes(context: Context, step: Step, gpus: int) -> Fix:
    """Return the change by which torchrun or a relative starts one process per GPU."""
    launch = step.launch
    total = gpus * (1 if is_lone(launch) else step.request.nodes or 1)
    name, number_of, program = {
        Program.ACCELERATE: ("num_processes", total, r"\b(accelerate|accelerate\.commands)[ .]launch\b"),
        Program.DEEPSPEED: ("num_gpus", gpus, r"\bdeepspeed\b"),
    }.get(launch.program, ("nproc-per-node", gpus, TORCHRUN))
    pattern = rf"--{re.sub('[-_]', '[-_]', name)}(=|\s+)\S+"
    fix = change_line(context, launch, pattern, f"--{name}={number_of}")
    if not fix.changes:
        fix = insert_words(context, launch, program, f"--{name}={number_of}")
    fix = fix.otherwise(f"write {launch.program.value} --{name}={number_of}")
    is_repeated = launch.launcher and step.request.tasks_per_node not in (None, 1)
    return fix + set_tasks(context, step, 1) if is_repeated else fix


def set_own_tasks(context: Context, step: Step, tasks: int) -> Fix:
    """Return the change of the numbers of tasks that srun or `flux run` has itself."""
    launch, nodes = step.launch, step.request.nodes
    fix = remove_options(context, "ntasks-per-gpu")
    total = f"--ntasks={tasks * nodes}" if nodes else ""
    counted = {"ntasks", "ntasks-per-node"} & {*launch.launcher_options}
    per_node = f"--{'tasks-per-node' if launch.launcher == 'flux' else 'ntasks-per-node'}={tasks}"
    if "ntasks" in counted:
        fix += replace_option(context, launch, "ntasks", total or per_node * (counted == {"ntasks"}))
    if "ntasks-per-node" in counted:
        fix += replace_option(context, launch, "ntasks-per-node", per_node)
    return fix if counted else fix + insert_option(context, launch, total or per_node)


def set_job_tasks(context: Context, tasks: int) -> Fix:
    """Return the change of the number of tasks per node in Slurm's directives, which have no other number then."""
    options = context.script.options
    others = [name for name in ("ntasks", "ntasks-per-gpu", "ntasks-per-socket") if name in options]
    if "ntasks-per-node" in options or not others:
        return set_option(context, "ntasks-per-node", str(tasks)) + remove_options(context, *others)
    fix = replace_option(context, None, others[0], f"--ntasks-per-node={tasks}")
    return fix + remove_options(context, *others[1:])


def share_gpus(context: Context, step: Step, tasks: int) -> Fix:
    """Return the change of --gpus-per-task by which another number of tasks has the same GPUs."""
    gpus, options = step.request.gpus_per_node, step.options
    if not gpus or "gpus-per-task" not in options or not {"gpus-per-node", "gres", "gpus"}.isdisjoint(options):
        return Fix()
    text = f"--gpus-per-task={gpus // tasks or 1}" if step.launch.launcher == "flux" else f"--gpus-per-node={gpus}"
    return replace_option(context, step.launch, "gpus-per-task", text)


def share_cores(context: Context, step: Step, tasks: int) -> Fix:
    """Return the change of the number of cores by which another number of tasks has the same cores: a guess."""
    name = "cores-per-task" if step.launch.launcher == "flux" else "cpus-per-task"
    share, before, fix = step.request.cpus_per_task, step.request.tasks_per_node, Fix()
    cores = share * before // tasks if share and before and before != tasks else 0
    if cores > 1 and name in context.script.options:
        fix += set_option(context, name, str(cores))
    if cores > 1 and name in step.launch.launcher_options:
        own = replace_option(context, step.launch, name, f"--{name}={cores}")
        fix += Fix() if any("$" in read_match(context, change) for change in own.changes) else own
    is_guess = fix.changes and before is not None and before < tasks
    return fix + advise(f"{share} cores for each of {count(before or 1, 'task')} are {cores} for each of {tasks}: keep "
                        f"{share} if that is the number for one GPU") if is_guess else fix


def set_ranks(context: Context, step: Step, per_node: int, is_counted: bool) -> Fix:
    """Return the change by which mpirun starts a number of ranks on each node."""
    launch, options, nodes = step.launch, step.launch.launcher_options, step.request.nodes
    if "select" in context.script.options and not is_counted:
        return set_chunk(context, "mpiprocs", per_node)
    if not nodes:
        return advise(f"start {launch.launcher} with {count(per_node, 'rank')} on each node")
    ranks, placed = f"-n {per_node * nodes}", place_ranks(context, per_node)
    fix = replace_option(context, launch, "ntasks", ranks) if "ntasks" in options else Fix()
    if "map-by" in options and "ntasks-per-node" in options:
        return fix + change_line(context, launch, r"ppr:\d+:node", f"ppr:{per_node}:node").otherwise(f"write {placed}")
    if "ntasks-per-node" in options:
        written = change_line(context, launch, r"(?<=\s)(-N|--?(npernode|ppn|perhost))(=|\s+)\d+", "")
        names = {re.split(r"[=\s]", read_match(context, change))[0] for change in written.changes}
        spelled = [change._replace(text=placed if find_mpi(context)[0] else f"{name} {per_node}")
                   for change in written.changes for name in names]
        return fix + Fix(tuple(spelled)).otherwise(f"write {placed}")
    fix += insert_option(context, launch, placed if "ntasks" in options else f"{ranks} {placed}").otherwise(
        f"write {launch.launcher} {ranks} {placed}")
    is_guess = not find_mpi(context)[0]
    return fix + advise(f"{placed} is Open MPI's; for others it is -ppn {per_node}") if is_guess else fix


def place_ranks(context: Context, per_node: int) -> str:
    """Return the option of mpirun for a number of ranks on each node: Open MPI's, if the MPI is unknown."""
    return f"--map-by ppr:{per_node}:node" if find_mpi(context)[0] in ("Open MPI", "") else f"-ppn {per_node}"


def set_chunk(context: Context, name: str, value: int) -> Fix:
    """Return the change of a resource in PBS's select=; advice if the job has none, such as Torque's nodes=2:ppn=4."""
    if "select" not in context.script.options:
        return advise(f"ask for {name}={value} on each node")
    line, select = context.option_line("select"), f"select={context.script.options['select']}"
    if re.search(rf":{name}=", select):
        return replace_text(context, line, rf"(?<=:){name}=\w+", f"{name}={value}")
    longer = f"{select}:{name}={value}"
    return replace_text(context, line, re.escape(select), longer).otherwise(f"write {longer}")


class Draft:
    """A script's lines while changes are made in it; a line that is None is removed."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines, self._changed, self._inserted = lines, dict[int, "str | None"](), dict[int, list[str]]()
        self._made: dict[Change, None] = {}

    def make(self, changes: Iterable[Change]) -> bool:
        """Make all of some changes, or none if one excludes those that are made; return whether they are made."""
        changed, inserted = {**self._changed}, {line: [*texts] for line, texts in self._inserted.items()}
        made = {**self._made}
        for change in changes:
            if change in made:
                continue
            if change.pattern and not change.adds_words and any(
                    (other.line, other.pattern) == (change.line, change.pattern) for other in made):
                return False
            made[change] = None
            if not change.pattern:
                texts = inserted.setdefault(change.line, [])
                if read_name(change.text) in map(read_name, texts):
                    return False
                texts.append(change.text)
                continue
            line = changed.get(change.line, self._lines[change.line - 1])
            match = None if line is None else re.search(change.pattern, line)
            if line is None or match is None:
                return False
            begin, end = match.span()
            changed[change.line] = self._tidy(change.line, f"{line[:begin]}{change.text}{line[end:]}")
        self._changed, self._inserted, self._made = changed, inserted, made
        return True

    def _tidy(self, number: int, line: str) -> str | None:
        """Return a line that has been changed, None if nothing is left of it."""
        is_continued = number > 1 and self._lines[number - 2].endswith("\\")
        is_empty = EMPTY_DIRECTIVE.fullmatch(line.strip()) or not line.strip() or line.strip() == "\\"
        return None if is_empty and (not is_continued or line.strip() == "\\") else line.rstrip() or line

    def list_edits(self, changes: Iterable[Change]) -> tuple[Edit, ...]:
        """Return the edits of the script to which some of the changes that are made lead, by line."""
        edits = [self._read_edit(change) for change in dict.fromkeys(changes)]
        return sort_edits(edit for edit in edits if edit)

    def _read_edit(self, change: Change) -> Edit | None:
        """Return the edit to which a change leads, None if the line stays as it is."""
        if not change.pattern:
            return Edit(Action.INSERT, change.line, change.text)
        text = self._changed[change.line]
        if text is None and self._empties_body(change.line):
            indent = re.match(r"\s*", self._lines[change.line - 1])
            return Edit(Action.REPLACE, change.line, f"{indent[0] if indent else ''}:")
        if text is None:
            return Edit(Action.REMOVE, change.line)
        return Edit(Action.REPLACE, change.line, text) if text != self._lines[change.line - 1] else None

    def _empties_body(self, line: int) -> bool:
        """Return whether a line is the last one of a body from which all statements are removed."""
        before, after = range(line - 1, 0, -1), range(line + 1, len(self._lines) + 1)
        opening = next((number for number in before if is_content(self._read_line(number))), 0)
        end = next((number for number in after if is_content(self._read_line(number))), 0)
        is_last = not any(self._changed.get(number, "") is None for number in range(line + 1, end))
        has_new = any(is_content(text) for number in range(opening + 1, end + 1)
                      for text in self._inserted.get(number, ()))
        return bool(opening and end and is_last and not has_new and OPENS_BODY.search(
            self._read_line(opening).rstrip()) and ENDS_BODY.match(self._read_line(end).lstrip()))

    def _read_line(self, number: int) -> str:
        """Return a line as it is now, empty if it is removed."""
        return self._changed.get(number, self._lines[number - 1]) or ""


def is_content(line: str) -> bool:
    """Return whether a line is neither empty nor a comment."""
    return bool(line.strip()) and not line.lstrip().startswith("#")


def sort_edits(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Return different edits by line, insertions first, and of these the directives and comments."""
    return tuple(sorted(dict.fromkeys(edits), key=lambda edit: (
        edit.line, edit.action is not Action.INSERT, not edit.text.startswith("#"))))


def read_name(text: str) -> str:
    """Return the option that a directive gives, the text itself if it is none."""
    match = re.match(r"(#\S+ -+[\w-]+)[= ]", text)
    return match[1] if match else text


def apply_edits(lines: Sequence[str], edits: Iterable[Edit]) -> str:
    """Return the text of a script after edits, each of which may be there several times."""
    kept: list[str] = []
    rest = deque(sort_edits(edits))
    for position, line in enumerate([*lines, None], 1):
        is_kept = line is not None
        while rest and rest[0].line == position:
            edit = rest.popleft()
            kept += [edit.text] if edit.action is not Action.REMOVE else []
            is_kept = is_kept and edit.action is Action.INSERT
        kept += [line] if line is not None and is_kept else []
    return "\n".join(kept)
