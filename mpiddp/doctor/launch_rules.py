"""Rules about the line that starts a training: launcher, MPI, options, variables."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence

from .batch_script import SLURM_VARIABLES, Launch, Program, Scheduler
from .context import (
    STARTERS,
    Change,
    Context,
    Problem,
    Suggestion,
    change_line,
    count,
    find_option,
    insert_option,
    is_mpirun,
    rule,
    suggest_tasks,
)
from .directives import SLURM_FLAGS, SLURM_NAMES, read_number
from .findings import Severity
from .launches import LAUNCHERS, is_our_option

# What a module's name begins with, if it is of an MPI that srun must be told of; or of a Cray, where it need not.
MPI_MODULES = {"Open MPI": r"(openmpi|ompi|hpcx)\b", "Intel MPI": r"(impi|intel-?mpi|(intel-)?oneapi-mpi)\b",
               "MPICH": r"(mpich|mvapich2?)\b", "Cray MPICH": r"cray-mpich"}
CRAY_SIGNS = (r"cray|prgenv|\bcpe\b|cudatoolkit|libfabric|aws-ofi|shifter|podman-hpc|uenv|MPICH_|\bFI_|\bhsn\d?|"
              r"slingshot|--network=")
OPEN_MPI_OPTIONS = ("x", "mca", "npernode", "oversubscribe", "allow-run-as-root", "report-bindings")
FITTING_MPI = {"Open MPI": "pmix", "Intel MPI": "pmi2", "MPICH": "pmi2"}
FLUX_WAITS = r"\bflux\s+(job\s+(wait|attach|status)|watch|queue\s+(drain|idle)|wait)\b"
EARLY_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
TASK_VARIABLES = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
INNER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed")


def find_mpi(context: Context) -> tuple[str, str]:
    """Return the MPI whose module the script loads, and the module; empty if there is none."""
    for module in reversed(context.modules):
        for part in module.lower().split("/"):
            for name, pattern in MPI_MODULES.items():
                if re.match(pattern, part):
                    return name, module
    return "", ""


def is_cray(context: Context) -> bool:
    """Return whether something in the script is as on a Cray, where the default of srun --mpi is right."""
    text = "\n".join(line for line in context.script.lines if not re.match(r"\s*#(?!SBATCH)", line))
    return re.search(CRAY_SIGNS, text, re.IGNORECASE) is not None


@rule("mpi-interface", "srun --mpi against the MPI of the environment")
def check_mpi_interface(context: Context) -> Iterator[Problem]:
    """Compare the option of srun with the MPI whose module is loaded."""
    library, module = find_mpi(context)
    for step in context.steps:
        launch = step.launch
        if launch.launcher != "srun" or launch.program is not Program.MPIDDP:
            continue
        if launch.has_unknown_options or launch.inner:
            continue
        given = launch.launcher_options.get("mpi")
        if given is None and {"SLURM_MPI_TYPE"} & {*context.script.exported, *launch.assignments}:
            continue
        fitting = FITTING_MPI.get(library, "pmix")
        correct: Suggestion = insert_option(context, launch, f"--mpi={fitting}") if given is None else change_line(
            context, launch, rf"--mpi[= ]{re.escape(given)}\b", f"--mpi={fitting}")
        correct = correct or f"srun --mpi={fitting}"
        if given is None:
            if is_cray(context) or step.request.tasks == 1:
                continue
            yield Problem(
                Severity.WARNING, launch.line, "srun without --mpi",
                f"{library or 'MPI'} then connects by the site's default, which is often none: each process trains "
                "alone, or the start fails (Cray MPICH needs no --mpi)", correct)
        elif library == "Cray MPICH" and given != "cray_shasta" and not launch.container:
            is_possible = given == "pmi2"  # some Crays need it, such as Kestrel of NREL for cray-mpich-abi
            yield Problem(Severity.WARNING if is_possible else Severity.ERROR, launch.line,
                          f"srun --mpi={given} with Cray MPICH (module {module})",
                          "on a Cray, srun's default is right for Cray MPICH: leave --mpi out"
                          + ", unless your site asks for it" * is_possible,
                          change_line(context, launch, rf"\s--mpi[= ]{re.escape(given)}\b", ""))
        elif given == "none":
            yield Problem(Severity.ERROR, launch.line, "srun --mpi=none", "the processes do not find each other: each "
                          "trains alone, or the start fails", correct)
        elif given.startswith("pmix") and library == "Intel MPI" and "I_MPI_PMI" not in context.script.exported:
            yield Problem(Severity.ERROR, launch.line, f"srun --mpi={given} with Intel MPI (module {module})",
                          "Intel MPI connects by PMI2", correct)
        elif given.startswith("pmix") and library == "MPICH":
            yield Problem(Severity.ERROR, launch.line, f"srun --mpi={given} with MPICH (module {module})",
                          "MPICH connects by PMI2, unless it was built with PMIx", correct)
        elif given in ("pmi2", "pmi", "pmi1", "openmpi") and library == "Open MPI":
            yield Problem(Severity.ERROR, launch.line, f"srun --mpi={given} with Open MPI (module {module})",
                          "Open MPI connects by PMIx; Open MPI 5 has nothing else", correct)
        elif given == "pmi2" and library == "Intel MPI" and "I_MPI_PMI_LIBRARY" not in {
                *context.script.exported, *context.host.environ}:
            yield Problem(Severity.WARNING, launch.line, "Intel MPI under srun without I_MPI_PMI_LIBRARY",
                          "Intel MPI finds Slurm's PMI2 only by this variable, unless the module sets it",
                          "export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so     # your site's path")


@rule("several-mpi", "modules of more than one MPI")
def check_several_mpi(context: Context) -> Iterator[Problem]:
    """Look for modules of different MPIs."""
    loaded = {}
    for module in context.modules:
        for name, pattern in MPI_MODULES.items():
            if re.match(pattern, module.lower()):
                loaded[name] = module
    if len(loaded) > 1 and context.steps:
        yield Problem(Severity.WARNING, context.steps[0].launch.line,
                      f"modules of several MPIs: {', '.join(loaded.values())}",
                      "launcher and library must be of the same MPI, the one that mpi4py was built with",
                      "python -m mpi4py --mpi-lib-version     # prints which one that is")


@rule("nested-launcher", "a launcher that starts launchers")
def check_nested_launcher(context: Context) -> Iterator[Problem]:
    """Look for a launcher within each task of another one."""
    for step in context.steps:
        launch, tasks = step.launch, step.request.tasks
        per_node = step.request.tasks_per_node
        if launch.inner:
            yield Problem(Severity.ERROR, launch.line, f"{launch.launcher} starts {launch.inner}",
                          f"each task starts a job of its own ({launch.inner} is a launcher itself)",
                          replace_launcher(launch))
        elif launch.program is Program.MPIDDP and launch.script_words and (
                os.path.basename(launch.script_words[0]) in ("torchrun", "accelerate", "deepspeed", *LAUNCHERS)
                or (launch.is_module and launch.script_words[0] in INNER_MODULES)):
            yield Problem(Severity.ERROR, launch.line, f"mpiddp starts {launch.script_words[0]}",
                          "mpiddp starts the training script itself, once in each rank", "python -m mpiddp train.py")
        elif launch.program in STARTERS and re.search(r"\bmpiddp\b", " ".join(launch.script_words[:1])):
            yield Problem(Severity.ERROR, launch.line, f"{launch.program.value} starts mpiddp",
                          "MPI must start the ranks: mpiddp takes the place of torchrun",
                          "srun --mpi=pmix python -m mpiddp train.py")
        elif launch.program in STARTERS and launch.launcher and find_option(launch.options, "num-processes") != "1":
            number = per_node or (tasks if "nodes" not in step.options else None)
            if number is None or number == 1:
                continue
            processes = step.processes_per_node
            each = f", each with {count(processes, 'process')}" if processes else ""
            where = " on each node" if per_node else ""
            name = launch.program.value
            instead = (f", or start mpiddp instead of it: python -m mpiddp.doctor --convert {context.script.path}"
                       if launch.program is not Program.DEEPSPEED else "")
            yield Problem(Severity.ERROR, launch.line, f"{number} times {name}{where}{each}",
                          f"{name} starts the processes of a node itself: start {name} once per node{instead}",
                          suggest_tasks(context, step, 1))


def replace_launcher(launch: Launch) -> str:
    """Return a line with the inner of two launchers left out."""
    start = "srun --mpi=pmix" if launch.launcher == "srun" else launch.launcher
    return f"{start} {' '.join(launch.program_words)}"


@rule("no-launcher", "a training that is started once although the job has several tasks or nodes")
def check_no_launcher(context: Context) -> Iterator[Problem]:
    """Look for a training that no launcher starts."""
    job = context.script.request
    for step in context.steps:
        launch = step.launch
        if launch.launcher or launch.in_loop:
            continue
        python = " ".join(launch.program_words[:4])
        if launch.program in STARTERS:
            if job.nodes and job.nodes > 1:
                yield Problem(Severity.ERROR, launch.line,
                              f"{launch.program.value} runs on the first of {job.nodes} nodes only",
                              "a batch script runs on one node; the others are idle, or waited for",
                              "srun --ntasks-per-node=1 " + python)
        elif (job.tasks or 1) > 1 or (launch.program is Program.MPIDDP and ((job.nodes or 1) > 1 or (
                job.gpus_per_node or 1) > 1)):
            numbers = (job.tasks, "task"), (job.nodes, "node"), (job.gpus_per_node, "GPU")
            many = next(count(number, noun) for number, noun in numbers if number and number > 1)
            starts = {Scheduler.SLURM: "srun --mpi=pmix", Scheduler.FLUX: "flux run"}
            start = starts.get(context.script.scheduler, "mpirun")
            is_ours = launch.program is Program.MPIDDP
            yield Problem(Severity.ERROR, launch.line, f"no launcher: one process for {many}",
                          "the script is started once, on the first node, and trains alone",
                          f"{start} {python}" if is_ours else f"{start} python -m mpiddp {launch.script or ''}".strip())


@rule("no-training", "directives, but no line that starts a training, or none that could be followed to one")
def check_no_training(context: Context) -> Iterator[Problem]:
    """Look for a script that starts nothing, or of which nothing that it starts could be followed."""
    script = context.script
    launches = [launch for launch in script.launches if launch.launcher and (launch.script or launch.unknown)]
    if script.directives and not script.trainings and launches:
        launch = launches[-1]
        started = launch.script or " ".join(launch.program_words[:3])
        yield Problem(Severity.WARNING, launch.line, f"what {started} starts is not known: no training was checked",
                      "no line starts Python, torchrun, accelerate or deepspeed that the doctor can follow; it reads a "
                      "shell script that is started if it is here, or is written by a here document")
    elif script.directives and not script.launches and not script.not_followed:
        yield Problem(Severity.NOTE, script.directives[0].line, "no line starts a training",
                      "nothing starts Python, torchrun, accelerate or deepspeed: right for a script that only prepares "
                      "data")


@rule("split-world", "torchrun that trains on each node alone")
def check_split_world(context: Context) -> Iterator[Problem]:
    """Look at how several nodes' torchrun find each other."""
    for step in context.steps:
        launch, nodes = step.launch, step.request.nodes
        if launch.program not in (Program.TORCHRUN, Program.TORCH_LAUNCH):
            continue
        if not launch.launcher or not nodes or nodes < 2:
            continue
        given, endpoint = find_option(launch.options, "nnodes"), find_option(launch.options, "rdzv-endpoint") or ""
        is_standalone = find_option(launch.options, "standalone") is not None
        if is_standalone or given in (None, "1"):
            how = "--standalone" if is_standalone else "without --nnodes" if given is None else "--nnodes=1"
            yield Problem(Severity.ERROR, launch.line, f"{launch.program.value} {how} on {nodes} nodes",
                          "each node trains alone", set_nodes(context, launch, nodes))
        elif read_number(given or "") not in (None, nodes):
            yield Problem(Severity.ERROR, launch.line, f"--nnodes={given} on {nodes} nodes",
                          "torchrun waits for nodes that do not come, or leaves nodes out",
                          set_nodes(context, launch, nodes))
        elif is_own_address(launch, endpoint or find_option(launch.options, "master-addr") or ""):
            yield Problem(Severity.ERROR, launch.line, f"each of {nodes} nodes takes its own name for the first node's",
                          "each node waits for itself: the name must be found once, before srun",
                          "python -m mpiddp needs no address")
        elif re.match(r"(localhost|127\.0\.0\.1|0\.0\.0\.0)(:|$)",
                      endpoint or find_option(launch.options, "master-addr") or ""):
            yield Problem(Severity.ERROR, launch.line, f"the address of the first node is localhost, on {nodes} nodes",
                          "each node waits for itself", "python -m mpiddp needs no address")


