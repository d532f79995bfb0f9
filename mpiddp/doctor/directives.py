"""The options of a job script's directives, and the resources for which they ask."""

from __future__ import annotations

import difflib
import enum
import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


class Scheduler(enum.Enum):
    """A batch system."""

    SLURM = "slurm"
    PBS = "pbs"
    LSF = "lsf"
    FLUX = "flux"
    NONE = "none"


SENTINELS = {"#SBATCH": Scheduler.SLURM, "#PBS": Scheduler.PBS, "#BSUB": Scheduler.LSF, "#flux:": Scheduler.FLUX,
             "#FLUX:": Scheduler.FLUX}
BEGINNINGS = {scheduler: sentinel for sentinel, scheduler in reversed(SENTINELS.items())}  # to write
# Beginnings that are meant to be #SBATCH.
WRONG_BEGINNING = re.compile(r"^(?:#(?:sbatch|SBTACH|SBACTH|SBATHC|SABTCH|SBATCh|Sbatch)\b|#SBATCH(?=-)|"
                             r"[ \t]+#SBATCH(?=\s+-))\s*")
PLAIN_CHARACTERS = str.maketrans("\u201c\u201d\u2018\u2019\u00a0", "\"\"'' ")  # for those of text processors
# A value in quotes, which may have such characters; or a dash, a quoted value or a space of a text processor.
TYPOGRAPHIC = re.compile(
    "(?P<plain>\"[^\"]*\"|'[^']*')|(?<!\\S)-*[\u2013\u2014]+-*(?=(?P<short>[A-Za-z](?![\\w-]*[A-Za-z-]))|\\w)|"
    "(?P<other>(?<=[=\\s])[\u201c\u201d\u2018\u2019][^\"'\u201c\u201d\u2018\u2019]*[\"'\u201c\u201d\u2018\u2019]|\u00a0)")
COMPONENT = re.compile(r"#SBATCH\s+(het|pack)job\b")  # what follows is for another component of the job
MISSPELLING_RATIO = 0.85  # of difflib, from which on a name is taken for a misspelling
# Long names of short options. srun has those of sbatch, and more.
SLURM_NAMES = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "E": "preserve-env", "F": "nodefile",
    "G": "gpus", "H": "hold", "I": "immediate", "J": "job-name", "K": "kill-on-bad-exit", "L": "licenses",
    "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec", "T": "threads", "W": "wait",
    "X": "disable-status", "Z": "no-allocate", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency",
    "e": "error", "i": "input", "k": "no-kill", "l": "label", "m": "distribution", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "r": "relative", "s": "oversubscribe", "t": "time", "u": "unbuffered",
    "v": "verbose", "w": "nodelist", "x": "exclude",
}
SLURM_FLAGS = frozenset((
    "contiguous", "disable-status", "exclusive", "get-user-env", "hold", "ignore-pbs", "immediate", "kill-on-bad-exit",
    "label", "no-allocate", "no-kill", "no-requeue", "overcommit", "overlap", "oversubscribe", "parsable",
    "preserve-env", "propagate", "pty", "quiet", "reboot", "requeue", "slurmd-debug", "spread-job", "test-only",
    "unbuffered", "use-min-nodes", "verbose", "container-mount-home", "no-container-mount-home",
    "no-container-entrypoint", "container-entrypoint", "container-writable", "container-remap-root", "exact", "whole",
))
# Options of sbatch that have no short name, by its manual; those of a site's plugins are not among them, but for pyxis.
OTHER_SLURM_OPTIONS = """\
acctg-freq bb bbf cluster-constraint comment consolidate-segments container container-id cores-per-socket
cpu-bind cpu-freq cpus-per-gpu deadline delay-boot export export-file extra gid gpu-bind gpu-freq gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint kill-on-invalid-dep mail-type mail-user mcs-label mem
mem-bind mem-per-cpu mem-per-gpu mincpus mpi network nice ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket open-mode power prefer priority profile reservation resv-ports segment share signal
sockets-per-node spread-segments stepmgr switches tasks-per-node thread-spec threads-per-core time-min tmp
tres-bind tres-per-job tres-per-task uid usage wait-all-nodes wckey workdir wrap x11 container-image
container-mounts container-workdir container-name container-env container-save
"""
SLURM_OPTIONS = frozenset((*SLURM_NAMES.values(), *SLURM_FLAGS, *OTHER_SLURM_OPTIONS.split()))
SLURM_ALIASES = {"tasks-per-node": "ntasks-per-node", "workdir": "chdir", "share": "oversubscribe"}
PBS_NAMES = {"N": "job-name", "A": "account", "q": "queue", "j": "join", "o": "output", "e": "error", "J": "array",
             "t": "array", "r": "rerunnable", "V": "export-all", "v": "export", "m": "mail", "M": "mail-user",
             "W": "attributes", "S": "shell", "k": "keep", "l": "resources", "d": "chdir", "p": "priority"}
