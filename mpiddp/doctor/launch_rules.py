"""Rules about the line that starts a training: launcher, MPI, options, variables."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator

from ..options.parser import FOREIGN_OPTION_HINTS
from ..options.table import FLAGS, OPTIONS, find_unknown_variables
from ..systems import launchers, starters
from ..systems.launchers import Launcher
from ..systems.mpi_libraries import CRAY_MPICH, CRAY_PMI, INTEL_MPI, MPICH, OPEN_MPI
from .batch_script import BatchScript
from .context import BLANK_BEHIND, Context, Step, count, error, is_alone, rule, warning
from .directives import parse_gpus, read_number
from .findings import Finding
from .launches import Launch, Program, find_launchers, find_option, is_our_option
from .shell import SimpleCommand

LOCALHOST = re.compile(r"(localhost|127\.0\.0\.1|0\.0\.0\.0)(?=:|\s|$)")
OWN_NAME = re.compile(r"(\$\(hostname[^()]*\)|`hostname[^`]*`|\$\{?HOSTNAME\}?)(:|$)")
CRAY_SIGNS = (r"cray|prgenv|\bcpe\b|cudatoolkit|libfabric|aws-ofi|shifter|podman-hpc|uenv|MPICH_|\bFI_|\bhsn\d?|"
              r"slingshot|--network=")
STARTS_ITSELF = r"\b\w*(run|exec)\b.*(\$0|\$\{0\}|BASH_SOURCE)"  # each task runs the script again
OTHER_SPREADERS = r"\b(ssh|pdsh|clush|pbsdsh|blaunch|parallel)\b"  # start a command on other nodes
QUICK = ("echo", "printf", "date", "exit", ":", "true")
EARLY_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
OTHER_PARSERS = re.compile(r"parse_known_args|parents\s*=|add_\w*(args|arguments)\(|HfArgumentParser|from_argparse")


def is_cray(context: Context) -> bool:
    """Return whether something in the script is as on a Cray, where the default of srun --mpi is right."""
    text = "\n".join(line for line in context.script.lines if not re.match(r"\s*#(?![A-Z])", line))
    return re.search(CRAY_SIGNS, text, re.IGNORECASE) is not None


def choose_interface(context: Context, launch: Launch) -> str:
    """Return a launcher's option for the interface of the MPI whose module is loaded."""
    return launch.row.options.get((context.mpi[0] or OPEN_MPI).interface, "")


@rule("mpi-interface")
def check_mpi_interface(context: Context) -> Iterator[Finding]:
    """Compare the launcher's interface to MPI with the MPI whose module is loaded."""
    library, module = context.mpi
    for step in context.steps:
        launch, row = step.launch, step.launch.row
        given = launch.options.get(row.interface_option)
        exported = {*context.script.exported, *launch.command.assignments}
        if not row.interface or launch.program is not Program.MPIDDP or launch.has_unknown_options or (
                launch.inner_launcher) or (given is None and row.asked in exported) or (
                not choose_interface(context, launch)):
            continue
        option = row.interface.partition("{")[0].rstrip("= ")
        fitting, shown = choose_interface(context, launch), f"{launch.launcher} {row.interface.format(given)}"
        write = f"{launch.launcher} {fitting}"
        own = library.interface if library is not None else None
        kinds = {kind for kind, option in row.options.items() if given and option == row.interface.format(given)}
        kinds |= {OPEN_MPI.interface} if given and given.startswith(OPEN_MPI.interface) else set()
        if given is None:
            if not is_cray(context) and step.request.tasks != 1:
                yield warning(
                    launch.line, f"{launch.launcher} without {option}",
                    f"{library.name if library else 'MPI'} then connects by the site's default, which is often none: "
                    "each process trains alone, or the start fails", write,
                    advice="" if library or CRAY_PMI not in row.options else f"Cray MPICH needs no {option}")
        elif library is CRAY_MPICH and own not in kinds and not launch.container:
            is_possible = MPICH.interface in kinds  # some Crays need it, such as for cray-mpich-abi
            text = f"{shown} with {library.name} (module {module})"
            reason = f"on a Cray, the default is right for Cray MPICH: leave {option} out"
            yield warning(launch.line, text, f"{reason}, unless your site asks for it") if is_possible else error(
                launch.line, text, reason)
        elif given == "none":
            yield error(launch.line, shown, "the processes do not find each other: each trains alone, or the start "
                        "fails", write)
        elif library is None or (library is INTEL_MPI and "I_MPI_PMI" in exported):
            continue
        elif own not in kinds and (kinds or given in ("pmi", "pmi1", "openmpi")):
            is_sure = re.search(r"/[5-9]\.", module) is not None and library is OPEN_MPI
            text, reason = f"{shown} with {library.name} (module {module})", f"{library.name} connects by {fitting}"
            yield error(launch.line, text, reason, write) if is_sure else warning(
                launch.line, text, f"{reason}, unless it was built or set up otherwise", write)
        elif library is INTEL_MPI and row.pmi_library not in {*exported, *context.host.environ}:
            yield warning(launch.line, f"{library.name} under {launch.launcher} without {row.pmi_library}",
                          f"{library.name} finds the launcher's interface only by this variable, unless the module "
                          "sets it", f"export {row.pmi_library}=/usr/lib64/libpmi2.so",
                          advice="the path is an example: your site has its own")


