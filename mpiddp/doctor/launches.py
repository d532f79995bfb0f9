"""The commands of a job script that start a training: launcher, its options, what stands between, and the program."""

from __future__ import annotations

import enum
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..options.table import FLAGS, OPTIONS, split_command
from ..systems.launchers import MPI_COUNTS, MPI_NODES, PALS
from ..systems.launchers import MPI_VALUES as MPI_OPTION_VALUES
from .directives import flux_options, getopt, slurm_options
from .shell import SHELLS, Command, QuoteError, Shell, Token, Word, parse_statements

MPI_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "mpirun.openmpi",
                 "mpirun.mpich", "orterun", "prterun", "aprun", "mpirun_rsh")
LAUNCHERS = ("srun", *MPI_LAUNCHERS, "flux", "jsrun", "ibrun")
CONTAINERS = ("apptainer", "singularity", "shifter", "podman-hpc", "podman", "docker", "ch-run", "enroot")
WRAPPERS = (*CONTAINERS, "env", "time", "nice", "nohup", "numactl", "taskset", "stdbuf", "timeout", "command", "exec",
            "setsid", "ionice", "conda", "mamba", "micromamba", "pixi", "uv", "poetry", "nsys", "ncu", "strace",
            "chrt", "catchsegv", "unbuffer", "hpcrun", "rocprof")
PROGRAM = re.compile(r"(.*/)?(python[\d.]*|mpiddp|torchrun|accelerate|deepspeed|colossalai)|[^=]*\.(py|sh|bash)")
MODULES = {
    "mpiddp": "mpiddp", "torch.distributed.run": "torchrun", "torch.distributed.launch": "launch",
    "torch.distributed.elastic.run": "torchrun", "accelerate.commands.launch": "accelerate",
    "accelerate.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed", "deepspeed": "deepspeed",
}
PYTHON_TOOLS = ("venv", "pip", "virtualenv", "ensurepip", "compileall", "json.tool", "zipfile", "mpi4py")
PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
# Options of torchrun and `accelerate launch` that take no value.
TORCHRUN_FLAGS = frozenset(("standalone", "no-python", "run-path", "use-env", "virtual-local-rank", "help"))
ACCELERATE_FLAGS = frozenset((
    "multi-gpu", "cpu", "use-deepspeed", "use-fsdp", "use-megatron-lm", "tpu", "use-xpu", "quiet", "debug",
    "no-python", "same-network", "use-cpu", "enable-cpu-affinity", "tpu-cluster", "no-tpu-cluster", "downcast-bf16",
    "dynamo-use-fullgraph", "dynamo-use-dynamic", "dynamo-use-regional-compilation", "help"))
DEEPSPEED_FLAGS = frozenset((
    "no-ssh", "no-ssh-check", "force-multi", "bind-cores-to-rank", "save-pid", "module", "no-python", "no-local-rank",
    "elastic-training", "enable-each-rank-log", "help"))
MPI_NAMES = {**dict.fromkeys((*(name.lstrip("-") for name in MPI_COUNTS if name != "-c"), "c"), "ntasks"),
             "N": "ntasks-per-node", "npernode": "ntasks-per-node", "ppn": "ntasks-per-node",
             "perhost": "ntasks-per-node", "d": "cpus-per-task", "depth": "cpus-per-task",
             "f": "hostfile", "machinefile": "hostfile", "H": "hosts", "host": "hosts"}
MPI_VALUES: Mapping[str, int] = {
    **dict.fromkeys((*PALS.counts, *PALS.per_node, *PALS.chooses, *MPI_NODES, "-N", "-npernode", "--npernode",
                     "-perhost", "--perhost", "--report-state-on-timeout", "--timeout", "--display", "-cpu-bind",
                     "--runtime-options", "-cc", "--cpu-list"), 1),
    **PALS.values, **MPI_OPTION_VALUES}
JSRUN_NAMES = {"n": "nrs", "r": "rs_per_host", "a": "tasks_per_rs", "c": "cpu_per_rs", "g": "gpu_per_rs", "b": "bind",
               "d": "launch_distribution", "p": "np"}
REPEATED = ("setopt", "x", "mca", "genv", "env")  # options that may be given several times, each for something else
MAX_DEPTH = 5  # of shell scripts that start shell scripts
MAX_FOLLOWED = 100  # shell scripts and texts that launches run


