"""Converts a job script that starts torchrun, accelerate or one Python per rank into one that starts mpiddp.

What cannot be decided from the script stands in a comment of the new one, `# check: …`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO

from ..discovery.script import LOCAL_RANK_OPTION
from .batch_script import BatchScript, Launch, Program, Request, Scheduler
from .conversion_directives import CHECK, convert_directives, count_ranks_per_node, read_torch_options
from .directives import read_number, slurm_options
from .shell import Command, QuoteError, Word, iterate_nodes, parse, read_text
from .statements import (
    Span,
    find_comments,
    find_line,
    find_place,
    find_span,
    find_unneeded,
    read_statements,
    references,
    remove_empty_lines,
    remove_exports,
    replace_spans,
)
from .words import as_word, break_lines, format_word, format_words, read_tokens

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
BY_SSH = re.compile(r"\b(ssh|pdsh|clush|pbsdsh)\b.*\b(torchrun|accelerate|torch\.distributed)")
BACKGROUND = re.compile(r"[ \t]*&(?!&)[ \t]*")
PARAMETER = re.compile(r'"?\$\{?([1-9])\b\}?"?')
NO_WRAPPERS = ("exec", "command", "builtin", "nohup", "setsid", "time")


@dataclass
class Replacement:
    """What takes the place of a launch: lines before it, options of mpiddp, and what the user has to check."""

    setup: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)


def convert(script: BatchScript, read_file: ReadFile) -> str:
    """Return the text of the job script that starts mpiddp; the same text if there is nothing to convert.

    `read_file` returns the text of a file that the script names, None if it cannot be read.
    """
    launches = [*{(launch.line, launch.text): launch for launch in find_convertible(script)}.values()]
    if not launches:
        return script.text
    removed = [launch for launch in launches if is_part(script, launch, launches)]
    trainings = [launch for launch in launches if launch not in removed]
    edits = [edit for launch in trainings
             for edit in replace_launch(script, launch, trainings, removed, read_file)]
    edits += [edit for launch in removed for edit in remove_launch(script, launch)]
    text = remove_unneeded(replace_spans(script.text, edits), script, edits, launches)
    main = max(trainings, key=lambda launch: count_ranks_per_node(script, launch) or 0)
    ranks = count_ranks_per_node(script, main)
    if script.scheduler is Scheduler.SLURM and ranks not in (None, script.request.tasks_per_node):
        text = keep_tasks(text, script.request)
    lines = convert_directives(script, text.split("\n"), ranks, is_plain=main.program is Program.PYTHON)
    return "\n".join(line for number, line in enumerate(lines)
                     if CHECK not in line or RUN_ONCE in line or line not in lines[:number])


def keep_tasks(text: str, request: Request) -> str:
    """Return the text in which each srun that starts no training has the number of tasks that it had by default."""
    data, edits = text.encode(), []
    for node in iterate_nodes(parse(text)):
        name = node.child_by_field_name("name") if node.type == "command" else None
        tokens = [] if name is None else read_tokens(read_text(node))
        options = dict(slurm_options(tokens[1:])[0])
        if name is None or read_text(name) != "srun" or "mpiddp" in tokens:
            continue
        if {"ntasks", "ntasks-per-node"} & {*options}:
            continue
        place = len(data[:name.end_byte].decode())
        edits.append((place, place, f" --ntasks={count_tasks(request, options.get('nodes', '$SLURM_NNODES'))}"))
    return replace_spans(text, edits)


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
    """Return the launches whose place mpiddp can take; a Python by srun or mpirun only if nothing else trains."""
    launches = [launch for launch in script.launches if launch.script_words and "<<" not in launch.text]
    started = [launch for launch in launches if launch.program in STARTED]
    if started or any(launch.program is Program.MPIDDP for launch in launches):
        return started
    return [launch for launch in launches if launch.program is Program.PYTHON and launch.launcher and not launch.inner
            and launch.launcher_options.get("ntasks") != "1"]


def replace_launch(
    script: BatchScript, launch: Launch, trainings: Sequence[Launch], removed: Sequence[Launch], read_file: ReadFile
) -> list[tuple[int, int, str]]:
    """Return the place of a launch in the text with the command that takes its place, and the lines before it.

    `removed` are the launches of other nodes' parts, which are taken out.
    """
    place = find_place(script.text, launch.line, launch.text)
    if place is None:
        return []
    begin, end = place
    new = Replacement()
    inner = find_inner_command(launch)
    if inner is not None:
        keep_inner_setup(script, launch, inner, new)
    read_options(script, launch, new, read_file)
    command = format_command(script, launch, new, script.text[begin:end] if inner is None else inner.text)
    waits = can_wait(script, launch, trainings)
    span = find_node_span(script, launch)
    if starts_one_node(script, launch) and (
            span is None or not (span.is_loop or any(is_same_training(launch, part) for part in removed))):
        new.checks.append(RUN_ONCE)
    if span is not None and span.is_loop:
        begin, end = span.begin, span.end
        new.checks += describe_loop(span)
        new.checks += [f"${name} was set by the loop over the nodes"
                       for name in sorted(span.assigned & references(command))]
    ampersand = BACKGROUND.match(script.text, end)
    if waits and ampersand is not None:
        end = ampersand.end()
        command += ";" * (script.text[end:end + 1] not in ("\n", ""))
    elif launch.is_background and not waits and ampersand is None and end != place[1]:
        command += " &"  # which stood in the loop
    line_begin, indent = find_line(script.text, begin)
    lines = [*(CHECK + check for check in new.checks), *new.setup]
    return [(begin, end, command), (line_begin, line_begin, "".join(f"{indent}{line}\n" for line in lines))]


def can_wait(script: BatchScript, launch: Launch, trainings: Sequence[Launch]) -> bool:
    """Return whether the script may wait for a launch where it stands, instead of starting it in the background."""
    span = find_node_span(script, launch)
    rest = script.text if span is None else script.text[:span.begin] + script.text[span.end:]
    is_repeated = span is None if starts_one_node(script, launch) else launch.in_loop
    return len(trainings) == 1 and not is_repeated and "$!" not in rest


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
    place = find_place(script.text, launch.line, launch.text)
    span = find_span(script.text, *place) if place is not None and starts_one_node(script, launch) else None
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
    background = None if span.is_loop else BACKGROUND.match(script.text, span.end)
    end = span.end if background is None else background.end()
    return [(span.begin, end, "\n".join(CHECK + check for check in describe_loop(span)))]


def find_inner_command(launch: Launch) -> Command | None:
    """Return the command of a script or text that a launch starts, in which the program stands."""
    length = len(launch.program_words)
    return next((command for command in launch.inner_commands
                 if tuple(command.words[len(command.words) - length:]) == launch.program_words), None)


def keep_inner_setup(script: BatchScript, launch: Launch, inner: Command, new: Replacement) -> None:
    """Keep the statements of a second script that set up the environment: the tasks inherit it."""
    tokens = read_tokens(launch.text)
    is_file = launch.followed != "text" and launch.followed in tokens
    arguments = tokens[tokens.index(launch.followed) + 1:] if is_file else []
    try:
        statements = read_statements(launch.inner_text)
    except QuoteError:
        return
    names = SET_BY_MPIDDP | references(inner.text) - references(format_words(launch.script_words, []))
    for statement in statements:
        if statement.contains(inner.text) and statement.kind not in ("command", "redirected_statement", "pipeline"):
            new.checks.append(f"each task also ran the rest of this: {statement.text.splitlines()[0]}")
    statements = [statement for statement in statements if not statement.contains(inner.text)]
    unneeded = find_unneeded(statements, names, format_words(launch.script_words, []))
    ours = {statement.text for statement in read_statements(script.text)}
    for statement in statements:
        if statement in unneeded or statement.is_comment or statement.text in ours:
            continue
        kept = remove_exports(statement.text, SET_BY_MPIDDP)
        if TASK_VARIABLES.search(kept) and statement.kind == "declaration_command":
            new.checks.append(f"this had a value of its own for each node or task: {kept}")
            kept = TASK_VARIABLES.sub("SLURM_JOB_ID", kept)
        if statement.text in ("env", "wait", "set -x") or TASK_VARIABLES.search(kept):
            continue
        kept = PARAMETER.sub(lambda match: "".join(arguments[int(match[1]) - 1:int(match[1])]), kept)
        if kept and launch.container and (statement.kind != "declaration_command" or launch.container == "enroot"):
            new.checks.append(f"this ran in the container, before the training: {kept.splitlines()[0]}")
        elif kept:
            new.setup += kept.split("\n")


def find_command(script: BatchScript, launch: Launch) -> Command:
    """Return the command that a launch is."""
    return next(command for command in script.commands if (command.line, command.text) == (launch.line, launch.text))


def read_options(script: BatchScript, launch: Launch, new: Replacement, read_file: ReadFile) -> None:
    """Find the options of mpiddp, and the variables, that stand for the recipe's own options."""
    options = read_torch_options(launch)
    if launch.program in STARTED and launch.script_words[0] in launch.unknown:
        new.checks.append(f"{launch.script_words[0]} may begin with options of {launch.program.value}: remove these")
    if "log-dir" in options or re.search(r"%[tnN]", launch.launcher_options.get("output", "")):
        new.options += ["--log-dir", options.get("log-dir") or "logs"]
    if options.get("local-ranks-filter"):
        new.options += ["--show", ",".join(f"local-{rank}" for rank in options["local-ranks-filter"].split(","))]
    if "virtual-local-rank" in options:
        new.options.append("--virtual-local-rank")
    if (read_number(options.get("max-restarts", "0")) or 0) > 0:
        new.checks.append("--max-restarts: mpiddp.supervise restarts a job; batch/supervise.sh has its lines")
    if launch.program is not Program.PYTHON and "B:" in script.options.get("signal", "") and not launch.is_background:
        new.checks.append("the shell's trap runs only when srun has ended: batch/requeue.sh stops a training in time")
    if launch.program in STARTED and (match := BY_SSH.search(script.text.replace("\\\n", " "))):
        new.checks.append(f"{match[1]} also starts a part of the training: leave it out")
    if "no-python" in options:
        new.checks.append("--no-python: mpiddp starts a Python script, not another program")
    if launch.program is Program.TORCH_LAUNCH and "use-env" not in options:
        add_local_rank(launch, new, read_file)
    if launch.program is Program.ACCELERATE:
        read_accelerate_options(options, new)


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
            new.setup.append(f"export {variable}={format_word(Word(options[name]))}")
    if "cpu" in options:
        new.setup.append("export ACCELERATE_USE_CPU=true")
    if "config-file" in options:
        new.setup += [f"CONFIG={format_word(Word(options['config-file']))}", *read_lines("accelerate_settings.sh")]
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


