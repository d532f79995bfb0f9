"""How schedulers read the options in a job script: their directives, their walltime, and what they set in the job.

Sources: sbatch(1) of Slurm 25.05, qsub(1B) of PBS and Torque, bsub(1), flux-batch(1) and its RFC 14.

Options have the same names for all schedulers here, those of Slurm: nodes, ntasks, ntasks-per-node, cpus-per-task,
gpus-per-node, gpus-per-task, walltime, output, error, chdir, array, job-name; what else there is keeps its own name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class TimeForm(NamedTuple):
    """How a scheduler reads a walltime.

    `pattern` matches what it accepts, `description` says so in words. `parse` returns the seconds of such a text, None
    for no limit. `hours` writes a number of hours. `few` says how it reads a number alone, or two numbers, where hours
    may be meant, and `mistaken` matches such a time, with the hours in a group.
    """

    pattern: str
    description: str
    parse: Callable[[str], int | None]
    hours: str
    few: str = ""
    mistaken: str = r"(?!)"

    def read(self, text: str) -> int | None:
        """Return the seconds of a walltime, None for no limit or what is refused."""
        return self.parse(text) if re.fullmatch(self.pattern, text, re.IGNORECASE) else None


class Directives(NamedTuple):
    """How a scheduler reads a job script.

    A line of options begins with one of `sentinels`. `names` are the options' names (above) by the names that the
    scheduler has for them, with one letter or more; `flags` are those that take no value, `options` all of them (empty:
    not known). `split` reads the words of a line if they are not options as GNU's getopt has them: it yields names and
    values. `spellings` write an option that is not --NAME=VALUE with its first long name in `names`. `ignores_late`:
    lines behind the first command are not read. `needs_shell`: a script without #! in its first line is refused.
    `output_name` names an output file after the job and its number; variables are not expanded there. `has_one_task`:
    without a number of tasks, a job has one on each node, and without a number of nodes, one node. `one_core` says what
    a job gets without a number of cores, empty if it may have more; `slots_are_cores`: its number of tasks is that of
    cores. `refuses_comments`: a comment behind options is an error. `starts_at_home`: a job starts in the home folder.
    `variables` are those that are set in a script, by the option that has the value. `folder` holds the folder of the
    submission, `array_numbers` the number of a job in an array. `task_numbers` number the tasks and nodes: in the job
    script itself they are 0.
    """

    sentinels: tuple[str, ...]
    time: TimeForm
    names: Mapping[str, str] = {}
    flags: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()
    split: Callable[[Sequence[str]], Iterator[tuple[str, str]]] | None = None
    spellings: Mapping[str, str] = {}
    ignores_late: bool = False
    needs_shell: bool = False
    output_name: str = ""
    has_one_task: bool = False
    one_core: str = ""
    slots_are_cores: bool = False
    refuses_comments: bool = False
    starts_at_home: bool = False
    variables: Mapping[str, str] = {}
    folder: str = ""
    array_numbers: tuple[str, ...] = ()
    task_numbers: tuple[str, ...] = ()

    def spell(self, name: str, value: str = "") -> str:
        """Return an option as it is written: by the scheduler's own long name for it."""
        own = [own for own, meant in self.names.items() if meant == name and len(own) > 1]
        long_name = name if name in self.options or not own else own[0]
        return self.spellings.get(name, f"--{long_name}={{}}" if value else f"--{long_name}").format(value)


def parse_fields(text: str, units_s: Sequence[int]) -> int | None:
    """Return the seconds of numbers between colons, whose last one is in the last unit; None for another text."""
    fields = text.strip().split(":")
    if len(fields) > len(units_s) or not all(re.fullmatch(r"[0-9]{1,7}", part) for part in fields):
        return None
    return sum(int(part) * unit_s for part, unit_s in zip(reversed(fields), reversed(units_s), strict=False))


def parse_slurm_time(text: str) -> int | None:
    """Return the seconds of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S (man sbatch)."""
    days, dash, rest = text.strip().rpartition("-")
    if not dash:
        return parse_fields(f"{rest}:00" if ":" not in rest else rest, (3600, 60, 1))
    hours = parse_fields(rest + ":00" * (2 - rest.count(":")), (3600, 60, 1))
    return int(days) * 86400 + hours if re.fullmatch(r"[0-9]{1,7}", days) and hours is not None else None


def parse_pbs_time(text: str) -> int | None:
    """Return the seconds of S, M:S or H:M:S (man pbs_resources)."""
    return parse_fields(text, (3600, 60, 1))


def parse_lsf_time(text: str) -> int | None:
    """Return the seconds of M or H:M, before the name of a host (man bsub)."""
    return parse_fields(text.partition("/")[0], (3600, 60))