def is_own_address(launch: Launch, address: str) -> bool:
    """Return whether a shell in each task makes an address of its own node's name."""
    match = re.match(r"(\$\(hostname[^()]*\)|`hostname[^`]*`|\$\{?HOSTNAME\}?)(:|$)", address)
    return match is not None and launch.followed != "" and match[1] not in launch.early


def set_nodes(context: Context, launch: Launch, nodes: int) -> Suggestion:
    """Return torchrun's line with the number of nodes."""
    correct = f"--nnodes={nodes}"
    return (change_line(context, launch, r"--nnodes[= ]\S+", correct)
            or change_line(context, launch, "--standalone",
                           f"{correct} --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29500")
            or change_line(context, launch, r"\btorchrun\b", f"torchrun {correct}") or correct)


@rule("early-variable", "a task's variable that the batch script expands, so that all tasks get the same")
def check_early_variable(context: Context) -> Iterator[Problem]:
    """Look for $SLURM_PROCID and its like in words that the batch shell expands."""
    yield from check_early_exports(context)
    for step in context.steps:
        launch = step.launch
        if not launch.launcher or launch.in_loop:
            continue
        if launch.followed:
            yield from check_early_text(context, launch)
            continue
        for name in TASK_VARIABLES:
            if any(part in (f"${name}", f"${{{name}}}") for part in launch.unknown):
                yield Problem(Severity.ERROR, launch.line, f"${name} is expanded before {launch.launcher} starts",
                              "the batch script's own value, 0, goes to all tasks",
                              "python -m mpiddp sets the ranks" if launch.program is Program.MPIDDP else
                              f"{launch.launcher} bash -c '… ${name} …'     # python -m mpiddp sets the ranks itself")
                break


