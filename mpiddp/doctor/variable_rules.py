"""Rules about the environment of the tasks: variables that are expanded too early, are empty, or do not arrive."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .batch_script import SLURM_VARIABLES, Launch, Program, Scheduler
from .context import Context, Fix, Problem, rule
from .edits import (
    VALUE,
    advise,
    change_line,
    insert_before,
    insert_option,
    read_match,
    remove_assignments,
    replace_option,
    replace_text,
    set_option,
)
from .findings import Severity

EARLY_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
TASK_VARIABLES = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")


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
                own = range(launch.line, launch.line + launch.text.count("\n") + 1)
                lines = [number for number, text in enumerate(context.script.lines, 1)
                         if re.search(rf"\$\{{?{name}\b", text) and not re.match(r"\s*(echo|printf|#)", text)
                         and number <= own[-1]]
                line = lines[-1] if lines and lines[-1] not in own else launch.line
                yield Problem(Severity.ERROR, line, f"${name} is expanded before {launch.launcher} starts",
                              "the batch script's own value, 0, goes to all tasks",
                              advise("leave it out: python -m mpiddp sets the ranks" if launch.program is Program.MPIDDP
                                     else f"write {launch.launcher} bash -c '… ${name} …' with the whole command in "
                                     "the quotes, and export the variables that it reads; or start mpiddp, which needs "
                                     "none of this"))
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
                          advise("leave it out: python -m mpiddp sets the ranks") if launch.program is Program.MPIDDP
                          else replace_text(context, line, pattern, r"\$"))
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
                          remove_assignments(context, number, match[1]) if is_device else
                          advise(f"remove this line and start python -m mpiddp, which sets the ranks, in line "
                                 f"{steps[-1].launch.line}; or set {match[1]} in each task: "
                                 f"srun bash -c '{match[1]}=${match[2]} exec python …'"))


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
                              set_missing_option(context, option))


def set_missing_option(context: Context, option: str) -> Fix:
    """Return the directive with an option that fits the others, or with an example."""
    job = context.script.request
    value = {"ntasks-per-node": job.gpus_per_node, "gpus-per-node": job.gpus_per_node or job.tasks_per_node,
             "gpus": job.gpus_per_node and job.nodes and job.gpus_per_node * job.nodes}.get(option)
    if value:
        return set_option(context, option, str(value))
    example = {"cpus-per-task": "8", "gpus-per-task": "1", "ntasks-per-gpu": "1"}.get(option, "4")
    return set_option(context, option, example) + advise(f"{example} is an example")


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
                          insert_option(context, launch, "--export=ALL").otherwise(
                              insert_before(context, launch, "unset SLURM_EXPORT_ENV")))
        elif own is not None and {"ALL", "NIL"}.isdisjoint(own.upper().split(",")) and (
                "$" not in re.sub(r"=[^,]*", "", own)):
            yield Problem(Severity.ERROR if own.upper() == "NONE" else Severity.WARNING, launch.line,
                          f"srun --export={read_export(context, launch)}",
                          "the tasks get nothing else of the environment, such as the modules' PATH",
                          replace_option(context, launch, "export", "--export=ALL") if own.upper() == "NONE"
                          else change_line(context, launch, r"(?<=--export[=\s])(?=[^\s=])", "ALL,").otherwise(
                              "begin the list with ALL,"))


def read_export(context: Context, launch: Launch) -> str:
    """Return the value of --export as the script has it, not as the shell expands it."""
    fix = change_line(context, launch, rf"(?<=--export[=\s]){VALUE}", "")
    return "".join(read_match(context, change) for change in fix.changes) or "…"
