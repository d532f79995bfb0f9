"""`--check`: each rank measures itself before the script; an outlier is a warning, or the job does not start.

Links between ranks take longer, and are left to `python -m mpiddp.check`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..base import timeline
from ..base.config import LaunchConfig
from ..base.errors import LaunchError
from ..base.ranks import RankPosition
from ..base.stderr import warn
from ..base.text import MAX_LISTED, fold_hosts
from ..bootstrap.rollcall import Rendezvous
from ..discovery.devices import use_device
from ..discovery.schedulers import find_scheduler
from . import PASS_PAUSE_S, PASSES, RANK_BUDGET_S
from .bench.machine import describe_rank, machine_id
from .bench.rank import RankResult, measure_rank
from .history import History
from .stats.findings import find_all
from .stats.schema import RANK_METRICS, Finding, Measurements, RankInfo, no_measurements
from .stats.tournament import split_into_turns

LOOKING, MEASURING = "looking at its machine", "measuring its node"


class Turn(NamedTuple):
    """In which of a pass's turns a rank measures."""

    number: int
    total: int


class NextStep(NamedTuple):
    """Rank 0's answer after a turn: whether the check goes on, or how it ends."""

    goes_on: bool
    warnings: Sequence[str] = ()


def check_nodes(roll: Rendezvous, place: RankPosition, device: str, config: LaunchConfig) -> None:
    """Measure this rank's part of its node, and print rank 0's findings as warnings. Collective.

    Raises LaunchError `bad-node` or `slow-node` on every rank, if `config` is strict; at the start's deadline
    LocalLaunchError, with the ranks that still measure.
    """
    timeline.begin_stage(LOOKING)
    torch_device, judge = use_device(device), Judge(config)
    turn = roll.exchange(LOOKING, (describe_rank(place, torch_device), machine_id()), judge.assign_turns)
    step, result = NextStep(goes_on=True), RankResult({}, [])
    for pass_number in range(PASSES):
        if step.goes_on:
            time.sleep(PASS_PAUSE_S if pass_number else 0.0)
            for number in range(turn.total):
                timeline.begin_stage(MEASURING)
                measures = number == turn.number and result.computes  # each try of a broken device may take a minute
                if measures:
                    result = measure_rank(torch_device, place.local_rank == 0, RANK_BUDGET_S)
                step = roll.exchange(MEASURING, result if measures else None, judge.add_results)
    warn(step.warnings)


class Judge:
    """Rank 0's part: assigns turns, collects results, and decides after each pass.

    A pass without findings is the last one: an outlier is one in every pass.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._history: History | None = None
        self._measured = no_measurements(())
        self._turns: list[list[int]] = []
        self._turns_done = 0

    def assign_turns(self, facts: Sequence[tuple[RankInfo, str]]) -> list[Turn]:
        """Return each rank's turn: nodes that are containers of one machine would disturb each other."""
        self._history = History(self._config.check_history) if self._config.check_history else None
        self._measured = no_measurements(tuple(info for info, _ in facts))
        self._turns = split_into_turns([info.node for info, _ in facts], [machine for _, machine in facts])
        number_of = {rank: number for number, ranks in enumerate(self._turns) for rank in ranks}
        return [Turn(number_of[rank], len(self._turns)) for rank in range(len(facts))]

    def add_results(self, results: Sequence[RankResult | None]) -> list[NextStep]:
        """Return each rank's next step after a turn; raise LaunchError if the check is strict and has findings."""
        for rank, result in enumerate(results):
            if result:
                self._measured.add(rank, result.values, result.reports)
        self._turns_done += 1
        passes, turns = divmod(self._turns_done, len(self._turns))
        goes_on = bool(turns) or (passes < PASSES and bool(self._findings(repeat_last_pass(self._measured))))
        return [NextStep(goes_on, () if goes_on else self._finish())] + [NextStep(goes_on)] * (len(results) - 1)

    def _findings(self, measured: Measurements) -> list[Finding]:
        return [*find_all(measured), *(self._history.compare(measured) if self._history else ())]

    def _finish(self) -> list[str]:
        findings = self._findings(self._measured)
        history_warnings = self._history.append(self._measured) if self._history else []
        if self._config.check == "strict" and (error := refusal(findings)):
            warn(history_warnings)
            raise error
        return [*history_warnings, *warnings(findings)]


def repeat_last_pass(measured: Measurements) -> Measurements:
    """Return the measurements if all passes to come were like the last one."""
    return measured._replace(by_rank={
        name: {rank: [*passes, *passes[-1:] * (PASSES - len(passes))] for rank, passes in by_rank.items()}
        for name, by_rank in measured.by_rank.items()})


def warnings(findings: Sequence[Finding]) -> list[str]:
    """Return the warnings `bad-node` and `slow-node`, a handful of each."""
    faults, slow = split_findings(findings)
    return [f"bad-node: {text}" for text in first_texts(faults)] + [f"slow-node: {text}" for text in first_texts(slow)]


def refusal(findings: Sequence[Finding]) -> LaunchError | None:
    """Return why a job does not start on its nodes, LaunchError `bad-node` or `slow-node`; None without findings."""
    faults, slow = split_findings(findings)
    hosts = dict.fromkeys(host for finding in findings for host in finding.hosts)
    scheduler = find_scheduler(os.environ)
    option = (scheduler and scheduler.exclude) or "mpiddp.supervise --exclude={}"
    exclusion = f"leave it out with {option.format(fold_hosts(hosts))}, or start" if hosts else "start"
    advice = f"{exclusion} with --check alone, which warns"
    if faults:
        return LaunchError(
            "bad-node",
            actual="\n".join(first_texts([*faults, *slow])),
            needed="nodes with room in /dev/shm and /tmp, and devices without errors",
            do=advice,
        )
    if slow:
        return LaunchError(
            "slow-node",
            actual="\n".join(first_texts(slow)),
            needed="nodes that are as fast as the others of their kind: all wait for the slowest in each step",
            do=advice,
        )
    return None


def split_findings(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return the findings about faults and missing room, and those about speed."""
    def is_slow(finding: Finding) -> bool:
        return finding.metric in RANK_METRICS and RANK_METRICS[finding.metric].unit != "B"

    return [finding for finding in findings if not is_slow(finding)], [*filter(is_slow, findings)]


def first_texts(findings: Sequence[Finding]) -> list[str]:
    """Return the texts of a handful of findings, and the number of the others."""
    texts = list(dict.fromkeys(finding.text for finding in findings))
    return texts if len(texts) <= MAX_LISTED else [*texts[:MAX_LISTED], f"{len(texts) - MAX_LISTED:,} more like these"]