@rule("nested-launcher")
def check_nested_launcher(context: Context) -> Iterator[Finding]:
    """Look for a launcher within each task of another one."""
    for step in context.steps:
        launch, tasks, per_node = step.launch, step.request.tasks, step.request.tasks_per_node
        target = os.path.basename(launch.script_words[0]) if launch.script_words else ""
        if launch.inner_launcher and not launch.inner_launcher.startswith("$"):
            yield error(launch.line, f"{launch.launcher} starts {launch.inner_launcher}",
                        f"each task starts a job of its own ({launch.inner_launcher} is a launcher itself)",
                        advice=f"leave {launch.inner_launcher} and its options out")
        elif launch.program is Program.MPIDDP and (starters.is_starter(target) or (
                target and find_launchers([target], 0))):
            yield error(launch.line, f"mpiddp starts {target}",
                        "mpiddp starts the training script itself, once in each rank",
                        advice="write python -m mpiddp and your script")
        elif launch.starter is not None and re.search(r"\bmpiddp\b", target):
            yield error(launch.line, f"{launch.name} starts mpiddp",
                        f"MPI must start the ranks: mpiddp takes the place of {launch.name}")
        elif launch.starter is not None and launch.launcher and (
                not launch.starter.total or find_option(launch.program_options, launch.starter.total) != "1"):
            number = per_node or (tasks if "nodes" not in step.options else None)
            if number is None or number == 1:
                continue
            each = step.processes_per_node
            many = f", each with {count(each, 'process')}" if each else ""
            make = warning if each and number * each <= (step.request.gpus_per_node or 0) else error  # a sweep
            yield make(launch.line, f"{number} times {launch.name}{' on each node' * bool(per_node)}{many}",
                       f"{launch.name} starts the processes of a node itself: start {launch.name} once per node",
                       write_once_per_node(step))


def write_once_per_node(step: Step) -> str:
    """Return the options of a launcher for one task on each node."""
    row, nodes = step.launch.row, step.request.nodes
    has_total = "ntasks" in step.launch.options and row.counts and nodes
    return f"{row.counts[0]} {nodes} " * bool(has_total) + row.ranks_per_node.format(1)


@rule("no-launcher")
def check_no_launcher(context: Context) -> Iterator[Finding]:
    """Look for a training that no launcher starts although the job has several tasks or nodes."""
    job = context.script.request
    for step in context.steps:
        launch = step.launch
        if launch.launcher or launch.command.in_loop or context.has_text(STARTS_ITSELF) or (
                launch.line > 1 and BLANK_BEHIND.search(context.script.lines[launch.line - 2])):
            continue
        start = find_start(context.script)
        if launch.starter is not None:
            starts_nodes = context.has_text(OTHER_SPREADERS) or any(
                other.launch.launcher and other.launch.starter is not None for other in context.steps) or (
                launch.starter is starters.DEEPSPEED and context.has_text(r"hostfile|\s-H\s"))
            if job.nodes and job.nodes > 1 and not starts_nodes:
                where = (f" --nnodes={job.nodes} --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29500"
                         if launch.starter.needs_address else "")
                yield error(launch.line, f"{launch.name} runs on the first of {job.nodes} nodes only",
                            "a batch script runs on one node; the others are idle, or waited for",
                            f"{start} {launch.name}{where} …",
                            advice=f"start {launch.name} once on each node, with the first node's address")
        elif launch.program is Program.PYTHON and not has_tasks_for_ranks(context, launch):
            continue
        elif (job.tasks or 1) > 1 or (launch.program is Program.MPIDDP and ((job.nodes or 1) > 1 or (
                job.gpus_per_node or 1) > 1)):
            numbers = (job.tasks, "task"), (job.nodes, "node"), (job.gpus_per_node, "GPU")
            many = next(count(number, noun) for number, noun in numbers if number and number > 1)
            make = warning if launch.program is Program.PYTHON else error
            yield make(launch.line, f"no launcher: one process for {many}",
                       "the script is started once, on the first node, and trains alone",
                       f"{find_start(context.script, per_node=0)} {launch.command.text}")


