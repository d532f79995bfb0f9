"""Converts a job script that starts torchrun, accelerate or one Python per rank into one that starts mpiddp.

What cannot be decided from the script stands in a comment of the new one, `# check: …`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from io import StringIO

from tree_sitter import Node

from .batch_script import BatchScript, Launch, Program, Request, Scheduler
from .conversion_command import (
    BY_SSH,
    RENDEZVOUS,
    SET_BY_MPIDDP,
    ConversionError,
    ReadFile,
    Replacement,
    format_command,
    read_options,
)
from .conversion_directives import CHECK, convert_directives, insert_check
from .conversion_inner import find_inner_command, keep_inner_setup
from .conversion_launches import (
    count_ranks_per_node,
    find_convertible,
    is_same_training,
    read_node_rank,
    starts_one_node,
)
from .directives import slurm_options
from .shell import QuoteError, find_errors, iterate_nodes, parse, read_text
from .statements import (
    Span,
    find_comments,
    find_line,
    find_places,
    find_removals,
    find_span,
    find_unneeded,
    read_statements,
    references,
    remove_empty_lines,
    remove_exports,
    replace_spans,
)
from .words import read_tokens

RUN_ONCE = "this line started the training on one node; now it starts it on all: run it once"
STARTER_ANYWHERE = re.compile(
    r"^[^#\n]*\b(torchrun|accelerate\s+launch|torch\.distributed\.(?:run|launch))\b", re.MULTILINE)
STARTER = re.compile(r"^(?!\s*(?:echo|printf|(?:export\s+|readonly\s+)?\w+\+?=[\"'(]))"
                     + STARTER_ANYWHERE.pattern.removeprefix("^"), re.MULTILINE)
BACKGROUND = re.compile(r"[ \t]*&(?!&)[ \t]*")
OF_TASKS = re.compile(r"\bSLURM_(NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE|CPUS_PER_TASK)\b")
CHANGED_COUNTS = "{} is of the new tasks, one for each rank"


def convert(script: BatchScript, read_file: ReadFile) -> str:
    """Return the text of the job script that starts mpiddp; the same text if there is nothing to convert.

    `read_file` returns the text of a file that the script names, None if it cannot be read. Raise ConversionError if
    the shell could not read the new text.
    """
    launches = [*{(launch.line, launch.text): launch for launch in find_convertible(script)}.values()]
    if not launches:
        return script.text
    removed = [launch for launch in launches if is_part(script, launch, launches)]
    trainings = [launch for launch in launches if launch not in removed]
    edits = [edit for launch in trainings for edit in replace_launch(script, launch, trainings, removed, read_file)]
    edits += [edit for launch in removed for edit in remove_launch(script, launch)]
    text = replace_spans(script.text, edits)
    check_syntax(script, text)
    text = wait_in_foreground(text)
    text = remove_unneeded(text, script, edits, launches)
    main = max(trainings, key=lambda launch: count_ranks_per_node(script, launch) or 0)
    ranks = count_ranks_per_node(script, main)
    lines = text.split("\n")
    if script.scheduler is Scheduler.SLURM and ranks not in (None, script.request.tasks_per_node):
        lines = keep_tasks(text, script, launches)
    lines = convert_directives(script, lines, ranks, is_plain=main.program is Program.PYTHON)
    if starter := find_starter(BY_SSH.sub("", "\n".join(lines))):
        lines = insert_check(lines, f"{starter} still starts something, which is not converted")
    text = "\n".join(line for number, line in enumerate(lines)
                     if CHECK not in line or RUN_ONCE in line or line not in lines[:number])
    check_syntax(script, text)
    return text


def find_starter(text: str, has_values: bool = False) -> str:
    """Return the first word of torchrun or a relative in a script, or in values of it, too; empty if there is none."""
    match = (STARTER_ANYWHERE if has_values else STARTER).search(text)
    return match[1] if match else ""


def check_syntax(script: BatchScript, text: str) -> None:
    """Raise ConversionError for a new text that the shell could not read."""
    try:
        errors = [*find_errors(parse(text))] if not parse(script.text).has_error else []
    except QuoteError as error:
        raise ConversionError(f"line {error.line} of the new script would have an open quote") from None
    if errors:
        raise ConversionError(f"line {errors[0].start_point.row + 1} of the new script would be no shell code")


def wait_in_foreground(text: str) -> str:
    """Return the text in which the only command in the background, a training, is waited for where it stands.

    `wait` has to be the next command, and nothing may ask for the process number or be done at a signal meanwhile.
    """
    nodes = [*iterate_nodes(parse(text))]
    signs = [node for node in nodes if node.type == "&"]
    if len(signs) != 1 or find_trap(nodes) is not None or "$!" in text:
        return text
    training, following = signs[0].prev_sibling, signs[0].next_named_sibling
    while following is not None and following.type == "comment":
        following = following.next_named_sibling
    if training is None or following is None or read_text(following) != "wait" or "mpiddp" not in read_text(training):
        return text
    data = text.encode()
    ends = [(len(data[:node.start_byte].decode().rstrip()), len(data[:node.end_byte].decode()))
            for node in (signs[0], following)]
    return replace_spans(text, [(begin, end, "") for begin, end in ends])


def keep_tasks(text: str, script: BatchScript, launches: Sequence[Launch]) -> list[str]:
    """Return the lines in which each srun that starts no training has the number of tasks that it had by default.

    What reads the number of tasks in another way, or starts srun in another way, is to be checked.
    """
    data, edits, checks = text.encode(), [], [
        CHANGED_COUNTS.format(f"SLURM_{match[1]}") for match in OF_TASKS.finditer(
            text.replace("--cpus-per-task=$SLURM_CPUS_PER_TASK", ""))]
    for node in iterate_nodes(parse(text)):
        name = node.child_by_field_name("name") if node.type == "command" else None
        tokens = [] if name is None else read_tokens(read_text(node))
        options = dict(slurm_options(tokens[1:])[0])
        if name is None or read_text(name) != "srun" or "-m mpiddp " in read_text(node):
            continue
        if {"ntasks", "ntasks-per-node"} & {*options}:
            continue
        place = len(data[:name.end_byte].decode())
        edits.append((place, place, f" --ntasks={count_tasks(script.request, options.get('nodes', '$SLURM_NNODES'))}"))
    converted = [launch.text for launch in launches]
    for command in script.commands:
        is_other = not re.match("srun|echo|printf", command.text) and command.text not in converted
        if "srun" in command.words and is_other and (
                not {"ntasks", "ntasks-per-node"} & {*dict(slurm_options(
                    command.words[command.words.index("srun") + 1:])[0])}):
            checks.append(f"this has more tasks now: {command.text.splitlines()[0]}")
    lines = replace_spans(text, edits).split("\n")
    for check in reversed(checks):
        lines = insert_check(lines, check)
    return lines


def count_tasks(request: Request, nodes: str) -> str:
    """Return the number of tasks on some nodes, as it is written in a script."""
    per_node = request.tasks_per_node
    if per_node is None:
        return str(request.tasks or 1)
    return nodes if per_node == 1 else f"$(({nodes} * {per_node}))"


def format_diff(script: BatchScript, text: str, title: str = "with mpiddp") -> str:
    """Return the changes to a script as a unified diff, empty if there are none."""
    name = os.path.basename(script.path)
    before, after = (StringIO(part).readlines() for part in (script.text, text))
    lines = difflib.unified_diff(before, after, name, name, tofiledate=title)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def replace_launch(
    script: BatchScript, launch: Launch, trainings: Sequence[Launch], removed: Sequence[Launch], read_file: ReadFile
) -> list[tuple[int, int, str]]:
    """Return the places of a launch in the text with the command that takes its place, and the lines before it.

    `removed` are the launches of other nodes' parts, which are taken out.
    """
    return [edit for begin, end in find_places(script.text, launch.line, launch.text)
            for edit in replace_place(script, launch, trainings, removed, read_file, begin, end)]


def replace_place(
    script: BatchScript, launch: Launch, trainings: Sequence[Launch], removed: Sequence[Launch], read_file: ReadFile,
    begin: int, end: int,
) -> list[tuple[int, int, str]]:
    """Return a launch's place in the text with the command that takes it, and the lines before that."""
    new = Replacement()
    inner = find_inner_command(launch)
    if inner is not None:
        keep_inner_setup(script, launch, inner, new)
    read_options(script, launch, new, read_file)
    command = format_command(script, launch, new)
    span = find_node_span(script, launch)
    if starts_one_node(script, launch) and (
            span is None or not (span.is_loop or any(is_same_training(launch, part) for part in removed))):
        new.checks.append(RUN_ONCE)
    if launch.is_background and len(trainings) > 1 and "CUDA_VISIBLE_DEVICES" in launch.assignments:
        new.checks.append("srun gives the steps of a node their GPUs and cores: --exact, --gpus-per-node, and so on")
    if span is not None and span.is_loop:
        begin, end = span.begin, span.end
        rest = references(script.text[:begin] + script.text[end:])
        numbers = [text for text in span.others if launch.is_background and "$!" in text
                   and re.split(r"\W", text)[0] in rest]  # which the script waits for later
        new.checks += [check for check, text in zip(describe_loop(span), span.others, strict=True)
                       if text not in numbers]
        command += "".join(f" & {text}" for text in numbers[:1])
        new.checks += [f"${name} was set by the loop over the nodes"
                       for name in sorted(span.assigned & references(command))]
        if launch.is_background and not numbers and BACKGROUND.match(script.text, end) is None and not (
                len(trainings) == 1 and is_alone(script, begin, end)):
            command += " &"
    if reads_input(script.text, begin) and not re.search(r"<(?!\()", command):
        command += " < /dev/null"
    line_begin, indent = find_line(script.text, begin)
    is_first = not script.text[line_begin:begin].strip() and not re.search(
        r"(&&|\|)[ \t]*$", script.text[:line_begin].rstrip("\n"))
    if not is_first and (new.setup or new.checks):
        line_begin, indent = find_outermost(script, begin, new)
    lines = [*(f"{indent}{CHECK}{check}" for check in new.checks)]
    lines += new.setup if any("<<" in line for line in new.setup) else [indent + line for line in new.setup]
    return [(begin, end, command), (line_begin, line_begin, "".join(f"{line}\n" for line in lines))]


