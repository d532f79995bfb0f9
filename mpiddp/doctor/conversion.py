"""Converts a job script that starts torchrun, accelerate or one Python per rank into one that starts mpiddp.

What cannot be decided from the script stands in a comment of the new one, `# check: …`.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..discovery.script import LOCAL_RANK_OPTION
from .batch_script import BatchScript, Launch, Program, Scheduler
from .shell import Command, Node, QuoteError, Word, parse, read_text
from .statements import (
    Statement,
    find_unneeded,
    read_statements,
    references,
    remove_exports,
)

ReadFile = Callable[[str], "str | None"]
STARTED = (Program.TORCHRUN, Program.TORCH_LAUNCH, Program.ACCELERATE)
# Options that srun does not need, or that the new line has with other values.
REPLACED = frozenset((
    "mpi", "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "gpus-per-task", "gpus-per-node",
    "gpus", "gres", "gpu-bind", "cpu-bind", "output", "error",
))
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
LINE_LENGTH = 118
NO_WRAPPERS = ("exec", "command", "builtin", "nohup", "setsid", "time")
PREFIX = "# check: "


@dataclass
class Job:
    """What the conversion finds out about a job: lines before the launch, options of mpiddp, and things to check."""

    ranks_per_node: int | None
    setup: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)


def convert(script: BatchScript, read_file: ReadFile) -> str:
    """Return the text of the job script that starts mpiddp; the same text if there is nothing to convert.

    `read_file` returns the text of a file that the script names, None if it cannot be read.
    """
    launches = [launch for launch in script.launches if is_convertible(launch)]
    if not launches:
        return script.text
    job = Job(count_ranks_per_node(script, launches[-1]))
    edits = [edit for launch in unique(launches) if (edit := replace_launch(script, launch, job, read_file))]
    text = apply_edits(script.text, edits)
    text = remove_unneeded(text, script, edits, launches)
    return "\n".join(convert_directives(script, text.split("\n"), job))


def format_diff(script: BatchScript, text: str) -> str:
    """Return the changes to a script as a unified diff, empty if there are none."""
    name = os.path.basename(script.path)
    lines = difflib.unified_diff(script.text.splitlines(), text.splitlines(), name, f"{name} (with mpiddp)", lineterm="")
    return "".join(f"{line}\n" for line in lines)


def is_convertible(launch: Launch) -> bool:
    """Return whether mpiddp can take the place of what a launch starts."""
    if launch.program in STARTED:
        return True
    return launch.program is Program.PYTHON and bool(launch.launcher and launch.script_words) and not launch.inner


def unique(launches: Iterable[Launch]) -> list[Launch]:
    """Return one launch for each place in the script."""
    return list({(launch.line, launch.text): launch for launch in launches}.values())


# --- the ranks of a node


def read_torch_options(launch: Launch) -> dict[str, str]:
    """Return the options of torchrun or `accelerate launch`, by their names with dashes."""
    options: dict[str, str] = {}
    name = ""
    for word in launch.options:
        if word.startswith("-") and len(word) > 1:
            name, _, value = word.lstrip("-").partition("=")
            name = {"t": "tee", "r": "redirects"}.get(name, name.replace("_", "-"))
            options[name] = value
        elif name:
            options[name] = word
    return options


def count_ranks_per_node(script: BatchScript, launch: Launch) -> int | None:
    """Return how many ranks the recipe starts on a node, None if that is unknown."""
    options, request = read_torch_options(launch), script.request
    gpus = request.gpus_per_node
    if launch.program is Program.PYTHON:
        return None
    if launch.program is Program.ACCELERATE:
        total, nodes = as_number(options.get("num-processes", "")), as_number(options.get("num-machines", ""))
        nodes = nodes or request.nodes
        return total // nodes if total and nodes and total % nodes == 0 else gpus
    text = options.get("nproc-per-node", "1")
    return as_number(text) or gpus


def as_number(text: str) -> int | None:
    """Return a number, None if the text is none."""
    return int(text) if text.isdecimal() else None


# --- the launch


def replace_launch(script: BatchScript, launch: Launch, job: Job, read_file: ReadFile) -> tuple[int, int, str] | None:
    """Return the place of a launch in the text, and the lines that take its place."""
    place = find_place(script.text, launch.line, launch.text)
    if place is None:
        return None
    begin, end = place
    inner = find_inner_command(launch)
    source = inner.text if inner is not None else script.text[begin:end]
    checks = len(job.checks)
    if inner is not None:
        keep_inner_setup(script, launch, inner, job, read_file, script.text[begin:end])
    read_options(script, launch, job, read_file)
    command = format_command(script, launch, job, source)
    indent = re.match(r"[ \t]*", script.text[script.text.rfind("\n", 0, begin) + 1:])
    lines = [*(PREFIX + check for check in job.checks[checks:]), *job.setup, command]
    job.setup = []
    while script.text[end:end + 2] == " &" and script.text[end:end + 3] != " &&":
        end += 2
    return begin, end, ("\n" + (indent[0] if indent else "")).join(lines)


def find_place(text: str, line: int, part: str) -> tuple[int, int] | None:
    """Return where a command stands that begins in a line; the whole line if it comes from an eval."""
    begin = 0
    for _ in range(line - 1):
        begin = text.index("\n", begin) + 1
    line_end = text.find("\n", begin)
    line_end = len(text) if line_end < 0 else line_end
    found = text.find(part, begin)
    if 0 <= found <= line_end:
        return found, found + len(part)
    for statement in read_statements(text):
        if statement.begin <= begin < statement.end or begin <= statement.begin <= line_end:
            return statement.begin, statement.end
    return None


def find_inner_command(launch: Launch) -> Command | None:
    """Return the command of a script or text that a launch starts, in which the program stands."""
    length = len(launch.program_words)
    return next((command for command in launch.inner_commands
                 if tuple(command.words[len(command.words) - length:]) == launch.program_words), None)


def keep_inner_setup(script: BatchScript, launch: Launch, inner: Command, job: Job, read_file: ReadFile, source: str) -> None:
    """Keep the statements of a second script that set up the environment: the tasks inherit it."""
    text = None if launch.followed == "text" else read_file(os.path.join(launch.folder or "", launch.followed))
    arguments: list[str] = []
    tokens = read_tokens(source)
    if text is None:
        shell = next((position for position, token in enumerate(tokens) if token in ("-c", "-lc")), None)
        text = Word(tokens[shell + 1]).strip("\"'") if shell is not None and shell + 1 < len(tokens) else ""
    elif launch.followed in tokens:
        arguments = tokens[tokens.index(launch.followed) + 1:]
    try:
        statements = read_statements(text)
    except QuoteError:
        return
    names = SET_BY_MPIDDP | references(inner.text) - references(format_words(launch.script_words, []))
    statements = [statement for statement in statements if not statement.contains(inner.text)]
    unneeded = find_unneeded(statements, names, format_words(launch.script_words, []))
    ours = {statement.text for statement in read_statements(script.text)}
    for statement in statements:
        if statement in unneeded or statement.is_comment or statement.text in ours:
            continue
        if statement.text in ("env", "wait", "set -x") or re.search(r"SLURM_(NODEID|PROCID|LOCALID)", statement.text):
            continue
        kept = remove_exports(statement.text, SET_BY_MPIDDP)
        for number, argument in enumerate(arguments, 1):
            kept = re.sub(rf'"?\$(\{{{number}\}}|{number}\b)"?', lambda _, value=argument: value, kept)
        if kept and launch.container:
            job.checks.append(f"this ran in the container, before the training: {kept.splitlines()[0]}")
        elif kept:
            job.setup += kept.split("\n")


def read_options(script: BatchScript, launch: Launch, job: Job, read_file: ReadFile) -> None:
    """Find the options of mpiddp, and the variables, that stand for the recipe's own options."""
    options = read_torch_options(launch)
    job.options = []
    if "log-dir" in options or re.search(r"%[tnN]", launch.launcher_options.get("output", "")):
        job.options += ["--log-dir", options.get("log-dir") or "logs"]
    if options.get("local-ranks-filter"):
        job.options += ["--show", ",".join(f"local-{rank}" for rank in options["local-ranks-filter"].split(","))]
    if "virtual-local-rank" in options:
        job.options.append("--virtual-local-rank")
    if (as_number(options.get("max-restarts", "0")) or 0) > 0:
        job.checks.append("--max-restarts: mpiddp.supervise restarts a job; batch/supervise.sh has its lines")
    if launch.program is not Program.PYTHON and "B:" in script.options.get("signal", "") and not launch.is_background:
        job.checks.append("the shell's trap runs only when srun has ended: batch/requeue.sh stops a training in time")
    if "no-python" in options:
        job.checks.append("--no-python: mpiddp starts a Python script, not another program")
    if launch.program is Program.TORCH_LAUNCH and "use-env" not in options:
        add_local_rank(launch, job, read_file)
    if launch.program is Program.ACCELERATE:
        read_accelerate_options(options, job)