def choose_launcher(script: BatchScript) -> Launcher:
    """Return the launcher of a job script's scheduler, or else an MPI's."""
    return next((row for row in launchers.LAUNCHERS if row.program and row.system is not None
                 and row.system == script.scheduler), launchers.MPIRUN)


def find_start(script: BatchScript, per_node: int = 1) -> str:
    """Return the command that starts ranks in a job, with an option for a number on each node if that is given."""
    row = choose_launcher(script)
    return f"{row.command} {row.ranks_per_node.format(per_node)}" if per_node else row.command


def has_tasks_for_ranks(context: Context, launch: Launch) -> bool:
    """Return whether the tasks of a job are meant for ranks of a plain Python script, and not as cores of it."""
    job, options = context.script.request, context.script.options
    are_cores = "ppn=" in options.get("torque-nodes", "") or not (
        context.script.form and (context.script.form.has_one_task or "select" in options))
    if are_cores or context.divides_gpus or context.may_use_several_gpus(launch):
        return False
    gpus = job.gpus_per_node or parse_gpus(options.get("gpus")) or (job.gpus_per_task or 0) * (job.tasks or 0)
    return (job.nodes or 1) > 1 or gpus > 1


@rule("split-world")
def check_split_world(context: Context) -> Iterator[Finding]:
    """Look at how a starter on several nodes finds the others."""
    for step in context.steps:
        launch, nodes = step.launch, step.request.nodes
        if launch.launcher and launch.starter is not None and nodes and nodes > 1 and not differs_by_task(launch):
            yield from judge_rendezvous(launch, nodes)


def differs_by_task(launch: Launch) -> bool:
    """Return whether the script gets a task's number, so that each task may be meant to train alone."""
    form = launch.row.system.directives if launch.row.system is not None else None
    return form is not None and any(name in part for word in launch.script_words for part in word.unknown
                                    for name in form.task_numbers)


def judge_rendezvous(launch: Launch, nodes: int) -> Iterator[Finding]:
    """Yield why the starters of several nodes would not find each other."""
    starter, options, name = launch.starter, launch.program_options, launch.name
    assert starter is not None
    rank, given = find_option(options, starter.node_rank) or "", find_option(options, starter.nodes)
    address = next(filter(None, (find_option(options, each) for each in starter.addresses)), "")
    is_standalone = find_option(options, "standalone") is not None
    ignores_rank = starter.needs_address and find_option(options, "rdzv-backend") not in (None, "static")
    correct = f"--{starter.nodes}={nodes}"
    meeting = "" if address else " --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29500"
    if is_alone(launch):
        yield error(launch.line, f"{name} without --{starter.several_nodes.replace('-', '_')} on {nodes} nodes",
                    "each node trains alone")
    elif rank.isdigit() and given != "1" and not ignores_rank:
        yield error(launch.line, f"node {rank} on each of {nodes} nodes",
                    f"{name} has the same number on all nodes: the start fails, or waits for the others",
                    advice="give each node its own number in a shell of each task: bash -c '…'")
    elif not starter.needs_address:
        return
    elif is_standalone or given in (None, "1"):
        how = "--standalone" if is_standalone else f"without --{starter.nodes}" if given is None else (
            f"--{starter.nodes}=1")
        yield error(launch.line, f"{name} {how} on {nodes} nodes", "each node trains alone", f"{correct}{meeting}")
    elif read_number(given) not in (None, nodes):
        yield error(launch.line, f"--{starter.nodes}={given} on {nodes} nodes",
                    f"{name} waits for nodes that do not come, or leaves nodes out", correct)
    elif not address:
        yield error(launch.line, f"{name} on {nodes} nodes without an address of the first one",
                    "each node waits for itself", meeting.strip(),
                    advice="in the job script's own line, not in a text in single quotes: $(hostname) must be the "
                           "first node's")
    elif (own := OWN_NAME.match(address)) and launch.followed and own[1] not in launch.early:
        yield error(launch.line, f"each of {nodes} nodes takes its own name for the first node's",
                    "each node waits for itself: the name must be found once, before the launcher starts the tasks")
    elif LOCALHOST.match(address):
        yield error(launch.line, f"the address of the first node is localhost, on {nodes} nodes",
                    "each node waits for itself; the batch script fills in the name of the first node, once",
                    LOCALHOST.sub("$(hostname)", address))


