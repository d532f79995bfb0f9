"""Writes the command that starts mpiddp in place of a recipe's launch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from ..discovery.script import LOCAL_RANK_OPTION
from .batch_script import BatchScript, Launch, Program, Scheduler
from .conversion_launches import (
    STARTED,
    TASK_VARIABLES,
    count_ranks_per_node,
    find_command,
    find_convertible,
    read_torch_options,
    starts_one_node,
)
from .directives import read_number
from .launches import WRAPPERS, read_launcher_options
from .shell import Word, parse, read_text
from .statements import references
from .words import break_lines, format_word, format_words

ReadFile = Callable[[str], "str | None"]
# Options that srun does not need, or that the new line has with other values.
REPLACED = frozenset((
    "mpi", "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "gpus-per-task", "gpu-bind",
    "cpu-bind",
))
SIZES = ("nodes", "ntasks", "ntasks-per-node")
SET_BY_MPIDDP = frozenset((
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
    "OMP_NUM_THREADS",
))
# Variables of a recipe's rendezvous; Python may read other exported ones, such as http_proxy.
RENDEZVOUS = re.compile(
    r"(?!\w+_proxy$)[a-z_\d]+|.*(MASTER|HEAD|MAIN_|RDZV|ENDPOINT|NODE|NPROC|ADDR|PORT|RANK|WORLD|HOST|IP\b).*")
# What accelerate launch sets for its ranks, by its option.
ACCELERATE_VARIABLES = {
    "mixed-precision": "ACCELERATE_MIXED_PRECISION",
    "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
ACCELERATE_PLUGINS = re.compile(r"(use-)?(fsdp|deepspeed|megatron-lm|zero|offload|parallelism|fp8|dynamo)\b")
# Enroot passes only the variables that its options name; PMIx communicates with Slurm through files in /tmp.
ENROOT_START = """'options=(--mount /tmp)
    [ -z "$PMIX_SERVER_TMPDIR" ] || options+=(--mount "$PMIX_SERVER_TMPDIR")
    for name in $(compgen -e | grep -E -v "$OWN"); do options+=(--env "$name"); done
    exec enroot start "${options[@]}" "$@"'"""
BY_SSH = re.compile(
    r"\b(ssh|pdsh|clush|pbsdsh|pbs_tmrsh|blaunch)\b.*\b(torchrun|accelerate|torch\.distributed|\w+\.sh)\b.*")
# Wrappers that stand before srun: it would start them once for each rank.
LEADING = ("exec", "command", "builtin", "nohup", "setsid", "time", "timeout", "nice")
PARAMETER = re.compile(r"\$\{?[1-9@*#]")


@dataclass
class Replacement:
    """What takes the place of a launch: lines before it, variables, options, and what the user has to check."""

    setup: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)


class ConversionError(ValueError):
    """A script could not be converted; the text says why."""