def add_local_rank(launch: Launch, job: Job, read_file: ReadFile) -> None:
    """Add --pass-local-rank if the script has an option for its local rank, as torch.distributed.launch expects."""
    name = launch.script_words[0] if launch.script_words and not launch.is_module else ""
    text = read_file(os.path.join(launch.folder or "", name)) if name else None
    if text is None:
        job.checks.append(f"if {name or 'the module'} parses --local_rank: add --pass-local-rank=--local_rank after mpiddp")
    elif option := LOCAL_RANK_OPTION.search(text.encode()):
        spelling = option[1].decode()
        job.options.append("--pass-local-rank" + ("" if spelling == "--local-rank" else f"={spelling}"))


def read_accelerate_options(options: dict[str, str], job: Job) -> None:
    """Set what accelerate launch would set for its ranks, from its options and its configuration."""
    for name, variable in ACCELERATE_VARIABLES.items():
        if name in options:
            job.setup.append(f"export {variable}={format_word(Word(options[name]))}")
    if "cpu" in options:
        job.setup.append("export ACCELERATE_USE_CPU=true")
    if "config-file" in options:
        job.setup += [f"CONFIG={format_word(Word(options['config-file']))}", *read_settings().splitlines()]
    else:
        job.checks.append("accelerate launch also reads ~/.cache/huggingface/accelerate/default_config.yaml, as "
                          "batch/accelerate.sh does")
    if plugins := [f"--{name}" for name in options if ACCELERATE_PLUGINS.match(name)]:
        job.checks.append(f"{', '.join(plugins)}: write this into a configuration with accelerate config, and take the "
                          "lines about CONFIG from batch/accelerate.sh")


