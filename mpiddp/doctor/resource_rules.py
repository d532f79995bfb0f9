"""Rules about the resources of a training: tasks, GPUs, cores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from .context import GPU_OPTIONS, TASK_OPTIONS, VISIBLE_DEVICES, Context, Step, count, error, rule, warning
from .directives import number
from .findings import Finding, Severity
from .launches import Launch, Program, find_option

WHOLE_NODE_GPUS = 8  # nodes with more GPUs are rare
CONTAINER_VALUES = ("-B", "--bind", "--pwd", "--cwd", "-H", "--home", "-o", "--overlay", "--env", "--env-file",
                    "-W", "--workdir", "-S", "--scratch", "-v", "--volume", "-w", "--mount", "--network")
CPU_MAPS = ("none", "map_cpu", "mask_cpu", "map_ldom", "mask_ldom", "no")
SHARED_CORE = "the rank and its DataLoader workers share that core, and the GPU waits for data"
GPU_SWITCHES = {"apptainer": ("--nv", "--rocm", "--nvccli"), "singularity": ("--nv", "--rocm", "--nvccli"),
                "podman-hpc": ("--gpu",)}


@rule("tasks-per-node")
def check_tasks_per_node(context: Context) -> Iterator[Finding]:
    """Compare the processes of a node with its GPUs."""
    job = context.script.request
    for step in context.steps:
        launch, request = step.launch, step.request
        processes, gpus, each = step.processes_per_node, request.gpus_per_node, request.gpus_per_task or 1
        has_other_ranks = launch.starter is None and launch.is_mpirun and "ntasks" in launch.options and (
            job.tasks not in (None, 0, request.tasks) and not has_spare_slots(context))
        if not processes or not gpus or processes == gpus or not step.uses_gpus or has_other_ranks:
            continue
        own = {"ntasks", "ntasks-per-node", "sets-per-node"} & set(launch.options)
        line = launch.line if launch.starter is not None or own else (
            context.option_line(*TASK_OPTIONS) or context.option_line(*GPU_OPTIONS) or launch.line)
        message = f"{count(processes, 'process')} per node for {count(gpus, 'GPU')} per node"
        write = name_processes(context, step, gpus)
        is_python = launch.program is Program.PYTHON
        if processes > 1 and gpus == processes * each and launch.starter is None:
            is_too_many = gpus > WHOLE_NODE_GPUS
            make = error if is_too_many else warning
            name = "gpus-per-task"
            yield make(launch.line if name in launch.options else context.option_line(name, "gpu"),
                       f"{processes} tasks with {each} GPUs each: {gpus} GPUs per node",
                       "one process uses one GPU" + "; hardly any node has that many GPUs, and the job will not start"
                       * is_too_many, "--gpus-per-task=1",
                       advice="" if is_too_many else f"if you want {gpus} GPUs of each node, start {gpus} tasks there")
        elif processes < gpus:
            uses_several = is_python and context.may_use_several_gpus(launch)
            if find_option(launch.program_options, "allow-idle-gpus") is not None or uses_several or (
                    launch.starter is None and not launch.launcher) or context.divides_gpus or (
                    has_devices_of_its_own(context, step)):
                continue
            is_refused = processes == 1 and launch.program is Program.MPIDDP
            make = error if is_refused else warning
            idle = "mpiddp refuses to start (idle-gpus)" if is_refused else (
                f"{count(gpus - processes, 'GPU')} of each node will be idle")
            yield make(line, message, f"one process {'mostly ' * is_python}uses one GPU; {idle}", write,
                       advice="only if one process uses one GPU" * is_python)
        elif find_option(launch.program_options, "share-gpus") is None and not (
                has_devices_of_its_own(context, step) or "ntasks-per-gpu" in step.options):
            make = warning if is_python else error
            yield make(line, message, "each process needs a GPU of its own", write)


def name_processes(context: Context, step: Step, gpus: int) -> str:
    """Return the option that starts one process for each GPU of a node, empty if there are several ways."""
    launch, starter = step.launch, step.launch.starter
    if starter is not None:
        per_node = f"--{starter.per_node.replace('-', '_')}={gpus}" if starter.per_node else ""
        total = f"--{starter.total.replace('-', '_')}={gpus * step.request.nodes}" if step.request.nodes else ""
        return per_node or total
    own = {"ntasks", "ntasks-per-node", "sets-per-node", "tasks-per-set"} & set(launch.options)
    if launch.row.ranks_per_node and (own or (launch.row.system is not None and (
            launch.row.system != context.script.scheduler))):
        return launch.row.ranks_per_node.format(gpus)
    return context.directive("ntasks-per-node", str(gpus))


def has_spare_slots(context: Context) -> bool:
    """Return whether a job has more tasks than GPUs, as where its tasks only stand for cores."""
    job = context.script.request
    return bool(job.tasks_per_node and job.gpus_per_node and job.tasks_per_node > job.gpus_per_node)


def has_devices_of_its_own(context: Context, step: Step) -> bool:
    """Return whether a training that is not mpiddp's gets some of a node's GPUs by a variable."""
    if step.launch.row.system is not None or step.launch.program is Program.MPIDDP:
        return False
    variables = {**context.script.variables, **step.launch.command.assignments}
    return any(
        name in variables and variables[name].count(",") + 1 != step.request.gpus_per_node for name in VISIBLE_DEVICES)


@rule("one-core")
def check_one_core(context: Context) -> Iterator[Finding]:
    """Look for a missing number of cores."""
    script, form = context.script, context.script.form
    for step in context.steps:
        launch, options, row = step.launch, step.options, step.launch.row
        job = script.request.tasks_per_node or script.request.tasks
        processes, slots = step.processes_per_node, script.request.tasks or 0
        has_cores = {"cpus-per-task", "cpus-per-set", "cores", "exclusive", "cpus-per-gpu", "mincpus",
                     "cores-per-socket"} & set(options)
        is_small = launch.program is Program.PYTHON and job == 1 and not any(name in options for name in GPU_OPTIONS)
        if launch.has_unknown_options or is_small:
            continue
        if row.one_core and not has_cores:
            yield warning(launch.line, f"no {row.cores}: {row.one_core}", SHARED_CORE, f"{row.cores}=8",
                          advice="8 is an example: the cores of a node divided by its tasks")
        elif form and form.one_core and (not launch.launcher or launch.is_mpirun or row.system == script.scheduler):
            is_one = step.request.cpus_per_task == 1 and step.request.gpus_per_node and "exclusive" not in options
            if (job is not None and processes is not None and job > processes) or (has_cores and not is_one):
                continue
            line = context.option_line("cpus-per-task") if is_one else None
            yield warning(
                line or context.option_line(*TASK_OPTIONS, *GPU_OPTIONS) or launch.line,
                "--cpus-per-task=1: one core for each task" if is_one else f"no --cpus-per-task: {form.one_core}",
                SHARED_CORE, context.directive("cpus-per-task", "8"),
                advice="8 is an example: the cores of a node divided by "
                       f"{count(step.request.tasks_per_node or 1, 'task')}")
        elif "select" in script.options and "+" not in script.options["select"]:
            chunk = dict(part.partition("=")[::2] for part in script.options["select"].split(":")[1:])
            if not {"ncpus", "host", "vnode", "system"} & set(chunk) and "ngpus" in chunk:
                yield warning(context.option_line("select"), "no ncpus: PBS gives each node one core",
                              "all ranks of a node share that core", context.directive("cpus-per-task", "32"),
                              advice="32 is an example: the cores of a node")
        elif form and form.slots_are_cores and not launch.launcher and 0 < slots < (processes or 1) and (
                "affinity" not in script.options.get("resources", "")):
            yield warning(context.option_line("ntasks"),
                          f"{count(slots, 'core')} for {count(processes or 1, 'process')}",
                          f"{form.spell('ntasks', str(slots))} asks for cores; {SHARED_CORE}",
                          context.directive("ntasks", str(8 * (processes or 1))),
                          advice="8 cores for each process are an example")


@rule("srun-cpus")
def check_srun_cpus(context: Context) -> Iterator[Finding]:
    """Look for a launcher that does not inherit the job's number of cores, and is not told it."""
    script = context.script
    cores = script.options.get("cpus-per-task", "1")
    steps = {step.launch.line: step for step in context.steps}
    for launch in script.launches:
        row = launch.row
        is_helper = launch.line not in steps and (launch.is_training or steps)
        if cores != "1" and row.cores_variable and row.system == script.scheduler and not is_helper and (
                lacks_cores(context, launch)):
            sentinel = script.form.sentinels[0] if script.form else ""
            yield warning(
                launch.line, f"{launch.launcher} does not inherit --cpus-per-task={cores} of {sentinel}",
                f"since {script.scheduler.name} 22.05 {launch.launcher} no longer takes the number from {sentinel}: "
                "each task gets one core", f"{launch.launcher} --cpus-per-task={cores}")


