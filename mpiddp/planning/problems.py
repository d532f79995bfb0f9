"""Refusals and warnings from the facts of all ranks, and the launcher's options that these messages name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..base.config import LaunchConfig
from ..base.errors import LaunchError
from ..base.text import find_minority, fold_hosts, format_duration, join_names
from ..discovery.host import HostFacts
from ..systems.launchers import NO_LAUNCHER, Launcher, describe_job_start, get_launcher
from ..systems.schedulers import NO_SCHEDULER, Scheduler, get_scheduler

SMALL_SHM_BYTES = 2**30
FEW_OPEN_FILES = 1024
CODE_TARGET = "-c"  # of a script from the command line
COMMANDS = ("check", "supervise", "where")


class Advice(NamedTuple):
    """The launcher and the scheduler of a job, whose options messages name; an unknown one has no options."""

    launcher: Launcher
    scheduler: Scheduler

    def words(self, option: str, number: int | str = "N") -> str:
        """Return the option in a field of Scheduler, or else of Launcher, in brackets after a space; empty for none.

        A launcher's comes with its command.
        """
        launcher_option = getattr(self.launcher, option, "")
        text = (getattr(self.scheduler, option, "")
                or (launcher_option and f"{self.launcher.command} {launcher_option}"))
        return f" ({text.format(number)})" if text else ""


NO_ADVICE = Advice(NO_LAUNCHER, NO_SCHEDULER)


def choose_advice(host: HostFacts) -> Advice:
    """Return the options that messages to a rank may name."""
    return Advice(get_launcher(host.launcher), get_scheduler(host.scheduler))


def check_script(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `script-missing`, `script-differs` or `script-error` if the job can't run one script."""
    missing = [host for host in facts if host.script and host.script.missing]
    if missing:
        raise LaunchError(
            "script-missing",
            actual=f"{script_error(missing[0])} ({describe_hosts(missing, facts)})",
            needed="a script, a folder or zip file with a __main__.py, or a module after -m, visible on every node",
            do=advise_on_missing(missing[0].script.target if missing[0].script else ""),
        )
    targets = dict.fromkeys(host.script.target for host in facts if host.script)  # mpirun -n 1 a.py : -n 3 b.py
    for target in targets.keys() - {CODE_TARGET}:
        same = [host for host in facts if host.script and host.script.target == target]
        common, others = find_minority([host.script.digest for host in same if host.script])
        if others:
            raise LaunchError(
                "script-differs",
                actual=f"the hash of {target} is {common} on most nodes, but "
                f"{describe_minority(others, list_hostnames(same))}",
                needed="the same script on every node",
                do="keep scripts on a file system that all nodes share, or copy the script to all nodes again",
            )
    broken = [host for host in facts if script_error(host)]
    if broken:
        raise LaunchError(
            "script-error",
            actual=script_error(broken[0]),
            needed=f"a script that Python can compile ({describe_hosts(broken, facts)})",
            do="fix the line (`python -m py_compile FILE` shows the same error);\n"
            "bytecode runs only with the Python version that made it",
        )


def advise_on_missing(name: str) -> str:
    """Return what to do about a script of this name that does not exist."""
    if name.rstrip("0123456789.") == "python":
        return "omit python before the script: python -m mpiddp train.py"
    if name in COMMANDS:
        return f"the command of mpiddp has a dot: python -m mpiddp.{name}"
    return "check the name and the working directory, and keep scripts on a file system that all nodes share"


def warn_local_rank_option(facts: Sequence[HostFacts], option: str, arguments: Sequence[str]) -> list[str]:
    """Return the warning `local-rank-option` if a script has an option for its local rank that it is not given.

    `option` is the one that mpiddp gives, `arguments` are the script's own.
    """
    script = next((host.script for host in facts if host.script and host.script.local_rank_options), None)
    if script is None or option in script.local_rank_options:
        return []
    wanted = script.local_rank_options[0]
    ours = "--pass-local-rank" + (f"={wanted}" if wanted != "--local-rank" else "")
    if option:
        return [f"local-rank-option: the script has an option {wanted}, but mpiddp passes {option}; use {ours}"]
    is_set = any(argument.startswith(script.local_rank_options) for argument in arguments)
    if is_set or script.reads_local_rank or len(facts) == 1:
        return []
    return [f"local-rank-option: the script has an option {wanted}, which is not set; {ours} sets it on each rank"]


