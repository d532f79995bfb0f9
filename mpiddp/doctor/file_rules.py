"""Rules about files and folders, and the environment of Python."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator

from .context import Context, Step, error, rule, warning
from .findings import Finding
from .launches import CONDA, Launch, Program, find_option, is_our_option
from .shell import SimpleCommand, Word

MODULE_SETUP = re.compile(r"modules?\.sh|lmod|/init/\w+|StdEnv")
# Modules of compilers, MPI and libraries, which define no function conda.
PLAIN_MODULES = re.compile(
    r"(openmpi|ompi|hpcx|mpich|mvapich|impi|intel|gcc|gnu|llvm|nvhpc|cuda|cudnn|nccl|rocm|ucx|libfabric|aws-ofi|"
    r"cmake|git|openblas|mkl|hdf5|slurm|singularity|apptainer|craype|cray-mpich|prgenv)[\w.-]*(/|$)", re.IGNORECASE)
CONDA_FOLDERS = r"conda|miniforge|mambaforge"
FILE_ENDINGS = re.compile(r"\.(ya?ml|json|jsonl|toml|txt|csv|tsv|py|sh|ini|cfg|conf)$")
READ_NAMES = re.compile(r"config|cfg|conf\b|yaml|data|\blist\b|input|\b(train|val|valid|eval|test)\b|vocab|deepspeed")
WRITTEN_NAMES = re.compile(r"\bout|output|sav|log|ckpt|checkpoint|result|metric|dump|writ|export|report|plot|trac|"
                           r"profil|resume|load|pretrained|weights|state|cache|work|\bdir\b|\bto\b|pred|hist|stat")


@rule("missing-file")
def check_missing_file(context: Context) -> Iterator[Finding]:
    """Look for files that the job needs and that are not here."""
    script, host = context.script, context.host
    base = script.options.get("chdir", "")
    if base and "$" not in base and "%" not in base and not host.is_folder(base):
        yield error(context.option_line("chdir"), f"no such folder: {base}", "the job cannot start in it")
        return
    for command in script.commands:
        path = find_activation(command)
        if path and not context.is_here(command.folder, path):
            lack = "the environment is not activated" if is_activation(command) else "what it sets up is missing"
            yield judge_absent(command.line, f"no such file: {path}", lack)
    for step in context.steps:
        launch = step.launch
        folder, image, config = launch.folder, find_image(step), find_option(
            launch.program_options, "config-file")
        if image and not context.is_here(folder, image):
            yield judge_absent(launch.line, f"no such image: {image}", "the start fails")
        if all(map(is_our_option, launch.program_options)) or launch.program is not Program.MPIDDP:
            yield from check_script(context, launch)
        if config and not launch.container and not context.is_here(folder, config):
            lack = f"{launch.name} cannot read it"
            yield judge_absent(launch.line, f"no such file: {config}", lack) if os.path.isabs(config) else error(
                launch.line, f"no such file: {config}", lack)
        yield from check_arguments(context, launch)


def check_script(context: Context, launch: Launch) -> Iterator[Finding]:
    """Look for the training script."""
    folder, script = launch.folder, launch.script
    if not script or launch.container or find_option(launch.program_options, "no-python") is not None or (
            context.is_here(folder, script) or not launch.is_training):
        return
    if os.path.isabs(script):
        yield judge_absent(launch.line, f"no such file: {script}", "the start fails")
        return
    place = os.path.normpath(os.path.join(context.script.options.get("chdir", ""), folder or ""))
    meant = find_similar_file(context, os.path.join(place, script))
    yield error(launch.line, f"no such file: {script}" + f" (did you mean {meant}?)" * bool(meant),
                f"looked for on this host, in {'the current folder' if place == '.' else place}")


def check_arguments(context: Context, launch: Launch) -> Iterator[Finding]:
    """Look for files among the training's arguments that are not here although their folders are."""
    folder = launch.folder
    if launch.container or (launch.script and not context.is_here(folder, launch.script)) or any(
            command.words[0] == "cd" for command in launch.texts):
        return
    for name, value in read_arguments(launch):
        own = os.path.dirname(value)
        if re.search(r"[*{},]|://|\$|`", value) or WRITTEN_NAMES.search(name) or not FILE_ENDINGS.search(value):
            continue
        place = context.list_places(folder, value)[0]
        is_read = READ_NAMES.search(name) is not None and not ("name" in name or launch.is_module)
        if context.is_here(folder, value) or (own and not context.host.is_folder(os.path.dirname(place))):
            continue
        meant = find_similar_file(context, place)
        if re.sub(r"\d+", "", meant) == re.sub(r"\d+", "", os.path.basename(value)):
            meant = ""  # one of a series
        if not (is_read or meant):
            continue
        make = error if own and is_read else warning
        yield make(launch.line, f"no such file: {value}" + f" (did you mean {os.path.join(own, meant)}?)" * bool(meant),
                   f"an argument of {launch.script_words[0]}: its folder is on this host, the file is not")


def read_arguments(launch: Launch) -> Iterator[tuple[str, str]]:
    """Yield the names, with dashes, and values of a training script's arguments, an empty name for a value alone."""
    name = ""
    for word in launch.script_words[1:]:
        own, has_value, value = word.partition("=")
        if has_value and re.fullmatch(r"[-+]*[\w.-]+", own):
            yield own.lstrip("-+").replace("_", "-"), value
            name = ""
        elif word.startswith("-"):
            name = word.lstrip("-").replace("_", "-")
        else:
            yield name, word
            name = ""


