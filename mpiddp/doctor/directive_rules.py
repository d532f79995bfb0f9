"""Rules about the directives: how they are written, walltime, memory, output, and job arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ..base.text import format_ranges
from .context import GPU_OPTIONS, NODE_FOLDERS, Context, count, error, note, rule, warning
from .directives import correct_directive, find_meant_option
from .findings import Finding
from .launches import find_option

MIN_WALLTIME_S = 300  # mpiddp waits as long for the start: torch comes from a shared file system
MIN_MB_PER_RANK = 2048  # torch with CUDA needs about that much memory of the host
LONG_TIME = re.compile(r"([0-9]{1,4})[ -]?(h|hrs?|hours?|d|days?)\b", re.IGNORECASE)


@rule("first-line")
def check_first_line(context: Context) -> Iterator[Finding]:
    """Look at the beginning of the script."""
    script = context.script
    if script.form is not None and script.form.needs_shell and not script.lines[0].startswith("#!"):
        yield error(1, "the first line does not begin with #!",
                    f"{script.scheduler.submit} refuses a script whose first line does not name a shell", "#!/bin/bash")


@rule("late-directive")
def check_late_directive(context: Context) -> Iterator[Finding]:
    """Look for directives behind the first command."""
    late = [directive for directive in context.script.directives if directive.is_late]
    if late:
        first = next(number for number, line in enumerate(context.script.lines, 1)
                     if line.strip() and line.lstrip()[0] != "#")
        are = "is not read: it stands" if len(late) == 1 else "are not read: they stand"
        names = format_ranges([directive.line for directive in late]).replace(",", ", ")
        yield error(late[0].line, f"line{'s' * (len(late) > 1)} {names} {are} after the first command, line {first}",
                    "the batch system reads directives only before the first command",
                    advice=f"move {'it' if len(late) == 1 else 'them'} above line {first}")


@rule("directive-text")
def check_directive_text(context: Context) -> Iterator[Finding]:
    """Look for what no scheduler reads as it is meant."""
    form, program = context.script.form, context.script.scheduler.submit
    if form is None:
        return
    for directive in context.script.directives:
        text, line = directive.text.split(" #")[0], directive.line
        meant = correct_directive(form, text)
        if not text.startswith(form.sentinels) or text[len(form.sentinels[0]):][:1] == "-":
            yield error(line, "not read as a directive", f"it must begin with '{form.sentinels[0]} '", meant)
        elif meant != text:
            yield error(line, "a typographic dash, quote or space in a directive",
                        "it is not read as an option; it was probably copied from a web page", meant)
        elif (match := re.search(r"\$\{?\w+\}?|\$\(", text)) and "comment" not in directive.options and (
                form.output_name):
            names = [name for name in ("output", "error") if "$" in directive.options.get(name, "")]
            is_text = any("$" in directive.options.get(name, "") for name in ("job-name", "mail-user"))
            message, reason = f"{match[0]} in a directive", f"{program} does not expand variables; "
            if names:
                yield error(line, message, f"{reason}the output goes to a folder with that name",
                            *(context.directive(name, f"{form.output_name}.{name[:3]}") for name in names))
            elif is_text:
                yield warning(line, message, f"{reason}the text stays as it is")
            else:
                yield error(line, message, f"{reason}it refuses the value",
                            advice=f"write the value of {match[0]} itself")
        elif form.refuses_comments and " #" in directive.text:
            yield error(line, f"a comment after a directive of {context.script.scheduler.name}",
                        f"{program} refuses it", text.rstrip())
        elif form.options and re.search(r"\s--[\w-]+(\s+=|=\s+[^-\s])", text):
            yield error(line, "spaces around the = of an option",
                        f"{program} reads what follows the space as something else, and refuses the job",
                        re.sub(r"(\s--[\w-]+)\s*=\s*", r"\1=", text))
        for name in re.findall(r"\s--([\w-]+)", meant) if form.options else ():
            if option := find_meant_option(form, name):
                yield error(line, f"{program} has no option --{name} (did you mean --{option}?)", "it refuses the job",
                            re.sub(rf"--{name}(?![\w-])", f"--{option}", meant))


@rule("walltime")
def check_walltime(context: Context) -> Iterator[Finding]:
    """Look at the walltime: refused, shorter than a start, or minutes that are meant as hours."""
    script, form = context.script, context.script.form
    text, line, walltime_s = script.options.get("walltime", ""), context.option_line("walltime"), (
        script.request.walltime_s)
    if form is None or not text or re.search(r"[$%{<]", text):
        return
    comment = script.lines[line - 1].partition(" #")[2] if line else ""
    match = re.fullmatch(form.time.mistaken, text)
    hours = next(filter(None, match.groups()), "") if match and not re.search(r"\bmin", comment) else ""
    if text.isdigit() and not hours and form.time.read("1") == 60:
        hours = find_hours(comment)
    if not re.fullmatch(form.time.pattern, text, re.IGNORECASE):
        meant = find_hours(text) or (text.partition(":")[0] if re.fullmatch(r"\d+:\d\d:\d\d", text) else "")
        yield error(line, f"a walltime of {text}, which {script.scheduler.submit} refuses",
                    f"{script.scheduler.submit} reads {form.time.description}",
                    context.directive("walltime", form.time.hours.format(int(meant or 24))),
                    advice="" if meant else "24 hours are an example")
    elif hours:
        yield warning(line, f"{form.spell('walltime', text)} is {count((walltime_s or 0) // 60, 'minute')}",
                      f"{script.scheduler.name} reads {form.time.few}",
                      context.directive("walltime", form.time.hours.format(hours)),
                      advice="" if find_hours(comment) == hours else f"only if {hours} hours are meant")
    elif walltime_s is not None and 0 < walltime_s < MIN_WALLTIME_S:
        yield warning(line, f"a walltime of {count(walltime_s, 'second')}",
                      "importing torch from a shared file system alone can take minutes")


def find_hours(text: str) -> str:
    """Return the number of hours that a text tells in words, empty for none."""
    match = LONG_TIME.search(text)
    return str(int(match[1]) * (24 if match[2][0] in "dD" else 1)) if match else ""


@rule("memory")
def check_memory(context: Context) -> Iterator[Finding]:
    """Look for a size without a unit, and for less memory than torch needs."""
    options, request = context.script.options, context.script.request
    text, line = options.get("mem", ""), context.option_line("mem")
    match = re.fullmatch(r"([0-9]{1,7})([MG]?)[Bb]?", text, re.IGNORECASE)
    ranks = max([step.processes_per_node or 0 for step in context.steps], default=0)
    if match is None or not int(match[1]) or not any(name in options for name in GPU_OPTIONS):
        return
    size_mb = int(match[1]) * (1024 if match[2].upper() == "G" else 1)
    if not match[2] and size_mb < 1024:
        yield error(line, f"--mem={text} is {text} MB", "a size without a unit is in MB; torch alone needs more",
                    context.directive("mem", f"{text}G"), advice="only if GB are meant")
    elif ranks and request.gpus_per_node and size_mb / ranks < MIN_MB_PER_RANK:
        yield warning(line, f"{size_mb / ranks / 1024:.1f} GB of memory for each rank",
                      "--mem is the memory of a node, which its ranks share; torch with CUDA needs about 2 GB in each "
                      "rank, without data", context.directive("mem", f"{ranks * 16}G"),
                      advice="16 GB for each rank are an example")


@rule("log-folder")
def check_log_folder(context: Context) -> Iterator[Finding]:
    """Look at the folders of the output: they must exist, and be the same on all nodes."""
    script, form = context.script, context.script.form
    for name in ("output", "error") if form else ():
        path = script.options.get(name, "")
        folder, line = os.path.dirname(path), context.option_line(name)
        if not folder or "$" in path or (re.search(r"%|\{\{|:", folder) and not NODE_FOLDERS.match(path)):
            continue
        if NODE_FOLDERS.match(path):
            own = form.output_name if form else ""
            yield warning(line, f"--{name}={path} is a folder of the node",
                          "only the first node has the file, and it may be deleted with the job",
                          context.directive(name, f"{own}.{name[:3]}") if own else "",
                          advice="" if own else "write it to a folder that all nodes have")
        elif not context.host.is_folder(os.path.join(script.options.get("chdir", ""), folder)):
            yield error(line, f"no such folder: {folder}",
                        "the job fails, or runs without output; a mkdir in the script comes too late",
                        advice=f"before you submit the job: mkdir -p {folder}")
            break
    for step in context.steps:
        folder = os.path.dirname(step.options.get("output", "")) if step.launch.launcher else ""
        if folder and "output" in step.launch.options and not re.search(r"[%$]", folder) and not context.is_here(
                step.launch.folder, folder):
            yield error(step.launch.line, f"no such folder: {folder}",
                        f"{step.launch.launcher} cannot write the output of the tasks", f"mkdir -p {folder}")
        logs = find_option(step.launch.program_options, "log-dir") or ""
        if logs and NODE_FOLDERS.match(logs):
            yield warning(step.launch.line, f"--log-dir {logs} is a folder of each node",
                          "you cannot read the logs of other nodes, and they may be deleted with the job",
                          "--log-dir=logs")


@rule("array-values")
def check_array_values(context: Context) -> Iterator[Finding]:
    """Compare the numbers of an array's jobs with the arrays of the script from which each job takes an element."""
    form, text = context.script.form, context.script.options.get("array", "")
    numbers: list[int] = []
    if form is None:
        return
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?(?::([1-9][0-9]{0,6}))?", part.strip())
        if match is None:
            return
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))[:10_000]
    for element in context.script.selections if numbers else ():
        first, end = -element.offset, element.length - element.offset
        late = [number for number in numbers if number >= end]
        if late:
            which = f"{form.array_numbers[0]}={late[0]}" + f" to {late[-1]}" * (len(late) > 1)
            yield error(element.line,
                        f"{element.text} is empty for {which}: {element.name} has {element.length} values",
                        "the first value has the number 0; a job without a value waits in the queue, and fails",
                        context.directive("array", f"{max(first, 0)}-{end - 1}"))
        elif min(numbers) >= first and len(numbers) < element.length:
            yield note(element.line,
                       f"{element.name} has {element.length} values, the array has {len(numbers)} jobs",
                       "no job takes the other values", context.directive("array", f"{max(first, 0)}-{end - 1}"),
                       advice="only if all values are meant")