def read_options(script: BatchScript, launch: Launch, new: Replacement, read_file: ReadFile) -> None:
    """Find the options of mpiddp, and the variables, that stand for the recipe's own options."""
    options = read_torch_options(launch)
    if launch.program in STARTED and launch.script_words[0] in launch.unknown:
        new.checks.append(f"{launch.script_words[0]} may begin with options of {launch.program.value}: remove these")
    output = launch.launcher_options.get("output", "")
    if "log-dir" in options or re.search(r"%[tnN]", output):
        written = next((token.text for token in launch.tokens if re.search(r"%[tnN]", token.text)), output)
        folder = os.path.dirname(re.sub(r"^-+\w+=|[\"']", "", written).partition("%")[0]) or "logs"
        new.options += ["--log-dir", format_value(options.get("log-dir") or folder)]
        new.checks += ["each rank's output goes to a file in the folder of --log-dir"] * ("log-dir" not in options)
    if options.get("local-ranks-filter"):
        new.options += ["--show", ",".join(f"local-{rank}" for rank in options["local-ranks-filter"].split(","))]
    if "virtual-local-rank" in options:
        new.options.append("--virtual-local-rank")
    if (read_number(options.get("max-restarts", "0")) or 0) > 0:
        new.checks.append("--max-restarts: mpiddp.supervise restarts a job; mpiddp's batch/supervise.sh has its lines")
    if launch.program is not Program.PYTHON and "B:" in script.options.get("signal", "") and not launch.is_background:
        new.checks.append("the shell's trap runs only when srun has ended: mpiddp's batch/requeue.sh stops in time")
    if launch.program in STARTED and (match := BY_SSH.search(script.text.replace("\\\n", " "))):
        starts = "may also start" if match[2].endswith(".sh") else "also starts"
        new.checks.append(f"{match[1]} {starts} a part of the training: leave that out")
    if "no-python" in options:
        new.checks.append("--no-python: mpiddp starts a Python script, not another program")
    if launch.program is Program.TORCH_LAUNCH and "use-env" not in options:
        add_local_rank(launch, new, read_file)
    if launch.program is Program.ACCELERATE:
        read_accelerate_options(options, new)
        if re.search(r"\b(CONFIG|settings)\b", script.text):  # names of the lines that are added
            new.setup = [re.sub(r"(^|\$)(CONFIG|settings)\b", r"\1accelerate_\2", line) for line in new.setup]


def add_local_rank(launch: Launch, new: Replacement, read_file: ReadFile) -> None:
    """Add --pass-local-rank if the script has an option for its local rank, as torch.distributed.launch expects."""
    name = launch.script_words[0] if launch.script_words and not launch.is_module else ""
    text = read_file(os.path.join(launch.folder or "", name)) if name else None
    if text is None:
        new.checks.append(f"if {name or 'the module'} parses --local_rank, add --pass-local-rank=--local_rank")
    elif "LOCAL_RANK" not in text and (option := LOCAL_RANK_OPTION.search(text.encode())):
        spelling = option[1].decode()
        new.options.append("--pass-local-rank" + ("" if spelling == "--local-rank" else f"={spelling}"))


def read_accelerate_options(options: dict[str, str], new: Replacement) -> None:
    """Set what accelerate launch would set for its ranks, from its options and its configuration."""
    for name, variable in ACCELERATE_VARIABLES.items():
        if name in options:
            new.variables.append(f"{variable}={format_value(options[name])}")
    if "cpu" in options:
        new.variables.append("ACCELERATE_USE_CPU=true")
    if "config-file" in options:
        new.setup += [f"CONFIG={format_value(options['config-file'])}", *read_lines("accelerate_settings.sh")]
    else:
        new.checks.append("accelerate launch also reads ~/.cache/huggingface/accelerate/default_config.yaml, as "
                          "mpiddp's batch/accelerate.sh does")
    if plugins := [f"--{name}" for name in options if ACCELERATE_PLUGINS.match(name)]:
        new.checks.append(f"{', '.join(plugins)}: write this into a configuration with accelerate config, and take the "
                          "lines about CONFIG from mpiddp's batch/accelerate.sh")


def read_lines(name: str) -> list[str]:
    """Return the lines of a file of shell code beside this module, which the scripts in batch/ have, too."""
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read().splitlines()


def format_value(text: str) -> str:
    """Return the value of an option or a variable as it is written, or else as the shell reads it."""
    token = getattr(text, "token", None)
    return token.text if token is not None else format_word(Word(text, [text] if "$" in text else []))