class Program(enum.Enum):
    """What a launch starts in the end."""

    MPIDDP = "mpiddp"
    TORCHRUN = "torchrun"
    TORCH_LAUNCH = "torch.distributed.launch"
    ACCELERATE = "accelerate launch"
    DEEPSPEED = "deepspeed"
    PYTHON = "python"
    OTHER = "another program"


KINDS = {"mpiddp": Program.MPIDDP, "torchrun": Program.TORCHRUN, "launch": Program.TORCH_LAUNCH,
         "accelerate": Program.ACCELERATE, "deepspeed": Program.DEEPSPEED}


@dataclass(frozen=True)
class Launch:
    """A command that starts a training.

    `launcher` is the first word's name, empty without a launcher, the word as written if it is unknown.
    `launcher_options` have long names; a flag's value is empty. `wrapper_words` stand between the launcher's options
    and the program: containers, numactl, env; the first `leading` of them before the launcher. `program_words` begin
    with the program; `options` are those before the user's `script`, `script_words` the script with its arguments.
    `inner` is a launcher that is started by this one;
    `supervised` are the options of mpiddp.supervise, None without it. `followed` is the shell script or text that the
    launcher starts and in which the program was found, `inner_text` its text; `early` are the unknown parts of it that
    the job script's shell expands, not that of the task. `unknown` could not be followed; if `has_unknown_options`, an
    unknown word stands among the launcher's options. `tokens` are the words of the command that starts the program.
    """

    line: int
    text: str
    launcher: str = ""
    launcher_options: dict[str, str] = field(default_factory=dict)
    program: Program = Program.OTHER
    program_words: tuple[str, ...] = ()
    script: str | None = None
    unknown: tuple[str, ...] = ()
    has_unknown_options: bool = False
    launcher_word: str = ""
    wrapper_words: tuple[str, ...] = ()
    leading: int = 0
    options: tuple[str, ...] = ()
    script_words: tuple[str, ...] = ()
    is_module: bool = False
    inner: str = ""
    supervised: tuple[str, ...] | None = None
    followed: str = ""
    inner_text: str = ""
    early: tuple[str, ...] = ()
    inner_commands: tuple[Command, ...] = ()
    assignments: Mapping[str, str] = field(default_factory=dict)
    is_background: bool = False
    in_loop: bool = False
    folder: str | None = ""
    outputs: tuple[Word, ...] = ()
    tokens: tuple[Token, ...] = ()

    @property
    def container(self) -> str:
        """The program that starts a container around the training, empty for none."""
        names = [os.path.basename(word) for word in self.wrapper_words]
        own = next((name for name in ("container-image", "environment") if name in self.launcher_options), "")
        return next((name for name in names if name in CONTAINERS), own)

    @property
    def is_training(self) -> bool:
        """Return whether the launch starts Python, as far as is known."""
        return self.program is not Program.OTHER


class ProgramCall(NamedTuple):
    """A program and its words, split: options, script with arguments."""

    program: Program
    options: tuple[str, ...] = ()
    script_words: tuple[str, ...] = ()
    is_module: bool = False