LSF_NAMES = {"J": "job-name", "P": "account", "q": "queue", "W": "walltime", "n": "ntasks", "o": "output",
             "e": "error", "R": "resources", "gpu": "gpu", "nnodes": "nodes", "M": "memory", "x": "exclusive",
             "oo": "output", "eo": "error", "cwd": "chdir", "alloc_flags": "alloc-flags", "r": "requeue"}
LSF_FLAGS = frozenset(("x", "r", "rn", "N", "B", "I", "Is", "K", "H"))
FLUX_NAMES = {"N": "nodes", "n": "ntasks", "c": "cores-per-task", "g": "gpus-per-task", "t": "time-limit",
              "q": "queue", "B": "bank", "o": "setopt", "x": "exclusive", "S": "setattr", "l": "label-io", "u":
              "unbuffered", "v": "verbose"}
FLUX_ALIASES = {"nslots": "ntasks", "cores-per-slot": "cores-per-task", "gpus-per-slot": "gpus-per-task",
                "tasks-per-node": "ntasks-per-node"}
FLUX_FLAGS = frozenset(("exclusive", "unbuffered", "verbose", "label-io", "dry-run", "wait", "watch"))
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Directive:
    """A line of options for the batch system; one that `is_late` stands behind the first command and is not read."""

    line: int
    text: str
    options: dict[str, str]
    is_late: bool = False


@dataclass(frozen=True)
class Request:
    """The resources of a job or a step; None is unknown. `tasks_per_node` may follow from a default."""

    nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    walltime_s: int | None = None
    unreadable: frozenset[str] = field(default_factory=frozenset)


def read_directives(
    lines: Sequence[str], document_lines: Container[int] = ()
) -> tuple[Scheduler, tuple[Directive, ...]]:
    """Return a script's batch system and its directives; those of another system or in a here document are left out."""
    directives: list[tuple[Scheduler, Directive]] = []
    has_command = False
    for number, line in enumerate(lines, 1):
        meant = correct_directive(line)
        sentinel = next((sentinel for sentinel in SENTINELS if meant.startswith(sentinel)), None)
        if sentinel is not None and number not in document_lines:
            scheduler = SENTINELS[sentinel]
            is_late = has_command and scheduler in (Scheduler.SLURM, Scheduler.PBS)
            options = read_options(scheduler, meant[len(sentinel):])
            directives.append((scheduler, Directive(number, line.rstrip(), options, is_late)))
        elif line.strip() and not line.lstrip().startswith("#"):
            has_command = True
    if not directives:
        return Scheduler.NONE, ()
    first = next((scheduler for scheduler, directive in directives if not directive.is_late), directives[0][0])
    return first, tuple(directive for scheduler, directive in directives if scheduler is first)


def find_directives_end(lines: Sequence[str]) -> int:
    """Return the position behind the last directive that the batch system reads, of the job's first component."""
    end = int(lines[0].startswith("#!"))
    for position, line in enumerate(lines):
        if COMPONENT.match(line) or (line.strip() and line[0] != "#"):
            break
        if line.startswith(tuple(SENTINELS)):
            end = position + 1
    return end