@rule("early-variable")
def check_early_variable(context: Context) -> Iterator[Finding]:
    """Look for a task's variable that the job script's shell expands, so that all tasks get the same."""
    script = context.script
    for step in context.steps:
        launch, form = step.launch, step.launch.row.system and step.launch.row.system.directives
        if not launch.launcher or launch.command.in_loop or not form:
            continue
        numbers = rf"\$\{{?({'|'.join(form.task_numbers)})\b" if form.task_numbers else r"(?!)"
        reason = "the batch script's own value, 0, goes to all tasks"
        early = launch.early if launch.followed else launch.unknown
        used = [word for word in (*launch.program_options, *launch.script_words) if reads_rank(launch, word)]
        names = [match[1] for part in early
                 if (match := re.match(numbers, part)) and any(part in word for word in used)]
        for name in names[:1]:
            sources = [number for number, text in enumerate(script.lines, 1) if number <= launch.command.last_line
                       and re.search(rf"(?<!\\)\$\{{?{name}\b", text) and not re.match(r"\s*(echo|printf|#)", text)]
            own = [number for number in sources if number >= launch.line]
            line = own[0] if own and launch.followed else launch.line if own or not sources else sources[-1]
            instead = f"write \\${name} there" if launch.followed else (
                f"write {launch.launcher} bash -c '… ${name} …' with the whole command in the quotes, and export the "
                "variables that it reads")
            yield error(line, f"${name} is expanded before {launch.launcher} starts", reason,
                        advice="leave it out: python -m mpiddp sets the ranks" if launch.program is Program.MPIDDP
                        else f"{instead}; or start mpiddp, which needs none of this")
        for number, text in enumerate(script.lines[:launch.line - 1], 1):
            match = re.match(rf"\s*(?:export|declare -x)\s+(\w+)=[\"']?{numbers}", text)
            is_read = match and ((match[1] in EARLY_RANKS and launch.program is Program.PYTHON)
                                 or match[1].endswith("VISIBLE_DEVICES"))
            if match and is_read and not launch.followed and number not in script.documents:
                yield error(number, f"${match[2]} is expanded before the tasks start", f"{reason} as {match[1]}",
                            advice=f"remove this line and start python -m mpiddp, which sets the ranks; or set "
                                   f"{match[1]} in each task: {launch.launcher} bash -c '{match[1]}=${match[2]} exec "
                                   "python …'")


def reads_rank(launch: Launch, word: str) -> bool:
    """Return whether a program reads the number of a task in one of its words.

    A node's number means nothing to torchrun where the nodes meet by c10d.
    """
    starter, options = launch.starter, launch.program_options
    if starter is None or not starter.needs_address or find_option(options, "rdzv-backend") in (None, "static"):
        return True
    dashed = [each.lstrip("-").replace("_", "-") for each in options]
    places = [place for place, each in enumerate(dashed) if each.partition("=")[0] == starter.node_rank]
    ignored = {options[number] for place in places for number in (place, place + 1) if number < len(options)}
    return word not in ignored


