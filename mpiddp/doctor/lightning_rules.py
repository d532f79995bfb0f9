"""The rule about Lightning, which compares its own numbers with those of a job of Slurm."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from .arguments import read_arguments
from .batch_script import Launch, Program, Scheduler
from .context import Context, Fix, Problem, Step, count, rule
from .directives import read_number
from .edits import advise, change_line, set_job_tasks
from .files import read_training
from .findings import Severity

IMPORT = re.compile(r"^\s*(import|from)\s+(pytorch_)?lightning\b", re.MULTILINE)
PACKAGE = re.compile(r"(pytorch_)?lightning(\.|$)")
OTHER_TRAINERS = re.compile(r"transformers|LightningEnvironment|cluster_environment|plugins")
INTERACTIVE = ("bash", "interactive")  # jobs with these names are none of Slurm for Lightning


@rule("lightning", "numbers of nodes and tasks that Lightning's Trainer refuses")
def check_lightning(context: Context) -> Iterator[Problem]:
    """Compare the numbers that Lightning's Trainer gets with those of the job."""
    if context.script.scheduler is not Scheduler.SLURM or context.script.options.get("job-name") in INTERACTIVE:
        return
    for step in context.steps:
        launch, options = step.launch, step.options
        trainer = find_trainer(context, launch)
        if trainer is None or launch.has_unknown_options or {"ntasks", "ntasks-per-node"}.isdisjoint(options):
            continue
        job = step.request if launch.launcher else context.script.request
        if "ntasks-per-node" not in options and (job.tasks or 1) > 1:
            yield Problem(Severity.ERROR, context.option_line("ntasks") or launch.line,
                          f"Lightning refuses {count(job.tasks or 0, 'task')} without --ntasks-per-node",
                          "it reads the number of tasks on each node from SLURM_NTASKS_PER_NODE, which is not set",
                          set_tasks_per_node(context, step, job.tasks_per_node))
        name, nodes = read_nodes(trainer, launch)
        if nodes and job.nodes and nodes != job.nodes:
            pattern = rf"(?<=--{re.sub('[-_]', '[-_]', name)}[= ]){nodes}\b"
            fix = change_line(context, launch, pattern, str(job.nodes)) if name else Fix()
            is_given = any(keyword.arg == "num_nodes" for keyword in trainer.keywords)
            given = f"Trainer(num_nodes={nodes})" if is_given else "Trainer has no num_nodes, which is then 1"
            yield Problem(Severity.ERROR, launch.line, f"{given}, but the job has {count(job.nodes, 'node')}",
                          "Lightning compares them, and refuses to start",
                          fix.otherwise(f"write num_nodes={job.nodes} in {launch.script}"))


def set_tasks_per_node(context: Context, step: Step, per_node: int | None) -> Fix:
    """Return the change of a number of all tasks to that of each node."""
    is_own = "ntasks" in step.launch.launcher_options
    return advise(f"write --ntasks-per-node={per_node or '…'} instead of --ntasks") if is_own or not per_node else (
        set_job_tasks(context, per_node))


def find_trainer(context: Context, launch: Launch) -> ast.Call | None:
    """Return the only call of Lightning's Trainer in a script that srun or the job script starts; None for another."""
    if launch.program is not Program.PYTHON or launch.launcher not in ("srun", "") or launch.container or (
            not launch.script):
        return None
    text = read_training(context, launch)
    if not IMPORT.search(text) or OTHER_TRAINERS.search(text):
        return None
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = find_trainer_names(nodes)
    calls = [node for node in nodes if isinstance(node, ast.Call) and spell_name(node.func) in names]
    return calls[0] if len(calls) == 1 else None


def spell_name(node: ast.expr) -> str:
    """Return a name with dots as it is written, or something that is no name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([getattr(node, "id", ""), *parts])


def find_trainer_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names by which a script can call Lightning's Trainer, without those of its own classes."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [(alias.name, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        for module, name in modules:
            if PACKAGE.match(module):
                is_class = isinstance(node, ast.ImportFrom) and module.endswith(".Trainer")
                names |= {name} if is_class else {f"{name}.Trainer", f"{name}.pytorch.Trainer"}
    return names - {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def read_nodes(trainer: ast.Call, launch: Launch) -> tuple[str, int | None]:
    """Return the number of nodes that a Trainer gets, and the script's option for it; None if it is not known."""
    values = {keyword.arg: keyword.value for keyword in trainer.keywords}
    value = values.get("num_nodes", ast.Constant(None if None in values or trainer.args else 1))
    if isinstance(value, ast.Attribute):
        name = value.attr.replace("_", "-")
        given = [word for option, word in read_arguments(launch) if option == name]
        return name, read_number(given[0]) if len(given) == 1 else None
    number_of = value.value if isinstance(value, ast.Constant) else None
    return "", number_of if type(number_of) is int else None
