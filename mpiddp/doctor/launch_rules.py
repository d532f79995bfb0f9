"""Rules about the line that starts a training: launcher, MPI, options, variables."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .batch_script import Command, Launch, Program, Scheduler
from .context import (
    MPI_MODULES,
    STARTERS,
    Context,
    Fix,
    Problem,
    Step,
    count,
    find_mpi,
    find_option,
    is_lone,
    is_mpirun,
    rule,
)
from .directives import SLURM_FLAGS, SLURM_NAMES, parse_gpus, read_number
from .edits import (
    TORCHRUN,
    advise,
    append_line,
    change_line,
    insert_before,
    insert_option,
    insert_words,
    place_ranks,
    replace_option,
    replace_text,
    set_chunk,
    set_option,
    set_starter_processes,
    set_tasks,
)
from .files import read_training
from .findings import Severity
from .launches import LAUNCHERS, is_our_option, split_program
from .shell import BLANK_BEHIND

LOCALHOST = r"(localhost|127\.0\.0\.1|0\.0\.0\.0)(?=:|\s|$)"
CRAY_SIGNS = (r"cray|prgenv|\bcpe\b|cudatoolkit|libfabric|aws-ofi|shifter|podman-hpc|uenv|MPICH_|\bFI_|\bhsn\d?|"
              r"slingshot|--network=")
OPEN_MPI_OPTIONS = ("x", "mca", "npernode", "oversubscribe", "allow-run-as-root", "report-bindings")
FITTING_MPI = {"Open MPI": "pmix", "Intel MPI": "pmi2", "MPICH": "pmi2"}
FLUX_WAITS = r"\bflux\s+(job\s+(wait|attach|status)|watch|queue\s+(drain|idle)|wait)\b"
# What is in the words or the text of a script of which one process uses several GPUs, or starts others.
SEVERAL_GPUS = re.compile(r"spawn|(?<!distributed)(?<!distributed[-_ ])(?<!sharded)(?<!sharded[-_ ])data.?parallel|"
                          r"device.?map|tensor.?parallel|\bray\b|vllm|accelerate.dispatch|\b(mp|multiprocessing)\.Process\(",
                          re.IGNORECASE)
STARTS_ITSELF = r"\b(srun|mpirun|mpiexec)\b.*(\$0|\$\{0\}|BASH_SOURCE)"  # each task runs the script again
NO_DOCKER = "docker passes neither Slurm's variables nor MPI's on: start a rank for each GPU with apptainer or enroot"
QUICK = ("echo", "printf", "date", "exit", ":", "true")
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
INNER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed")


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
        fitting = choose_mpi_interface(context)
        correct = insert_option(context, launch, f"--mpi={fitting}").otherwise(f"write srun --mpi={fitting}") if (
            given is None) else replace_option(context, launch, "mpi", f"--mpi={fitting}")
        if given is None:
            if is_cray(context) or step.request.tasks == 1:
                continue
            yield Problem(
                Severity.WARNING, launch.line, "srun without --mpi",
                f"{library or 'MPI'} then connects by the site's default, which is often none: each process trains "
                "alone, or the start fails", correct if library else correct + advise("Cray MPICH needs no --mpi"))
        elif library == "Cray MPICH" and given != "cray_shasta" and not launch.container:
            is_possible = given == "pmi2"  # some Crays need it, such as Kestrel of NREL for cray-mpich-abi
            yield Problem(Severity.WARNING if is_possible else Severity.ERROR, launch.line,
                          f"srun --mpi={given} with Cray MPICH (module {module})",
                          "on a Cray, srun's default is right for Cray MPICH: leave --mpi out"
                          + ", unless your site asks for it" * is_possible,
                          replace_option(context, launch, "mpi", ""))
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
                          insert_before(context, launch, "export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so")
                          + advise("the path is an example: your site has its own"))


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
                      advise("load only that one; python -m mpi4py --mpi-lib-version prints which it is"))


@rule("nested-launcher", "a launcher that starts launchers")
def check_nested_launcher(context: Context) -> Iterator[Problem]:
    """Look for a launcher within each task of another one."""
    for step in context.steps:
        launch, tasks = step.launch, step.request.tasks
        per_node = step.request.tasks_per_node
        if launch.inner and not launch.inner.startswith("$"):
            yield Problem(Severity.ERROR, launch.line, f"{launch.launcher} starts {launch.inner}",
                          f"each task starts a job of its own ({launch.inner} is a launcher itself)",
                          remove_inner_launcher(context, launch))
        elif launch.program is Program.MPIDDP and launch.script_words and (
                os.path.basename(launch.script_words[0]) in ("torchrun", "accelerate", "deepspeed", *LAUNCHERS)
                or (launch.is_module and launch.script_words[0] in INNER_MODULES)):
            yield Problem(Severity.ERROR, launch.line, f"mpiddp starts {launch.script_words[0]}",
                          "mpiddp starts the training script itself, once in each rank",
                          remove_inner_starter(context, launch))
        elif launch.program in STARTERS and re.search(r"\bmpiddp\b", " ".join(launch.script_words[:1])):
            yield Problem(Severity.ERROR, launch.line, f"{launch.program.value} starts mpiddp",
                          "MPI must start the ranks: mpiddp takes the place of torchrun",
                          start_ranks_by_mpi(context, step))
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
                          set_tasks(context, step, 1))


def remove_inner_launcher(context: Context, launch: Launch) -> Fix:
    """Return the change that leaves out the inner of two launchers with its options."""
    pattern = rf"(?<![\w/.-]){re.escape(launch.inner)}\s+(\S.*?\s)?(?={re.escape(launch.program_words[0])}\s)"
    return change_line(context, launch, pattern, "").otherwise(f"leave {launch.inner} and its options out")


def remove_inner_starter(context: Context, launch: Launch) -> Fix:
    """Return the change that leaves out the launcher which mpiddp starts, with its options."""
    words = launch.script_words
    inner = split_program([*(("python", "-m") if launch.is_module else ()), *words])
    name, script = re.escape(words[0]), re.escape(next(iter(inner.script_words), ""))
    begin = rf"-m\s+{name}" if launch.is_module else name
    fix = change_line(context, launch, rf"{begin}\s+(\S.*?\s)?(?={script}(\s|$))", "") if script else Fix()
    return fix.otherwise("write python -m mpiddp and your script")


def choose_mpi_interface(context: Context) -> str:
    """Return the value of srun --mpi for the MPI whose module is loaded."""
    return FITTING_MPI.get(find_mpi(context)[0], "pmix")


def start_ranks_by_mpi(context: Context, step: Step) -> Fix:
    """Return the change by which MPI starts the ranks of mpiddp instead of torchrun."""
    launch, scheduler = step.launch, context.script.scheduler
    if scheduler is not Scheduler.SLURM or launch.launcher not in ("srun", ""):
        return advise("start mpiddp by MPI's launcher, with one rank for each GPU: mpirun python -m mpiddp")
    start = "" if launch.launcher else f"{choose_launcher(context)} "
    pattern = r"(python\S*\s+-m\s+)?" + TORCHRUN.removeprefix(r"\b") + r"\s.*?(-m\s+)?mpiddp\b"
    fix = change_line(context, launch, pattern, f"{start}python -m mpiddp").otherwise(f"write {start}python -m mpiddp")
    if "mpi" in launch.launcher_options:
        fix += replace_option(context, launch, "mpi", f"--mpi={choose_mpi_interface(context)}")
    ranks = step.request.gpus_per_node or step.processes_per_node
    step = step if launch.launcher else replace(step, request=context.script.request)
    return fix + set_tasks(context, step, ranks) if ranks and ranks != step.request.tasks_per_node else fix


@rule("no-launcher", "a training that is started once although the job has several tasks or nodes")
def check_no_launcher(context: Context) -> Iterator[Problem]:
    """Look for a training that no launcher starts."""
    job = context.script.request
    for step in context.steps:
        launch = step.launch
        if launch.launcher or launch.in_loop or context.has_text(STARTS_ITSELF) or (
                launch.line > 1 and BLANK_BEHIND.search(context.script.lines[launch.line - 2])):
            continue
        if launch.program in STARTERS:
            starts_nodes = launch.program is Program.DEEPSPEED and context.has_text(r"hostfile|\s-H\s")
            if job.nodes and job.nodes > 1 and not starts_nodes:
                yield Problem(Severity.ERROR, launch.line,
                              f"{launch.program.value} runs on the first of {job.nodes} nodes only",
                              "a batch script runs on one node; the others are idle, or waited for",
                              start_on_each_node(context, step))
        elif launch.program is Program.PYTHON and not has_tasks_for_ranks(context, launch):
            continue
        elif (job.tasks or 1) > 1 or (launch.program is Program.MPIDDP and ((job.nodes or 1) > 1 or (
                job.gpus_per_node or 1) > 1)):
            numbers = (job.tasks, "task"), (job.nodes, "node"), (job.gpus_per_node, "GPU")
            many = next(count(number, noun) for number, noun in numbers if number and number > 1)
            yield Problem(Severity.ERROR, launch.line, f"no launcher: one process for {many}",
                          "the script is started once, on the first node, and trains alone",
                          add_launcher(context, step))


def has_tasks_for_ranks(context: Context, launch: Launch) -> bool:
    """Return whether the tasks of a job are meant for ranks of a plain Python script, and not as cores of it."""
    job, options = context.script.request, context.script.options
    are_cores = context.script.scheduler is Scheduler.LSF or "ppn=" in options.get("nodes", "")
    if are_cores or context.has_text(r"\bray\s+start\b") or divides_gpus(context):
        return False
    if (job.nodes or 1) > 1:
        return True
    gpus = job.gpus_per_node or parse_gpus(options.get("gpus")) or (job.gpus_per_task or 0) * (job.tasks or 0)
    return gpus > 1 and not may_use_several_gpus(context, launch)


def divides_gpus(context: Context) -> bool:
    """Return whether trainings divide a node's GPUs: several run at once, or see different ones."""
    values = {match for line in context.script.lines if not line.lstrip().startswith("#") for match in re.findall(
        rf"\b(?:{'|'.join(VISIBLE_DEVICES)})=([^\s;&|]*)", line)}
    at_once = [step for step in context.steps if step.launch.is_background]
    return len(values) > 1 or len(at_once) > 1 or any(
        step.launch.in_loop or step.request.gpus_per_node not in (None, context.script.request.gpus_per_node)
        for step in at_once)