def check_early_text(context: Context, launch: Launch) -> Iterator[Problem]:
    """Look for variables of a task in a text that the batch shell expands, and a shell in each task reads."""
    script = context.script
    own = range(launch.line, launch.line + launch.text.count("\n") + 1)
    for name in TASK_VARIABLES:
        if not {f"${name}", f"${{{name}}}"} & {*launch.early}:
            continue
        pattern = rf"(?<!\\)\$(?=\{{?{name}\b)"
        line = next((number for number in sorted({*script.document_lines, *own}) if re.search(
            pattern, script.lines[number - 1]) and not re.match(r"\s*(echo|printf|#)", script.lines[number - 1])), None)
        if line is not None:
            yield Problem(Severity.ERROR, line, f"${name} is expanded before {launch.launcher} starts",
                          "the batch script's own value, 0, goes to all tasks: a here document without quotes, and a "
                          "text in double quotes, are expanded at once",
                          "python -m mpiddp sets the ranks" if launch.program is Program.MPIDDP else
                          Change(line - 1, ((pattern, r"\$"),)))
            return


def check_early_exports(context: Context) -> Iterator[Problem]:
    """Look for `export RANK=$SLURM_PROCID` and its like in the batch script."""
    script = context.script
    steps = [step for step in context.steps if step.launch.launcher and not step.launch.followed
             and not step.launch.in_loop]
    for number, text in enumerate(script.lines, 1):
        match = re.match(rf"\s*(?:export|declare -x)\s+(\w+)=[\"']?\$\{{?({'|'.join(TASK_VARIABLES)})\b", text)
        if match is None or number in script.document_lines:
            continue
        is_device = match[1].endswith("VISIBLE_DEVICES")
        if match[1] in (*EARLY_RANKS, "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") and any(
                step.launch.line > number and (is_device or step.launch.program is Program.PYTHON) for step in steps):
            yield Problem(Severity.ERROR, number, f"${match[2]} is expanded before the tasks start",
                          f"the batch script's own value, 0, goes to all tasks as {match[1]}",
                          f"# {match[1]}: remove this line" if is_device else
                          "srun --mpi=pmix python -m mpiddp …     # sets the ranks")