def is_alone(script: BatchScript, begin: int, end: int) -> bool:
    """Return whether nothing outside a part of the script runs in the background, or at a signal."""
    rest = script.text[:begin] + " " * (end - begin) + script.text[end:]
    nodes = [*iterate_nodes(parse(rest))]
    return "$!" not in rest and not any(node.type == "&" for node in nodes) and find_trap(nodes) is None


def find_trap(nodes: Sequence[Node]) -> Node | None:
    """Return the first `trap` among nodes, None if there is none."""
    return next((node for node in nodes if node.type == "command" and read_text(node).startswith("trap ")), None)


def find_outermost(script: BatchScript, place: int, new: Replacement) -> tuple[int, str]:
    """Return where the line of the outermost statement around a place begins, and its indentation."""
    statement = next((each for each in read_statements(script.text) if each.begin <= place < each.end), None)
    if statement is None:  # in what the parser could not read
        return find_line(script.text, place)
    names = (statement.assigned | statement.counters) & references("\n".join(new.setup))
    new.checks += [f"${name} has its value only in the lines below" for name in sorted(names)]
    return find_line(script.text, statement.begin)


def reads_input(text: str, place: int) -> bool:
    """Return whether a place is in a loop that reads lines, `while read …`, of which srun would take all."""
    byte = len(text[:place].encode())
    return any(node.type == "while_statement" and node.start_byte <= byte < node.end_byte
               and re.match(r"while\s+(IFS=\S*\s+)?read\b", read_text(node)) for node in iterate_nodes(parse(text)))