def format_command(script: BatchScript, launch: Launch, new: Replacement, source: str) -> str:
    """Return the line that starts mpiddp."""
    tokens = read_tokens(source)
    words = [*format_python(launch), "-m", "mpiddp", *new.options, *(["-m"] if launch.is_module else [])]
    first = launch.script_words[0]
    is_written = not launch.followed and first in tokens  # then a function's parameters stay as they are
    program = " ".join([*words, *tokens[tokens.index(first):]] if is_written else
                       [*words, format_words(launch.script_words, tokens)])
    wrappers = [word for number, word in enumerate(launch.wrapper_words)
                if not is_shell_word(word, launch) and not (word in NO_WRAPPERS and number == 0)]
    variables = read_variables(script, launch)
    assignments = [f"{name}={format_word(Word(value))}" for name, value in launch.assignments.items()
                   if name not in SET_BY_MPIDDP]
    begin = [*assignments, *format_launcher(script, launch, new)]
    if wrappers[:2] == ["enroot", "start"]:
        new.setup += read_lines("enroot_variables.sh")
        wrappers = ["bash", "-c", ENROOT_START, "enroot", *wrappers[2:]]
    elif os.path.basename(wrappers[0] if wrappers else "") == "enroot":
        new.checks.append("enroot passes the job's variables only with --env: batch/enroot.sh has the lines")
    begin += [word if word is ENROOT_START else variables.get(word) or format_word(as_word(word)) for word in wrappers]
    redirects = [read_text(node) for node in parse(launch.text).named_children[0].named_children
                 if node.type in ("file_redirect", "herestring_redirect")]
    return break_lines([" ".join(begin), " ".join([program, *redirects])])