class Reader:
    """Reads the launches of commands.

    `open_script` returns the text of a shell script that they start, or None; `documents` are those that the job script
    writes itself.
    """

    def __init__(self, environment: Mapping[str, str], is_empty: Callable[[str], bool],
                 open_script: Callable[[str], str | None], documents: Mapping[str, Word] = {}) -> None:
        self._environment, self._is_empty, self._open_script = environment, is_empty, open_script
        self._documents = documents
        self.notes: list[tuple[int, str]] = []
        self._followed = 0

    def read(self, command: Command, depth: int = 0) -> Launch | None:
        """Return the launch that a command is, None if it is none."""
        words = list(command.words)
        base = Launch(command.line, command.text, assignments=command.assignments,
                      is_background=command.is_background, in_loop=command.in_loop, folder=command.folder,
                      outputs=command.outputs, tokens=command.tokens)
        unknown_start = words[0] if words[0].is_unknown and len(words) > 1 else None
        words, before = skip_wrappers(words[unknown_start is not None:])
        words, supervised = split_supervise(words)
        if not words:
            return None
        base = replace(base, wrapper_words=tuple(before))
        launcher = os.path.basename(words[0])
        if launcher not in LAUNCHERS or (launcher == "flux" and words[1:2] not in (["run"], ["submit"])):
            if unknown_start is not None:
                base = replace(base, launcher=unknown_start, launcher_word=unknown_start, has_unknown_options=True)
            launch = self._read_program(base, words, command, depth)
            is_tool = launch.is_module and launch.script_words[:1] != () and launch.script_words[0] in PYTHON_TOOLS
            is_launch = launch.is_training and not is_tool and (
                launch.program is not Program.PYTHON or launch.script_words)
            return launch if is_launch else None
        options, length, has_unknown = read_launcher_options(launcher, words)
        if not words[length:] and not has_unknown:
            return None
        named: dict[str, str] = {}
        for name, value in options:
            named[name] = f"{named[name]},{value}" if name in REPEATED and name in named else value
        base = replace(base, launcher=launcher, launcher_word=words[0], launcher_options=named, supervised=supervised,
                       has_unknown_options=has_unknown, leading=len(before))
        return self._read_program(base, words[length:], command, depth)

    def _read_program(self, base: Launch, words: list[Word], command: Command, depth: int) -> Launch:
        """Return a launch with what it starts."""
        words, wrappers = skip_wrappers(words)
        base = replace(base, wrapper_words=(*base.wrapper_words, *wrappers), program_words=tuple(words),
                       unknown=tuple(dict.fromkeys(part for word in command.words for part in word.unknown)))
        if not words:
            return base
        name = os.path.basename(words[0])
        if base.launcher and name in LAUNCHERS:
            length = read_launcher_options(name, words)[1]
            inner = self._read_program(base, words[length:], command, depth)
            return replace(inner, inner=name)
        if name in SHELLS or re.fullmatch(r".*\.(sh|bash|slurm|sbatch)", words[0]) or (
                self._find_document(command, words[0]) is not None):
            return self._follow_script(base, words, command, depth)
        call = split_program(words)
        first = words[0] if call.program is Program.OTHER and "/" in words[0] else None
        script = call.script_words[0] if call.script_words and not call.is_module else first
        if script is not None and any(script == word and word.unknown for word in words):
            script = None
        return replace(base, program=call.program, options=call.options, script_words=call.script_words,
                       is_module=call.is_module, script=script)

    def _follow_script(self, base: Launch, words: list[Word], command: Command, depth: int) -> Launch:
        """Return a launch of a shell, with the program that its text or file starts."""
        name, text, parameters = find_shell_text(words)
        base = replace(base, script=name or None)
        if name and text is None:
            text = self._find_document(command, name)
        if name and text is None:
            if any(name == word and word.unknown for word in words):
                return replace(base, script=None)
            text = self._open_script(os.path.join(command.folder or "", name))
            if text is None:
                return base
        if text is None:
            text = command.input_text
        self._followed += 1
        if text is None or depth >= MAX_DEPTH or self._followed > MAX_FOLLOWED:
            return base
        shell = Shell({**self._environment}, self._is_empty, parameters)
        try:
            shell.follow(parse_statements(text))
        except QuoteError:
            self.notes.append((command.line, f"the text that {words[0]} runs has an open quote"))
            return base
        launches = [launch for inner in shell.commands if (launch := self.read(inner, depth + 1)) is not None]
        trainings = [launch for launch in launches if launch.is_training]
        if not trainings:
            return base
        early = dict.fromkeys((*base.unknown, *getattr(text, "unknown", ())))
        inner = trainings[-1]
        return replace(
            base, program=inner.program, program_words=inner.program_words, script=inner.script,
            options=inner.options, script_words=inner.script_words, is_module=inner.is_module, inner=inner.launcher,
            followed=name or "text", inner_text=text, early=tuple(early),
            wrapper_words=(*base.wrapper_words, *inner.wrapper_words), unknown=(*base.unknown, *inner.unknown),
            inner_commands=tuple(shell.commands), tokens=inner.tokens)

    def _find_document(self, command: Command, name: str) -> Word | None:
        """Return the text of a shell script that the job script writes itself, None if it does not."""
        return self._documents.get(os.path.normpath(os.path.join(command.folder or "", name)))


