"""Converts a job script that starts torchrun, accelerate or one Python per rank into one that starts mpiddp.

What cannot be decided from the script stands in a comment of the new one, `# check: …`.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import takewhile

from tree_sitter import Node

from ..discovery.script import LOCAL_RANK_OPTION
from .batch_script import BatchScript, Launch, Program, Request, Scheduler
from .conversion_directives import (
    CHECK,
    convert_directives,
    count_ranks_per_node,
    insert_check,
    read_torch_options,
)
from .directives import read_number, slurm_options
from .launches import WRAPPERS, read_launcher_options
from .shell import Command, QuoteError, Word, find_errors, iterate_nodes, parse, read_text
from .statements import (
    HARMLESS,
    Span,
    Statement,
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
from .words import break_lines, format_word, format_words, read_tokens

ReadFile = Callable[[str], "str | None"]
STARTED = (Program.TORCHRUN, Program.TORCH_LAUNCH, Program.ACCELERATE)
# Options that srun does not need, or that the new line has with other values.
REPLACED = frozenset((
    "mpi", "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "gpus-per-task", "gpu-bind",
    "cpu-bind",
))
SIZES = ("nodes", "ntasks", "ntasks-per-node")
SET_BY_MPIDDP = frozenset((
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
    "OMP_NUM_THREADS",
))
# What accelerate launch sets for its ranks, by its option.
ACCELERATE_VARIABLES = {
    "mixed-precision": "ACCELERATE_MIXED_PRECISION",
    "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
ACCELERATE_PLUGINS = re.compile(r"(use-)?(fsdp|deepspeed|megatron-lm|zero|offload|parallelism|fp8|dynamo)\b")
TASK_VARIABLES = re.compile(r"\bSLURM_(NODEID|PROCID|LOCALID)\b")
# Enroot passes only the variables that its options name; PMIx communicates with Slurm through files in /tmp.
ENROOT_START = """'options=(--mount /tmp)
    [ -z "$PMIX_SERVER_TMPDIR" ] || options+=(--mount "$PMIX_SERVER_TMPDIR")
    for name in $(compgen -e | grep -E -v "$OWN"); do options+=(--env "$name"); done
    exec enroot start "${options[@]}" "$@"'"""
RUN_ONCE = "this line started the training on one node; now it starts it on all: run it once"
BY_SSH = re.compile(
    r"\b(ssh|pdsh|clush|pbsdsh|pbs_tmrsh|blaunch)\b.*\b(torchrun|accelerate|torch\.distributed|\w+\.sh)\b.*")
STARTER_ANYWHERE = re.compile(
    r"^[^#\n]*\b(torchrun|accelerate\s+launch|torch\.distributed\.(?:run|launch))\b", re.MULTILINE)
STARTER = re.compile(r"^(?!\s*(?:echo|printf|(?:export\s+|readonly\s+)?\w+\+?=[\"'(]))"
                     + STARTER_ANYWHERE.pattern.removeprefix("^"), re.MULTILINE)
BACKGROUND = re.compile(r"[ \t]*&(?!&)[ \t]*")
# Wrappers that stand before srun: it would start them once for each rank.
LEADING = ("exec", "command", "builtin", "nohup", "setsid", "time", "timeout", "nice")
# What a second script may do before the training so that the job script can do it: its tasks inherit it.
MOVABLE = HARMLESS | {"module", "ml", "source", ".", "conda", "mamba", "micromamba", "unset", "ulimit", "mkdir", "cd"}
PARAMETER = re.compile(r"\$\{?[1-9@*#]")
OF_ONE_TASK = re.compile(r"\$0|\$!|\$\{[1-9@*]\W|SLURMD_NODENAME|hostname")
OF_TASKS = re.compile(r"\bSLURM_(NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE|CPUS_PER_TASK)\b")
RENDEZVOUS = re.compile(r"[a-z_\d]+|.*(MASTER|HEAD|MAIN_|RDZV|ENDPOINT|NODE|NPROC|ADDR|PORT|RANK|WORLD|HOST|IP\b).*")
CHANGED_COUNTS = "{} is of the new tasks, one for each rank"