def may_use_several_gpus(context: Context, launch: Launch) -> bool:
    """Return whether a plain Python script may use several GPUs itself, or start processes, by its words or text."""
    words = " ".join((*launch.options, *launch.script_words))
    return re.search("multiprocess", words, re.IGNORECASE) is not None or any(
        map(SEVERAL_GPUS.search, (words, read_training(context, launch))))


def insert_launcher(context: Context, launch: Launch, start: str) -> Fix:
    """Return the change that writes a launcher before a command, behind variables that are set for it."""
    text = launch.text.split("\n")[0]
    rest = re.sub(r"^((\w+=\S*|exec|time|nohup)\s+)*", "", text)
    if re.match(r"eval\b|['\"]", rest):
        return advise(f"write {start} before {' '.join(launch.program_words[:2])}")
    return change_line(context, launch, rf"(?<![\w/.-]){re.escape(rest)}", f"{start} {rest}").otherwise(
        f"write {start} before {' '.join(launch.program_words[:2])}")


def start_on_each_node(context: Context, step: Step) -> Fix:
    """Return the change that starts torchrun or a relative on each node."""
    launch, nodes = step.launch, step.request.nodes
    if context.script.scheduler is not Scheduler.SLURM or nodes is None:
        return advise(f"start {launch.program.value} once on each node")
    if launch.container == "docker":
        return advise(NO_DOCKER)
    split = judge_rendezvous(context, launch, nodes)
    if split and not split.fix.changes:
        return split.fix
    if context.script.request.tasks_per_node in (None, 1):
        fix = insert_launcher(context, launch, f"{start_srun(context)} --ntasks-per-node=1")
    else:
        job = replace(step, request=context.script.request)
        fix = insert_launcher(context, launch, start_srun(context)) + set_tasks(context, job, 1)
    fix += split.fix if split else Fix()
    gpus = step.request.gpus_per_task if step.request.gpus_per_node is None else None
    return fix + set_starter_processes(context, step, gpus) if gpus and step.processes_per_node not in (
        None, gpus) else fix