def format_command(script: BatchScript, launch: Launch, new: Replacement) -> str:
    """Return the line that starts mpiddp."""
    program = getattr(launch.program_words[0], "token", None)
    if program is not None and PARAMETER.search(program.text) and not launch.followed:
        raise ConversionError(f"what line {launch.line} starts is in the arguments of its function")
    is_here = not launch.followed  # where variables, and a function's parameters, are those of the new line
    script_words = format_words(launch.script_words, launch.tokens, is_here)
    if names := find_fixed(script, launch):
        new.checks.append(f"the arguments are written with the values of {', '.join(names)}")
    first = getattr(launch.script_words[0], "token", None)
    if first is not None and first.count > 1 and "$" in first.text and first.text not in script_words:
        new.checks.append(f"{first.text} is taken apart, with the values that it has here")
    program = " ".join([*format_python(launch), "-m", "mpiddp", *new.options, *(["-m"] if launch.is_module else []),
                        script_words])
    if launch.followed and TASK_VARIABLES.search(script_words):  # which the job script's shell must not expand
        new.checks.append("the arguments name a node or a task: each rank has its own now")
        program = f"bash -c {shlex.quote(program)}"
    leading, wrappers = split_wrappers(launch)
    if is_here:  # a variable such as `$DRY`, which is empty unless the submission sets it
        leading = [*(token.text for token in takewhile(lambda token: not token.count, launch.tokens)), *leading]
    assignments = [f"{name}={format_word(Word(value))}" for name, value in launch.assignments.items()
                   if name not in SET_BY_MPIDDP]
    begin = [*new.variables, *assignments, *leading, *format_launcher(script, launch, new)]
    if wrappers[:2] == ["enroot", "start"]:
        new.setup += read_lines("enroot_variables.sh")
        begin += ["bash", "-c", ENROOT_START, "enroot", format_words(wrappers[2:], launch.tokens, is_here)]
    else:
        if os.path.basename(wrappers[0] if wrappers else "") == "enroot":
            new.checks.append("enroot passes variables only with --env: mpiddp's batch/enroot.sh has the lines")
        begin += [format_words(wrappers, launch.tokens, is_here)] if wrappers else []
    redirects = [read_text(node) for node in parse(launch.text).named_children[0].named_children
                 if node.type in ("file_redirect", "herestring_redirect")]
    return break_lines([" ".join(begin), " ".join([program, *redirects])])


def find_fixed(script: BatchScript, launch: Launch) -> list[str]:
    """Return the variables whose values stand in the text in double quotes of which a shell starts the launch."""
    texts = [word.token.text for word in find_command(script, launch).words if launch.followed == "text"
             and word.token is not None and " " in word and word.token.text.startswith('"')]
    names = frozenset[str]().union(*(references(text.replace("\\$", "")) for text in texts))
    return [name for name in sorted(names) if not re.match("SLURM|RANK|LOCAL_RANK|MASTER|HOME$|USER$|PWD$", name)
            and not any(name in part for word in launch.script_words for part in getattr(word, "unknown", ()))]


def split_wrappers(launch: Launch) -> tuple[list[str], list[str]]:
    """Return the wrappers before the launcher, and those of each rank, without the shell that is not needed."""
    leading, rest = list(launch.wrapper_words[:launch.leading]), list(launch.wrapper_words[launch.leading:])
    while not launch.launcher and rest and rest[0] in LEADING:
        end = next((position for position, word in enumerate(rest) if position and word in WRAPPERS), len(rest))
        leading, rest = [*leading, *rest[:end]], rest[end:]
    rest = [word for word in rest if not is_shell_word(word, launch)]
    return leading, rest[1:] if rest and rest[0] in ("exec", "command") else rest


def is_shell_word(word: str, launch: Launch) -> bool:
    """Return whether a word only started the shell in which the program was found."""
    return bool(launch.followed) and os.path.basename(word) in ("bash", "sh", "-c", launch.followed)


def format_python(launch: Launch) -> list[str]:
    """Return the words that start Python, with its own options."""
    words = list(launch.program_words)
    name = os.path.basename(words[0])
    if re.fullmatch(r"python[\d.]*", name):
        end = words.index("-m") if launch.program in STARTED else words.index(launch.script_words[0])
        return [format_word(Word(word)) for word in words[:end] if word != "-m"]
    folder = os.path.dirname(words[0])
    return [os.path.join(folder, "python")] if folder else ["python"]