@rule("unset-variable", "a variable that Slurm sets only with an option that is not given")
def check_unset_variable(context: Context) -> Iterator[Problem]:
    """Look for variables of Slurm in launches that are empty."""
    if context.script.scheduler is not Scheduler.SLURM:
        return
    for launch in context.script.launches:
        for name, option in SLURM_VARIABLES.items():
            is_used = any(part in (f"${name}", f"${{{name}}}") for part in launch.unknown)
            in_task = launch.followed and launch.launcher == "srun"
            if is_used and option not in context.script.options and not in_task:
                yield Problem(Severity.ERROR, launch.line, f"${name} is empty without #SBATCH --{option}",
                              "Slurm sets it only if the option is given; the command then has an empty value",
                              f"#SBATCH --{option}={'8' if option == 'cpus-per-task' else '4'}")


@rule("export-none", "--export by which the environment is lost")
def check_export_none(context: Context) -> Iterator[Problem]:
    """Look for --export=NONE, or a list without ALL."""
    script = context.script
    is_none = script.scheduler is Scheduler.SLURM and script.options.get("export", "").upper() == "NONE"
    for step in context.steps:
        launch = step.launch
        own = launch.launcher_options.get("export")
        if launch.launcher != "srun":
            continue
        if own is None and is_none and not context.has_text("SLURM_EXPORT_ENV"):
            yield Problem(Severity.ERROR, context.option_line("export"), "--export=NONE also holds for srun",
                          "the tasks get nothing of the environment that the script sets up",
                          insert_option(context, launch, "--export=ALL") or "unset SLURM_EXPORT_ENV")
        elif own is not None and {"ALL", "NIL"}.isdisjoint(own.upper().split(",")) and "$" not in own:
            yield Problem(Severity.ERROR if own.upper() == "NONE" else Severity.WARNING, launch.line,
                          f"srun --export={own}",
                          "the tasks get nothing else of the environment, such as the modules' PATH",
                          "srun --export=ALL" + ("" if own.upper() == "NONE" else f",{own}"))