def find_similar_file(context: Context, path: str) -> str:
    """Return the name of the file, of the same kind, in the folder of a path that has nearly its name, or nothing."""
    ending = os.path.splitext(path)[1]
    names = [name for name in context.host.list_names(os.path.dirname(path)) if name.endswith(ending)]
    return next(iter(difflib.get_close_matches(os.path.basename(path), names, 1, 0.8)), "")


def judge_absent(line: int, message: str, lack: str) -> Finding:
    """Return what is wrong with a file that is not on this host, but may be on the compute nodes."""
    return warning(line, message, f"not found on this host; ignore this if the compute nodes have it, but otherwise "
                   f"{lack}")


def find_activation(command: SimpleCommand) -> str:
    """Return the file that a `source` reads, or the folder that `conda activate` names; empty if there is none."""
    words = command.words
    is_source = words[0] in ("source", ".") and len(words) > 1
    is_conda = words[:2] == ("conda", "activate") and len(words) > 2 and "/" in words[2]
    word: Word | None = words[1] if is_source else words[2] if is_conda else None
    return "" if word is None or word.unknown or (is_source and "/" not in word and "." not in word) else word


def find_image(step: Step) -> str:
    """Return the image of a container that is a file, empty if there is none that is known."""
    own = step.launch.options.get("container-image", "")
    return next((word for word in (own, *step.launch.wrapper_words) if re.search(r"\.(sif|sqsh|simg|img)$", word)
                 and "$" not in word and "=" not in word and "://" not in word), "")


@rule("work-folder")
def check_work_folder(context: Context) -> Iterator[Finding]:
    """Look for a script that does not leave the home folder in which its job starts."""
    script, form = context.script, context.script.form
    for step in context.steps[:1]:
        launch = step.launch
        if form and form.starts_at_home and launch.folder == "" and launch.script and not (
                os.path.isabs(launch.script) or {"chdir", "wd"} & set(script.options)):
            yield error(launch.line, f"{launch.script} is looked for in the home folder",
                        f"{script.scheduler.name} starts a job there, not in the folder where it was submitted",
                        f'cd "${form.folder}" || exit 1')


def is_activation(command: SimpleCommand) -> bool:
    """Return whether a command activates an environment of Python."""
    words = command.words
    return (words[0] in ("source", ".") and len(words) > 1 and os.path.basename(words[1]) == "activate") or (
        words[0] in CONDA and words[1:2] == ("activate",))


@rule("other-python")
def check_other_python(context: Context) -> Iterator[Finding]:
    """Compare the Python that is started with the environment that is activated."""
    last = next((command for command in reversed(context.script.commands) if is_activation(command)), None)
    for step in context.steps if last else ():
        launch = step.launch
        program = launch.inner.words[launch.program_at]
        if last and last.line < launch.line and not launch.container and not launch.followed and re.match(
                r"/(usr|bin|opt/rh)(/|$)", program):
            yield warning(launch.line, f"{program} is not the Python of the environment",
                          f"line {last.line} activates an environment, which this path leaves out", "python")


@rule("conda-base")
def check_conda_base(context: Context) -> Iterator[Finding]:
    """Look for an activation of base or NAME that no other one follows."""
    last = next((command for command in reversed(context.script.commands) if is_activation(command)), None)
    if last is None or not context.steps or any(re.search(CONDA_FOLDERS, module) for module in context.modules):
        return  # the base of a site's module is what the site offers
    words = last.words
    in_base = words[0] in CONDA or (re.search(CONDA_FOLDERS, words[1]) is not None and "/envs/" not in words[1])
    name = next(iter(words[2:3]), "base")
    correct = f"{last.text.partition('activate')[0]}activate"
    advice = f"write {correct} with the name of your environment (conda env list shows it)"
    if in_base and name == "base":
        yield warning(last.line, "conda's base environment",
                      "it seldom has torch and mpi4py, and packages in it disturb conda itself", advice=advice)
    elif in_base and name == "NAME":
        yield error(last.line, "NAME stands for the name of your environment",
                    "conda has no environment of this name, and the training runs with another Python", advice=advice)


@rule("conda-init")
def check_conda_init(context: Context) -> Iterator[Finding]:
    """Look for `conda activate` before which nothing defines it."""
    for command in context.script.commands:
        if command.words[:2] != ("conda", "activate"):
            continue
        before = [other for other in context.script.commands if other.line <= command.line and other is not command]
        loads = [other for other in before if other.words[0] in ("ml", "module")]
        modules = [word for other in loads for word in other.words[1:] if word not in ("load", "add", "purge")]
        is_known = any((other.words[0] in ("source", ".") and not MODULE_SETUP.search(other.text))
                       or ("conda" in other.text and other not in loads) for other in before)
        reads_profile = re.search(r"\s-\w*[li]|--login", context.script.lines[0]) is not None
        if not is_known and not reads_profile and not context.has_text(r"conda.*(shell\.|hook)") and all(
                map(PLAIN_MODULES.match, modules)):
            yield error(command.line, "conda activate in a shell that conda has not set up",
                        "a batch job does not read ~/.bashrc; conda refuses, and the system's Python is used",
                        'source "$(conda info --base)/etc/profile.d/conda.sh"')
        return