def format_launcher(script: BatchScript, launch: Launch, new: Replacement) -> list[str]:
    """Return the launcher of the new line, with those of its options that still make sense."""
    if launch.launcher in ("", "srun") and script.scheduler in (Scheduler.SLURM, Scheduler.NONE):
        words = ["srun", *choose_interface(script, new)]
        if "cpus-per-task" in script.options or "cpus-per-task" in launch.launcher_options:
            words.append("--cpus-per-task=$SLURM_CPUS_PER_TASK")
        return [*words, *(f"--{name}={format_value(value)}" if value else f"--{name}"
                          for name, value in keep_options(script, launch).items())]
    if launch.launcher and launch.program is Program.PYTHON:
        return [format_word(word) for word in drop_variables(launcher_words(script, launch))]
    start, example = {"flux": ("flux run", "flux.sh"), "jsrun": ("jsrun", "jsrun.sh")}.get(
        launch.launcher, (launch.launcher or "mpirun", "pbs.sh or pals.sh"))
    new.checks.append(f"{start} with one rank for each GPU, as in mpiddp's batch/{example}")
    return [start]


def keep_options(script: BatchScript, launch: Launch) -> dict[str, str]:
    """Return the options of srun that the new line has, too; some nodes of the job keep their number, and get ranks."""
    options, ranks = launch.launcher_options, count_ranks_per_node(script, launch)
    kept = {name: value for name, value in options.items() if name not in REPLACED and not re.search("%[tnN]", value)}
    if launch.program is Program.PYTHON:
        return kept | {name: options[name] for name in SIZES if name in options}
    if starts_one_node(script, launch):
        kept.pop("nodelist", None)
        options = {}
    given = read_torch_options(launch)
    own = "1" if not launch.launcher and ("standalone" in given or "nnodes" not in given) else given.get("nnodes", "")
    nodes = read_number(options.get("nodes") or own) or script.request.nodes
    if nodes and script.request.nodes:
        nodes = min(nodes, script.request.nodes)  # torchrun's number is that of tasks if each task starts one
    most = max(count_ranks_per_node(script, each) or 0 for each in find_convertible(script))
    if nodes and ranks and (script.request.nodes, most) not in ((None, ranks), (nodes, ranks)):
        kept |= {"nodes": str(nodes), "ntasks": str(nodes * ranks)}
    return kept


def choose_interface(script: BatchScript, new: Replacement) -> list[str]:
    """Return srun's option for the MPI whose module the script loads; it is Open MPI's if there is none."""
    loaded = " ".join(word for command in script.commands if command.words[0] in ("module", "ml")
                      for word in command.words[1:]).lower()
    if re.search(r"cray-mpich|prgenv-|cray-python", loaded):
        return []
    if re.search(r"\b(intel-?mpi|impi|intel-oneapi-mpi|mpich|mvapich2?)\b", loaded):
        return ["--mpi=pmi2"]
    if not re.search(r"open-?mpi|hpcx|foss", loaded):
        new.checks.append("--mpi=pmix is for Open MPI; --mpi=pmi2 for MPICH and Intel MPI, none for Cray MPICH")
    return ["--mpi=pmix"]


def launcher_words(script: BatchScript, launch: Launch) -> list[Word]:
    """Return the launcher and its options as they are written, with known variables expanded."""
    words = find_command(script, launch).words[launch.leading:]
    return list(words[:read_launcher_options(launch.launcher, words)[1]])


def drop_variables(words: list[Word]) -> list[Word]:
    """Return mpirun's words without `-x MASTER_ADDR` and the like."""
    kept: list[Word] = []
    for word in words:
        if kept and kept[-1] in ("-x", "-genv", "-env") and word.partition("=")[0] in SET_BY_MPIDDP:
            kept.pop()
        else:
            kept.append(word)
    return kept