@rule("unknown-option", "options and MPIDDP_… variables that mpiddp does not have")
def check_unknown_option(context: Context) -> Iterator[Problem]:
    """Parse mpiddp's options as a start does."""
    from ..options.table import find_unknown_variables

    for launch in context.script.trainings:
        if launch.program is not Program.MPIDDP:
            continue
        errors = find_option_errors(launch)
        foreign = [text for text in errors
                   if read_option(text) and "did you mean" not in text and not is_for_sbatch(text)]
        for texts in [[text] for text in errors if text not in foreign] + [foreign] * bool(foreign):
            yield judge_options(context, launch, texts)
    variables = {**context.script.variables, **{
        name: value for launch in context.script.launches for name, value in launch.assignments.items()}}
    for text in find_unknown_variables(variables):
        name, line = text.split(" ")[0], context.script.variable_lines.get(text.split(" ")[0])
        correct = next(iter(re.findall(r"did you mean (\w+)", text)), "")
        yield Problem(Severity.WARNING, line, f"no such option: {text}", "the variable has no effect",
                      context.script.lines[line - 1].strip().replace(name, correct) if line and correct else correct)


def judge_options(context: Context, launch: Launch, errors: Sequence[str]) -> Problem:
    """Return what is wrong with an option, or with several that mpiddp does not have."""
    names = [*map(read_option, errors)]
    text, reason = errors[0], "mpiddp ends with status 2 before the training"
    changes = [change for error in errors if (change := correct_option(context, launch, error))]
    change = changes[0]._replace(edits=tuple(edit for each in changes for edit in each.edits)) if changes else None
    if len(errors) > 1:
        text = f"unrecognized arguments: {', '.join(names)}"
        reason += "; the launcher sets the numbers of nodes and processes, and MPI needs no address"
    elif is_for_sbatch(text):
        text = f"{names[0]} is an option of sbatch, not of mpiddp"
        change = change and change._replace(above=f"#SBATCH {names[0]}")
        reason += "; batch/requeue.sh has what else a requeue needs" * (names[0] == "--requeue")
    return Problem(Severity.ERROR, launch.line, text, reason, change)


def read_option(error: str) -> str:
    """Return the option that an error message names, empty for none."""
    match = re.search(r"arguments: ([^\s;]+)", error)
    return match[1] if match else ""


