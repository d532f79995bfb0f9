"""The arguments of the training script: which files they name, and what the jobs of an array share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from .batch_script import Launch, Scheduler
from .context import Context, Fix, Problem, Step
from .edits import change_line
from .files import find_similar_file, is_here, list_places
from .findings import Severity
from .shell import Word

FILE_ENDINGS = re.compile(r"\.(ya?ml|json|jsonl|toml|txt|csv|tsv|py|sh|ini|cfg|conf)$")
ENDING = re.compile(r"\.[A-Za-z]\w{0,5}$")
READ_NAMES = re.compile(r"config|cfg|conf\b|yaml|data|\blist\b|input|\b(train|val|valid|eval|test)\b|vocab|deepspeed")
WRITTEN_NAMES = re.compile(r"\bout|output|sav|log|ckpt|checkpoint|result|metric|dump|writ|export|report|plot|trac|"
                           r"profil|resume|load|pretrained|weights|state|cache|work|\bdir\b|\bto\b|pred|hist|stat")
SHARED_NAMES = re.compile(r"(output|out|sav(e|ing)|results?|ckpts?|checkpoints?)([-_ ]?(dir|path|folder|file|to))?|"
                          r"(work|experiment|exp)[-_ ]?(dir|path|folder)")
NAMES_OF_RUN = re.compile(r"name|run|\bexp|\btag|suffix|version|\bid\b|group")
CONTROL = re.compile(r"ARRAY_TASK_ID|ARRAY_INDEX|ARRAYID|JOBINDEX|JOB_?ID")


class Argument(NamedTuple):
    """A word behind the script with the option before it, whose name has dashes; empty for a word alone."""

    name: str
    value: Word


def read_arguments(launch: Launch) -> list[Argument]:
    """Return the arguments of a training script that are values: `--name value`, `--name=value`, `name=value`."""
    arguments: list[Argument] = []
    name = ""
    for word in launch.script_words[1:]:
        own, has_value, value = word.partition("=")
        unknown = getattr(word, "unknown", ())
        if has_value and re.fullmatch(r"[-+]*[\w.-]+", own):
            arguments.append(Argument(own.lstrip("-+").replace("_", "-"), Word(value, unknown)))
            name = ""
        elif word.startswith("-"):
            name = word.lstrip("-").replace("_", "-")
        else:
            arguments.append(Argument(name, Word(word, unknown)))
            name = ""
    return arguments


def check_missing_arguments(context: Context, step: Step) -> Iterator[Problem]:
    """Look for files among the training's arguments that are not here although their folders are."""
    launch = step.launch
    if launch.container or (launch.script and not is_here(context, launch.folder, launch.script)) or any(
            command.words[0] == "cd" for command in launch.inner_commands):
        return
    for name, value in read_arguments(launch):
        folder = os.path.dirname(value)
        if value.unknown or re.search(r"[*{},]|://", value) or WRITTEN_NAMES.search(name) or not (
                FILE_ENDINGS.search(value) or (folder and ENDING.search(value))):
            continue
        place = list_places(context, launch.folder, value)[0]
        if is_here(context, launch.folder, value) or (folder and not context.host.is_folder(os.path.dirname(place))):
            continue
        meant = find_similar_file(context, place)
        if re.sub(r"\d+", "", meant) == re.sub(r"\d+", "", os.path.basename(value)):
            meant = ""  # one of a series
        is_read = READ_NAMES.search(name) is not None and FILE_ENDINGS.search(value) is not None and not (
            "name" in name or launch.is_module)
        if meant or is_read:
            pattern = rf"(?<![\w.-]){re.escape(os.path.basename(value))}(?![\w.])"
            severity = Severity.ERROR if is_read and folder else Severity.WARNING
            yield Problem(severity, launch.line, f"no such file: {value}"
                          + f" (did you mean {os.path.join(folder, meant)}?)" * bool(meant),
                          f"an argument of {launch.script_words[0]}: its folder is on this host, the file is not",
                          change_line(context, launch, pattern, meant) if meant else Fix())


def check_shared_outputs(context: Context, step: Step) -> Iterator[Problem]:
    """Look for a file or folder that the trainings of all jobs of an array write."""
    launch = step.launch
    arguments = read_arguments(launch)
    numbers = read_array(context)[1]
    if not numbers or len(numbers) < 2 or context.script.options.get("array", "").endswith("%1") or (
            launch.folder is None):
        return
    texts = map(context.host.read, list_places(context, launch.folder, launch.script)) if launch.script else ()
    if any(text and CONTROL.search(text) for text in texts) or any(
            NAMES_OF_RUN.search(name) and value.unknown for name, value in arguments):
        return
    for name, value in arguments:
        is_path = "/" in value or ENDING.search(value) or re.search(r"(dir|path|folder|output|out)$", name)
        if not SHARED_NAMES.fullmatch(name) or value.unknown or not is_path or value in ("", "/dev/null") or (
                re.fullmatch(r"[\d.]+|true|false|none", value, re.IGNORECASE)):
            continue
        if "." in os.path.basename(value) and any(map(context.host.exists, list_places(
                context, launch.folder, value))):
            continue  # it may be read
        stem, ending = os.path.splitext(value)
        variable = read_array(context)[0]
        yield Problem(Severity.WARNING, launch.line, f"--{name} {value} in an array",
                      "all jobs of the array write it: they overwrite one another, and may continue from one "
                      "another's checkpoints",
                      change_line(context, launch, rf"(?<![\w./-]){re.escape(value)}(?![\w./-])",
                                  f"{stem.rstrip('/')}-${variable}{ending}").otherwise(
                          f"write {stem.rstrip('/')}-${variable}{ending}"))


def read_array(context: Context) -> tuple[str, list[int]]:
    """Return the variable with the number of an array's job, and the numbers; none if they are not known."""
    script, options = context.script, context.script.options
    if script.scheduler is Scheduler.SLURM:
        variable, text = "SLURM_ARRAY_TASK_ID", options.get("array", "")
    elif script.scheduler is Scheduler.PBS:
        is_torque = any(re.search(r"#PBS\s.*-t\s", directive.text) for directive in script.directives)
        variable, text = ("PBS_ARRAYID" if is_torque else "PBS_ARRAY_INDEX"), options.get("array", "")
    elif script.scheduler is Scheduler.LSF:
        match = re.search(r"\[(.*)\]", options.get("job-name", ""))
        variable, text = "LSB_JOBINDEX", match[1] if match else ""
    else:
        return "", []
    numbers: list[int] = []
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?(?::([1-9][0-9]{0,6}))?", part.strip())
        if match is None:
            return "", []
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))[:10_000]
    return variable, numbers
