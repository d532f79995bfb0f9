"""Rules about the resources of a job: tasks, GPUs, cores, memory, time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from .batch_script import Launch, Program, Scheduler
from .context import (
    GPU_OPTIONS,
    STARTERS,
    TASK_OPTIONS,
    Context,
    Fix,
    Problem,
    Step,
    count,
    find_mpi,
    find_option,
    is_mpirun,
    parse_memory_mb,
    rule,
)
from .directives import number, parse_gpus, read_number
from .edits import (
    advise,
    change_line,
    insert_before,
    insert_option,
    insert_words,
    remove_assignments,
    remove_options,
    replace_option,
    set_chunk,
    set_option,
    set_ranks,
    set_starter_processes,
    set_tasks,
    set_variable,
)
from .files import read_training
from .findings import Severity
from .launch_rules import VISIBLE_DEVICES, divides_gpus, may_use_several_gpus

WHOLE_NODE_GPUS = 8  # nodes with more GPUs are rare
MIN_MB_PER_RANK = 2048  # torch with CUDA needs about that much memory of the host
CONTAINER_VALUES = ("-B", "--bind", "--pwd", "--cwd", "-H", "--home", "-o", "--overlay", "--env", "--env-file",
                    "-W", "--workdir", "-S", "--scratch", "-v", "--volume", "-w", "--mount", "--network")
CPU_MAPS = ("none", "map_cpu", "mask_cpu", "map_ldom", "mask_ldom", "no")


@rule("tasks-per-node", "processes per node against GPUs per node")
def check_tasks_per_node(context: Context) -> Iterator[Problem]:
    """Compare the processes of a node with its GPUs."""
    for step in context.steps:
        processes, gpus = step.processes_per_node, step.request.gpus_per_node
        if not processes or not gpus or processes == gpus or not step.uses_gpus or has_other_ranks(context, step):
            continue
        line, each = process_line(context, step), step.request.gpus_per_task or 1
        if processes > 1 and gpus == processes * each and step.launch.program not in STARTERS:
            yield judge_gpus_of_tasks(context, step, processes, each)
        elif processes < gpus:
            if find_option(step.launch.options, "allow-idle-gpus") is not None or is_alone(context, step) or (
                    divides_gpus(context) or has_devices_of_its_own(context, step)):
                continue
            is_refused = processes == 1 and step.launch.program is Program.MPIDDP
            reason = "mpiddp refuses to start (idle-gpus)" if is_refused else (
                f"{count(gpus - processes, 'GPU')} of each node will be idle")
            is_python = step.launch.program is Program.PYTHON
            is_error = is_refused or (processes == 1 and not is_python)
            yield Problem(Severity.ERROR if is_error else Severity.WARNING, line,
                          f"{count(processes, 'process')} per node for {count(gpus, 'GPU')} per node",
                          f"one process {'mostly ' * is_python}uses one GPU; {reason}", set_processes(
                              context, step, gpus) + advise("only if one process uses one GPU" * is_python))
        elif find_option(step.launch.options, "share-gpus") is None and not has_devices_of_its_own(context, step):
            yield Problem(Severity.ERROR, line, f"{processes} processes per node for {count(gpus, 'GPU')} per node",
                          "each process needs a GPU of its own", set_processes(context, step, gpus))


def has_other_ranks(context: Context, step: Step) -> bool:
    """Return whether mpirun's own number of ranks is not the job's, which the rule mpirun-ranks is about."""
    job = context.script.request
    if step.launch.program in STARTERS:
        return False
    return is_mpirun(step.launch) and "ntasks" in step.launch.launcher_options and job.tasks not in (
        None, 0, step.request.tasks) and not has_spare_slots(context)


def has_spare_slots(context: Context) -> bool:
    """Return whether a job has more tasks than GPUs, as where its tasks only stand for cores."""
    job = context.script.request
    return bool(job.tasks_per_node and job.gpus_per_node and job.tasks_per_node > job.gpus_per_node)


def judge_gpus_of_tasks(context: Context, step: Step, tasks: int, each: int) -> Problem:
    """Return what is wrong with several tasks per node that have several GPUs each."""
    gpus, launch = tasks * each, step.launch
    name = "gpus-per-node"
    is_given = name in context.script.options or name in launch.launcher_options
    text = "--gpus-per-task=1" if launch.launcher == "flux" else "" if is_given else f"--{name}={tasks}"
    fix = advise('write -gpu "num=1/task"') if context.script.scheduler is Scheduler.LSF else (
        replace_option(context, launch, "gpus-per-task", text))
    is_too_many = gpus > WHOLE_NODE_GPUS
    return Problem(
        Severity.ERROR if is_too_many else Severity.WARNING,
        launch.line if "gpus-per-task" in launch.launcher_options else context.option_line("gpus-per-task", "gpu"),
        f"{tasks} tasks with {each} GPUs each: {gpus} GPUs per node",
        "one process uses one GPU" + "; hardly any node has that many GPUs, and the job will not start" * is_too_many,
        fix if is_too_many else fix + advise(f"if you want {gpus} GPUs of each node, write --ntasks-per-node="
                                             f"{gpus} --gpus-per-node={gpus}"))


def is_alone(context: Context, step: Step) -> bool:
    """Return whether a process of plain Python may use several GPUs, or another rule is about the launch."""
    launch = step.launch
    return (launch.program is Program.PYTHON and may_use_several_gpus(context, launch)) or (
        launch.program not in STARTERS and not launch.launcher)


def has_devices_of_its_own(context: Context, step: Step) -> bool:
    """Return whether a training that is not mpiddp's gets some of a node's GPUs by a variable."""
    if step.launch.launcher == "srun" or step.launch.program is Program.MPIDDP:
        return False
    variables = {**context.script.variables, **step.launch.assignments}
    return any(
        name in variables and variables[name].count(",") + 1 != step.request.gpus_per_node for name in VISIBLE_DEVICES)


def process_line(context: Context, step: Step) -> int | None:
    """Return the line that sets the number of processes, else that of the GPUs."""
    launch = step.launch
    own = {"ntasks", "ntasks-per-node", "rs_per_host"} & set(launch.launcher_options)
    if launch.program in STARTERS or own:
        return launch.line
    return context.option_line(*TASK_OPTIONS) or context.option_line(*GPU_OPTIONS) or launch.line


def set_processes(context: Context, step: Step, gpus: int) -> Fix:
    """Return the change that starts one process per GPU."""
    if step.launch.program in STARTERS:
        return set_starter_processes(context, step, gpus)
    return set_tasks(context, step, gpus)


@rule("uneven-tasks", "tasks that cannot be divided evenly among nodes, or whose nodes are left to Slurm")
def check_uneven_tasks(context: Context) -> Iterator[Problem]:
    """Look at a number of tasks without a number per node."""
    for step in context.steps:
        request, options = step.request, step.options
        if (step.launch.launcher != "srun" and not is_mpirun(step.launch)) or step.launch.program in STARTERS:
            continue
        tasks, nodes = request.tasks, request.nodes
        line = context.option_line("ntasks") or step.launch.line
        if tasks and nodes and nodes > 1 and tasks % nodes and tasks > nodes:
            yield Problem(Severity.WARNING, line, f"{tasks} tasks on {nodes} nodes cannot be divided evenly",
                          "nodes get different numbers of ranks, and GPUs are idle",
                          set_total(context, step, (request.gpus_per_node or tasks // nodes) * nodes))
        elif (context.script.scheduler is Scheduler.SLURM and tasks and tasks > 1 and "nodes" not in options
              and "ntasks-per-node" not in options and request.gpus_per_node and request.gpus_per_task is None):
            gpus = request.gpus_per_node
            yield Problem(Severity.WARNING, line, f"{tasks} tasks without --nodes and --ntasks-per-node",
                          f"Slurm may put more tasks on a node than it has GPUs ({gpus}), or fewer",
                          place_tasks(context, step, tasks, gpus))
        elif (context.script.scheduler is Scheduler.SLURM and tasks and nodes and 1 < nodes < tasks
              and "ntasks" in context.script.options and "ntasks" not in step.launch.launcher_options
              and {"ntasks-per-node", "exclusive"}.isdisjoint(options) and request.gpus_per_node
              and request.gpus_per_task is None):
            yield Problem(Severity.WARNING, line, f"{tasks} tasks on {nodes} nodes without --ntasks-per-node",
                          "on nodes that jobs share Slurm may put all tasks but one on the first of them",
                          replace_option(context, None, "ntasks", f"--ntasks-per-node={tasks // nodes}"))


def set_total(context: Context, step: Step, tasks: int) -> Fix:
    """Return the change of the number of all tasks, in the launch or in the directives."""
    launch = step.launch
    if is_mpirun(launch) and "ntasks" in launch.launcher_options:
        return replace_option(context, launch, "ntasks", f"-n {tasks}")
    if "ntasks" in launch.launcher_options:
        return replace_option(context, launch, "ntasks", f"--ntasks={tasks}")
    if "ntasks" in context.script.options:
        return set_option(context, "ntasks", str(tasks))
    return advise(f"start {tasks} tasks")


def place_tasks(context: Context, step: Step, tasks: int, gpus: int) -> Fix:
    """Return the change of a number of tasks to one of nodes and of tasks per node."""
    nodes, per_node = max(1, tasks // gpus), min(gpus, tasks)
    fix = replace_option(context, step.launch, "ntasks", f"--nodes={nodes} --ntasks-per-node={per_node}")
    return fix if nodes * per_node == tasks else fix + advise(
        f"{nodes * per_node} tasks are an example: {tasks} cannot be divided among nodes with {gpus} GPUs")


@rule("gpus-per-task", "--gpus-per-task or --gpu-bind, by which a rank sees only its own GPU")
def check_gpus_per_task(context: Context) -> Iterator[Problem]:
    """Say what follows where each rank sees only its own GPU."""
    for step in context.steps:
        launch, options = step.launch, step.options
        binding = options.get("gpu-bind", "")
        is_bound = re.match(r"(verbose,)?(per_task|single|map_gpu|mask_gpu)", binding) is not None
        is_isolated = step.request.gpus_per_task == 1 or is_bound
        if (launch.launcher == "srun" and launch.program is Program.MPIDDP and is_isolated and "none" not in binding
                and (step.request.tasks_per_node or 2) > 1
                and find_option(launch.options, "virtual-local-rank") is None):
            name = "gpus-per-task" if step.request.gpus_per_task == 1 else "gpu-bind"
            gpus = step.request.tasks_per_node
            yield Problem(
                Severity.NOTE, launch.line if name in launch.launcher_options else context.option_line(name),
                f"--{name} shows each rank only its own GPU, as cuda:0",
                "a script that uses cuda:LOCAL_RANK fails, and ranks may lose direct access to each other's GPU memory",
                show_all_gpus(context, step, gpus) if gpus and name == "gpus-per-task" else
                insert_words(context, launch, r"\bmpiddp\b(?=\s)", "--virtual-local-rank").otherwise(
                    "write python -m mpiddp --virtual-local-rank"))


def show_all_gpus(context: Context, step: Step, gpus: int) -> Fix:
    """Return the change of --gpus-per-task to a number of GPUs per node, if that is not given."""
    options = step.launch.launcher_options if "gpus-per-task" in step.launch.launcher_options else (
        context.script.options)
    is_given = not {"gpus-per-node", "gres", "gpus"}.isdisjoint(options)
    return replace_option(context, step.launch, "gpus-per-task", "" if is_given else f"--gpus-per-node={gpus}")


@rule("one-core", "no number of cores, so that each task gets one")
def check_one_core(context: Context) -> Iterator[Problem]:
    """Look for a missing --cpus-per-task."""
    script = context.script
    for step in context.steps:
        launch, options = step.launch, step.options
        if launch.has_unknown_options:
            continue
        if script.scheduler is Scheduler.SLURM and (launch.launcher in ("srun", "") or is_mpirun(launch)):
            given = ("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus", "cores-per-socket")
            is_one = step.request.cpus_per_task == 1 and step.request.gpus_per_node and "exclusive" not in options
            if is_spread_over_cores(context, step) or (any(name in options for name in given) and not is_one):
                continue
            line = context.option_line("cpus-per-task") if is_one else None
            yield Problem(Severity.WARNING, line or context.option_line(*TASK_OPTIONS, *GPU_OPTIONS) or launch.line,
                          "--cpus-per-task=1: one core for each task" if is_one else
                          "no --cpus-per-task: Slurm gives each task one core",
                          "the rank and its DataLoader workers share that core, and the GPU waits for data",
                          set_cores(context, step))
        elif launch.launcher == "jsrun" and "cpu_per_rs" not in launch.launcher_options:
            yield Problem(Severity.WARNING, launch.line, "no --cpu_per_rs: jsrun gives each resource set one core",
                          "the rank and its DataLoader workers share that core, and the GPU waits for data",
                          insert_option(context, launch, "--cpu_per_rs 7") + advise(
                              "7 is an example: the cores of a node divided by its resource sets"))
        elif launch.launcher == "flux" and not {"cores-per-task", "exclusive", "cores"} & set(launch.launcher_options):
            yield Problem(Severity.WARNING, launch.line, "no --cores-per-task: Flux gives each task one core",
                          "the rank and its DataLoader workers share that core, and the GPU waits for data",
                          insert_option(context, launch, "--cores-per-task=8") + advise(
                              "8 is an example: the cores of a node divided by its tasks"))
        elif script.scheduler is Scheduler.PBS and "select" in script.options and "+" not in script.options["select"]:
            chunk = dict(part.partition("=")[::2] for part in script.options["select"].split(":")[1:])
            if not {"ncpus", "host", "vnode", "system"} & set(chunk) and "ngpus" in chunk:
                yield Problem(Severity.WARNING, context.option_line("select"), "no ncpus: PBS gives each node one core",
                              "all ranks of a node share that core", set_chunk(context, "ncpus", 32) + advise(
                                  "32 is an example: the cores of a node (pbsnodes -av)"))


def is_spread_over_cores(context: Context, step: Step) -> bool:
    """Return whether a job with many tasks starts fewer processes, so that each has several cores."""
    request, processes = context.script.request, step.processes_per_node
    job = request.tasks_per_node or request.tasks
    return job is not None and processes is not None and job > processes


def set_cores(context: Context, step: Step) -> Fix:
    """Return the change that gives each task several cores, and srun their number."""
    fix = set_option(context, "cpus-per-task", "8") + advise(
        "8 is an example: the cores of a node (sinfo -o '%n %c') divided by "
        f"{count(step.request.tasks_per_node or 1, 'task')}")
    if "cpus-per-task" in step.launch.launcher_options:
        return fix + replace_option(context, step.launch, "cpus-per-task", "--cpus-per-task=$SLURM_CPUS_PER_TASK")
    return fix + pass_cores(context, step.launch) if lacks_cores(context, step.launch) else fix


def pass_cores(context: Context, launch: Launch) -> Fix:
    """Return the change that tells srun the number of cores."""
    fix = insert_option(context, launch, "--cpus-per-task=$SLURM_CPUS_PER_TASK")
    return fix.otherwise(insert_before(context, launch, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"))


def lacks_cores(context: Context, launch: Launch) -> bool:
    """Return whether srun is told no number of cores."""
    binding = launch.launcher_options.get("cpu-bind", launch.launcher_options.get("cpu_bind", ""))
    return not (
        launch.launcher != "srun" or launch.has_unknown_options
        or {"cpus-per-task", "cpus-per-gpu"} & set(launch.launcher_options)
        or "tres-per-task" in context.script.options  # srun inherits it
        or "SRUN_CPUS_PER_TASK" in {*context.script.exported, *launch.assignments}
        or binding.removeprefix("verbose,").removeprefix("v,").replace("=", ":").partition(":")[0] in CPU_MAPS)


@rule("srun-cpus", "cores that srun does not inherit from sbatch")
def check_srun_cpus(context: Context) -> Iterator[Problem]:
    """Look for an srun without --cpus-per-task."""
    cores = context.script.options.get("cpus-per-task", "1")
    for step in context.steps:
        if cores != "1" and lacks_cores(context, step.launch):
            yield Problem(
                Severity.WARNING, step.launch.line, f"srun does not inherit --cpus-per-task={cores} of #SBATCH",
                "since Slurm 22.05 srun no longer takes the number from #SBATCH: each task gets one core",
                pass_cores(context, step.launch))


@rule("hyper-threads", "two ranks, or two threads of a rank, on one core")
def check_hyper_threads(context: Context) -> Iterator[Problem]:
    """Look for options that use both hardware threads of a core, and for more threads than cores."""
    for step in context.steps:
        options = step.options
        per_core = options.get("ntasks-per-core", "1")
        if options.get("hint") == "multithread" or options.get("threads-per-core", "1") not in ("1", "") or (
                "use-hwthread-cpus" in options):
            name = next(name for name in ("hint", "threads-per-core", "use-hwthread-cpus") if name in options)
            yield Problem(Severity.WARNING, context.option_line(name) or step.launch.line,
                          f"--{name} counts hardware threads as cores",
                          "two threads of a rank share a core, which slows training down",
                          (change_line(context, step.launch, r"\s--?use-hwthread-cpus\b", "")
                           if name == "use-hwthread-cpus" else
                           replace_option(context, step.launch, name, "--hint=nomultithread"))
                          + advise("each core then counts once: halve --cpus-per-task if a node has too few"))
        elif (read_number(per_core) or 0) > 1:
            yield Problem(Severity.WARNING, context.option_line("ntasks-per-core") or step.launch.line,
                          f"--ntasks-per-core={per_core} puts {per_core} ranks on one core",
                          "they slow each other down",
                          replace_option(context, step.launch, "ntasks-per-core", "--hint=nomultithread"))
        threads = read_number(context.script.variables.get("OMP_NUM_THREADS", "")) or 0
        cores = step.request.cpus_per_task
        ranks = step.processes_per_node if step.launch.program in STARTERS and step.request.tasks_per_node == 1 else 1
        if threads > 1 and cores and ranks and threads * ranks > cores:
            yield Problem(Severity.WARNING, context.script.variable_lines["OMP_NUM_THREADS"],
                          f"OMP_NUM_THREADS={threads} for {count(cores // ranks or 1, 'core')} per rank",
                          "more threads than cores slow a rank down",
                          set_variable(context, context.script.variable_lines["OMP_NUM_THREADS"], "OMP_NUM_THREADS",
                                       str(max(1, cores // ranks))) + advise("only if no other program needs it"))


@rule("memory", "memory per node: a size without a unit, too small, or given twice")
def check_memory(context: Context) -> Iterator[Problem]:
    """Look at --mem and its relatives."""
    options = context.script.options
    if context.script.scheduler is not Scheduler.SLURM:
        return
    names = [name for name in ("mem", "mem-per-cpu", "mem-per-gpu") if name in options]
    if len(names) > 1:
        yield Problem(Severity.ERROR, context.option_line(names[1]),
                      f"--{names[0]} and --{names[1]} exclude each other",
                      "sbatch refuses the job, or ignores one of them",
                      remove_options(context, *names[1:]) + advise("keep the one that you mean"))
        return
    for name in names:
        size, text = parse_memory_mb(options[name]), options[name]
        if not size:  # 0 is all memory of the node
            continue
        if name != "mem-per-cpu" and text.isdigit() and size < 1024:
            is_short = needs_torch(context)
            fix = set_option(context, name, f"{text}G")
            yield Problem(Severity.ERROR if is_short else Severity.NOTE, context.option_line(name),
                          f"--{name}={text} is {text} MB",
                          "a size without a unit is in MB" + "; torch alone needs more" * is_short,
                          fix + advise("only if GB are meant"))
            continue
        per_node = {"mem": 1, "mem-per-gpu": context.script.request.gpus_per_node,
                    "mem-per-cpu": (context.script.request.cpus_per_task or int("exclusive" not in options))
                    * (context.script.request.tasks_per_node or 0)}[name]
        ranks = max([step.processes_per_node or 0 for step in context.steps if step.launch.launcher], default=0)
        gpus = context.script.request.gpus_per_node
        if per_node and ranks and size * per_node / ranks < MIN_MB_PER_RANK and gpus:
            yield Problem(Severity.WARNING, context.option_line(name),
                          f"{size * per_node / ranks / 1024:.1f} GB of memory for each rank",
                          "--mem is the memory of a node, which its ranks share; torch with CUDA needs about 2 GB "
                          "in each rank, without data",
                          replace_option(context, None, name, f"--mem={max(ranks, gpus) * 16}G")
                          + advise("16 GB for each rank are an example"))


def needs_torch(context: Context) -> bool:
    """Return whether a job has GPUs, or a training that surely imports torch."""
    return any(name in context.script.options for name in GPU_OPTIONS) or any(
        step.launch.program is not Program.PYTHON or re.search(
            r"^\s*(import|from)\s+torch\b", read_training(context, step.launch), re.MULTILINE)
        for step in context.steps)


@rule("exclusive", "all GPUs of a node, but not the node")
def check_exclusive(context: Context) -> Iterator[Problem]:
    """Look for a job that uses all GPUs of nodes that other jobs may share."""
    options, request = context.script.options, context.script.request
    if (context.script.scheduler is Scheduler.SLURM and (request.gpus_per_node or 0) >= WHOLE_NODE_GPUS
            and (request.gpus_per_task or 1) == 1 and not divides_gpus(context)
            and "exclusive" not in options and parse_memory_mb(options.get("mem", "")) != 0 and context.steps):
        yield Problem(Severity.WARNING, context.option_line(*GPU_OPTIONS),
                      f"{request.gpus_per_node} GPUs per node without --exclusive",
                      "other jobs may use the node's cores and memory beside a job that has all of its GPUs",
                      set_option(context, "exclusive") + advise("the job then has, and pays for, whole nodes"))


@rule("mpirun-ranks", "mpirun -n against the tasks of the job")
def check_mpirun_ranks(context: Context) -> Iterator[Problem]:
    """Compare the ranks that mpirun starts with the tasks of the job."""
    job, tasks = context.script.request, count_tasks(context)
    for step in context.steps:
        launch, options = step.launch, step.launch.launcher_options
        ranks = number(options, "ntasks")
        is_helper = ranks == 1 and len(context.steps) > 1
        has_others = {"hostfile", "hosts", "oversubscribe"} & set(options)
        if not is_mpirun(launch) or ranks is None or is_helper or has_others or any(
                command.is_background for command in context.script.commands):
            continue  # others may have the other tasks
        per_node = number(options, "ntasks-per-node")
        if per_node is not None and job.nodes and per_node * job.nodes != ranks:
            yield Problem(Severity.ERROR, launch.line, f"{ranks} ranks, but {per_node} on each of "
                          f"{count(job.nodes, 'node')}", "nodes get different numbers of ranks, or the start fails",
                          set_ranks(context, replace(step, request=job), 1 if launch.program in STARTERS else
                                    job.gpus_per_node or per_node, is_counted=True))
        elif not options.get("ntasks-per-node") and tasks and ranks != tasks and not (
                ranks < tasks and has_spare_slots(context)) and not (
                context.script.scheduler is Scheduler.SLURM and "ntasks" not in context.script.options
                and "ntasks-per-node" not in context.script.options and job.nodes == 1 and ranks == 1):
            is_more = ranks > tasks
            yield Problem(
                Severity.ERROR if is_more else Severity.WARNING, launch.line,
                f"{launch.launcher} starts {count(ranks, 'rank')}, but the job has {count(tasks, 'task')}",
                "the job has too few slots for the ranks, and the start fails" if is_more else
                f"the other tasks' cores and GPUs are idle; without -n, {launch.launcher} starts one rank per task",
                match_ranks(context, step, ranks))


def count_tasks(context: Context) -> int | None:
    """Return the tasks of the job: for Open MPI a chunk of PBS without mpiprocs has one."""
    script = context.script
    if script.scheduler is Scheduler.PBS and "mpiprocs" not in script.options.get("select", "mpiprocs") and (
            find_mpi(context)[0] == "Open MPI"):
        return script.request.nodes
    return script.request.tasks


def match_ranks(context: Context, step: Step, ranks: int) -> Fix:
    """Return the change by which mpirun starts as many ranks as the job has tasks, one for each GPU."""
    job, launch = context.script.request, step.launch
    leave_out = replace_option(context, launch, "ntasks", "")
    gpus = 1 if launch.program in STARTERS else job.gpus_per_node
    if not gpus or not job.nodes or job.tasks_per_node == gpus:
        return leave_out
    if context.script.scheduler is Scheduler.SLURM:
        fix = set_tasks(context, replace(step, launch=replace(launch, launcher_options={}), request=job), gpus)
    elif "select" in context.script.options:
        fix = set_chunk(context, "mpiprocs", gpus)
    else:
        return advise(f"ask for {count(gpus, 'slot')} per node, and start {gpus * job.nodes} ranks")
    return fix if ranks == gpus * job.nodes else fix + leave_out


@rule("container-gpus", "a container that does not see the GPUs")
def check_container_gpus(context: Context) -> Iterator[Problem]:
    """Look for a container without the option that makes GPUs visible in it."""
    for step in context.steps:
        launch = step.launch
        names = {name.upper() for name in (*context.script.variables, *launch.assignments, *context.host.environ)}
        if not step.request.gpus_per_node or not step.uses_gpus:
            continue
        if launch.container in ("apptainer", "singularity"):
            if any(re.search("singularity|apptainer|container", module) for module in context.modules):
                continue  # the site's module may make the GPUs visible
            if not context.has_text(r"--(nv|nvccli|rocm)\b") and not any(
                    re.search(r"_(NV|ROCM|NVCCLI)$", name) for name in names) and not has_unknown_word(step):
                yield Problem(Severity.ERROR, launch.line, f"{launch.container} without --nv or --rocm",
                              "torch sees no GPU in the container (--nv for NVIDIA, --rocm for AMD)",
                              insert_word(context, launch, launch.container, "--rocm" if context.has_text(
                                  r"(?i)rocm|\bmi\d{3}|\bamd") else "--nv"))
        elif launch.container == "podman-hpc" and "--gpu" not in launch.wrapper_words and not has_unknown_word(step):
            yield Problem(Severity.ERROR, launch.line, "podman-hpc without --gpu", "torch sees no GPU in the container",
                          insert_word(context, launch, "podman-hpc", "--gpu"))


def insert_word(context: Context, launch: Launch, program: str, option: str) -> Fix:
    """Return the change that gives a container another option."""
    verb = "run" if "run" in launch.wrapper_words else "exec"
    fix = insert_words(context, launch, rf"\b{program}\s+{verb}\b", option)
    return fix.otherwise(f"write {program} {verb} {option}")


def has_unknown_word(step: Step) -> bool:
    """Return whether words before the program are unknown, among which an option may be.

    A word in quotes that is no array, and the value of an option, are none.
    """
    words = step.launch.wrapper_words
    return any(getattr(word, "is_unknown", False) and before not in CONTAINER_VALUES
               and ("@" in word or f'"{word}"' not in step.launch.text)
               for before, word in zip(("", *words), words, strict=False))


@rule("visible-devices", "CUDA_VISIBLE_DEVICES with fewer GPUs than the job has")
def check_visible_devices(context: Context) -> Iterator[Problem]:
    """Compare CUDA_VISIBLE_DEVICES with the GPUs of a node; srun sets it anew in each task."""
    gpus = context.script.request.gpus_per_node
    for step, name in product(context.steps, VISIBLE_DEVICES):
        own = step.launch.assignments.get(name)
        devices = own or context.script.variables.get(name, "")
        if step.launch.launcher == "srun" or divides_gpus(context):
            continue
        visible, processes = len(devices.split(",")), step.processes_per_node or 1
        if gpus and re.fullmatch(r"\d+(,\d+)*", devices) and visible < gpus:
            is_ours = step.launch.program is Program.MPIDDP
            is_short = is_ours or processes > visible
            line = step.launch.line if own else context.script.variable_lines[name]
            reason = "mpiddp gives each rank a GPU of its own" if is_ours else (
                f"{count(processes, 'process')} of a node cannot have a GPU each" if is_short else "they are idle")
            fix = remove_assignments(context, line, name)
            yield Problem(Severity.ERROR if is_short else Severity.WARNING, line,
                          f"{name}={devices} hides {gpus - visible} of {count(gpus, 'GPU')}",
                          f"the batch system sets it; {reason}",
                          fix if is_short else fix + advise("or ask for fewer GPUs"))


@rule("step-gpus", "flux run without the job's GPUs")
def check_step_gpus(context: Context) -> Iterator[Problem]:
    """Look for a step of Flux that asks for no GPUs in a job that does."""
    job = context.script.options
    for step in context.steps:
        asked = parse_gpus(job.get("gpus-per-task")) or parse_gpus(job.get("gpus-per-node"))
        if step.launch.launcher == "flux" and asked and not (
                {"gpus-per-task", "gpus-per-node", "exclusive"} & set(step.launch.launcher_options)):
            gpus = step.processes_per_node if step.launch.program in STARTERS else 1
            yield Problem(Severity.ERROR, step.launch.line, "flux run asks for no GPUs",
                          "its tasks see none of the job's GPUs",
                          insert_option(context, step.launch, f"--gpus-per-task={gpus or 1}"))