def lacks_cores(context: Context, launch: Launch) -> bool:
    """Return whether a launcher is told no number of cores."""
    binding = launch.options.get("cpu-bind", launch.options.get("cpu_bind", ""))
    kind = re.sub(r"^(verbose|v),", "", binding).replace("=", ":").partition(":")[0]
    return not (
        launch.has_unknown_options or {"cpus-per-task", "cpus-per-gpu", "exclusive"} & set(launch.options)
        or "tres-per-task" in context.script.options  # it inherits this one
        or launch.row.cores_variable in {*context.script.exported, *launch.command.assignments} or kind in CPU_MAPS)


@rule("mpirun-ranks")
def check_mpirun_ranks(context: Context) -> Iterator[Finding]:
    """Compare the ranks that mpirun starts with the tasks of the job."""
    job = context.script.request
    for step in context.steps:
        launch, options, tasks = step.launch, step.launch.options, count_slots(context)
        ranks, per_node = number(options, "ntasks"), number(options, "ntasks-per-node")
        is_helper = ranks == 1 and len(context.steps) > 1
        if not launch.is_mpirun or ranks is None or is_helper or {"hostfile", "hosts", "oversubscribe"} & set(
                options) or any(command.is_background for command in context.script.commands):
            continue  # others may have the other tasks
        gpus = job.gpus_per_node if launch.starter is None else 1
        write = context.directive("ntasks-per-node", str(gpus)) if gpus and job.tasks_per_node != gpus else ""
        if per_node is not None and job.nodes and per_node * job.nodes != ranks:
            yield error(launch.line, f"{ranks} ranks, but {per_node} on each of {count(job.nodes, 'node')}",
                        "nodes get different numbers of ranks, or the start fails",
                        f"{launch.launcher} -n {per_node * job.nodes}")
        elif not per_node and tasks and ranks != tasks and not (ranks < tasks and has_spare_slots(context)) and not (
                {"ntasks", "ntasks-per-node"}.isdisjoint(context.script.options) and job.nodes == 1 and ranks == 1):
            make = error if ranks > tasks else warning
            yield make(launch.line,
                       f"{launch.launcher} starts {count(ranks, 'rank')}, but the job has {count(tasks, 'task')}",
                       "the job has too few slots for the ranks, and the start fails" if ranks > tasks else
                       f"the other tasks' cores and GPUs are idle; without -n, {launch.launcher} starts one rank per "
                       "task", write, advice="" if write else f"leave -n {ranks} out")