def is_for_sbatch(error: str) -> bool:
    """Return whether an error message is about an option of sbatch, and has no hint."""
    option = read_option(error)
    return error.endswith(f": {option}") and option.partition("=")[0].removeprefix("--") in {
        *SLURM_NAMES.values(), *SLURM_FLAGS}


def correct_option(context: Context, launch: Launch, error: str) -> Change | None:
    """Return the change to the option that may be meant, or one that leaves out what mpiddp does not have."""
    option, meant = read_option(error), re.search(r"did you mean (--[\w-]+)", error)
    if not option:
        return None
    if meant:
        return change_line(context, launch, rf"(?<![\w-]){re.escape(option)}\b", meant[1])
    later = next((word for before, word in zip(launch.options, launch.options[1:], strict=False)
                  if before == option and not word.startswith("-")), "")
    value = rf"(=\S+|\s+{re.escape(later)})?" if later else r"(=\S+)?"
    return change_line(context, launch, rf"\s{re.escape(option)}{value}(?!\S)", "")


def find_option_errors(launch: Launch) -> list[str]:
    """Return what mpiddp would print about its options: a line for each that it does not have, or for a wrong value."""
    unknown = [word for word in launch.options if not is_our_option(word)]
    if unknown:
        return [text for word in unknown if (text := parse_options([word]))]
    ends = {"--help", "-h", "--version"} & set(launch.options)
    text = "" if ends or any("$" in word for word in launch.options) else parse_options(launch.options)
    return [text] if text else []


def parse_options(words: Sequence[str]) -> str:
    """Return mpiddp's error message for options, empty if they are right."""
    from ..cli import read_config

    try:
        read_config([*words, "script.py"], {})
    except argparse.ArgumentTypeError as error:
        return str(error).removeprefix("mpiddp: ").removesuffix(" (see python -m mpiddp --help)")
    return ""


@rule("background-wait", "a training in the background without a wait")
def check_background_wait(context: Context) -> Iterator[Problem]:
    """Look for a launch with & after which the script ends."""
    script = context.script
    started = [step.launch for step in context.steps]
    last = script.launches[-1:]
    if not started and last and last[0].launcher in (*LAUNCHERS, "flux") and all(
            command.words[0] in ("echo", "printf", "date", "exit", ":", "true") for command in script.commands
            if command.line > last[0].line):
        started = [last[0]]
    for launch in started:
        if launch.is_background and not any(command.words[0] == "wait" and command.line >= launch.line
                                            for command in script.commands):
            yield Problem(Severity.ERROR, launch.line,
                          "the training runs in the background, and nothing waits for it",
                          "the job ends with the script, and kills the training", "wait")
        if script.scheduler is Scheduler.FLUX and re.match(r"\s*flux\s+submit\b", launch.text) and not (
                {"wait", "watch"} & set(launch.launcher_options) or context.has_text(FLUX_WAITS)):
            yield Problem(Severity.ERROR, launch.line, "flux submit does not wait for the training",
                          "the job ends with the script, and kills the training",
                          change_line(context, launch, r"\bflux\s+submit\b", "flux run"))


@rule("mpi-option", "options of another MPI's mpirun")
def check_mpi_option(context: Context) -> Iterator[Problem]:
    """Compare the options of mpirun with the MPI whose module is loaded."""
    library, module = find_mpi(context)
    foreign = {"Open MPI": ("genv", "genvall", "perhost", "ppn", "bootstrap", "f"),
               "Intel MPI": OPEN_MPI_OPTIONS, "MPICH": OPEN_MPI_OPTIONS}.get(library, ())
    for step in context.steps:
        if not is_mpirun(step.launch):
            continue
        words = step.launch.text.split()
        for name in foreign:
            if word := next((word for word in words if word.lstrip("-") == name and word.startswith("-")), ""):
                yield Problem(Severity.ERROR, step.launch.line,
                              f"{word} is no option of {library}'s {step.launch.launcher}",
                              f"the start fails: the module {module} is {library}",
                              {"genv": "-x NAME=VALUE", "x": "-genv NAME VALUE", "ppn": "-N 4", "perhost": "-N 4",
                               "npernode": "-ppn 4"}.get(name, ""))
                break
