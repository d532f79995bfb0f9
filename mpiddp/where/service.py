"""The coordinator's snapshot service: samples all ranks through their agents, and answers the requesters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from ..failure.root_cause import NOBODY, JobActivity, Report
from ..failure.stack import Frame, frames_from_json, frames_from_lists
from .outliers import build_snapshot, describe_locations, find_free_ranks, move_to_failure, waiting_calls
from .protocol import Progress, Sample, SampleRequest, SnapshotReply
from .snapshot import ChildProcess, CollectiveSeq, RankSample, as_json, format_table
from .stall import DeadlockDetector, StallDetector, find_wait_for_finished

NO_PROGRESS = Progress(0, 0.0, "", False)

Outgoing = list[tuple[int, SampleRequest | SnapshotReply]]  # links, and the messages to send there


class SnapshotCollector:
    """Requests a sample from each agent, and gathers the answers."""

    def __init__(self) -> None:
        self._number = 0  # of the current request
        self._signals = True  # as in the current request
        self._requesters: list[int] = []
        self._hosts: dict[int, str] = {}  # of the ranks being sampled
        self._answers: dict[int, Sample] = {}
        self.samples: list[RankSample] = []  # of the last snapshot

    def request(
        self, requester: int, links: Mapping[int, int], hosts: Mapping[int, str], signals: bool = True
    ) -> Outgoing:
        """Return the requests to send to `links`; none if such a snapshot is already being taken.

        `links` and `hosts` are by rank. A `requester` below 0 has no link: it reads `samples`. `signals` is as in
        `SampleRequest`.
        """
        is_pending = bool(self._requesters) and (self._signals or not signals)
        if requester not in self._requesters:
            self._requesters.append(requester)
        if is_pending:
            return []
        self._number += 1
        self._signals, self._answers, self._hosts = signals, {}, dict(hosts)
        return [(link, SampleRequest(self._number, signals)) for link in links.values()]

    def take(self, rank: int, answer: Sample) -> Outgoing:
        """Take a rank's answer, unless it is too late; return the snapshot if this is the last answer."""
        if answer.number == self._number:
            self._answers[rank] = answer
        return self.finish() if self._hosts.keys() <= self._answers.keys() else []

    def forget(self, requester: int) -> None:
        """Remove a requester that has disconnected."""
        self._requesters = [other for other in self._requesters if other != requester]

    def finish(self) -> Outgoing:
        """Return the snapshot of the answers received so far, for each requester."""
        requesters, self._requesters = self._requesters, []
        if not requesters:
            return []
        self.samples = self._decode_answers()
        shown = SnapshotReply(as_json(build_snapshot(self.samples)) if max(requesters) >= 0 else "")
        return [(requester, shown) for requester in requesters]

    def _decode_answers(self) -> list[RankSample]:
        stacks: dict[str, tuple[Frame, ...]] = {"": ()}  # a cache: the stacks of most ranks are alike
        sequences: dict[str, tuple[CollectiveSeq, ...]] = {}
        samples = []
        for rank in sorted(self._hosts):
            host, answer = self._hosts[rank], self._answers.get(rank)
            if answer is None:
                samples.append(RankSample(rank, host, has_answered=False))
                continue
            steps, age_s, groups, spins, waits_in = answer.progress or NO_PROGRESS
            try:
                if answer.stack not in stacks:
                    stacks[answer.stack] = frames_from_json(answer.stack)
                if groups not in sequences:
                    sequences[groups] = parse_sequences(groups)
                children = parse_children(answer.children)
            except (ValueError, TypeError, RecursionError):  # still show the other ranks
                samples.append(RankSample(rank, host, has_answered=False))
                continue
            samples.append(RankSample(
                rank, host, stacks[answer.stack], answer.state, answer.kernel, answer.cores, answer.busy_s,
                answer.moved_bytes, True, answer.ended, children, steps, age_s, sequences[groups], spins,
                answer.faults, answer.unseen, answer.native, waits_in, answer.unacked_bytes))
        return samples


def parse_sequences(text: str) -> tuple[CollectiveSeq, ...]:
    """Return the sequence numbers in a `Progress`; raise ValueError or TypeError for anything else."""
    return tuple(CollectiveSeq(int(number), str(ranks), str(name))
                 for number, ranks, name in (json.loads(text) if text else ()))


def parse_children(text: str) -> tuple[ChildProcess, ...]:
    """Return the children in a `Sample`; raise ValueError or TypeError for anything else."""
    return tuple(ChildProcess(int(pid), frames_from_lists(frames), *map(str, fields))
                 for pid, frames, *fields in (json.loads(text) if text else ()))


class StallReport(NamedTuple):
    """The job hangs, or its ranks make progress again."""

    text: str  # to print
    cause: str  # for the failure report, empty if the ranks make progress
    rank: int  # the first outlier, NOBODY if there is none


class SnapshotService:
    """Formats the latest snapshot for users, --stall and root-cause analysis."""

    def __init__(self, stall_s: float) -> None:
        self.collector = SnapshotCollector()
        self._stall, self._deadlock = StallDetector(stall_s), DeadlockDetector()

    @property
    def stall_interval_s(self) -> float:
        """The time between two snapshots for --stall."""
        return self._stall.interval_s

    def format_table(self) -> str:
        """Return the last snapshot as a table."""
        return "\n".join(format_table(build_snapshot(self.collector.samples)))

    def observe(self, failures: Mapping[int, str]) -> JobActivity:
        """Return the last snapshot for root-cause analysis; `failures` are the lines at which ranks have failed."""
        samples = [move_to_failure(sample, failures[sample.rank]) if failures.get(sample.rank) else sample
                   for sample in self.collector.samples]
        snapshot = build_snapshot(samples)
        has_result = snapshot.outlier_group is not None or all(
            group.location.activity.is_waiting for group in snapshot.groups)
        table = "\n".join(format_table(snapshot)) if has_result else ""
        has_groups = any(len(sample.sequences) > 1 for sample in samples)
        return JobActivity(describe_locations(samples), find_free_ranks(samples), waiting_calls(samples), table,
                           has_groups=has_groups, deadlock=find_wait_for_finished(samples))

    def find_deadlock(self, now_s: float) -> Report | None:
        """Return a report if no rank can go on, as DeadlockDetector.update() does."""
        return self._deadlock.update(self.collector.samples, now_s)

    def find_stall(self, now_s: float) -> StallReport | None:
        """Return what to report at `now_s`, on any monotonic clock; None for nothing."""
        line = self._stall.update(self.collector.samples, now_s)
        if not line:
            return None
        if not self._stall.stalled_s:
            return StallReport(line, "", NOBODY)
        snapshot = build_snapshot(self.collector.samples)
        outliers = snapshot.outlier_group
        return StallReport("\n".join([line, *format_table(snapshot)]), "; ".join([line, *snapshot.findings]),
                           outliers.ranks[0] if outliers else NOBODY)