def add_launcher(context: Context, step: Step) -> Fix:
    """Return the change that starts mpiddp by a launcher, with one task for each GPU."""
    launch, job = step.launch, context.script.request
    if launch.container == "docker":
        return advise(NO_DOCKER)
    fix = insert_launcher(context, launch, choose_launcher(context))
    if context.script.scheduler is Scheduler.SLURM and not find_mpi(context)[0] and not is_cray(context):
        fix += advise("--mpi=pmix is for Open MPI, --mpi=pmi2 for MPICH and Intel MPI")
    if launch.program is Program.PYTHON and launch.script_words:
        begin = rf"(?<=\s){re.escape(launch.script_words[0])}(?=\s|$)"
        pattern = rf"-m\s+{begin}" if launch.is_module else begin
        name = f"-m {launch.script_words[0]}" if launch.is_module else launch.script_words[0]
        fix += change_line(context, launch, pattern, f"-m mpiddp {name}").otherwise(f"write python -m mpiddp {name}")
        fix += advise(f"only if {launch.script_words[0]} trains by torch.distributed")
    gpus = job.gpus_per_node
    if context.script.scheduler is Scheduler.SLURM and gpus and job.tasks_per_node not in (None, gpus):
        fix += set_tasks(context, replace(step, request=job), gpus)
    elif context.script.scheduler is Scheduler.PBS and gpus and job.nodes and job.tasks_per_node != gpus:
        fix += set_chunk(context, "mpiprocs", gpus)
    return fix