def find_shell_text(words: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """Return the file that a shell runs, or the text after -c, and the parameters."""
    if os.path.basename(words[0]) not in SHELLS:
        return words[0], None, list(words[1:])
    rest = list(words[1:])
    while rest and rest[0].startswith(("-", "+")):
        option = rest.pop(0)
        if re.fullmatch(r"-[a-z]*c", option) and rest:
            return "", rest[0], list(rest[2:])
        if option in ("-o", "+o", "--rcfile", "--init-file") and rest:
            rest.pop(0)
    if rest and rest[0] not in ("-", "/dev/stdin"):
        return rest[0], None, rest[1:]
    return "", None, rest[1:]


def split_supervise(words: list[Word]) -> tuple[list[Word], tuple[str, ...] | None]:
    """Return the command that mpiddp.supervise starts, and its own options; None if it is not supervised."""
    begin = next((position + 1 for position, word in enumerate(words) if word == "mpiddp.supervise"), 0)
    if not begin:
        return words, None
    end = next((position for position in range(begin, len(words))
                if os.path.basename(words[position]) in LAUNCHERS or PROGRAM.fullmatch(words[position])), len(words))
    return words[end:], tuple(words[begin:end])


def skip_wrappers(words: list[Word]) -> tuple[list[Word], list[Word]]:
    """Return the words from the program on, and the words before it.

    Options of a wrapper are not read: the program is the next word that looks like a program.
    """
    skipped: list[Word] = []
    while words and os.path.basename(words[0]) in WRAPPERS:
        if words[0] in ("conda", "mamba", "micromamba") and "run" not in words[:3]:
            break
        end = next((position for position in range(1, len(words)) if is_program(words[position])), len(words))
        if end == len(words) and os.path.basename(words[0]) not in CONTAINERS:
            end = next((position for position in range(1, len(words)) if not words[position].startswith("-")
                        and "=" not in words[position]), end)
        if end == len(words):
            break
        skipped += words[:end]
        words = words[end:]
    return words, skipped


def is_program(word: str) -> bool:
    """Return whether a word is the name of a program that is known here, or a script's."""
    name = os.path.basename(word)
    return (name in LAUNCHERS or name in SHELLS or name in WRAPPERS or PROGRAM.fullmatch(word) is not None) and (
        not word.startswith("-"))


def read_launcher_options(launcher: str, words: Sequence[Word]) -> tuple[list[tuple[str, str]], int, bool]:
    """Return a launcher's options by their long names, where its program begins, and whether a word is unknown.

    A word that is unknown as a whole may be any number of options.
    """
    begin = 2 if launcher == "flux" else 1
    options: list[tuple[str, str]] = []
    position, has_unknown = begin, False
    while position < len(words):
        rest = words[position:]
        if rest[0].is_unknown and (len(rest) == 1 or not rest[0].startswith("-")) and has_program(rest[1:]):
            has_unknown = True
            position += 1
            continue
        own, length = read_own_options(launcher, rest)
        if not length:
            break
        options += own
        position += length
    return options, position, has_unknown


def has_program(words: Sequence[Word]) -> bool:
    """Return whether options or a program follow, so that the word before them is no program."""
    return any(is_program(word) or word.is_unknown for word in words) or bool(words and words[0].startswith("-"))


def read_own_options(launcher: str, words: Sequence[Word]) -> tuple[list[tuple[str, str]], int]:
    """Return the options at the begin of words, and their number of words."""
    if launcher == "srun":
        return slurm_options(words)
    if launcher == "flux":
        return flux_options(words)
    if launcher == "jsrun":
        return getopt(words, JSRUN_NAMES, frozenset(), {})
    options: list[tuple[str, str]] = []
    position = 0
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        name, has_value, value = word.partition("=")
        position += 1
        count = MPI_VALUES.get(name) if launcher != "ibrun" else 1
        if count is None:
            count = 1 if position < len(words) and is_plain_value(words[position]) else 0
        if not has_value:
            value = " ".join(words[position:position + count])
            position += count
        options += name_mpi_option(launcher, name.lstrip("-"), value)
    return options, position


def is_plain_value(word: str) -> bool:
    """Return whether a word after an unknown option is its value: a number, or what is no program."""
    return word.isdigit() or not (word.startswith("-") or is_program(word) or "/" in word)


def name_mpi_option(launcher: str, name: str, value: str) -> list[tuple[str, str]]:
    """Return an option of mpirun and its relatives by its long name."""
    if launcher == "aprun" and name == "N":
        return [("ntasks-per-node", value)]
    options = [(MPI_NAMES.get(name, name), value)]
    if name == "map-by" and (match := re.match(r"ppr:(\d+):node", value)):
        options.append(("ntasks-per-node", match[1]))
    return options


def split_program(words: Sequence[str]) -> ProgramCall:
    """Return what a program's words start."""
    name = os.path.basename(words[0])
    if name == "mpiddp":
        return split_mpiddp(words[1:])
    if name == "torchrun":
        return split_options(Program.TORCHRUN, words[1:], TORCHRUN_FLAGS)
    if name == "accelerate" and "launch" in words[1:2]:
        return split_options(Program.ACCELERATE, words[2:], ACCELERATE_FLAGS)
    if name == "deepspeed":
        return split_options(Program.DEEPSPEED, words[1:], DEEPSPEED_FLAGS)
    if re.fullmatch(r"python[\d.]*", name):
        return split_python(words)
    if words[0].endswith(".py"):
        return ProgramCall(Program.PYTHON, (), tuple(words))
    return ProgramCall(Program.OTHER)


def split_python(words: Sequence[str]) -> ProgramCall:
    """Return what a command of Python starts."""
    position = 1
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-m", "-c", "-"):
        position += 2 if words[position] in PYTHON_VALUES else 1
    rest = words[position:]
    if "-c" in rest[:1]:
        return ProgramCall(Program.PYTHON)
    if "-m" not in rest[:1]:
        return ProgramCall(Program.PYTHON, (), tuple(rest))
    module = rest[1] if len(rest) > 1 else ""
    kind = KINDS.get(MODULES.get(module, ""))
    if kind is Program.MPIDDP:
        return split_mpiddp(rest[2:])
    if kind is None:
        return ProgramCall(Program.PYTHON, (), tuple(rest[1:]), is_module=True)
    return split_options(kind, rest[2:], ACCELERATE_FLAGS if kind is Program.ACCELERATE else TORCHRUN_FLAGS)


def split_mpiddp(words: Sequence[str]) -> ProgramCall:
    """Return mpiddp's options and the script that it starts; an option that it does not have may have a value."""
    ours, rest = split_command(words)
    while ours and not is_our_option(ours[-1]) and "=" not in ours[-1] and rest and not re.fullmatch(
            r".*\.py|-.*", rest[0]) and any(word == "-m" or word.endswith(".py") for word in rest[1:]):
        more, later = split_command(rest[1:])
        ours, rest = [*ours, rest[0], *more], later
    if rest[:1] == ["-c"]:
        return ProgramCall(Program.MPIDDP, tuple(ours))
    is_module = rest[:1] == ["-m"]
    return ProgramCall(Program.MPIDDP, tuple(ours), tuple(rest[1:] if is_module or rest[:1] == ["--"] else rest),
                       is_module)


def is_our_option(word: str) -> bool:
    """Return whether mpiddp has an option."""
    name = word.partition("=")[0].replace("_", "-").removeprefix("--")
    return not word.startswith("-") or word == "-h" or name in {*OPTIONS, *FLAGS, "help", "version"}


def split_options(program: Program, words: Sequence[str], flags: frozenset[str]) -> ProgramCall:
    """Return the options of another launcher of Python, and the script that it starts."""
    position = 0
    while position < len(words) and words[position].startswith("-"):
        name, has_value, _ = words[position].lstrip("-").replace("_", "-").partition("=")
        position += 1
        if name in ("m", "module"):
            return ProgramCall(program, tuple(words[:position - 1]), tuple(words[position:]), is_module=True)
        if not has_value and name not in flags and position < len(words) and not words[position].endswith(".py"):
            position += 1
    return ProgramCall(program, tuple(words[:position]), tuple(words[position:]))


def quote(words: Sequence[str]) -> str:
    """Return words as a shell reads them, with variables as they are written."""
    return " ".join(word if "$" in word else shlex.quote(word) for word in words)