def read_settings() -> str:
    """Return the lines that set what a configuration of Accelerate says."""
    with open(os.path.join(os.path.dirname(__file__), "accelerate_settings.sh"), encoding="utf-8") as file:
        return file.read()


def format_command(script: BatchScript, launch: Launch, job: Job, source: str) -> str:
    """Return the line that starts mpiddp."""
    tokens = read_tokens(source)
    words = [*format_python(launch), "-m", "mpiddp", *job.options, *(["-m"] if launch.is_module else [])]
    program = " ".join([*words, format_words(launch.script_words, tokens)])
    wrappers = [word for word in launch.wrapper_words if word not in NO_WRAPPERS and not is_shell_word(word, launch)]
    assignments = [f"{name}={format_word(Word(value))}" for name, value in launch.assignments.items()
                   if name not in SET_BY_MPIDDP]
    begin = [*assignments, *format_launcher(script, launch, job)]
    if wrappers[:2] == ["enroot", "start"]:
        job.setup += ENROOT_LINES
        wrappers = ["bash", "-c", ENROOT_START, "enroot", *wrappers[2:]]
    elif os.path.basename(wrappers[0] if wrappers else "") == "enroot":
        job.checks.append("enroot passes the job's variables only with --env: batch/enroot.sh has the lines")
    begin += [word if word is ENROOT_START else format_word(Word(word)) for word in wrappers]
    redirects = [read_text(node) for node in parse(source).named_children[0].named_children
                 if node.type in ("file_redirect", "herestring_redirect")]
    return break_lines([" ".join(begin), " ".join([program, *redirects])])