def start_srun(context: Context) -> str:
    """Return srun with the option that it needs to pass the environment on."""
    return "srun --export=ALL" if context.script.options.get("export", "").upper() == "NONE" else "srun"


def choose_launcher(context: Context) -> str:
    """Return the launcher of a batch system with its options."""
    scheduler, job = context.script.scheduler, context.script.request
    gpus, nodes = job.gpus_per_node, job.nodes
    if scheduler is Scheduler.SLURM:
        mpi = "" if is_cray(context) else f" --mpi={choose_mpi_interface(context)}"
        return f"{start_srun(context)}{mpi}"
    if scheduler is Scheduler.FLUX:
        return f"flux run --nodes={nodes} --ntasks={gpus * nodes} --gpus-per-task=1" if gpus and nodes else "flux run"
    if scheduler is Scheduler.LSF and gpus and nodes and gpus != job.tasks_per_node:
        return f"mpirun -n {gpus * nodes} {place_ranks(context, gpus)}"
    return "mpirun"


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
    elif script.directives and not script.launches and not script.not_followed and not context.has_text(
            r"\b(ssh|pdsh|clush|pbsdsh)\b|--multi-prog"):
        yield Problem(Severity.NOTE, script.directives[0].line, "no line starts a training",
                      "nothing starts Python, torchrun, accelerate or deepspeed: right for a script that only prepares "
                      "data")


@rule("split-world", "torchrun or a relative that trains on each node alone")
def check_split_world(context: Context) -> Iterator[Problem]:
    """Look at how several nodes' torchrun find each other."""
    for step in context.steps:
        launch, nodes = step.launch, step.request.nodes
        if launch.launcher and nodes and nodes > 1 and (problem := judge_rendezvous(context, launch, nodes)):
            yield problem