def correct_directive(line: str) -> str:
    """Return a directive as it is meant: with its right beginning, and with the dashes, quotes and spaces of a shell.

    A command in a comment, `#sbatch --array=1-4 job.sh`, is none.
    """
    meant = WRONG_BEGINNING.sub("#SBATCH ", line)
    if meant != line:
        words = split_words(meant.removeprefix("#SBATCH"))
        if not words or slurm_options(words)[1] < len(words):
            return line
    if not meant.startswith(tuple(SENTINELS)):
        return meant
    return TYPOGRAPHIC.sub(lambda match: match[0] if match["plain"] else match["other"].translate(
        PLAIN_CHARACTERS) if match["other"] else "-" if match["short"] else "--", meant)


def split_words(text: str) -> list[str]:
    """Return the words of a directive, without a comment."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def read_options(scheduler: Scheduler, text: str) -> dict[str, str]:
    """Return the options in a directive's text by their long names."""
    words = split_words(text)
    if scheduler is Scheduler.SLURM:
        return {find_meant_option(name) or name: value for name, value in slurm_options(words)[0]}
    if scheduler is Scheduler.FLUX:
        return dict(flux_options(words)[0])
    names, flags = (PBS_NAMES, frozenset("V")) if scheduler is Scheduler.PBS else (LSF_NAMES, LSF_FLAGS)
    return dict(single_dash_options(words, names, flags))


def find_meant_option(name: str) -> str | None:
    """Return the option of sbatch for which a name is a misspelling, None if it is one, or begins one, or is like none.

    An option of a site's plugin is mostly like none.
    """
    if any(option.startswith(name) for option in SLURM_OPTIONS):
        return None
    return next(iter(difflib.get_close_matches(name, SLURM_OPTIONS, 1, MISSPELLING_RATIO)), None)


def slurm_options(words: Sequence[str]) -> tuple[list[tuple[str, str]], int]:
    """Return the options of sbatch or srun, and the position of the first other word.

    The cores and GPUs of --tres-per-task stand behind it as options of their own.
    """
    options, position = getopt(words, SLURM_NAMES, SLURM_FLAGS, SLURM_ALIASES)
    own = {"cpu": "cpus-per-task", "gres/gpu": "gpus-per-task", "gres:gpu": "gpus-per-task"}
    resources = [(own[name], value) for option, text in options if option == "tres-per-task"
                 for name, value in re.findall(r"(cpu|gres[/:]gpu)[:=]([^,]+)", text)]
    return [*options, *resources], position


def flux_options(words: Sequence[str]) -> tuple[list[tuple[str, str]], int]:
    """Return the options of `flux batch` or `flux run`, and the position of the first other word."""
    return getopt(words, FLUX_NAMES, FLUX_FLAGS, FLUX_ALIASES)


def getopt(
    words: Sequence[str], names: Mapping[str, str], flags: frozenset[str], aliases: Mapping[str, str]
) -> tuple[list[tuple[str, str]], int]:
    """Return options as GNU's getopt reads them, by their long names, and the position of the first other word."""
    options: list[tuple[str, str]] = []
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "-":
        word = words[position]
        position += 1
        if word == "--":
            break
        name, has_value, value = word[2:].partition("=")
        if word.startswith("--"):
            name = aliases.get(name, name)
        else:
            short, value = word[1], word[2:]
            name = names.get(short, short)
            has_value = value
            value = value.removeprefix("=")
            while has_value and name in flags and value[:1] in names:  # -lu: two flags
                options.append((name, ""))
                name, value = names[value[0]], value[1:]
                has_value = value
        if not has_value and name not in flags and position < len(words) and is_value(words[position]):
            value = words[position]
            position += 1
        options.append((name, value))
    return options, position


def is_value(word: str) -> bool:
    """Return whether a word may be the value of the option before it."""
    return not word.startswith("--") and not re.match(r"-[A-Za-z]", word)


