"""What keeps a job from starting, or is worth a warning, found in the facts of all its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..base.config import LaunchConfig
from ..base.errors import LaunchError
from ..base.text import duration, folded, listed, minority
from ..discovery.host import HostFacts
from .advice import choose_advice

SMALL_SHM_BYTES = 2**30
FEW_OPEN_FILES = 1024
CODE_TARGET = "-c"  # the target of a script that was given on the command line


def check_script(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `script-missing`, `script-differs` or `script-error` where the job can't run one script."""
    missing = [one for one in facts if one.script and one.script.missing]
    if missing:
        raise LaunchError(
            "script-missing",
            found=f"{get_script_error(missing[0])} ({describe_hosts(missing, facts)})",
            needed="a script, a folder or zip file with a __main__.py, or -m with a module, that every node can see",
            do="check the name and the working directory, and keep scripts on a file system that all nodes share",
        )
    targets = dict.fromkeys(one.script.target for one in facts if one.script)  # mpirun -n 1 a.py : -n 3 b.py
    for target in targets.keys() - {CODE_TARGET}:
        same = [one for one in facts if one.script and one.script.target == target]
        common, others = minority([one.script.digest for one in same if one.script])
        if others:
            raise LaunchError(
                "script-differs",
                found=f"{target} has the hash {common} on most nodes, but {describe_minority(others, list_hostnames(same))}",
                needed="the same script on every node",
                do="keep scripts on a file system that all nodes share, or copy them to all nodes again",
            )
    broken = [one for one in facts if get_script_error(one)]
    if broken:
        raise LaunchError(
            "script-error",
            found=get_script_error(broken[0]),
            needed=f"a script that this Python can compile ({describe_hosts(broken, facts)} cannot)",
            do="mend the line; `python -m py_compile FILE` shows the same. Bytecode runs with the Python that made it",
        )


def warn_local_rank_option(facts: Sequence[HostFacts], option: str, arguments: Sequence[str]) -> list[str]:
    """Return the warning `local-rank-option` where a script has an option for its local rank that nobody gives it.

    `option` is the one that mpiddp gives, `arguments` are the script's own.
    """
    wanted = next((one.script.local_rank_option for one in facts if one.script and one.script.local_rank_option), "")
    if not wanted or option or len(facts) == 1 or any(one.startswith(wanted) for one in arguments):
        return []
    cure = "--pass-local-rank" + (f"={wanted}" if wanted != "--local-rank" else "")
    return [f"local-rank-option: the script has an option {wanted}, which no rank is given; {cure} gives each its own"]