def judge_rendezvous(context: Context, launch: Launch, nodes: int) -> Problem | None:
    """Return why the starters of several nodes would not find each other, None if they do or for another program."""
    name, options = launch.program.value, launch.options
    start = f"start the ranks by {choose_launcher(context)} python -m mpiddp"
    start += ", as --convert writes it" * (launch.program is not Program.DEEPSPEED)
    rank = find_option(options, "node-rank") or find_option(options, "machine-rank") or ""
    if is_lone(launch):
        option = "num_machines" if launch.program is Program.ACCELERATE else "hostfile"
        return Problem(Severity.ERROR, launch.line, f"{name} without --{option} on {nodes} nodes",
                       "each node trains alone", advise(start))
    if launch.program in STARTERS and rank.isdigit() and find_option(options, "nnodes") != "1":
        return Problem(Severity.ERROR, launch.line, f"node {rank} on each of {nodes} nodes",
                       f"{name} has the same number on all nodes: the start fails, or waits for the others",
                       advise(f"{start}, or give each node its own number: bash -c '… $SLURM_NODEID …'"))
    if launch.program not in (Program.TORCHRUN, Program.TORCH_LAUNCH):
        return None
    given, endpoint = find_option(launch.options, "nnodes"), find_option(launch.options, "rdzv-endpoint") or ""
    endpoint = endpoint or find_option(launch.options, "master-addr") or ""
    is_standalone = find_option(launch.options, "standalone") is not None
    if is_standalone or given in (None, "1"):
        how = "--standalone" if is_standalone else "without --nnodes" if given is None else "--nnodes=1"
        return Problem(Severity.ERROR, launch.line, f"{launch.program.value} {how} on {nodes} nodes",
                       "each node trains alone", set_nodes(context, launch, nodes, endpoint))
    if read_number(given or "") not in (None, nodes):
        return Problem(Severity.ERROR, launch.line, f"--nnodes={given} on {nodes} nodes",
                       "torchrun waits for nodes that do not come, or leaves nodes out",
                       set_nodes(context, launch, nodes, endpoint))
    if is_own_address(launch, endpoint):
        return Problem(Severity.ERROR, launch.line, f"each of {nodes} nodes takes its own name for the first node's",
                       "each node waits for itself: the name must be found once, before srun",
                       advise("leave the address to python -m mpiddp, which needs none"))
    if re.match(LOCALHOST, endpoint):
        return Problem(Severity.ERROR, launch.line, f"the address of the first node is localhost, on {nodes} nodes",
                       "each node waits for itself; the batch script fills in the name of the first node, once",
                       set_address(context, launch))
    return None


def is_own_address(launch: Launch, address: str) -> bool:
    """Return whether a shell in each task makes an address of its own node's name."""
    match = re.match(r"(\$\(hostname[^()]*\)|`hostname[^`]*`|\$\{?HOSTNAME\}?)(:|$)", address)
    return match is not None and launch.followed != "" and match[1] not in launch.early


def set_nodes(context: Context, launch: Launch, nodes: int, endpoint: str) -> Fix:
    """Return the change by which torchrun knows the number of nodes, and the first of them."""
    correct = f"--nnodes={nodes}"
    if not endpoint and not launch.followed:
        correct += " --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29500"
    fixes = (change_line(context, launch, r"--nnodes(=|\s+)\S+", correct),
             change_line(context, launch, r"--standalone\b", correct), insert_words(context, launch, TORCHRUN, correct))
    fix = next((fix for fix in fixes if fix.changes), advise(f"write torchrun {correct}"))
    return fix + set_address(context, launch) if re.match(LOCALHOST, endpoint) else fix


def set_address(context: Context, launch: Launch) -> Fix:
    """Return the change by which all nodes get the name of the first one."""
    fix = Fix() if launch.followed else change_line(context, launch, rf"\b{LOCALHOST}", "$(hostname)")
    return fix.otherwise("give the name of the first node, which the batch script runs on: $(hostname)")


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
                      replace_text(context, line, rf"\b{name}\b", correct) if correct else Fix())


def judge_options(context: Context, launch: Launch, errors: Sequence[str]) -> Problem:
    """Return what is wrong with an option, or with several that mpiddp does not have."""
    names = [*map(read_option, errors)]
    text, reason = errors[0], "mpiddp ends with status 2 before the training"
    fix = sum((correct_option(context, launch, error) for error in errors), Fix())
    if len(errors) > 1:
        text = f"unrecognized arguments: {', '.join(names)}"
        reason += "; the launcher sets the numbers of nodes and processes, and MPI needs no address"
    elif is_for_sbatch(text):
        text = f"{names[0]} is an option of sbatch, not of mpiddp"
        name, has_value, value = names[0].removeprefix("--").partition("=")
        is_complete = name in SLURM_FLAGS or has_value
        can_set = is_complete and context.script.scheduler is Scheduler.SLURM
        fix += set_option(context, name, value) if can_set else advise(f"give {names[0]} in a directive")
        reason += "; mpiddp's batch/requeue.sh has what else a requeue needs" * (names[0] == "--requeue")
    return Problem(Severity.ERROR, launch.line, text, reason, fix)


