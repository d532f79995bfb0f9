"""`--check`: benchmarks of single ranks before the script; findings are warnings, or the job does not start.

Links between ranks take longer: only `python -m mpiddp.check` measures them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from ..base import timeline
from ..base.config import LaunchConfig
from ..base.errors import LaunchError
from ..base.ranks import RankPosition
from ..base.stderr import warn
from ..base.text import MAX_LISTED, fold_hosts
from ..bootstrap.rollcall import Rendezvous
from ..discovery.process import read_boot_id
from ..discovery.schedulers import find_scheduler
from . import PASS_PAUSE_S, PASSES, RANK_BUDGET_S
from .bench.machine import describe_rank
from .bench.rank import RankResult, measure_rank
from .stats.findings import find_all
from .stats.schema import RANK_METRICS, CheckFinding, Measurements, RankInfo, no_measurements
from .stats.text import limit_lines
from .stats.tournament import split_into_turns

IDENTIFYING, MEASURING = "identifying its node", "measuring its node"  # stages of the start


def check_nodes(rendezvous: Rendezvous, place: RankPosition, device: str, config: LaunchConfig) -> None:
    """Run this rank's benchmarks, and print the findings as warnings on rank 0. Collective.

    Raises LaunchError `bad-node` or `slow-node` on every rank, if `config` is strict; at the start's deadline
    LocalLaunchError, with the ranks that are still measuring.
    """
    timeline.begin_stage(IDENTIFYING)
    torch_device, judge = torch.device(device), Judge(config)
    own = describe_rank(place, torch_device), read_boot_id()
    turn, turns = rendezvous.exchange(IDENTIFYING, own, judge.assign_turns)
    result, lines = RankResult({}, []), None
    for pass_number in range(PASSES):
        if lines is None:
            time.sleep(PASS_PAUSE_S if pass_number else 0.0)
            for number in range(turns):
                timeline.begin_stage(MEASURING)
                measures = number == turn and result.computes  # a retry of a broken device may take a minute
                if measures:
                    result = measure_rank(torch_device, place.local_rank == 0, RANK_BUDGET_S)
                lines = rendezvous.exchange(MEASURING, result if measures else None, judge.add_results)
    warn(lines or ())


class Judge:
    """Rank 0's part: assigns turns, collects results, and decides after each pass.

    The check ends after a pass without findings, because an outlier is one in every pass.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._measured = no_measurements(())
        self._turns = self._turns_done = 0

    def assign_turns(self, facts: Sequence[tuple[RankInfo, str]]) -> list[tuple[int, int]]:
        """Return each rank's turn and the number of turns, from the ranks and their machines' IDs ("" is unknown).

        Nodes on the same machine, such as containers, would disturb each other.
        """
        self._measured = no_measurements(tuple(info for info, _ in facts))
        turns = split_into_turns({info.node: {machine or f"node {info.node}"} for info, machine in facts})
        self._turns = len(turns)
        turn_of = {node: turn for turn, nodes in enumerate(turns) for node in nodes}
        return [(turn_of[info.node], self._turns) for info, _ in facts]

    def add_results(self, results: Sequence[RankResult | None]) -> list[Sequence[str] | None]:
        """Add a turn's results; return each rank's warnings, which end the check, or None if it goes on.

        Raises LaunchError if the check is strict, ends, and has findings.
        """
        for rank, result in enumerate(results):
            if result:
                self._measured.add(rank, result.values, result.reports)
        self._turns_done += 1
        passes, turns = divmod(self._turns_done, self._turns)
        if turns or (passes < PASSES and find_all(_repeat_last_pass(self._measured))):
            return [None] * len(results)
        return [self._finish()] + [()] * (len(results) - 1)

    def _finish(self) -> list[str]:
        findings = find_all(self._measured)
        if self._config.check == "strict" and (error := refusal(findings)):
            raise error
        return warnings(findings)


def _repeat_last_pass(measured: Measurements) -> Measurements:
    # as if all further passes were like the last one
    return measured._replace(by_rank={
        name: {rank: [*passes, *passes[-1:] * (PASSES - len(passes))] for rank, passes in by_rank.items()}
        for name, by_rank in measured.by_rank.items()})


def warnings(findings: Sequence[CheckFinding]) -> list[str]:
    """Return the warnings `bad-node` and `slow-node`, a few of each."""
    faults, slow = _split_texts(findings)
    return [f"bad-node: {text}" for text in _limit(faults)] + [f"slow-node: {text}" for text in _limit(slow)]


def refusal(findings: Sequence[CheckFinding]) -> LaunchError | None:
    """Return the error `bad-node` or `slow-node` for these findings; None without findings."""
    faults, slow = _split_texts(findings)
    hosts = dict.fromkeys(host for finding in findings for host in finding.hosts)
    scheduler = find_scheduler(os.environ)
    option = (scheduler and scheduler.exclude) or "mpiddp.supervise --exclude={}"
    exclusion = f"exclude it with {option.format(fold_hosts(hosts))}, or start" if hosts else "start"
    advice = f"{exclusion} with --check, which only warns"
    if faults:
        return LaunchError(
            "bad-node",
            actual="\n".join(_limit([*faults, *slow])),
            needed="nodes with free space in /dev/shm and /tmp, and devices without errors",
            do=advice,
        )
    if slow:
        return LaunchError(
            "slow-node",
            actual="\n".join(_limit(slow)),
            needed="nodes as fast as their peers: in each step all ranks wait for the slowest",
            do=advice,
        )
    return None


def _split_texts(findings: Sequence[CheckFinding]) -> tuple[list[str], list[str]]:
    """Return the texts of findings about faults and missing space, and of those about speed."""
    faults: dict[str, None] = {}
    slow: dict[str, None] = {}
    for finding in findings:
        is_slow = finding.metric in RANK_METRICS and RANK_METRICS[finding.metric].unit != "B"
        (slow if is_slow else faults)[finding.text] = None
    return [*faults], [*slow]


def _limit(texts: Sequence[str]) -> list[str]:
    return limit_lines(texts, MAX_LISTED + 1, "finding")