ENROOT_LINES = [
    "# All variables are passed on, except those that describe this node's own programs and folders.",
    "export OWN='^(_|BASH.*|CONDA.*|CPATH|CUDA_(HOME|PATH|ROOT)|HOME|HOSTNAME|LD_.*|LIBRARY_PATH|LMOD.*|LOADEDMODULES|"
    "LOGNAME|MANPATH|MODULE.*|OLDPWD|OMPI_HOME|OPAL_PREFIX|OWN|PATH|PKG_.*|PMIX_INSTALL_PREFIX|PS1|PWD|"
    "PYTHON(HOME|PATH|STARTUP|USERBASE)|SHELL|SHLVL|TERM|TMPDIR|UCX_MODULE_DIR|USER|VIRTUAL_ENV|XDG_.*|__.*)$'",
]
ENROOT_START = """'options=(--mount /tmp)
    [ -z "$PMIX_SERVER_TMPDIR" ] || options+=(--mount "$PMIX_SERVER_TMPDIR")
    for name in $(compgen -e | grep -E -v "$OWN"); do options+=(--env "$name"); done
    exec enroot start "${options[@]}" "$@"'"""


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


def format_launcher(script: BatchScript, launch: Launch, job: Job) -> list[str]:
    """Return the launcher of the new line, with those of its options that still make sense."""
    if launch.launcher in ("", "srun") and script.scheduler in (Scheduler.SLURM, Scheduler.NONE):
        words = ["srun", "--mpi=pmix"]
        if "cpus-per-task" in script.options or "cpus-per-task" in launch.launcher_options:
            words.append("--cpus-per-task=$SLURM_CPUS_PER_TASK")
        kept = {name: value for name, value in launch.launcher_options.items() if name not in REPLACED}
        return words + [f"--{name}={format_word(Word(value))}" if value else f"--{name}" for name, value in kept.items()]
    if launch.launcher and launch.program is Program.PYTHON:
        return [format_word(word) for word in drop_variables(launcher_words(script, launch))]
    job.checks.append("the launcher of the site's MPI, with one rank for each GPU: batch/pbs.sh and batch/pals.sh have it")
    return [launch.launcher or "mpirun"]


def launcher_words(script: BatchScript, launch: Launch) -> list[Word]:
    """Return the launcher and its options as they are written, with known variables expanded."""
    command = next(command for command in script.commands if (command.line, command.text) == (launch.line, launch.text))
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


# --- words


def read_tokens(source: str) -> list[str]:
    """Return the words of a simple command as they are written."""
    node = parse(source).named_children[0] if source.strip() else None
    while node is not None and node.type != "command":
        node = node.named_children[0] if node.named_children else None
    return [] if node is None else [read_text(child) for child in node.named_children if "assignment" not in child.type]


def format_words(words: Sequence[str], tokens: Sequence[str]) -> str:
    """Return words as the shell reads them; from the end on as they were written, as far as each token is one word."""
    written: list[str] = []
    for word, token in zip(reversed(words), reversed(tokens), strict=False):
        if token != word and not is_one_word(token, word):
            break
        written.insert(0, token)
    return " ".join([*map(format_word, map(as_word, words[:len(words) - len(written)])), *written])


def is_one_word(token: str, word: str) -> bool:
    """Return whether a token with quotes or variables surely makes this one word."""
    if re.fullmatch(r"\"[^\"@*]*\"|'[^']*'", token) or token in getattr(word, "unknown", ()):
        return True
    before, _, after = token.partition("$")
    name = re.match(r"\w+|\{\w+\}", after)
    return bool(before and name) and word.startswith(before) and word.endswith(after[name.end():] if name else "")