def parse_flux_time(text: str) -> int | None:
    """Return the seconds of 90s, 60m, 2h or 1d; a number alone is minutes."""
    match = re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]+)?)([smhd]?)", text.strip())
    return int(float(match[1]) * UNITS_S[match[2] or "m"]) if match else None


def split_single_dashes(
    words: Sequence[str], names: Mapping[str, str], flags: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Yield options of several letters behind a single dash, with the word behind each that takes a value."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            name = word.lstrip("-")
            takes = name not in flags and rest and not (rest[0].startswith("-") and len(rest[0]) > 1)
            yield names.get(name, name), rest.pop(0) if takes else ""


def split_pbs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of qsub: those of `-l` by their own names, and what select= and nodes= ask for."""
    for name, value in split_single_dashes(words, PBS_NAMES, frozenset("V")):
        if name != "resources":
            yield name, value
            continue
        for part in re.split(r",(?=[\w.]+=|wd\b)", value):
            key, _, own = part.partition("=")
            yield key if key != "nodes" else "torque-nodes", own
            if key not in ("select", "nodes") or "+" in own:
                continue
            count, *pairs = own.split(":")
            chunk = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            yield "nodes", count
            tasks, cores = chunk.get("mpiprocs", chunk.get("ppn", "")), chunk.get("ncpus", "")
            yield from [("ntasks-per-node", tasks)] if tasks else ()
            yield from [("gpus-per-node", gpus)] if (gpus := chunk.get("ngpus", chunk.get("gpus", ""))) else ()
            if tasks.isdecimal() and cores.isdecimal() and int(tasks) > 0:
                yield "cpus-per-task", str(int(cores) // int(tasks))


def split_lsf(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of bsub, with what -R span[ptile=N], -gpu num=N and -J name[1-4] ask for."""
    flags = frozenset(("x", "r", "rn", "N", "B", "I", "Is", "K", "H"))
    for name, value in split_single_dashes(words, LSF_NAMES, flags):
        yield name, value
        if name == "resources" and (match := re.search(r"span\[\s*ptile\s*=\s*(\d+)", value)):
            yield "ntasks-per-node", match[1]
        if name == "gpu" and (match := re.search(r"\bnum=([0-9]+)(/task)?", value)):
            yield "gpus-per-task" if match[2] else "gpus-per-node", match[1]
        if name == "job-name" and (match := re.search(r"\[(.*)\]", value)):
            yield "array", match[1]


# srun has the options of sbatch, and more.
SLURM_NAMES = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "E": "preserve-env", "F": "nodefile",
    "G": "gpus", "H": "hold", "I": "immediate", "J": "job-name", "K": "kill-on-bad-exit", "L": "licenses",
    "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec", "T": "threads", "W": "wait",
    "X": "disable-status", "Z": "no-allocate", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency",
    "e": "error", "i": "input", "k": "no-kill", "l": "label", "m": "distribution", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "r": "relative", "s": "oversubscribe", "t": "walltime", "u": "unbuffered",
    "v": "verbose", "w": "nodelist", "x": "exclude",
    "tasks-per-node": "ntasks-per-node", "workdir": "chdir", "share": "oversubscribe", "time": "walltime",
}
SLURM_FLAGS = frozenset((
    "contiguous", "disable-status", "exclusive", "get-user-env", "hold", "ignore-pbs", "immediate", "kill-on-bad-exit",
    "label", "no-allocate", "no-kill", "no-requeue", "overcommit", "overlap", "oversubscribe", "parsable",
    "preserve-env", "propagate", "pty", "quiet", "reboot", "requeue", "slurmd-debug", "spread-job", "test-only",
    "unbuffered", "use-min-nodes", "verbose", "container-mount-home", "no-container-mount-home",
    "no-container-entrypoint", "container-entrypoint", "container-writable", "container-remap-root", "exact", "whole"))
# Those of a site's plugins are not among them, but for pyxis.
SLURM_OPTIONS = frozenset((
    *SLURM_NAMES, *SLURM_NAMES.values(), *SLURM_FLAGS,
    "acctg-freq", "bb", "bbf", "cluster-constraint", "comment", "consolidate-segments", "container", "container-id",
    "cores-per-socket", "cpu-bind", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "export", "export-file",
    "extra", "gid", "gpu-bind", "gpu-freq", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags",
    "hint", "jobid", "kill-on-invalid-dep", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu",
    "mem-per-gpu", "mincpus", "mpi", "multi-prog", "network", "nice", "ntasks-per-core", "ntasks-per-gpu",
    "ntasks-per-node", "ntasks-per-socket", "open-mode", "power", "prefer", "priority", "profile", "reservation",
    "resv-ports", "segment", "signal", "sockets-per-node", "spread-segments", "stepmgr", "switches", "thread-spec",
    "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-job", "tres-per-task", "uid", "usage",
    "wait-all-nodes", "wckey", "wrap", "x11", "container-image", "container-mounts", "container-workdir",
    "container-name", "container-env", "container-save")) - {"walltime"}