def find_node_span(script: BatchScript, launch: Launch) -> Span | None:
    """Return the place of a launch of one node's part, or the loop around it; None if it cannot be taken out."""
    places = find_places(script.text, launch.line, launch.text)
    span = find_span(script.text, *places[0]) if len(places) == 1 and starts_one_node(script, launch) else None
    if span is None:
        return None
    lines = range(script.text.count("\n", 0, span.begin) + 1, script.text.count("\n", 0, span.end) + 2)
    inside = [each for each in find_convertible(script) if each.line in lines]
    return span if not span.is_loop or len(inside) == 1 else None


def is_part(script: BatchScript, launch: Launch, launches: Sequence[Launch]) -> bool:
    """Return whether a launch only starts a node's part of a training of which an earlier one starts another part.

    Launches that start a part a second time are several trainings, which are left to the user.
    """
    parts = [each for each in launches if starts_one_node(script, each) and is_same_training(each, launch)]
    return launch in parts[1:] and find_node_span(script, launch) is not None and (
        len({read_node_rank(each) for each in parts}) == len(parts))


def describe_loop(span: Span) -> list[str]:
    """Return what a loop over the nodes did besides starting the training."""
    return [f"the loop over the nodes also ran this: {text.splitlines()[0]}" for text in span.others]


