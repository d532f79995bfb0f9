"""Rules about the arguments of the training script: arrays of values, folders that one node has, options of mpiddp."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from ..options.table import FLAGS, OPTIONS
from .arguments import read_array
from .batch_script import Command, Launch, Program, Scheduler
from .context import Change, Context, Fix, Problem, Step, find_mpi, rule
from .edits import advise, place_ranks, replace_text
from .file_rules import is_activation
from .files import NODE_FOLDERS, read_training
from .findings import Severity
from .launches import LAUNCHERS
from .shell import Word
from .words import read_tokens

OTHER_PARSERS = re.compile(r"parse_known_args|parents\s*=|add_\w*(args|arguments)\(|HfArgumentParser|from_argparse")
FILLERS = ("tar", "cp", "rsync", "unzip", "mv", "wget", "curl", "git")
SPREADERS = (*LAUNCHERS, "pdsh", "clush", "pbsdsh", "ssh", "blaunch", "sbcast", "parallel", "dsh")


@rule("array-values", "a job array with other numbers than its list of values")
def check_array_values(context: Context) -> Iterator[Problem]:
    """Compare the numbers of an array's jobs with the arrays of the script from which each job takes an element."""
    variable, numbers = read_array(context)
    line = context.option_line("array", "job-name")
    for selection in context.script.selections if numbers else ():
        if may_expand(context, selection.name):
            continue
        last = max(numbers) + selection.offset
        correct = f"0-{selection.length - 1}" if not selection.offset else (
            f"{-selection.offset}-{selection.length - 1 - selection.offset}")
        fix = replace_only_text(context, line, rf"{min(numbers)}-{max(numbers)}", correct)
        if last >= selection.length:
            late = [number for number in numbers if number + selection.offset >= selection.length]
            which = f"{variable}={late[0]}" + f" to {late[-1]}" * (len(late) > 1)
            yield Problem(Severity.ERROR, selection.line,
                          f"{selection.text} is empty for {which}: {selection.name} has {selection.length} values",
                          "the first value has the number 0; a job without a value waits in the queue, and fails",
                          fix)
        elif min(numbers) + selection.offset >= 0 and len(numbers) < selection.length:
            yield Problem(Severity.NOTE, selection.line,
                          f"{selection.name} has {selection.length} values, the array has {len(numbers)} jobs",
                          "no job takes the other values", fix + advise("only if all values are meant"))


def may_expand(context: Context, name: str) -> bool:
    """Return whether an array has an element that bash may expand to several: a pattern of files, or braces."""
    for text in re.findall(rf"\b{name}\+?=\(([^()]*)", context.script.text):
        unquoted = re.sub(r"\"[^\"]*\"|'[^']*'|\\.|(?m:(?:^|\s)#.*)", "", text)
        values = re.sub(r"\$\{?(\w+)\}?", lambda match: context.script.variables.get(match[1], ""), unquoted)
        if re.search(r"[*?\[{]", values):
            return True
    return False


def replace_only_text(context: Context, line: int | None, pattern: str, text: str) -> Fix:
    """Return the change of what a pattern matches in a line, nothing if it matches at several places."""
    is_once = line is not None and len(re.findall(pattern, context.script.lines[line - 1])) == 1
    return replace_text(context, line, pattern, text) if is_once else Fix()


@rule("late-option", "options of mpiddp behind the training script, which gets them")
def check_late_option(context: Context) -> Iterator[Problem]:
    """Look for options of mpiddp among the arguments of a script that has no such options."""
    for step in context.steps:
        launch = step.launch
        if launch.program is not Program.MPIDDP or not launch.script or launch.container:
            continue
        text = read_training(context, launch)
        if "ArgumentParser(" not in text or "add_argument(" not in text or OTHER_PARSERS.search(text):
            continue  # its options may come from elsewhere
        late = list(find_late_options(launch, text))
        if late:
            names = [words[0].partition("=")[0] for words in late]
            is_several = len(late) > 1
            yield Problem(
                Severity.ERROR, launch.line, f"{', '.join(names)}: after {launch.script}, which has no such "
                f"option{'s' * is_several}",
                "what stands behind the script goes to the script; options of mpiddp stand before it",
                move_options(context, launch, [" ".join(words) for words in late]))


def find_late_options(launch: Launch, text: str) -> Iterator[tuple[str, ...]]:
    """Yield the options of mpiddp, with their values, among the arguments of a script that does not name them."""
    words = launch.script_words[1:]
    for position, word in enumerate(words):
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        is_ours = word.startswith("--") and (name in FLAGS or name in OPTIONS)
        if not is_ours or re.search(re.escape(name).replace(r"\-", "[-_]"), text):
            continue
        following = words[position + 1:position + 2]
        takes_value = name in OPTIONS and "=" not in word
        if takes_value and "nargs" not in OPTIONS[name] and (not following or following[0].startswith("-")):
            continue  # not the form of ours
        yield (word, *following) if takes_value and following and not following[0].startswith("-") else (word,)


def move_options(context: Context, launch: Launch, options: list[str]) -> Fix:
    """Return the change of a line to one with options before the script."""
    script = re.escape(os.path.basename(launch.script or ""))
    for number, line in enumerate(context.script.lines, 1):
        match = re.search(rf"\bmpiddp\b.*?\s(\S*{script})(?=\s|$)", line)
        if match and not line.lstrip().startswith("#") and all(f" {option}" in line for option in options):
            removals = [Change(number, "", rf"\s{re.escape(option)}(?!\S)") for option in options]
            return Fix((*removals, Change(number, f"{' '.join(options)} {match[1]}",
                                          rf"(?<=\s){re.escape(match[1])}(?=\s|$)")))
    return advise(f"write python -m mpiddp {' '.join(options)} {launch.script}")