PBS_NAMES = {"N": "job-name", "A": "account", "q": "queue", "j": "join", "o": "output", "e": "error", "J": "array",
             "t": "array", "r": "rerunnable", "V": "export-all", "v": "export", "m": "mail", "M": "mail-user",
             "W": "attributes", "S": "shell", "k": "keep", "l": "resources", "d": "chdir", "w": "chdir",
             "p": "priority"}
LSF_NAMES = {"J": "job-name", "P": "account", "q": "queue", "W": "walltime", "n": "ntasks", "o": "output",
             "e": "error", "R": "resources", "gpu": "gpu", "nnodes": "nodes", "M": "memory", "x": "exclusive",
             "oo": "output", "eo": "error", "cwd": "chdir", "alloc_flags": "alloc-flags", "r": "requeue"}
FLUX_NAMES = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "g": "gpus-per-task", "t": "walltime",
              "q": "queue", "B": "bank", "o": "setopt", "x": "exclusive", "S": "setattr", "l": "label-io",
              "u": "unbuffered", "v": "verbose", "nslots": "ntasks", "cores-per-slot": "cpus-per-task",
              "cores-per-task": "cpus-per-task", "gpus-per-slot": "gpus-per-task", "tasks-per-node": "ntasks-per-node",
              "time-limit": "walltime", "cwd": "chdir"}
FLUX_FLAGS = frozenset(("exclusive", "unbuffered", "verbose", "label-io", "dry-run", "wait", "watch"))

SLURM = Directives(
    ("#SBATCH",), TimeForm(
        r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE|-1",
        "minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]]", parse_slurm_time,
        "{}:00:00", "a number alone as minutes, and two numbers as minutes and seconds",
        r"(0?[1-9]|12|24|36|48|72|96):00|(12|24|36|48|72|96|168)"),
    SLURM_NAMES, SLURM_FLAGS, SLURM_OPTIONS, ignores_late=True,
    needs_shell=True, output_name="%x-%j", has_one_task=True,
    one_core="Slurm gives each task one core",
    variables={
        "SLURM_NNODES": "nodes", "SLURM_JOB_NUM_NODES": "nodes", "SLURM_NTASKS": "ntasks", "SLURM_NPROCS": "ntasks",
        "SLURM_GPUS_ON_NODE": "gpus-per-node", "SLURM_CPUS_PER_TASK": "cpus-per-task",
        "SLURM_NTASKS_PER_NODE": "ntasks-per-node", "SLURM_JOB_NAME": "job-name"},
    folder="SLURM_SUBMIT_DIR", array_numbers=("SLURM_ARRAY_TASK_ID",),
    task_numbers=("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"))
PBS = Directives(
    ("#PBS",), TimeForm(
        r"\d+(:\d+){0,3}(\.\d+)?", "hours:minutes:seconds", parse_pbs_time, "{}:00:00",
        "two numbers as minutes and seconds", r"(0?[1-9]|12|24|36|48|72|96):00"),
    split=split_pbs, spellings={
        "walltime": "-l walltime={}", "ntasks-per-node": "-l select=…:mpiprocs={}", "array": "-J {}", "nodes":
        "-l select={}", "output": "-o {}", "error": "-e {}", "cpus-per-task": "-l select=…:ncpus={}"},
    ignores_late=True, refuses_comments=True, starts_at_home=True, folder="PBS_O_WORKDIR",
    array_numbers=("PBS_ARRAY_INDEX", "PBS_ARRAYID"))
LSF = Directives(
    ("#BSUB",), TimeForm(
        r"\d+(:\d+)?(/\S+)?", "hours:minutes, or minutes", parse_lsf_time, "{}:00", "a number alone as minutes",
        r"(12|24|36|48|72|96|168)"),
    split=split_lsf, spellings={"walltime": "-W {}", "ntasks": "-n {}", "nodes": "-nnodes {}", "output": "-o {}",
                                "error": "-e {}", "ntasks-per-node": '-R "span[ptile={}]"'},
    slots_are_cores=True, variables={"LSB_DJOB_NUMPROC": "ntasks"}, folder="LS_SUBCWD", array_numbers=("LSB_JOBINDEX",))
FLUX = Directives(
    ("#flux:", "#FLUX:"), TimeForm(
        r"\d+(\.\d+)?(ms|[smhd])?|inf(inity)?", "minutes, or a number with s, m, h or d", parse_flux_time, "{}h",
        "a number alone as minutes", r"(12|24|36|48|72|96|168)"),
    FLUX_NAMES, FLUX_FLAGS,
    task_numbers=("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"))