def as_word(text: str) -> Word:
    """Return a text as a word."""
    return text if isinstance(text, Word) else Word(text)


def format_word(word: Word) -> str:
    """Return a word as the shell reads it; what is not known of it is as it was written."""
    if word.is_unknown or (word.unknown and re.fullmatch(r"[\w$/.:=,@%+{}-]*", word) and "=" not in word):
        return f'"{word}"' if str(word) in ("$@", "${@}") else str(word)
    if word.unknown or re.fullmatch(r"[\w./:=,@%+-]*\$\{?\w+\}?[\w./:=,@%+-]*", word):
        return '"' + re.sub(r'(?<!\\)"', '\\"', word) + '"' if " " in word or word.unknown else str(word)
    return shlex.quote(word)


def break_lines(parts: Sequence[str]) -> str:
    """Return a command, with a line for each part and more if it is long."""
    whole = " ".join(parts)
    if len(whole) <= LINE_LENGTH or "\n" in whole:
        return whole if len(whole) <= LINE_LENGTH else " \\\n    ".join(parts)
    lines = [""]
    for word in " \0".join(parts).split(" "):
        is_new = word.startswith("\0") or len(lines[-1]) + len(word) > LINE_LENGTH - 6
        if is_new and lines[-1]:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word.lstrip("\0")
    return " \\\n    ".join(lines)


# --- the text around the launch


def apply_edits(text: str, edits: Iterable[tuple[int, int, str]]) -> str:
    """Return a text in which places have new text."""
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def remove_unneeded(text: str, script: BatchScript, edits: Sequence[tuple[int, int, str]], launches: Sequence[Launch]) -> str:
    """Return a text without the statements that served only what the launches no longer need."""
    old = "".join(script.text[begin:end] for begin, end, _ in edits) + "".join(
        command.text for launch in launches for command in launch.inner_commands)
    new = "".join(new for *_, new in edits)
    statements = read_statements(text)
    names = SET_BY_MPIDDP | (references(old) - references(new))
    unneeded = [statement for statement in find_unneeded(statements, names, "")]
    is_background = any(launch.is_background for launch in launches) and not any(
        command.is_background and command.text not in old for command in script.commands)
    unneeded += [statement for statement in statements
                 if statement.text == "env" or (is_background and statement.text == "wait")]
    removed = [(statement.begin, statement.end, "")
               for statement in (*unneeded, *find_comments(statements, unneeded, text))]
    read = frozenset[str]().union(*(references(statement.text) for statement in statements if statement not in unneeded))
    changed = [(statement.begin, statement.end, remove_exports(statement.text, SET_BY_MPIDDP - read))
               for statement in statements if statement not in unneeded and statement.assigned & (SET_BY_MPIDDP - read)]
    created = [(statement.begin, statement.end, create_containers(statement.text)) for statement in statements
               if "enroot" in statement.commands and "enroot create" in statement.text and "srun" not in statement.commands]
    text = apply_edits(text, [edit for edit in {*removed, *changed, *created} if text[edit[0]:edit[1]].strip() != edit[2]])
    return remove_empty_lines(text, script.text)


def find_comments(statements: Sequence[Statement], removed: Sequence[Statement], text: str) -> list[Statement]:
    """Return the comments in the lines right above statements that are removed."""
    found: list[Statement] = []
    for statement, following in reversed([*zip(statements, statements[1:], strict=False)]):
        is_above = text[statement.end:following.begin].strip(" \t") in ("\n", "")
        is_plain = statement.is_comment and not re.match(r"#(!|#?SBATCH|#?PBS|#?BSUB|flux:)", statement.text)
        if is_plain and is_above and (following in removed or following in found):
            found.append(statement)
    return found