def single_dash_options(
    words: Sequence[str], names: Mapping[str, str], flags: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Yield the options of qsub or bsub; those of `-l` and of `-R span[…]` by their own names."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            continue
        name = word.lstrip("-")
        value = "" if name in flags or not rest or (rest[0].startswith("-") and len(rest[0]) > 1) else rest.pop(0)
        long_name = names.get(name, name)
        if long_name != "resources":
            yield long_name, value
            continue
        for part in re.split(r",(?=[\w.]+=|wd\b)", value) if names is PBS_NAMES else [value]:
            key, _, own = part.partition("=")
            if names is PBS_NAMES:
                yield key, own
            elif match := re.search(r"span\[\s*ptile\s*=\s*(\d+)", part):
                yield "ntasks-per-node", match[1]
            else:
                yield "resources", part


def read_request(scheduler: Scheduler, options: Mapping[str, str]) -> Request:
    """Return the resources that options ask for."""
    if scheduler is Scheduler.SLURM:
        return read_slurm_request(options)
    if scheduler is Scheduler.PBS:
        return read_pbs_request(options)
    if scheduler is Scheduler.LSF:
        gpus = re.search(r"\bnum=([0-9]+)(/task)?", options.get("gpu", ""))
        number_of = read_number(gpus[1]) if gpus else None
        is_of_task = gpus is not None and gpus[2] is not None
        return complete(Request(
            nodes=number(options, "nodes"), tasks=number(options, "ntasks"),
            tasks_per_node=number(options, "ntasks-per-node"), gpus_per_node=None if is_of_task else number_of,
            gpus_per_task=number_of if is_of_task else None,
            walltime_s=parse_lsf_time(options.get("walltime", ""))))
    if scheduler is Scheduler.FLUX:
        return complete(Request(
            nodes=number(options, "nodes"), tasks=number(options, "ntasks"),
            tasks_per_node=number(options, "ntasks-per-node"), cpus_per_task=number(options, "cores-per-task"),
            gpus_per_node=number(options, "gpus-per-node"), gpus_per_task=number(options, "gpus-per-task"),
            walltime_s=parse_flux_time(options.get("time-limit", ""))))
    return Request()


def read_slurm_request(options: Mapping[str, str]) -> Request:
    """Return the resources that options of sbatch or srun ask for; without a number of tasks, a node has one."""
    unreadable = frozenset(name for name in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
                           if name in options and number(options, name) is None)
    nodes, tasks = number(options, "nodes"), number(options, "ntasks")
    per_node = number(options, "ntasks-per-node")
    gpus_per_node = parse_gpus(options.get("gpus-per-node"))
    if gpus_per_node is None:
        gres = [part.partition(":")[2] for part in options.get("gres", "").split(",") if re.match(r"gpu(:|$)", part)]
        gpus_per_node = parse_gpus(gres[0] or "1") if gres else None
    if "nodes" not in options and tasks is None and "ntasks" not in options:
        nodes = 1
    has_tasks = any(name in options for name in ("ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket"))
    if not has_tasks and "nodes" not in unreadable:
        per_node = 1
    if tasks is not None and nodes and per_node is not None and tasks < nodes * per_node:
        per_node = tasks // nodes if tasks % nodes == 0 else None  # --ntasks wins, and --ntasks-per-node is a limit
    gpus = parse_gpus(options.get("gpus"))
    if gpus is not None and gpus_per_node is None and nodes and gpus % nodes == 0:
        gpus_per_node = gpus // nodes
    per_gpu = number(options, "ntasks-per-gpu")
    if per_node is None and per_gpu is not None and gpus_per_node is not None:
        per_node = per_gpu * gpus_per_node
    return complete(Request(
        nodes, tasks, per_node, number(options, "cpus-per-task"), gpus_per_node,
        parse_gpus(options.get("gpus-per-task")), parse_slurm_time(options.get("time", "")), unreadable))


def read_pbs_request(options: Mapping[str, str]) -> Request:
    """Return the resources that options of qsub ask for, by select= or by nodes=."""
    text = options.get("select", "")
    walltime = parse_clock(options.get("walltime", ""))
    if text and "+" not in text:
        count, *parts = text.split(":")
        chunk = dict(part.split("=", 1) for part in parts if "=" in part)
        nodes = read_number(count)
        per_node, cpus = number(chunk, "mpiprocs"), number(chunk, "ncpus")
        return complete(Request(nodes, None, per_node, cpus // per_node if cpus and per_node else None,
                                number(chunk, "ngpus"), None, walltime))
    if (match := re.match(r"(\d+)\b", options.get("nodes", ""))) and "+" not in options["nodes"]:
        chunk = dict(part.split("=", 1) for part in options["nodes"].split(":") if "=" in part)
        nodes = read_number(match[1])
        return complete(Request(nodes, None, number(chunk, "ppn"), None, number(chunk, "gpus"), None, walltime))
    return Request(walltime_s=walltime)


def complete(request: Request) -> Request:
    """Return a request with the numbers that follow from the others."""
    nodes, tasks, per_node = request.nodes, request.tasks, request.tasks_per_node
    if tasks is None and nodes is not None and per_node is not None:
        tasks = nodes * per_node
    if per_node is None and nodes and tasks is not None and tasks % nodes == 0:
        per_node = tasks // nodes
    if nodes is None and per_node and tasks is not None and tasks % per_node == 0:
        nodes = tasks // per_node
    gpus = request.gpus_per_node
    if gpus is None and request.gpus_per_task is not None and per_node is not None:
        gpus = request.gpus_per_task * per_node
    return Request(nodes, tasks, per_node, request.cpus_per_task, gpus, request.gpus_per_task, request.walltime_s,
                   request.unreadable)


def number(options: Mapping[str, str], name: str) -> int | None:
    """Return an option's value as a number, None if it is not given or is none."""
    return read_number(options.get(name, ""))


def read_number(text: str) -> int | None:
    """Return the number that a text is, None if it is none or has more than seven digits."""
    return int(text) if re.fullmatch(r"[0-9]{1,7}", text) else None


def parse_gpus(text: str | None) -> int | None:
    """Return a number of GPUs: 4, a100:4, or a100, which is one."""
    if text is None:
        return None
    last = re.sub(r"\(.*\)$", "", text).rpartition(":")[2]
    if (given := read_number(last)) is not None:
        return given
    return 1 if re.fullmatch(r"[a-zA-Z][\w.-]*", text) else None


def parse_slurm_time(text: str) -> int | None:
    """Return the seconds of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S (man sbatch)."""
    match = re.fullmatch(r"(?:(D)-)?(D)(?::(D))?(?::(D))?".replace("D", "[0-9]{1,7}"), text.strip())
    if match is None:
        return None
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1]:
        return days * 86400 + first * 3600 + second * 60 + third
    return first * 3600 + second * 60 + third if match[4] else first * 60 + second


def parse_clock(text: str) -> int | None:
    """Return the seconds of H:M:S, M:S or S."""
    if not re.fullmatch(r"[0-9]{1,7}(:[0-9]{1,7}){0,2}", text.strip()):
        return None
    seconds = 0
    for part in text.strip().split(":"):
        seconds = seconds * 60 + int(part)
    return seconds


def parse_lsf_time(text: str) -> int | None:
    """Return the seconds of H:M or M (man bsub)."""
    minutes = text.partition("/")[0]
    seconds = parse_clock(minutes) if minutes.count(":") < 2 else None
    return None if seconds is None else seconds * 60


def parse_flux_time(text: str) -> int | None:
    """Return the seconds of 90s, 60m, 2h or 1d; a number alone is minutes."""
    match = re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]+)?)([smhd]?)", text.strip())
    return int(float(match[1]) * UNITS_S[match[2] or "m"]) if match else None