def read_option(error: str) -> str:
    """Return the option that an error message names, empty for none."""
    match = re.search(r"arguments: ([^\s;]+)", error)
    return match[1] if match else ""


def is_for_sbatch(error: str) -> bool:
    """Return whether an error message is about an option of sbatch, and has no hint."""
    option = read_option(error)
    return error.endswith(f": {option}") and option.partition("=")[0].removeprefix("--") in {
        *SLURM_NAMES.values(), *SLURM_FLAGS}


def correct_option(context: Context, launch: Launch, error: str) -> Fix:
    """Return the change to the option that may be meant, or one that leaves out what mpiddp does not have."""
    option, meant = read_option(error), re.search(r"did you mean (--[\w-]+)", error)
    if not option:
        return Fix()
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
            command.words[0] in QUICK for command in script.commands if command.line > last[0].line):
        started = [last[0]]
    for launch in started:
        if launch.is_background and not any(is_wait(command) and command.line >= launch.line
                                            for command in script.commands):
            yield Problem(Severity.ERROR, launch.line,
                          "the training runs in the background, and nothing waits for it",
                          "the job ends with the script, and kills the training", wait_at_end(context, launch))
        if script.scheduler is Scheduler.FLUX and re.match(r"\s*flux\s+submit\b", launch.text) and not (
                {"wait", "watch"} & set(launch.launcher_options) or context.has_text(FLUX_WAITS)):
            yield Problem(Severity.ERROR, launch.line, "flux submit does not wait for the training",
                          "the job ends with the script, and kills the training",
                          change_line(context, launch, r"\bflux\s+submit\b", "flux run").otherwise("write flux run"))


def wait_at_end(context: Context, launch: Launch) -> Fix:
    """Return the change that waits at the end of the script, if nothing before that may need what was trained."""
    later = [command for command in context.script.commands if command.line > launch.line
             and command.words[0] not in QUICK and command.text not in {each.text for each in context.script.trainings}]
    trainings = {each.text for each in context.script.trainings}
    if any(command.is_background and command.text not in trainings for command in context.script.commands):
        return advise("write wait with the number of its process: job=$! behind the &, then wait $job")
    return append_line(context, "wait") if not later else advise(f"write wait before line {later[0].line}")


def is_wait(command: Command) -> bool:
    """Return whether a command waits for a process, or asks whether it is still there."""
    name, *words = command.words
    return name == "wait" or (name == "kill" and "-0" in words) or any(word.startswith("--pid") for word in words)


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
                              translate_option(context, step.launch, name, word))
                break


def translate_option(context: Context, launch: Launch, name: str, word: str) -> Fix:
    """Return the change of another MPI's option to the one that the loaded MPI has, or its removal."""
    words = launch.text.split()
    values = words[words.index(word) + 1:][:2]
    first, second = (*values, "", "")[:2]
    new = {"genv": f"-x {first}={second}", "x": f"-genv {first.replace('=', ' ', 1)}", "ppn": f"-N {first}",
           "perhost": f"-N {first}", "npernode": f"-ppn {first}", "f": f"--hostfile {first}"}.get(name, "")
    length = {"genv": 2, "mca": 2, "genvall": 0, "oversubscribe": 0, "allow-run-as-root": 0, "report-bindings": 0}
    old = r"\s+".join(map(re.escape, [word, *values[:length.get(name, 1)]]))
    return change_line(context, launch, rf"(?<!\S){old}(?!\S)" if new else rf"\s+{old}(?!\S)", new).otherwise(
        f"write {new} instead of {word}" if new else f"leave {word} out")