def create_containers(text: str) -> str:
    """Return the lines that create an Enroot container on each node instead of on the first alone."""
    match = re.search(r"enroot create (?:-n|--name)[ =]?(\S+) (\S+)", text)
    if match is None:
        return PREFIX + "the container has to be created on each node: batch/enroot.sh has the line\n" + text
    name, image = (f'"{part}"' if part.startswith("$") else part for part in match.groups())
    return (f"srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 \\\n"
            f"    sh -c 'enroot list | grep -qx \"$0\" || enroot create --name \"$0\" \"$1\"' {name} {image} || exit 1")


def remove_empty_lines(text: str, before: str) -> str:
    """Return a text without the lines that have become empty."""
    old = before.split("\n")
    kept: list[str] = []
    matcher = difflib.SequenceMatcher(None, old, text.split("\n"), autojunk=False)
    new = text.split("\n")
    for kind, _, _, begin, end in matcher.get_opcodes():
        kept += [line for line in new[begin:end] if kind == "equal" or line.strip()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).rstrip("\n") + "\n"


# --- the directives


def convert_directives(script: BatchScript, lines: list[str], job: Job) -> list[str]:
    """Return the lines with one task for each rank, and its share of the cores."""
    ranks, request = job.ranks_per_node, script.request
    if script.scheduler is not Scheduler.SLURM or ranks is None:
        if any("python -m mpiddp" in line for line in lines) and ranks is None and not any(
                launch.program is Program.PYTHON for launch in script.launches):
            return insert_check(lines, "tasks per node: as many as a node has GPUs")
        return lines
    tasks = request.tasks_per_node or 1
    cores = request.cpus_per_task or next(filter(None, (
        as_number(launch.launcher_options.get("cpus-per-task", "")) for launch in script.launches)), None)
    changes: dict[str, str | None] = {"ntasks": None, "ntasks-per-gpu": None, "ntasks-per-node": str(ranks)}
    if cores is not None:
        changes["cpus-per-task"] = str(max(1, cores * tasks // ranks))
    if request.gpus_per_task is not None:
        changes |= {"gpus-per-task": None, "gpus-per-node": str(request.gpus_per_task * tasks)}
    if tasks == ranks and request.gpus_per_task is None:
        changes = {}
    return edit_directives(lines, script, changes)


def edit_directives(lines: list[str], script: BatchScript, changes: dict[str, str | None]) -> list[str]:
    """Return the lines with other values of sbatch's options; a new option comes behind the others."""
    missing = {name: value for name, value in changes.items() if value is not None}
    edited: list[str] = []
    last = 0
    for line in lines:
        if line.startswith("#SBATCH"):
            line, found = edit_directive(line, changes)
            missing = {name: value for name, value in missing.items() if name not in found}
            if line.strip() == "#SBATCH":
                continue
            last = len(edited) + 1
        edited.append(line)
    edited[last:last] = [f"#SBATCH --{name}={value}" for name, value in missing.items()]
    if changes and "cpus-per-task" not in {**script.options, **changes}:
        edited = insert_check(edited, "--cpus-per-task: a node's cores divided by its tasks, here and behind srun")
    return edited


def edit_directive(line: str, changes: dict[str, str | None]) -> tuple[str, set[str]]:
    """Return a directive with other values, and the options that it has."""
    spellings = {"ntasks-per-node": "(--ntasks-per-node|--tasks-per-node)", "ntasks": "(--ntasks|-n)",
                 "cpus-per-task": "(--cpus-per-task|-c)"}
    found = set()
    for name, value in changes.items():
        pattern = rf"(?<=\s){spellings.get(name, f'(--{name})')}(?:=|\s+|(?<=-\w))([^\s#-]\S*)(\s+#.*)?"
        if re.search(pattern, line):
            found.add(name)
            line = re.sub(pattern, "" if value is None else rf"--{name}={value}", line).rstrip()
    return line, found


def insert_check(lines: list[str], text: str) -> list[str]:
    """Return the lines with something to check behind the directives."""
    last = max((number for number, line in enumerate(lines) if line.startswith(("#SBATCH", "#PBS", "#BSUB", "#flux"))),
               default=0)
    return [*lines[:last + 1], PREFIX + text, *lines[last + 1:]]