def read_variables(script: BatchScript, launch: Launch) -> dict[str, str]:
    """Return the words of a launch that were written as a variable, by their values."""
    tokens = [token for token in read_tokens(launch.text) if re.fullmatch(r'"?\$\{?\w+\}?"?', token)]
    values = {script.variables.get(token.strip('"${}'), ""): token for token in tokens}
    return {value: token for value, token in values.items() if value and not value.split()[1:]}


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
        return [*words, *(f"--{name}={format_word(Word(value, [value] if '$' in value else []))}" if value
                          else f"--{name}" for name, value in keep_options(script, launch).items())]
    if launch.launcher and launch.program is Program.PYTHON:
        return [format_word(word) for word in drop_variables(launcher_words(script, launch))]
    new.checks.append("the launcher of the site's MPI, with one rank for each GPU, as in batch/pbs.sh and pals.sh")
    return [launch.launcher or "mpirun"]


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
    command = find_command(script, launch)
    end = len(command.words) - len(launch.program_words) - len(launch.wrapper_words)
    return list(command.words[:end])


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
    unneeded = find_unneeded(statements, SET_BY_MPIDDP | (references(old) - references(new)), "")
    waits = any(node.type == "&" for node in iterate_nodes(parse(text)))
    unneeded += [statement for statement in statements
                 if statement.text == "env" or (statement.text == "wait" and not waits)]
    kept = [statement for statement in statements if statement not in unneeded]
    unread = SET_BY_MPIDDP - frozenset[str]().union(*(references(statement.text) for statement in kept))
    changes = dict.fromkeys((*unneeded, *find_comments(statements, unneeded, text)), "")
    for statement in kept:
        if statement.assigned & unread:
            changes[statement] = remove_exports(statement.text, unread)
        elif "enroot create" in statement.text and "srun" not in statement.commands:
            changes[statement] = create_containers(statement.text)
    edited = replace_spans(text, [(statement.begin, statement.end, part) for statement, part in changes.items()])
    return remove_empty_lines(edited, script.text)


def create_containers(text: str) -> str:
    """Return the lines that create an Enroot container on each node instead of on the first alone."""
    match = re.search(r"enroot create (?:-n|--name)[ =]?(\S+) (\S+)", text)
    if match is None:
        return CHECK + "the container has to be created on each node: batch/enroot.sh has the line\n" + text
    name, image = (f'"{part}"' if part.startswith("$") else part for part in match.groups())
    return (f"srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 \\\n"
            f"    sh -c 'enroot list | grep -qx \"$0\" || enroot create --name \"$0\" \"$1\"' {name} {image} || exit 1")
