"""`--check`: each rank is measured by itself before the script; what is odd is a warning, or stops the start.

Links between ranks take longer, and are left to `python -m mpiddp.check`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from .. import stages
from ..config import LaunchConfig
from ..environment import Place
from ..errors import LaunchError
from ..facts.devices import use_device
from ..facts.schedulers import find_scheduler
from ..join.rollcall import RollCall
from ..plan.words import LISTED, folded
from ..say import warn
from . import PASSES
from .controller import Controller
from .history import History
from .rpc import RpcController, worker_loop
from .stats.findings import find
from .stats.schema import RANK_METRICS, Finding, Measurements, Passes
from .workers import measuring

MEASURING = "measuring its node"


def check_nodes(roll: RollCall, place: Place, device: str, config: LaunchConfig) -> None:
    """Measure this rank's part of its node, and print on rank 0 what is odd about nodes. Collective.

    Raises LaunchError `bad-node` or `slow-node` on every rank, if `config` is strict.
    """
    stages.begin(MEASURING)
    works = measuring(place, use_device(device))
    judged: Sequence[str] | LaunchError = ()
    if roll.rank:
        worker_loop(roll.comm, works)
    else:
        ranks = RpcController(roll.comm, works, roll.name)
        judged = judge(Controller(ranks, roll.size, roll.remaining_s), config)
        ranks.dismiss()

    def answer(ranks: Sequence[object]) -> Sequence[None]:
        if isinstance(judged, LaunchError):
            raise judged
        return [None] * len(ranks)

    roll.agree(MEASURING, None, answer)
    warn(() if isinstance(judged, LaunchError) else judged)


def judge(controller: Controller, config: LaunchConfig) -> list[str] | LaunchError:
    """Return the warnings of a check, or, if it is strict, why the job does not start on these nodes.

    Nobody can be accused any more after a pass in which nothing was odd: then there is no other one.
    """
    history = History(config.check_history) if config.check_history else None

    def findings(measured: Measurements) -> list[Finding]:
        return [*find(measured), *(history.compare(measured) if history else ())]

    measured = controller.run(PASSES, links=False, goes_on=lambda seen: bool(findings(repeated(seen))))
    found = findings(measured)
    about_history = history.keep(measured) if history else []
    if config.check == "strict" and (error := refusal(found)):
        warn(about_history)
        return error
    return [*about_history, *warnings(found)]


def repeated(measured: Measurements) -> Measurements:
    """Return what this would be if all other passes were like the last one."""
    def like_last(passes: Passes) -> Passes:
        return [*passes, *passes[-1:] * (PASSES - len(passes))]

    return measured._replace(own={name: {rank: like_last(passes) for rank, passes in some.items()}
                                  for name, some in measured.own.items()})


def is_slow(finding: Finding) -> bool:
    """Tell whether a finding is of how fast something is; others are of room, and of what is bad by itself."""
    return finding.metric in RANK_METRICS and RANK_METRICS[finding.metric].unit != "B"


def warnings(findings: Sequence[Finding]) -> list[str]:
    """Return the warnings `bad-node` and `slow-node`, a handful of each."""
    bad, slow = split(findings)
    return [f"bad-node: {words}" for words in lines(bad)] + [f"slow-node: {words}" for words in lines(slow)]


def refusal(findings: Sequence[Finding]) -> LaunchError | None:
    """Return why a job does not start on its nodes, LaunchError `bad-node` or `slow-node`; None if nothing is odd."""
    bad, slow = split(findings)
    hosts = dict.fromkeys(host for one in findings for host in one.hosts)
    scheduler = find_scheduler(os.environ)
    option = (scheduler and scheduler.exclude) or "mpiddp.supervise --exclude={}"
    without = f"leave it out with {option.format(folded(hosts))}, or start" if hosts else "start"
    cure = f"{without} with --check alone, which warns"
    if bad:
        return LaunchError(
            "bad-node",
            found="\n".join(lines([*bad, *slow])),
            needed="nodes with room in /dev/shm and /tmp, and devices without errors",
            do=cure,
        )
    if slow:
        return LaunchError(
            "slow-node",
            found="\n".join(lines(slow)),
            needed="nodes that are as fast as the others of their kind: all wait for the slowest in each step",
            do=cure,
        )
    return None


def split(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return what is bad by itself, and what is slow."""
    return [one for one in findings if not is_slow(one)], [one for one in findings if is_slow(one)]


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the words of a handful of findings; the rest are counted."""
    words = list(dict.fromkeys(one.words for one in findings))
    return words if len(words) <= LISTED else [*words[:LISTED], f"{len(words) - LISTED:,} more like these"]