def count_slots(context: Context) -> int | None:
    """Return the tasks of the job: for Open MPI a chunk of select= without mpiprocs has one."""
    script, library = context.script, context.mpi[0]
    if "mpiprocs" not in script.options.get("select", "mpiprocs") and library and library.launcher and (
            library.interface != "pmi"):
        return script.request.nodes
    return script.request.tasks


@rule("container-gpus")
def check_container_gpus(context: Context) -> Iterator[Finding]:
    """Look for a container without the option that makes GPUs visible in it."""
    for step in context.steps:
        launch, switches = step.launch, GPU_SWITCHES.get(step.launch.container, ())
        names = {name.upper() for name in (*context.script.variables, *launch.command.assignments,
                                           *context.host.environ)}
        if not switches or not step.request.gpus_per_node or not step.uses_gpus or has_unknown_word(launch):
            continue
        is_set = any(re.search(r"_(NV|ROCM|NVCCLI)$", name) for name in names) or any(
            re.search("singularity|apptainer|container", module) for module in context.modules)
        if not is_set and not context.has_text(rf"({'|'.join(switches)})\b"):
            others = " or ".join(switches[:2])
            yield warning(launch.line, f"{launch.container} without {others}",
                          "torch sees no GPU in the container, unless the site has changed this", switches[0])


def has_unknown_word(launch: Launch) -> bool:
    """Return whether a word before the program may be an option that is not known; the value of an option is none."""
    words = launch.wrapper_words
    return any(word.is_unknown and before not in CONTAINER_VALUES and ("@" in word or not word.parts[0].is_quoted)
               for before, word in zip(("", *words), words, strict=False))


@rule("visible-devices")
def check_visible_devices(context: Context) -> Iterator[Finding]:
    """Compare CUDA_VISIBLE_DEVICES with the GPUs of a node; a scheduler's launcher sets it anew in each task."""
    gpus = context.script.request.gpus_per_node
    for step, name in product(context.steps, VISIBLE_DEVICES):
        launch, processes = step.launch, step.processes_per_node or 1
        own = launch.command.assignments.get(name)
        devices = own or context.script.variables.get(name, "")
        visible = len(devices.split(","))
        if launch.row.system is not None or context.divides_gpus or not gpus or visible >= gpus or not re.fullmatch(
                r"\d+(,\d+)*", devices):
            continue
        is_ours = launch.program is Program.MPIDDP
        reason = "mpiddp gives each rank a GPU of its own" if is_ours else (
            f"{count(processes, 'process')} of a node cannot have a GPU each" if processes > visible else "they are "
            "idle")
        finding = error(launch.line if own else context.script.variable_lines[name],
                      f"{name}={devices} hides {gpus - visible} of {count(gpus, 'GPU')}",
                      f"the batch system sets it; {reason}", advice="leave it out")
        yield finding if processes > visible else replace(finding, severity=Severity.WARNING)


@rule("step-gpus")
def check_step_gpus(context: Context) -> Iterator[Finding]:
    """Look for a launcher that gives no GPUs to a training without its own option."""
    for step in context.steps:
        row, options = step.launch.row, step.options
        if row.gpus_by_option and step.uses_gpus and not step.launch.has_unknown_options and not (
                {"gpus-per-task", "gpus-per-node", "gpus-per-set", "exclusive"} & set(options)):
            yield warning(step.launch.line, f"{row.command} asks for no GPUs", "its tasks see no GPU",
                          f"{row.gpus_by_option}=1")
