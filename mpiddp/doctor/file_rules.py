"""Rules about the directives' lines, files and folders, the environment, and variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from ..base.text import format_ranges
from .arguments import check_missing_arguments, check_shared_outputs
from .batch_script import Command, Program, Scheduler
from .context import GPU_OPTIONS, Context, Fix, Problem, Step, find_option, rule
from .directives import WRONG_BEGINNING, correct_directive, find_directives_end, find_meant_option
from .edits import (
    advise,
    change_line,
    insert_before,
    insert_line,
    move_line,
    remove_assignments,
    replace_text,
    set_option,
    set_variable,
)
from .files import NODE_FOLDERS, find_similar_file, is_here
from .findings import Severity
from .launch_rules import find_option_errors

MODULE_SETUP = re.compile(r"modules?\.sh|lmod|/init/\w+|StdEnv")
# Modules of compilers, MPI and libraries, which define no function conda.
PLAIN_MODULES = re.compile(
    r"(openmpi|ompi|hpcx|mpich|mvapich|impi|intel|gcc|gnu|llvm|nvhpc|cuda|cudnn|nccl|rocm|ucx|libfabric|aws-ofi|"
    r"cmake|git|openblas|mkl|hdf5|slurm|singularity|apptainer|craype|cray-mpich|prgenv)[\w.-]*(/|$)", re.IGNORECASE)
CONDA_FOLDERS = r"conda|miniforge|mambaforge"
PYTHON_MODULES = re.compile(r"(python|anaconda|miniconda|conda|pytorch|torch|cray-python|miniforge)", re.IGNORECASE)
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE")
NODE_CACHES = "/tmp/$USER"  # noqa: S108
CACHES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "MIOPEN_USER_DB_PATH",
          "MIOPEN_CUSTOM_CACHE_DIR", "CUDA_CACHE_PATH")
SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("1", "each kernel waits for the one before: for debugging only"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is checked by another one: for debugging only"),
    "NCCL_P2P_DISABLE": ("1", "the GPUs of a node then exchange data through the memory of the host"),
    "NCCL_IB_DISABLE": ("1", "nodes then use TCP sockets instead of InfiniBand"),
    "NCCL_NET": ("Socket", "nodes then use TCP sockets instead of the fast network"),
    "AMD_SERIALIZE_KERNEL": ("3", "each kernel waits for the one before: for debugging only"),
}


@rule("late-directive", "directives after the first command, which are not read")
def check_late_directive(context: Context) -> Iterator[Problem]:
    """Look for directives that the batch system ignores."""
    script = context.script
    late = [directive.line for directive in script.directives if directive.is_late]
    if late:
        first, end = find_first_command(script.lines), find_directives_end(script.lines)
        are = "is not read: it stands" if len(late) == 1 else "are not read: they stand"
        yield Problem(Severity.ERROR, late[0], f"{name_lines(late)} {are} after the first command, line {first}",
                      "the batch system reads directives only before the first command",
                      sum((move_line(context, line, end + 1, script.lines[line - 1].strip()) for line in late), Fix()))


def find_first_command(lines: Sequence[str]) -> int:
    """Return the number of the first line that is neither empty nor a comment."""
    return next(number for number, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#")


def name_lines(numbers: Sequence[int]) -> str:
    """Return the numbers of lines in words."""
    return f"line{'s' * (len(numbers) > 1)} {format_ranges(numbers).replace(',', ', ')}"


@rule("directive-text", "directives with variables, typographic characters, a wrong beginning or a misspelt option")
def check_directive_text(context: Context) -> Iterator[Problem]:
    """Look for what no batch system reads as it is meant."""
    for directive in context.script.directives:
        text = directive.text.split(" #")[0]
        meant = correct_directive(text)
        if not WRONG_BEGINNING.match(text) and meant != text:
            yield Problem(Severity.ERROR, directive.line, "a typographic dash, quote or space in a directive",
                          "it is not read as an option; it was probably copied from a web page",
                          replace_text(context, directive.line, re.escape(text), meant))
        elif context.script.scheduler is Scheduler.SLURM and (
                match := re.search(r"\$\{?\w+\}?|\$\(", text)) and "comment" not in directive.options:
            names = [name for name in ("output", "error") if "$" in directive.options.get(name, "")]
            is_text = any("$" in directive.options.get(name, "") for name in ("job-name", "mail-user"))
            yield Problem(Severity.WARNING if is_text else Severity.ERROR, directive.line, f"{match[0]} in a directive",
                          "sbatch does not expand variables; " + (
                              "the output goes to a folder with that name" if names else
                              "the text stays as it is" if is_text else "it refuses the value"),
                          sum((set_option(context, name, f"%x-%j.{name[:3]}") for name in names), Fix()) + advise(
                              "%x is the job's name, %j its number, %u your user name" if names else
                              f"write the value of {match[0]} itself"))
        elif context.script.scheduler is Scheduler.PBS and " #" in directive.text:
            yield Problem(Severity.ERROR, directive.line, "a comment after a directive of PBS", "qsub refuses it",
                          replace_text(context, directive.line, re.escape(directive.text), text.rstrip()))
        elif context.script.scheduler is Scheduler.SLURM and re.search(r"\s--[\w-]+(\s+=|=\s+[^-\s])", text):
            yield Problem(Severity.ERROR, directive.line, "spaces around the = of an option",
                          "sbatch reads what follows the space as something else, and refuses the job",
                          replace_text(context, directive.line, re.escape(text),
                                       re.sub(r"(\s--[\w-]+)\s*=\s*", r"\1=", text)))
        if WRONG_BEGINNING.match(text):
            yield Problem(Severity.ERROR, directive.line, "not read as a directive", "it must begin with '#SBATCH '",
                          replace_text(context, directive.line, WRONG_BEGINNING.pattern, "#SBATCH "))
        for name in re.findall(r"\s--([\w-]+)", meant) if context.script.scheduler is Scheduler.SLURM else ():
            if option := find_meant_option(name):
                yield Problem(
                    Severity.ERROR, directive.line, f"sbatch has no option --{name} (did you mean --{option}?)",
                    "it refuses the job", replace_text(context, directive.line, rf"--{name}(?![\w-])", f"--{option}"))


@rule("output-overwritten", "output files that overwrite each other")
def check_output_overwritten(context: Context) -> Iterator[Problem]:
    """Look for an array whose jobs write one file, and for a file that the next job overwrites."""
    options = context.script.options
    for step in context.steps:
        yield from check_shared_outputs(context, step)
    if context.script.scheduler is not Scheduler.SLURM or not context.steps:
        return
    is_array = "array" in options
    for name in ("output", "error"):
        text = options.get(name, "")
        if not text or text == "/dev/null" or re.search(r"%\d*[ajJ]|\$", text) or (
                not is_array and ("%A" in text or options.get("open-mode") == "append")) or (
                options.get("array", "").endswith("%1") and options.get("open-mode") == "append"):
            continue
        stem, dot, ending = text.rpartition(".") if "." in os.path.basename(text) else (text, "", "")
        yield Problem(
            Severity.WARNING if is_array else Severity.NOTE, context.option_line(name),
            f"--{name}={text} in an array" if is_array else f"--{name}={text} is the same file for each job",
            "all jobs of the array write the same file, and overwrite each other's lines" if is_array else
            "the next job overwrites the output of this one",
            set_option(context, name, f"{stem}-{'%A_%a' if is_array else '%j'}{dot}{ending}"))
        break
    for step in context.steps:
        for output in step.launch.outputs if is_array else ():
            if not output.unknown and output != "/dev/null":
                yield Problem(Severity.WARNING, step.launch.line, f"> {output} in an array",
                              "all jobs of the array write the same file, and overwrite each other's lines",
                              change_line(context, step.launch, rf">\s*{re.escape(output)}(?![\w.])",
                                          f"> {output}.$SLURM_ARRAY_TASK_ID").otherwise(
                                  f"write > {output}.$SLURM_ARRAY_TASK_ID"))


@rule("missing-file", "scripts, environments, images and folders that do not exist here")
def check_missing_file(context: Context) -> Iterator[Problem]:
    """Look for files that the job needs and that are not here."""
    script, host = context.script, context.host
    base = script.options.get("chdir", "")
    if base and "$" not in base and "%" not in base and not host.is_folder(base):
        yield Problem(Severity.ERROR, context.option_line("chdir"), f"no such folder: {base}",
                      "the job cannot start in it")
        return
    for command in script.commands:
        path = find_activation(command)
        if path and not is_here(context, command.folder, path):
            lack = "the environment is not activated" if is_activation(command) else "what it sets up is missing"
            yield judge_absent(command.line, f"no such file: {path}", lack)
    for step in context.steps:
        launch = step.launch
        yield from check_missing_arguments(context, step)
        image = find_image(step)
        if image and not is_here(context, launch.folder, image):
            yield judge_absent(launch.line, f"no such image: {image}", "the start fails")
        if launch.program is Program.MPIDDP and find_option_errors(launch):
            continue  # the script may be the value of that option
        is_python = not launch.container and find_option(launch.options, "no-python") is None
        if launch.script and is_python and not is_here(context, launch.folder, launch.script):
            if os.path.isabs(launch.script):
                yield judge_absent(launch.line, f"no such file: {launch.script}", "the start fails")
                continue
            folder = os.path.normpath(os.path.join(base, launch.folder or ""))
            meant = find_similar_file(context, os.path.join(folder, launch.script))
            name = re.escape(os.path.basename(launch.script))
            yield Problem(Severity.ERROR, launch.line, f"no such file: {launch.script}"
                          + f" (did you mean {meant}?)" * bool(meant),
                          f"looked for on this host, in {'the current folder' if folder == '.' else folder}",
                          change_line(context, launch, rf"(?<![\w.-]){name}(?!\w)", meant) if meant else Fix())
        config = find_option(launch.options, "config-file")
        if config and "$" not in config and not launch.container and not is_here(context, launch.folder, config):
            lack = "accelerate cannot read it"
            yield judge_absent(launch.line, f"no such file: {config}", lack) if os.path.isabs(config) else Problem(
                Severity.ERROR, launch.line, f"no such file: {config}", lack)


def judge_absent(line: int, message: str, lack: str) -> Problem:
    """Return what is wrong with a file that is not on this host, but may be on the compute nodes."""
    return Problem(Severity.WARNING, line, message,
                   f"not found on this host; ignore this if the compute nodes have it, but otherwise {lack}")


def find_activation(command: Command) -> str:
    """Return the file that a `source` reads, or the folder that `conda activate` names; empty if there is none."""
    words = command.words
    is_source = words[0] in ("source", ".") and len(words) > 1
    is_conda = words[:2] == ("conda", "activate") and len(words) > 2 and "/" in words[2]
    word = words[1] if is_source else words[2] if is_conda else None
    return "" if word is None or word.unknown or (is_source and "/" not in word and "." not in word) else word


def find_image(step: Step) -> str:
    """Return the image of a container that is a file, empty if there is none that is known."""
    launch = step.launch
    own = launch.launcher_options.get("container-image", "")
    words = [own, *launch.wrapper_words]
    return next((word for word in words if re.search(r"\.(sif|sqsh|simg|img)$", word) and "$" not in word
                 and "=" not in word and "://" not in word), "")


@rule("missing-module", "modules that do not exist here")
def check_missing_module(context: Context) -> Iterator[Problem]:
    """Look for modules in MODULEPATH by their names; where modules add folders to it, only for the first."""
    folders = [folder for folder in context.host.environ.get("MODULEPATH", "").split(":") if folder]
    loads = [command for command in context.script.commands if command.words[:2] == ("module", "load")]
    if any(command.words[0] in ("module", "ml") and "use" in command.words for command in context.script.commands):
        return
    is_hierarchy = any(re.search("core|compiler|linux", folder, re.IGNORECASE) for folder in folders)
    for command in loads[:1] if is_hierarchy else loads:
        for word in command.words[2:3] if is_hierarchy else command.words[2:]:
            name = word.partition("/")[0]
            places = [f"{folder}/{name}{end}" for folder in folders for end in ("", ".lua")]
            if folders and not word.unknown and not any(map(context.host.exists, places)):
                yield Problem(Severity.WARNING, command.line, f"no such module: {word}",
                              "no folder of MODULEPATH has it on this host",
                              advise(f"module spider {name} lists the versions that there are"))


@rule("log-folder", "folders of output that do not exist, or that only one node has")
def check_log_folder(context: Context) -> Iterator[Problem]:
    """Look at where the output goes."""
    script = context.script
    for name in ("output", "error"):
        path = script.options.get(name, "")
        folder = os.path.dirname(path)
        if not folder or "$" in path or script.scheduler is Scheduler.NONE:
            continue
        line = context.option_line(name)
        if NODE_FOLDERS.match(path):
            yield Problem(Severity.WARNING, line, f"--{name}={path} is a folder of the node",
                          "only the first node has the file, and it may be deleted with the job",
                          set_option(context, name, f"%x-%j.{name[:3]}") if script.scheduler is Scheduler.SLURM
                          else advise("write it to a folder that all nodes have"))
        elif not re.search(r"%|\{\{|:", folder) and not context.host.is_folder(
                os.path.join(script.options.get("chdir", ""), folder)):
            yield Problem(Severity.ERROR, line, f"no such folder: {folder}",
                          "the job fails, or runs without output; a mkdir in the script comes too late",
                          advise(f"before you submit the job: mkdir -p {folder}"))
            break
    for step in context.steps:
        own = os.path.dirname(step.launch.launcher_options.get("output", "")) if step.launch.launcher == "srun" else ""
        if own and not re.search(r"[%$]", own) and not is_here(context, step.launch.folder, own):
            yield Problem(Severity.ERROR, step.launch.line, f"no such folder: {own}",
                          "srun cannot write the output of the tasks",
                          insert_before(context, step.launch, f"mkdir -p {own}"))
        if step.launch.program is not Program.MPIDDP:
            continue
        path = find_option(step.launch.options, "log-dir") or script.variables.get("MPIDDP_LOG_DIR", "")
        if path and NODE_FOLDERS.match(path):
            yield Problem(Severity.WARNING, step.launch.line, f"--log-dir {path} is a folder of each node",
                          "you cannot read the logs of other nodes, and they may be deleted with the job",
                          change_line(context, step.launch, r"--log[-_]dir(=|\s+)\S+", "--log-dir=logs").otherwise(
                              set_variable(context, script.variable_lines.get("MPIDDP_LOG_DIR"), "MPIDDP_LOG_DIR",
                                           "logs")))


@rule("work-folder", "a job of PBS that starts in the home folder")
def check_work_folder(context: Context) -> Iterator[Problem]:
    """Look for a PBS script without cd."""
    script = context.script
    for step in context.steps[:1]:
        launch = step.launch
        if script.scheduler is Scheduler.PBS and launch.folder == "" and launch.script and not (
                os.path.isabs(launch.script) or {"chdir", "w", "wd"} & set(script.options)):
            yield Problem(Severity.ERROR, launch.line, f"{launch.script} is looked for in the home folder",
                          "PBS starts a job there, not in the folder where it was submitted",
                          insert_line(find_first_command(script.lines), 'cd "$PBS_O_WORKDIR" || exit 1'))


@rule("other-python", "a Python that is not the activated environment's")
def check_other_python(context: Context) -> Iterator[Problem]:
    """Compare the Python that is started with the environment that is activated."""
    activations = [command for command in context.script.commands if is_activation(command)]
    if not activations:
        return
    last = activations[-1]
    for step in context.steps:
        program, line = step.launch.program_words[0], step.launch.line
        if step.launch.container or step.launch.followed:
            continue
        if re.match(r"/(usr|bin|opt/rh)(/|$)", program):
            yield Problem(Severity.ERROR, line, f"{program} is not the Python of the environment",
                          f"line {last.line} activates an environment, which this path leaves out",
                          change_line(context, step.launch, rf"{re.escape(program)}(?=\s)", "python").otherwise(
                              "start python without a path"))
        elif all(command.line > line for command in activations) and not step.launch.in_loop:
            yield Problem(Severity.ERROR, last.line, "the environment is activated after the training",
                          "the training runs with another Python", move_line(context, last.line, line, last.text))
        else:
            later = [command for command in context.script.commands
                     if last.line < command.line < line and command.words[0] in ("module", "ml")
                     and any(PYTHON_MODULES.match(word) for word in command.words[1:])]
            for command in later[:1]:
                yield Problem(Severity.WARNING, command.line,
                              f"a module with a Python is loaded after the environment of line {last.line}",
                              "its Python comes first in PATH and hides that of the environment",
                              move_line(context, command.line, last.line, command.text))


def is_activation(command: Command) -> bool:
    """Return whether a command activates an environment of Python."""
    words = command.words
    return (words[0] in ("source", ".") and len(words) > 1 and os.path.basename(words[1]) == "activate") or (
        words[0] in ("conda", "mamba", "micromamba") and words[1:2] == ("activate",))


@rule("conda-base", "conda's base environment, or NAME instead of an environment's name")
def check_conda_base(context: Context) -> Iterator[Problem]:
    """Look for an activation of base or NAME that no other one follows."""
    activations = [command for command in context.script.commands if is_activation(command)]
    if not activations or not context.steps:
        return
    last = activations[-1]
    words = last.words
    is_conda = words[0] in ("conda", "mamba", "micromamba")
    name = next(iter(words[2:3]), "base")
    if any(re.search(CONDA_FOLDERS, module) for module in context.modules):
        return  # the base of a site's module is what the site offers
    in_base = re.search(CONDA_FOLDERS, words[1]) is not None and "/envs/" not in words[1]
    if (is_conda or in_base) and name in ("base", "NAME"):
        is_base = name == "base"
        yield Problem(Severity.WARNING if is_base else Severity.ERROR, last.line,
                      "conda's base environment" if is_base else "NAME stands for the name of your environment",
                      "it seldom has torch and mpi4py, and packages in it disturb conda itself" if is_base else
                      "conda has no environment of this name, and the training runs with another Python",
                      advise(f"write {last.text.partition('activate')[0]}activate with the name of your environment "
                             "(conda env list shows it)"))


@rule("conda-init", "conda activate in a shell that does not know it")
def check_conda_init(context: Context) -> Iterator[Problem]:
    """Look for `conda activate` before which nothing defines it."""
    first = context.script.lines[0]
    for command in context.script.commands:
        if command.words[:2] != ("conda", "activate"):
            continue
        before = [other for other in context.script.commands if other.line <= command.line and other is not command]
        loads = [other for other in before if other.words[0] in ("ml", "module")]
        modules = [word for other in loads for word in other.words[1:] if word not in ("load", "add", "purge")]
        is_known = any((other.words[0] in ("source", ".") and not MODULE_SETUP.search(other.text))
                       or ("conda" in other.text and other not in loads) for other in before
                       ) or re.search(r"\s-\w*[li]|--login", first) or context.has_text(r"conda.*(shell\.|hook)")
        unset = [module for module in modules if not defines_conda(context, module)]
        if not is_known and unset == modules:
            name = next((module for module in modules if re.search(CONDA_FOLDERS, module)), "")
            yield Problem(Severity.WARNING if name else Severity.ERROR, command.line,
                          "conda activate in a shell that conda has not set up",
                          f"the file of the module {name} on this host defines no function conda" if name else
                          "a batch job does not read ~/.bashrc; conda refuses, and the system's Python is used",
                          insert_line(command.line, 'source "$(conda info --base)/etc/profile.d/conda.sh"'))
        return


def defines_conda(context: Context, module: str) -> bool:
    """Return whether a module may define the function conda: by its file if that is here, or else by its name."""
    folders = context.host.environ.get("MODULEPATH", "").split(":")
    texts = [text for folder in folders if folder for end in ("", ".lua")
             if (text := context.host.read(f"{folder}/{module}{end}")) is not None]
    if texts:
        return any(re.search(r"conda\.sh|conda shell|shell_?function|source_?sh|set_?alias|depends|load|prereq", text)
                   for text in texts)
    return PLAIN_MODULES.match(module) is None


@rule("local-caches", "compilers' caches on a shared file system")
def check_local_caches(context: Context) -> Iterator[Problem]:
    """Look for caches that all nodes write."""
    home = context.host.environ.get("HOME", "/home")
    for name in CACHES:
        line, path = context.find_assignment(name)
        if context.steps and path.startswith((home, "$HOME", "${HOME}", "~", "/home", "/users", "/lustre", "/gpfs")):
            yield Problem(Severity.WARNING, line, f"{name}={path}",
                          "all ranks write this cache at once: locks and small files on a shared file system",
                          set_variable(context, line, name, f"{NODE_CACHES}/{name.split('_')[0].lower()}"))


@rule("copied-variables", "variables of torch.distributed that mpiddp sets itself")
def check_copied_variables(context: Context) -> Iterator[Problem]:
    """Look for MASTER_ADDR and its like before mpiddp."""
    lines = [(number, name) for number, text in enumerate(context.script.lines, 1) for name in RENDEZVOUS
             if re.match(rf"\s*((export|declare|readonly)\s+(-x\s+)?)?{name}=", text)]
    if lines and {step.launch.program for step in context.steps} == {Program.MPIDDP}:
        numbers, names = zip(*lines, strict=True)
        pronoun = "them" if len({*names}) > 1 else "it"
        yield Problem(Severity.NOTE, numbers[0], f"{', '.join(dict.fromkeys(names))}: mpiddp sets {pronoun} itself",
                      f"mpiddp overwrites {pronoun}", remove_copies(context, lines))


def remove_copies(context: Context, lines: Sequence[tuple[int, str]]) -> Fix:
    """Return the removal of variables from their lines; advice if another line reads one of them."""
    numbers, names = zip(*lines, strict=True)
    if context.has_text(rf"\$\{{?({'|'.join(names)})\b"):
        return advise(f"remove {name_lines(numbers)}, and what reads these variables")
    return sum((remove_assignments(context, number, *(name for line, name in lines if line == number))
                for number in dict.fromkeys(numbers)), Fix())


@rule("slow-variables", "variables that slow training down")
def check_slow_variables(context: Context) -> Iterator[Problem]:
    """Look for variables for debugging, and for switches of networks."""
    nodes = context.script.request.nodes
    for name, (value, reason) in SLOW_VARIABLES.items():
        is_set = context.script.variables.get(name, "") == value and context.steps
        if is_set and not (name in ("NCCL_IB_DISABLE", "NCCL_NET") and nodes == 1):
            line = context.script.variable_lines[name]
            why = "keep it if its comment still holds" if has_comment(context.script.lines, line) else ""
            yield Problem(Severity.WARNING, line, f"{name}={value}", reason,
                          remove_assignments(context, line, name) + advise(why))


def has_comment(lines: Sequence[str], number: int) -> bool:
    """Return whether a line, or the lines above it up to an empty one or a directive, have a comment."""
    for line in lines[number - 1::-1]:
        text = line.strip()
        if " #" in text or re.match(r"#(?![!#]|[A-Z]+\b)", text):
            return True
        if not text.startswith("export ") and "=" not in text:
            return False
    return False


@rule("no-gpus", "a job that asks for no GPUs, although its container or backend needs them")
def check_no_gpus(context: Context) -> Iterator[Problem]:
    """Look for a job without GPUs whose options need them."""
    script = context.script
    if script.scheduler is not Scheduler.SLURM or any(name in script.options for name in GPU_OPTIONS):
        return
    for step in context.steps:
        launch = step.launch
        if "exclusive" in script.options or set(GPU_OPTIONS) & set(launch.launcher_options):
            continue
        needs = "--nv" in launch.wrapper_words or "--rocm" in launch.wrapper_words or (
            find_option(launch.options, "backend") == "nccl" or find_option(launch.options, "device") == "cuda")
        if needs:
            yield Problem(Severity.ERROR, launch.line, "the training needs GPUs, but the job asks for none",
                          "torch sees no GPU", ask_for_gpus(context))


def ask_for_gpus(context: Context) -> Fix:
    """Return the directive with a GPU for each task of a node, or with an example."""
    tasks = context.script.request.tasks_per_node or 4
    return set_option(context, "gpus-per-node", str(tasks)) + advise(f"{tasks} is an example: the GPUs of a node")