@rule("node-folder", "data that only the first node gets in a folder of its own")
def check_node_folder(context: Context) -> Iterator[Problem]:
    """Look for commands of the batch script that fill a folder of the node, from which the ranks of all nodes read."""
    script = context.script
    nodes = script.request.nodes or 1
    fills = [(command, folder) for command in script.commands if (folder := find_filled_folder(command))]
    for step in context.steps[:1] if nodes > 1 else ():
        for command, folder in fills:
            forms = [folder, *find_forms(command, folder)]
            if command.line > step.launch.line or not reads_folder(context, step, forms) or is_spread(context, forms):
                continue
            others = [each for each, other in fills if each is not command and f"{other}/".startswith(f"{folder}/")]
            yield Problem(
                Severity.WARNING, command.line, f"only the first of {nodes} nodes gets {folder}",
                "a batch script runs on the first node, and each node has a folder of its own under this name: the "
                "other nodes' ranks find nothing", sum((start_per_node(context, nodes, each) for each in (
                    *find_makers(context, command, folder), command, *others)),
                    find_questions(context, folder, [each.line for each in (command, *others)])))
            return


def find_questions(context: Context, folder: str, known: Sequence[int]) -> Fix:
    """Return advice about other lines with a folder that have to be run on each node, too."""
    lines = [str(number) for number, line in enumerate(context.script.lines, 1) if folder in line and re.search(
        r"\|\s*tar\b|\[\s+(!\s+)?-[defs]\s", line) and not line.lstrip().startswith("#") and number not in known]
    return advise(f"look at line{'s' * (len(lines) > 1)} {', '.join(lines)}, too") if lines else Fix()


def find_filled_folder(command: Command) -> str:
    """Return the folder of the node that a command copies or unpacks files to, empty for none."""
    words, name = command.words, os.path.basename(command.words[0])
    if name not in FILLERS:
        return ""
    places = [words[position + 1] for position, word in enumerate(words[:-1])
              if (name, word) in (("tar", "-C"), ("tar", "--directory"), ("unzip", "-d"), ("wget", "-P"),
                                  ("wget", "-O"), ("curl", "-o"))]
    places += [Word(word.partition("=")[2]) for word in words if name == "tar" and word.startswith("--directory=")]
    if name == "tar" and not re.search(r"^-?\w*x|--extract|--get", " ".join(words[1:])):
        return ""
    if name in ("cp", "rsync", "mv") or (name == "git" and "clone" in words):
        places = [words[-1]]
    return next((place.rstrip("/") for place in places if NODE_FOLDERS.match(place)), "")


def find_forms(command: Command, folder: str) -> list[str]:
    """Return how a command writes a folder's variable, such as $LOCAL."""
    tokens = read_tokens(command.text)
    if len(tokens) != len(command.words):
        return []
    names = [match[1] for token, word in zip(tokens, command.words, strict=True) if word.rstrip("/") == folder
             and (match := re.match(r"[\"']?\$\{?(\w+)", token))]
    return [form for name in names for form in (f"${name}", f"${{{name}}}")]


def reads_folder(context: Context, step: Step, forms: Sequence[str]) -> bool:
    """Return whether the training's words, its variables or its environment lead to a folder, as it is written."""
    launch = step.launch
    exported = [line.partition("=")[2].strip("\"'") for line in context.script.lines if re.match(
        r"\s*export\s+\w+=", line)]
    activated = [word for command in context.script.commands if is_activation(command) for word in command.words[1:]]
    texts = [*launch.script_words[1:], *launch.program_words[:1], *exported, *activated]
    return any(re.search(rf"(^|[=:,\s]){re.escape(form)}([/\"':]|$)", text) for text in texts for form in forms)


def is_spread(context: Context, forms: Sequence[str]) -> bool:
    """Return whether a command that runs on other nodes, too, may fill a folder there."""
    trainings = {launch.text for launch in context.script.trainings}
    return any(os.path.basename(command.words[0]) in SPREADERS and command.text not in trainings
               and any(form in f"{command.text} {' '.join(command.words)}" for form in forms)
               for command in context.script.commands)


def find_makers(context: Context, command: Command, folder: str) -> list[Command]:
    """Return the mkdir of a folder before a command that fills it."""
    return [each for each in context.script.commands if each.words[0] == "mkdir" and each.line < command.line
            and any(f"{folder}/".startswith(f"{word}/") for word in each.words[1:])][-1:]


def start_per_node(context: Context, nodes: int, command: Command) -> Fix:
    """Return the change of a line that runs a command once on each node."""
    is_slurm = context.script.scheduler is Scheduler.SLURM
    placed = place_ranks(context, 1)
    start = "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1" if is_slurm else f"mpirun -n {nodes} {placed}"
    is_list = re.search(r"\||&&|;", re.sub(r"(\|\||&&)\s*exit.*", "", context.script.lines[command.line - 1]))
    fix = Fix() if is_list else replace_text(
        context, command.line, rf"(?<![\w/.-]){re.escape(command.text)}", f"{start} {command.text}")
    is_guess = not is_slurm and not find_mpi(context)[0]
    return fix.otherwise(f"run {command.text} once on each node: {start}") + (
        advise(f"{placed} is Open MPI's; for others it is -ppn 1") if is_guess else Fix())