def check_options(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `options-differ` if ranks have different values of options that must be the same for all."""
    first = facts[0].options
    for rank, host in enumerate(facts):
        if host.options != first:
            name = next(name for name in (*first, *host.options) if first.get(name) != host.options.get(name))
            actual = (f"{name} is {first.get(name) or 'not set'} on rank 0, but {host.options.get(name) or 'not set'} "
                      f"on rank {rank} on {host.hostname}")
            if host.site_options != facts[0].site_options:
                raise LaunchError(
                    "options-differ",
                    actual=f"{actual}; the site profile differs: {facts[0].site_file or 'none'} on "
                    f"{facts[0].hostname}, {host.site_file or 'none'} on {host.hostname}",
                    needed="the same options on all ranks, in the site profile too",
                    do="ask the centre to install one profile on all nodes, or turn it off for this job: MPIDDP_SITE=",
                )
            raise LaunchError(
                "options-differ",
                actual=actual,
                needed="the same options on all ranks, in each part of the command line and in MPIDDP_ variables",
                do="repeat the options before the script in each part of a command line with colons, or export the\n"
                f"variables to all nodes{choose_advice(host).words('export')}",
            )


def check_time_left(first: HostFacts, config: LaunchConfig) -> None:
    """Raise LaunchError `stop-too-early` if --stop-before stops the job now, as the first rank knows."""
    if first.stop_in_s is None or first.stop_in_s > 0 or config.stop_before_s is None:
        return
    left, before = max(0.0, config.stop_before_s + first.stop_in_s), config.stop_before_s
    raise LaunchError(
        "stop-too-early",
        actual=f"--stop-before {before:g} leaves no time to train: it stops the job {format_duration(before)} before "
        f"the walltime, and only {format_duration(left)} is left",
        needed="time to train before the stop; a job that stops at once makes no progress, even if it is requeued",
        do="request a longer walltime from the batch system, or reduce --stop-before",
    )


def check_software(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `version-skew` if nodes run different software."""
    for name in facts[0].versions:
        check_version(name, [host.versions[name] for host in facts], list_hostnames(facts))


def check_version(name: str, versions: Sequence[str], hosts: Sequence[str]) -> None:
    """Raise LaunchError `version-skew` if ranks have different versions of a piece of software."""
    common, others = find_minority(versions)
    if others:
        raise LaunchError(
            "version-skew",
            actual=f"{name} is {common or 'missing'} on most nodes, but {describe_minority(others, hosts)}",
            needed=f"the same {name} on every node",
            do="use one environment on a shared file system, or install the same versions on all nodes",
        )


def check_idle_gpus(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `idle-gpus` if Slurm gave several GPUs to the only rank of a node."""
    ranks = Counter(host.node for host in facts)
    idle = [host for host in facts if not host.alone and ranks[host.node] == 1 < max(host.given_gpus, host.task_gpus)]
    if idle:
        given = max(idle[0].given_gpus, idle[0].task_gpus)
        raise LaunchError(
            "idle-gpus",
            actual=f"1 rank, but {given} GPUs on {fold_hostnames(idle)}",
            needed="one rank for each GPU",
            do=f"start {given} ranks per node{choose_advice(idle[0]).words('ranks_per_node', given)}, "
            "or ask for one GPU;\nadd --allow-idle-gpus if the script itself uses several GPUs",
        )


def check_gpu_count(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `too-few-gpus` if Slurm gave the job fewer GPUs on a node than it has ranks there."""
    ranks = Counter(host.node for host in facts)
    short = [host for host in facts if 0 < host.given_gpus < ranks[host.node] and len(host.gpus) < ranks[host.node]]
    if short:
        given, wanted, advice = short[0].given_gpus, ranks[short[0].node], choose_advice(short[0])
        raise LaunchError(
            "too-few-gpus",
            actual=f"{wanted} ranks, but {given} GPU{'s' * (given != 1)} from Slurm on {fold_hostnames(short)}",
            needed="one GPU for each rank of a node",
            do=f"start {given} rank{'s' * (given != 1)} per node{advice.words('ranks_per_node', given)}, "
            f"or ask for more GPUs{advice.words('gpus', wanted)};\n"
            "--share-gpus lets ranks share a GPU, --device=cpu uses none",
        )


def check_hidden_gpus(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `hidden-gpus` if two variables together hide all GPUs from a rank."""
    hidden = [host for host in facts if host.hidden]
    if hidden:
        raise LaunchError(
            "hidden-gpus",
            actual=f"{hidden[0].hidden} (on {fold_hostnames(hidden)})",
            needed="only one of the two lists, or a second list that counts from 0 among the GPUs of the first",
            do="unset HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES before mpiddp, in each task if Slurm sets them\n"
            "(Flags=amd_gpu_env in gres.conf makes Slurm set only ROCR_VISIBLE_DEVICES); --device=cpu uses no GPU",
        )


def check_logs(errors: Sequence[str], hosts: Sequence[str]) -> None:
    """Raise LaunchError `log-unwritable` if a rank cannot write its log; `errors` are the reasons, empty for none."""
    broken = [rank for rank, error in enumerate(errors) if error]
    if broken:
        raise LaunchError(
            "log-unwritable",
            actual=f"{errors[broken[0]]} (on {fold_hosts(hosts[rank] for rank in broken)})",
            needed="a --log-dir in which every node can create files",
            do="choose a folder on a file system that all nodes share, or one that exists on every node",
        )


def warn_unknown_options(config: LaunchConfig, ranks: int) -> list[str]:
    """Return the warnings `unknown-variable` and `no-rank` for variables and ranks that do not exist."""
    lines = []
    if config.unknown_variables:
        lines.append(f"unknown-variable: no option matches {join_names(config.unknown_variables)}")
    if beyond := sorted(rank for rank in config.output_filter.ranks if rank >= ranks):
        lines.append(f"no-rank: --show names rank {join_names(list(map(str, beyond)))}, "
                     f"but the job has ranks 0 to {ranks - 1}")
    return lines


def warn_hosts(facts: Sequence[HostFacts]) -> list[str]:
    """Return the warnings `shm-small`, `low-nofile`, `python-differs` and `same-hostname`."""
    lines = []
    small = [host for host in facts if host.shm_bytes < SMALL_SHM_BYTES]
    if small:
        least = min(host.shm_bytes for host in small) // 2**20
        lines.append(f"shm-small: /dev/shm has {least} MiB on {fold_hostnames(small)}; DataLoader workers and MPI need "
                     "more (in a container: --shm-size, or bind the host's)")
    few = [host for host in facts if host.open_files < FEW_OPEN_FILES]
    if few:
        lines.append(f"low-nofile: the limit of open files is {min(host.open_files for host in few)} on "
                     f"{fold_hostnames(few)}; raise it with ulimit -n")
    common, others = find_minority([host.prefix for host in facts])
    if others:
        lines.append(f"python-differs: Python's environment is {common} on most nodes, but "
                     f"{describe_minority(others, list_hostnames(facts))}; the versions are the same")
    nodes_of: dict[str, set[int]] = {}
    for host in facts:
        nodes_of.setdefault(host.hostname, set()).add(host.node)
    shared = [(name, len(nodes)) for name, nodes in nodes_of.items() if len(nodes) > 1]
    if shared:
        lines.append("same-hostname: " + join_names([f"{count} nodes have the hostname {name}" for name,
                                                     count in shared]))
    return lines


def warn_idle_nodes(facts: Sequence[HostFacts]) -> list[str]:
    """Return the warning `idle-nodes` if one node has all ranks, by a launcher that may not know the job's nodes."""
    first, (launcher, scheduler) = facts[0], choose_advice(facts[0])
    if first.job_nodes < 2 or not launcher.on_hosts or any(host.node != first.node for host in facts):
        return []
    ranks = "the only rank runs" if len(facts) == 1 else f"all {len(facts)} ranks run"
    line = (f"idle-nodes: the {scheduler.name} job has {first.job_nodes} nodes, but {ranks} on {first.hostname}; to "
            f"use all nodes, start with {describe_job_start(scheduler, launcher)}")
    return [line]


def warn_site(facts: Sequence[HostFacts]) -> list[str]:
    """Return the warnings of the site profile, once each, with the hosts that have them if not all do."""
    hosts: dict[str, list[HostFacts]] = {}
    for host in facts:
        for line in host.site_warnings:
            hosts.setdefault(line, []).append(host)
    return [line if len(warned) == len(facts) else f"{line} (on {fold_hostnames(warned)})"
            for line, warned in hosts.items()]


def warn_stale_variables(ranks: Iterable[tuple[int, dict[str, str], dict[str, str]]]) -> list[str]:
    """Return the warning `stale-environment` if variables had other values before.

    `ranks` are those that had any set, each with its former and its new variables.
    """
    stale: dict[str, str] = {}
    for rank, old, exports in ranks:
        for name, value in old.items():
            if value != exports[name]:
                stale.setdefault(name, f"{name}={value} on rank {rank}")
    return [f"stale-environment: replaced with MPI's values: {', '.join(stale.values())}"] if stale else []


def describe_minority(others: dict[str, list[int]], hosts: Sequence[str]) -> str:
    """Return in words which hosts have which of the rarer values."""
    return join_names([f"{value or 'missing'} on {fold_hosts(hosts[rank] for rank in ranks)}"
                       for value, ranks in others.items()])


def script_error(host: HostFacts) -> str:
    """Return why a rank cannot run the script, empty if it can."""
    return (host.script.error if host.script else None) or ""


def describe_hosts(affected: Sequence[HostFacts], facts: Sequence[HostFacts]) -> str:
    """Return the hosts of the `affected` ranks in words."""
    if len(affected) == len(facts):
        return "on every rank" if len(facts) > 1 else "on the only rank"
    return f"on {fold_hostnames(affected)}"


def fold_hostnames(facts: Iterable[HostFacts]) -> str:
    """Return the hosts of ranks, folded."""
    return fold_hosts(host.hostname for host in facts)


def list_hostnames(facts: Iterable[HostFacts]) -> list[str]:
    """Return each rank's hostname."""
    return [host.hostname for host in facts]