@dataclass
class Replacement:
    """What takes the place of a launch: lines before it, variables, options, and what the user has to check."""

    setup: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)


class ConversionError(ValueError):
    """A script could not be converted; the text says why."""


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


def find_convertible(script: BatchScript) -> list[Launch]:
    """Return the launches whose place mpiddp can take; a Python by srun or mpirun only if nothing else trains.

    A step with one process on a node, beside trainings with more, is none.
    """
    launches = [launch for launch in script.launches if launch.script_words and "<<" not in launch.text]
    chosen = [launch for launch in launches if launch.program in STARTED]
    if not chosen and all(launch.program is not Program.MPIDDP for launch in launches):
        chosen = [launch for launch in launches if launch.program is Program.PYTHON and launch.launcher
                 and not launch.inner and launch.launcher_options.get("ntasks") != "1"]
    most = max((count_processes(script, launch) for launch in chosen), default=0)
    return [launch for launch in chosen if most < 2 or count_processes(script, launch) != 1]


def count_processes(script: BatchScript, launch: Launch) -> int:
    """Return the processes of a launch on a node, 0 if their number is unknown."""
    if launch.program is not Program.PYTHON:
        return count_ranks_per_node(script, launch) or 0
    options, nodes = launch.launcher_options, script.request.nodes
    total, per_node = (read_number(options.get(name, "")) for name in ("ntasks", "ntasks-per-node"))
    return per_node or (total // nodes if total and nodes else script.request.tasks_per_node or 0)


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


def starts_one_node(script: BatchScript, launch: Launch) -> bool:
    """Return whether a launch starts one node's part of a training: it names the node, or is in a loop over them."""
    options, rank = read_torch_options(launch), read_node_rank(launch)
    nodes = options.get("nnodes", options.get("num-machines", "1"))
    is_given = not TASK_VARIABLES.search(rank) and (not launch.followed or rank in launch.early)
    return bool(rank) and is_given and nodes != "1" and script.request.nodes != 1 and (
        "nodelist" in launch.launcher_options or (launch.in_loop and "$" in rank))


def read_node_rank(launch: Launch) -> str:
    """Return the number of a node among those of a training as it is given, empty if it is not."""
    options = read_torch_options(launch)
    return options.get("node-rank", options.get("machine-rank", ""))


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


def is_same_training(launch: Launch, other: Launch) -> bool:
    """Return whether two launches start the same script in the same way."""
    return (launch.script_words, launch.assignments) == (other.script_words, other.assignments)


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


def find_inner_command(launch: Launch) -> Command | None:
    """Return the command of a script or text that a launch starts, in which the program stands."""
    length = len(launch.program_words)
    return next((command for command in launch.inner_commands
                 if tuple(command.words[len(command.words) - length:]) == launch.program_words), None)


def keep_inner_setup(script: BatchScript, launch: Launch, inner: Command, new: Replacement) -> None:
    """Keep the statements of a second script that set up the environment; others are told, and not run any more."""
    try:
        statements = [part for statement in read_statements(launch.inner_text) if not statement.is_comment
                      for part in split_list(statement, inner.text)]
    except QuoteError:
        new.checks.append(f"{launch.followed} also did what could not be read")
        return
    training = next((each for each in statements if each.contains(inner.text)), None)
    words = format_words(launch.script_words, [])
    exported = {name for each in statements for name in each.exported if not RENDEZVOUS.fullmatch(name)}
    names = SET_BY_MPIDDP | references(inner.text) - references(words) - exported
    unneeded = find_unneeded([each for each in statements if each is not training], names, words)
    ours = {statement.text for statement in read_statements(script.text)}
    is_later = False
    for statement in statements:
        if statement is training:
            is_later = True
            waits = any(each.text == "wait" for each in statements)
            if statement.kind != "command" or (statement.is_background and not waits):
                new.checks += [f"each task also ran the rest of this: {line}" for line in statement.text.splitlines()]
        elif statement in unneeded or statement.text in ("env", "set -x", "wait"):
            continue
        elif is_later or not is_movable(statement):
            new.checks += [f"each task also ran this, {'behind' if is_later else 'before'} the training: {line}"
                           for line in statement.text.splitlines()]
        elif statement.text not in ours:
            add_setup(launch, statement, new)


def split_list(statement: Statement, last: str) -> list[Statement]:
    """Return the commands of `A && B && last`, or the statement itself if it is none."""
    if statement.kind != "list" or "||" in statement.text or not statement.text.endswith(last):
        return [statement]
    return read_statements(re.sub(r"\s*&&\s*", "\n", statement.text))


def is_movable(statement: Statement) -> bool:
    """Return whether the job script can run a statement in place of each of its tasks."""
    commands = statement.commands - ({"exit"} if re.search(r"\|\| *exit\b", statement.text) else set())
    return (commands <= MOVABLE and not statement.writes and not statement.is_background
            and statement.kind != "function_definition" and not OF_ONE_TASK.search(statement.text)
            and not (TASK_VARIABLES.search(statement.text) and statement.kind != "declaration_command")
            and not ("'" in statement.text and PARAMETER.search(statement.text)))


def add_setup(launch: Launch, statement: Statement, new: Replacement) -> None:
    """Add a statement of a second script to the lines before the launch, with the arguments that the script had."""
    tokens = read_tokens(launch.text)
    is_file = launch.followed != "text" and launch.followed in tokens
    arguments = tokens[tokens.index(launch.followed) + 1:] if is_file else []
    kept = remove_exports(statement.text, SET_BY_MPIDDP)
    if TASK_VARIABLES.search(kept):
        new.checks.append(f"this had a value of its own for each node or task: {kept}")
        kept = "" if "VISIBLE_DEVICES" in kept else TASK_VARIABLES.sub("SLURM_JOB_ID", kept)
    kept = re.sub(r'"?\$\{?([1-9])\b\}?"?',
                  lambda match: "".join(arguments[int(match[1]) - 1:int(match[1])]) or '""', kept)
    if kept and launch.container and (statement.kind != "declaration_command" or launch.container == "enroot"):
        new.checks.append(f"this ran in the container, before the training: {kept.splitlines()[0]}")
    elif kept:
        new.setup += kept.split("\n")
        new.checks += [f"this holds for the rest of the script, too: {kept}"] * ("cd" in statement.commands)


def find_command(script: BatchScript, launch: Launch) -> Command:
    """Return the command that a launch is."""
    return next(command for command in script.commands if (command.line, command.text) == (launch.line, launch.text))


def read_options(script: BatchScript, launch: Launch, new: Replacement, read_file: ReadFile) -> None:
    """Find the options of mpiddp, and the variables, that stand for the recipe's own options."""
    options = read_torch_options(launch)
    if launch.program in STARTED and launch.script_words[0] in launch.unknown:
        new.checks.append(f"{launch.script_words[0]} may begin with options of {launch.program.value}: remove these")
    output = launch.launcher_options.get("output", "")
    if "log-dir" in options or re.search(r"%[tnN]", output):
        written = next((token.text for token in launch.tokens if re.search(r"%[tnN]", token.text)), output)
        folder = os.path.dirname(re.sub(r"^-+\w+=|[\"']", "", written).partition("%")[0]) or "logs"
        new.options += ["--log-dir", format_value(options.get("log-dir") or folder)]
        new.checks += ["each rank's output goes to a file in the folder of --log-dir"] * ("log-dir" not in options)
    if options.get("local-ranks-filter"):
        new.options += ["--show", ",".join(f"local-{rank}" for rank in options["local-ranks-filter"].split(","))]
    if "virtual-local-rank" in options:
        new.options.append("--virtual-local-rank")
    if (read_number(options.get("max-restarts", "0")) or 0) > 0:
        new.checks.append("--max-restarts: mpiddp.supervise restarts a job; batch/supervise.sh has its lines")
    if launch.program is not Program.PYTHON and "B:" in script.options.get("signal", "") and not launch.is_background:
        new.checks.append("the shell's trap runs only when srun has ended: batch/requeue.sh stops a training in time")
    if launch.program in STARTED and (match := BY_SSH.search(script.text.replace("\\\n", " "))):
        starts = "may also start" if match[2].endswith(".sh") else "also starts"
        new.checks.append(f"{match[1]} {starts} a part of the training: leave that out")
    if "no-python" in options:
        new.checks.append("--no-python: mpiddp starts a Python script, not another program")
    if launch.program is Program.TORCH_LAUNCH and "use-env" not in options:
        add_local_rank(launch, new, read_file)
    if launch.program is Program.ACCELERATE:
        read_accelerate_options(options, new)
        if re.search(r"\b(CONFIG|settings)\b", script.text):  # names of the lines that are added
            new.setup = [re.sub(r"(^|\$)(CONFIG|settings)\b", r"\1accelerate_\2", line) for line in new.setup]


def add_local_rank(launch: Launch, new: Replacement, read_file: ReadFile) -> None:
    """Add --pass-local-rank if the script has an option for its local rank, as torch.distributed.launch expects."""
    name = launch.script_words[0] if launch.script_words and not launch.is_module else ""
    text = read_file(os.path.join(launch.folder or "", name)) if name else None
    if text is None:
        new.checks.append(f"if {name or 'the module'} parses --local_rank, add --pass-local-rank=--local_rank")
    elif "LOCAL_RANK" not in text and (option := LOCAL_RANK_OPTION.search(text.encode())):
        spelling = option[1].decode()
        new.options.append("--pass-local-rank" + ("" if spelling == "--local-rank" else f"={spelling}"))


def read_accelerate_options(options: dict[str, str], new: Replacement) -> None:
    """Set what accelerate launch would set for its ranks, from its options and its configuration."""
    for name, variable in ACCELERATE_VARIABLES.items():
        if name in options:
            new.variables.append(f"{variable}={format_value(options[name])}")
    if "cpu" in options:
        new.variables.append("ACCELERATE_USE_CPU=true")
    if "config-file" in options:
        new.setup += [f"CONFIG={format_value(options['config-file'])}", *read_lines("accelerate_settings.sh")]
    else:
        new.checks.append("accelerate launch also reads ~/.cache/huggingface/accelerate/default_config.yaml, as "
                          "batch/accelerate.sh does")
    if plugins := [f"--{name}" for name in options if ACCELERATE_PLUGINS.match(name)]:
        new.checks.append(f"{', '.join(plugins)}: write this into a configuration with accelerate config, and take the "
                          "lines about CONFIG from batch/accelerate.sh")


def read_lines(name: str) -> list[str]:
    """Return the lines of a file of shell code beside this module, which the scripts in batch/ have, too."""
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read().splitlines()


def format_value(text: str) -> str:
    """Return the value of an option or a variable as it is written, or else as the shell reads it."""
    token = getattr(text, "token", None)
    return token.text if token is not None else format_word(Word(text, [text] if "$" in text else []))


def format_command(script: BatchScript, launch: Launch, new: Replacement) -> str:
    """Return the line that starts mpiddp."""
    program = getattr(launch.program_words[0], "token", None)
    if program is not None and PARAMETER.search(program.text) and not launch.followed:
        raise ConversionError(f"what line {launch.line} starts is in the arguments of its function")
    is_here = not launch.followed  # where variables, and a function's parameters, are those of the new line
    script_words = format_words(launch.script_words, launch.tokens, is_here)
    if names := find_fixed(script, launch):
        new.checks.append(f"the arguments are written with the values of {', '.join(names)}")
    first = getattr(launch.script_words[0], "token", None)
    if first is not None and first.count > 1 and "$" in first.text and first.text not in script_words:
        new.checks.append(f"{first.text} is taken apart, with the values that it has here")
    program = " ".join([*format_python(launch), "-m", "mpiddp", *new.options, *(["-m"] if launch.is_module else []),
                        script_words])
    if launch.followed and TASK_VARIABLES.search(script_words):  # which the job script's shell must not expand
        new.checks.append("the arguments name a node or a task: each rank has its own now")
        program = f"bash -c {shlex.quote(program)}"
    leading, wrappers = split_wrappers(launch)
    if is_here:  # a variable such as `$DRY`, which is empty unless the submission sets it
        leading = [*(token.text for token in takewhile(lambda token: not token.count, launch.tokens)), *leading]
    assignments = [f"{name}={format_word(Word(value))}" for name, value in launch.assignments.items()
                   if name not in SET_BY_MPIDDP]
    begin = [*new.variables, *assignments, *leading, *format_launcher(script, launch, new)]
    if wrappers[:2] == ["enroot", "start"]:
        new.setup += read_lines("enroot_variables.sh")
        begin += ["bash", "-c", ENROOT_START, "enroot", format_words(wrappers[2:], launch.tokens, is_here)]
    else:
        if os.path.basename(wrappers[0] if wrappers else "") == "enroot":
            new.checks.append("enroot passes the job's variables only with --env: batch/enroot.sh has the lines")
        begin += [format_words(wrappers, launch.tokens, is_here)] if wrappers else []
    redirects = [read_text(node) for node in parse(launch.text).named_children[0].named_children
                 if node.type in ("file_redirect", "herestring_redirect")]
    return break_lines([" ".join(begin), " ".join([program, *redirects])])


def find_fixed(script: BatchScript, launch: Launch) -> list[str]:
    """Return the variables whose values stand in the text in double quotes of which a shell starts the launch."""
    texts = [word.token.text for word in find_command(script, launch).words if launch.followed == "text"
             and word.token is not None and " " in word and word.token.text.startswith('"')]
    names = frozenset[str]().union(*(references(text.replace("\\$", "")) for text in texts))
    return [name for name in sorted(names) if not re.match("SLURM|RANK|LOCAL_RANK|MASTER|HOME$|USER$|PWD$", name)
            and not any(name in part for word in launch.script_words for part in getattr(word, "unknown", ()))]


def split_wrappers(launch: Launch) -> tuple[list[str], list[str]]:
    """Return the wrappers before the launcher, and those of each rank, without the shell that is not needed."""
    leading, rest = list(launch.wrapper_words[:launch.leading]), list(launch.wrapper_words[launch.leading:])
    while not launch.launcher and rest and rest[0] in LEADING:
        end = next((position for position, word in enumerate(rest) if position and word in WRAPPERS), len(rest))
        leading, rest = [*leading, *rest[:end]], rest[end:]
    rest = [word for word in rest if not is_shell_word(word, launch)]
    return leading, rest[1:] if rest and rest[0] in ("exec", "command") else rest


def is_shell_word(word: str, launch: Launch) -> bool:
    """Return whether a word only started the shell in which the program was found."""
    return bool(launch.followed) and os.path.basename(word) in ("bash", "sh", "-c", launch.followed)


def format_python(launch: Launch) -> list[str]:
    """Return the words that start Python, with its own options."""
    words = list(launch.program_words)
    name = os.path.basename(words[0])
    if re.fullmatch(r"python[\d.]*", name):
        end = words.index("-m") if launch.program in STARTED else words.index(launch.script_words[0])
        return [format_word(Word(word)) for word in words[:end] if word != "-m"]
    folder = os.path.dirname(words[0])
    return [os.path.join(folder, "python")] if folder else ["python"]


def format_launcher(script: BatchScript, launch: Launch, new: Replacement) -> list[str]:
    """Return the launcher of the new line, with those of its options that still make sense."""
    if launch.launcher in ("", "srun") and script.scheduler in (Scheduler.SLURM, Scheduler.NONE):
        words = ["srun", *choose_interface(script, new)]
        if "cpus-per-task" in script.options or "cpus-per-task" in launch.launcher_options:
            words.append("--cpus-per-task=$SLURM_CPUS_PER_TASK")
        return [*words, *(f"--{name}={format_value(value)}" if value else f"--{name}"
                          for name, value in keep_options(script, launch).items())]
    if launch.launcher and launch.program is Program.PYTHON:
        return [format_word(word) for word in drop_variables(launcher_words(script, launch))]
    start, example = {"flux": ("flux run", "flux.sh"), "jsrun": ("jsrun", "jsrun.sh")}.get(
        launch.launcher, (launch.launcher or "mpirun", "pbs.sh or pals.sh"))
    new.checks.append(f"{start} with one rank for each GPU, as in batch/{example}")
    return [start]


def keep_options(script: BatchScript, launch: Launch) -> dict[str, str]:
    """Return the options of srun that the new line has, too; some nodes of the job keep their number, and get ranks."""
    options, ranks = launch.launcher_options, count_ranks_per_node(script, launch)
    kept = {name: value for name, value in options.items() if name not in REPLACED and not re.search("%[tnN]", value)}
    if launch.program is Program.PYTHON:
        return kept | {name: options[name] for name in SIZES if name in options}
    if starts_one_node(script, launch):
        kept.pop("nodelist", None)
        options = {}
    given = read_torch_options(launch)
    own = "1" if not launch.launcher and ("standalone" in given or "nnodes" not in given) else given.get("nnodes", "")
    nodes = read_number(options.get("nodes") or own) or script.request.nodes
    if nodes and script.request.nodes:
        nodes = min(nodes, script.request.nodes)  # torchrun's number is that of tasks if each task starts one
    most = max(count_ranks_per_node(script, each) or 0 for each in find_convertible(script))
    if nodes and ranks and (script.request.nodes, most) not in ((None, ranks), (nodes, ranks)):
        kept |= {"nodes": str(nodes), "ntasks": str(nodes * ranks)}
    return kept


def choose_interface(script: BatchScript, new: Replacement) -> list[str]:
    """Return srun's option for the MPI whose module the script loads; it is Open MPI's if there is none."""
    loaded = " ".join(word for command in script.commands if command.words[0] in ("module", "ml")
                      for word in command.words[1:]).lower()
    if re.search(r"cray-mpich|prgenv-|cray-python", loaded):
        return []
    if re.search(r"\b(intel-?mpi|impi|intel-oneapi-mpi|mpich|mvapich2?)\b", loaded):
        return ["--mpi=pmi2"]
    if not re.search(r"open-?mpi|hpcx|foss", loaded):
        new.checks.append("--mpi=pmix is for Open MPI; --mpi=pmi2 for MPICH and Intel MPI, none for Cray MPICH")
    return ["--mpi=pmix"]


def launcher_words(script: BatchScript, launch: Launch) -> list[Word]:
    """Return the launcher and its options as they are written, with known variables expanded."""
    words = find_command(script, launch).words[launch.leading:]
    return list(words[:read_launcher_options(launch.launcher, words)[1]])


def drop_variables(words: list[Word]) -> list[Word]:
    """Return mpirun's words without `-x MASTER_ADDR` and the like."""
    kept: list[Word] = []
    for word in words:
        if kept and kept[-1] in ("-x", "-genv", "-env") and word.partition("=")[0] in SET_BY_MPIDDP:
            kept.pop()
        else:
            kept.append(word)
    return kept


def remove_unneeded(
    text: str, script: BatchScript, edits: Sequence[tuple[int, int, str]], launches: Sequence[Launch]
) -> str:
    """Return a text without the statements that served only what the launches no longer need."""
    old = "".join(script.text[begin:end] for begin, end, _ in edits) + "".join(
        command.text for launch in launches for command in launch.inner_commands)
    new = "".join(new for *_, new in edits)
    statements = read_statements(text)
    # Python may read what is exported, unless its name tells that it is about the meeting of the ranks.
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
        return CHECK + "the container has to be created on each node: batch/enroot.sh has the line\n" + text
    name, image = (f'"{part}"' if part.startswith("$") else part for part in match.groups())
    return (f"srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 \\\n"
            f"    sh -c 'enroot list | grep -qx \"$0\" || enroot create --name \"$0\" \"$1\"' {name} {image} || exit 1")