def remove_launch(script: BatchScript, launch: Launch) -> list[tuple[int, int, str]]:
    """Return the place of a launch in the text, or of the loop around it, with nothing that takes its place."""
    span = find_node_span(script, launch)
    assert span is not None
    background = BACKGROUND.match(script.text, span.end)
    end = span.end if background is None else background.end()
    return [(span.begin, end, "\n".join(CHECK + check for check in describe_loop(span)))]


def remove_unneeded(
    text: str, script: BatchScript, edits: Sequence[tuple[int, int, str]], launches: Sequence[Launch]
) -> str:
    """Return a text without the statements that served only what the launches no longer need."""
    old = "".join(script.text[begin:end] for begin, end, _ in edits) + "".join(
        command.text for launch in launches for command in launch.inner_commands)
    new = "".join(new for *_, new in edits)
    statements = read_statements(text)
    exported = {name for statement in statements for name in statement.exported if not RENDEZVOUS.fullmatch(name)}
    unneeded = find_unneeded(statements, SET_BY_MPIDDP | (references(old) - references(new) - exported), "")
    waits = any(node.type == "&" for node in iterate_nodes(parse(text)))
    unneeded += [statement for statement in statements
                 if statement.text == "env" or (statement.text == "wait" and not waits)]
    kept = [statement for statement in statements if statement not in unneeded]
    unread = SET_BY_MPIDDP - frozenset[str]().union(*(references(statement.text) for statement in kept))
    removed, changes = [*unneeded, *find_comments(statements, unneeded, text)], {}
    for statement in kept:
        if statement.assigned & unread:
            changes[statement] = remove_exports(statement.text, unread)
        elif "enroot create" in statement.text and "srun" not in statement.commands:
            changes[statement] = create_containers(statement.text)
    removed += [statement for statement, part in changes.items() if not part]
    new_parts = [(statement.begin, statement.end, part) for statement, part in changes.items() if part]
    spans = find_removals(text, ((statement.begin, statement.end) for statement in removed))
    return remove_empty_lines(replace_spans(text, [*spans, *new_parts]), script.text)


def create_containers(text: str) -> str:
    """Return the lines that create an Enroot container on each node instead of on the first alone."""
    match = re.search(r"enroot create (?:-n|--name)[ =]?(\S+) (\S+)", text)
    if match is None:
        return CHECK + "the container has to be created on each node: mpiddp's batch/enroot.sh has the line\n" + text
    name, image = (f'"{part}"' if part.startswith("$") else part for part in match.groups())
    return (f"srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 \\\n"
            f"    sh -c 'enroot list | grep -qx \"$0\" || enroot create --name \"$0\" \"$1\"' {name} {image} || exit 1")