@rule("unknown-option")
def check_unknown_option(context: Context) -> Iterator[Finding]:
    """Look for options and MPIDDP_… variables that mpiddp does not have."""
    names = [*OPTIONS, *FLAGS]
    for launch in context.script.trainings:
        unknown = [word.partition("=")[0] for word in launch.program_options if not is_our_option(word)]
        for word in unknown if launch.program is Program.MPIDDP else ():
            dashed = word.replace("_", "-")
            hint = next((text for options, text in FOREIGN_OPTION_HINTS.items() if dashed in options), "")
            meant = "" if hint else next(iter(difflib.get_close_matches(dashed.lstrip("-"), names, 1, 0.6)), "")
            yield error(launch.line, f"mpiddp has no option {word}" + f" (did you mean --{meant}?)" * bool(meant),
                        "mpiddp ends with status 2 before the training", f"--{meant}" if meant else "", advice=hint)
    script = context.script
    variables = {**script.variables, **{
        name: value for launch in script.launches for name, value in launch.command.assignments.items()}}
    for text in find_unknown_variables(variables):
        yield warning(script.variable_lines.get(text.split(" ")[0]), f"no such option: {text}",
                      "the variable has no effect", *re.findall(r"did you mean (\w+)", text))


@rule("late-option")
def check_late_option(context: Context) -> Iterator[Finding]:
    """Look for options of mpiddp among the arguments of a script that has no such options."""
    for step in context.steps:
        launch, text = step.launch, context.read_training(step.launch)
        if launch.program is not Program.MPIDDP or launch.container or OTHER_PARSERS.search(text) or (
                "ArgumentParser(" not in text or "add_argument(" not in text):
            continue  # its options may come from elsewhere
        late = [" ".join(words) for words in find_late_options(launch, text)]
        if late:
            names = ", ".join(re.split("[ =]", words)[0] for words in late)
            yield error(launch.line,
                        f"{names}: after {launch.script}, which has no such option{'s' * (len(late) > 1)}",
                        "what stands behind the script goes to the script; options of mpiddp stand before it",
                        f"python -m mpiddp {' '.join(late)} {launch.script}")


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
        has_value = bool(following) and not following[0].startswith("-")
        if takes_value and "nargs" not in OPTIONS[name] and not has_value:
            continue  # not the form of ours
        yield (word.spelling, following[0].spelling) if takes_value and has_value else (word.spelling,)


@rule("background-wait")
def check_background_wait(context: Context) -> Iterator[Finding]:
    """Look for a launch in the background after which the script ends."""
    script = context.script
    started = [step.launch for step in context.steps]
    last = script.launches[-1:]
    if not started and last and last[0].launcher and all(
            command.words[0] in QUICK for command in script.commands if command.line > last[0].line):
        started = [last[0]]
    for launch in started:
        waits = any(is_wait(command) and command.line >= launch.line for command in script.commands)
        reason = "the job ends with the script, and kills the training"
        is_last = all(command.words[0] in QUICK for command in script.commands if command.line > launch.line)
        make = error if is_last else warning
        if launch.command.is_background and not waits:
            yield make(launch.line, "the training runs in the background, and nothing waits for it", reason, "wait")
        verb = launch.words[launch.begin + 1] if len(launch.row.words) > 1 else ""
        waits = bool({"wait", "watch"} & set(launch.options)) or context.has_text(
            rf"\b{launch.launcher}\s+(job\s+(wait|attach|status)|watch|queue\s+(drain|idle)|wait)\b")
        if verb in launch.row.verbs[1:] and not waits and script.scheduler == launch.row.system:
            yield error(launch.line, f"{launch.launcher} {verb} does not wait for the training", reason,
                        launch.row.command)


def is_wait(command: SimpleCommand) -> bool:
    """Return whether a command waits for a process, or asks whether it is still there."""
    name, *words = command.words
    return name == "wait" or (name == "kill" and "-0" in words) or any(word.startswith("--pid") for word in words)


@rule("line-continuation")
def check_line_continuation(context: Context) -> Iterator[Finding]:
    """Look for a backslash with a blank or a comment behind it."""
    lines = context.script.lines
    for number in context.broken_lines:
        line = lines[number - 1]
        if match := BLANK_BEHIND.search(line):
            what = "a comment" if match[1] else "a blank"
            yield error(number, f"{what} behind the backslash", "the command ends here, and the next line is another "
                        "one", f"{line[:match.start()]}\\",
                        advice="write the comment in a line above the command" if match[1] else "")
    for command in context.script.commands:
        if command.words[0].startswith("-") and lines[command.line - 1].lstrip().startswith("-") and (
                command.line - 1 not in context.broken_lines):
            yield error(command.line, f"a line begins with an option: {command.words[0]}",
                        "the shell takes it for a command; the training does not get it",
                        advice="end the line above with a backslash, and move comments out of the command")