def check_options(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `options-differ` where ranks were given different options that all have to have alike."""
    first = facts[0].options
    for rank, one in enumerate(facts):
        if one.options != first:
            name = next(name for name in (*first, *one.options) if first.get(name) != one.options.get(name))
            has, lacks = (facts[0].options.get(name), one.options.get(name))
            raise LaunchError(
                "options-differ",
                found=f"{name} is {has or 'not set'} on rank 0, but {lacks or 'not set'} on rank {rank} "
                f"on {one.hostname}",
                needed="the same options for all ranks, in each part of the command line and in MPIDDP_ variables",
                do="give all parts of a command line with colons the same options before their scripts, or export the\n"
                f"variables to all nodes{choose_advice(one).words('export')}",
            )


def check_time_left(first: HostFacts, config: LaunchConfig) -> None:
    """Raise LaunchError `stop-too-early` where --stop-before stops the job now, by what the first rank knows."""
    if first.stop_in_s is None or first.stop_in_s > 0 or config.stop_before_s is None:
        return
    left, before = max(0.0, config.stop_before_s + first.stop_in_s), config.stop_before_s
    raise LaunchError(
        "stop-too-early",
        found=f"{duration(left)} are left until the walltime, and --stop-before {before:g} stops the job "
        f"{duration(before)} before it",
        needed="time to train between the start and the stop: a job that stops at once gets no further,\n"
        "however often it is queued again",
        do="ask the batch system for a longer walltime, or give --stop-before fewer seconds",
    )


def check_software(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `version-skew` where nodes run different software."""
    for name in facts[0].versions:
        check_version(name, [one.versions[name] for one in facts], list_hostnames(facts))


def check_version(name: str, versions: Sequence[str], hosts: Sequence[str]) -> None:
    """Raise LaunchError `version-skew` where ranks have different versions of a piece of software."""
    common, others = minority(versions)
    if others:
        raise LaunchError(
            "version-skew",
            found=f"{name} is {common or 'missing'} on most nodes, but {describe_minority(others, hosts)}",
            needed=f"the same {name} on every node",
            do="use one environment on a shared file system, or bring all nodes' copies to the same state",
        )


def check_idle_gpus(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `idle-gpus` where the only rank of a node was given several GPUs, of which it would use one."""
    ranks = Counter(one.node for one in facts)
    idle = [one for one in facts if not one.alone and ranks[one.node] == 1 < count_given_gpus(one)]
    if idle:
        given = count_given_gpus(idle[0])
        raise LaunchError(
            "idle-gpus",
            found=f"1 rank, but {given} GPUs on {fold_hosts(idle)}",
            needed="one rank for each GPU",
            do=f"start {given} ranks a node{choose_advice(idle[0]).words('ranks_per_node', given)}, or ask for one GPU\n"
            "(--allow-idle-gpus for a script that uses several itself)",
        )


def count_given_gpus(one: HostFacts) -> int:
    """Return how many GPUs Slurm has given the only rank of a node."""
    return max(one.given_gpus, one.task_gpus)


def check_gpu_count(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `too-few-gpus` where Slurm has given the job fewer GPUs on a node than it has ranks there."""
    ranks = Counter(one.node for one in facts)
    short = [one for one in facts if 0 < one.given_gpus < ranks[one.node] and len(one.gpus) < ranks[one.node]]
    if short:
        given, wanted, advice = short[0].given_gpus, ranks[short[0].node], choose_advice(short[0])
        raise LaunchError(
            "too-few-gpus",
            found=f"{wanted} ranks, but {given} GPU{'s' * (given != 1)} on {fold_hosts(short)}, as Slurm says",
            needed="one GPU for each rank of a node",
            do=f"start {given} rank{'s' * (given != 1)} a node{advice.words('ranks_per_node', given)}, "
            f"or ask for more GPUs{advice.words('gpus', wanted)};\n"
            "--share-gpus lets ranks share one, --device=cpu takes none",
        )


def check_hidden_gpus(facts: Sequence[HostFacts]) -> None:
    """Raise LaunchError `hidden-gpus` where two variables together hide all GPUs from a rank."""
    hidden = [rank_facts for rank_facts in facts if rank_facts.hidden]
    if hidden:
        raise LaunchError(
            "hidden-gpus",
            found=f"{hidden[0].hidden} (on {fold_hosts(hidden)})",
            needed="one of the two lists alone, or a second one that counts from 0 among what the first one leaves",
            do="unset HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES before mpiddp, in each task if Slurm sets them\n"
            "(Flags=amd_gpu_env in gres.conf makes Slurm set only ROCR_VISIBLE_DEVICES); --device=cpu takes no GPU",
        )


def check_logs(errors: Sequence[str], lacking: Sequence[bool], hosts: Sequence[str]) -> None:
    """Raise LaunchError `log-unwritable` or `no-zstd` where a rank cannot write its log, or compress it.

    `errors` say why, by rank, and `lacking` tells who has no zstd and needs it.
    """
    if without := [rank for rank, lacks in enumerate(lacking) if lacks]:
        raise LaunchError(
            "no-zstd",
            found=f"Python has no zstd (on {folded(hosts[rank] for rank in without)})",
            needed="Python 3.14, or the package zstandard, for --log-compress=zstd",
            do="pip install zstandard, or take --log-compress=gzip",
        )
    broken = [rank for rank, error in enumerate(errors) if error]
    if broken:
        raise LaunchError(
            "log-unwritable",
            found=f"{errors[broken[0]]} (on {folded(hosts[rank] for rank in broken)})",
            needed="a --log-dir in which every node can make files",
            do="name a folder on a file system that all nodes share, or one that is there on each",
        )


def warn_unknown_options(config: LaunchConfig, ranks: int) -> list[str]:
    """Return the warnings `unknown-variable` and `no-rank` for what the user has asked and nobody has."""
    found = []
    if config.unknown_variables:
        found.append(f"unknown-variable: no option has the variable {listed(config.unknown_variables)}")
    if beyond := sorted(rank for rank in config.shown.ranks if rank >= ranks):
        found.append(f"no-rank: --show names rank {listed(list(map(str, beyond)))}, "
                     f"but the job has ranks 0 to {ranks - 1}")
    return found


def warn_hosts(facts: Sequence[HostFacts]) -> list[str]:
    """Return what does not stop the job but is worth a line each."""
    found = []
    small = [one for one in facts if one.shm_bytes < SMALL_SHM_BYTES]
    if small:
        least = min(one.shm_bytes for one in small) // 2**20
        found.append(f"shm-small: /dev/shm has {least} MiB on {fold_hosts(small)}; DataLoader workers and MPI need more "
                     "(in a container: --shm-size, or bind the host's)")
    few = [one for one in facts if one.open_files < FEW_OPEN_FILES]
    if few:
        found.append(f"low-nofile: {min(one.open_files for one in few)} open files allowed on {fold_hosts(few)}; "
                     "raise it with ulimit -n")
    common, others = minority([one.prefix for one in facts])
    if others:
        found.append(f"python-differs: Python's environment is {common} on most nodes, but "
                     f"{describe_minority(others, list_hostnames(facts))}; the versions are the same")
    nodes_of: dict[str, set[int]] = {}
    for one in facts:
        nodes_of.setdefault(one.hostname, set()).add(one.node)
    shared = [(host, len(nodes)) for host, nodes in nodes_of.items() if len(nodes) > 1]
    if shared:
        found.append("same-hostname: " + listed([f"{count} nodes call themselves {host}" for host, count in shared]))
    return found


def warn_stale_variables(ranks: Iterable[tuple[int, dict[str, str], dict[str, str]]]) -> list[str]:
    """Return the warning `stale-environment` where variables were set to something else before.

    `ranks` are those that had any set, each with its former and its new variables.
    """
    found: dict[str, str] = {}
    for rank, old, exports in ranks:
        for name, value in old.items():
            if value != exports[name]:
                found.setdefault(name, f"{name}={value} on rank {rank}")
    return [f"stale-environment: already set, and set anew from MPI: {', '.join(found.values())}"] if found else []


def describe_minority(others: dict[str, list[int]], hosts: Sequence[str]) -> str:
    """Return in words which hosts have which of the rarer values."""
    return listed([f"{value or 'missing'} on {folded(hosts[rank] for rank in ranks)}"
                   for value, ranks in others.items()])


def get_script_error(one: HostFacts) -> str:
    """Return why a rank cannot run the script, empty where it can."""
    return (one.script.error if one.script else None) or ""


def describe_hosts(some: Sequence[HostFacts], facts: Sequence[HostFacts]) -> str:
    """Return the hosts of some ranks in words."""
    if len(some) == len(facts):
        return "every rank" if len(facts) > 1 else "the one rank"
    return f"on {fold_hosts(some)}"


def fold_hosts(facts: Iterable[HostFacts]) -> str:
    """Return the hosts of some ranks, folded."""
    return folded(one.hostname for one in facts)


def list_hostnames(facts: Iterable[HostFacts]) -> list[str]:
    """Return each rank's hostname."""
    return [one.hostname for one in facts]
