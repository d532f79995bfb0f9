"""Histories of simulated jobs: what each rank does, and when, as samples show it. A seed draws a job.

All ranks make the same steps: collectives of several process groups, synchronous or not, sends, computation, loading,
files, a debugger. The ranks are not equally fast, and the network may stall. In a faulty job a rank leaves out a step.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from mpiddp.base.text import format_ranges
from mpiddp.failure.stack import Frame, FrameKind
from mpiddp.where.snapshot import CollectiveSeq, RankSample

SITE = "/env/lib/python3.11/site-packages/"
FOREVER_S = 1e9
SKEW_S = 0.9  # between the samples of one snapshot
COLLECTIVES = "all_reduce", "barrier", "broadcast", "all_gather", "backward"


class Group(NamedTuple):
    """A process group of these ranks."""

    name: str
    ranks: tuple[int, ...]


class Step(NamedTuple):
    """A line of the script: `kind` is a collective of `group`, or what the ranks of `group` do on their own.

    An `is_async` collective is only started. `lasts_s` is how long it takes once all are there.
    """

    line: int
    kind: str
    group: Group
    lasts_s: float
    is_async: bool = False


class Span(NamedTuple):
    """What a rank does from `begin_s` on."""

    begin_s: float
    sample: RankSample
    cpu_rate: float = 0.0
    byte_rate: float = 0.0


class Job:
    """The history of a job: the spans of each rank, made step by step."""

    def __init__(self, seed: int, has_fault: bool = False) -> None:
        self._random = random = Random(seed)
        self.world = Group("0", tuple(range(random.randint(2, 5))))
        self._groups = [self.world]
        if not has_fault and random.random() < 0.6:
            self._groups += [Group(str(number), tuple(sorted(random.sample(
                self.world.ranks, random.randint(2, len(self.world.ranks)))))) for number in (1, 2)]
        self._uses_gpus = not has_fault and random.random() < 0.1
        self._now_s = dict.fromkeys(self.world.ranks, 0.0)
        self._entered = {(rank, group.name): 0 for group in self._groups for rank in group.ranks}
        self.spans: dict[int, list[Span]] = {rank: [] for rank in self.world.ranks}
        steps = [self._draw_step(line, has_fault) for line in range(1, random.randint(6, 20))]
        self._run(steps, random.choice(self.world.ranks) if has_fault else -1)

    def _draw_step(self, line: int, only_collectives: bool) -> Step:
        random = self._random
        group = random.choice(self._groups)
        own = () if only_collectives else ("compute", "sleep", "load", "file", "debug", "send", "wait")
        kind = random.choice([*COLLECTIVES[:4 if len(self._groups) > 1 else 5], *own])
        if kind in own and kind not in ("send", "wait"):
            group = Group("", (random.choice(self.world.ranks),))  # the others go on to the next step
        is_slow = random.random() < 0.3
        return Step(line, kind, group, random.uniform(5, 60) if is_slow else random.uniform(0, 0.5),
                    kind == "all_reduce" and not only_collectives and random.random() < 0.2)

    def _run(self, steps: list[Step], faulty: int) -> None:
        left_out = self._random.choice(steps) if faulty >= 0 else None
        plans = {rank: [step for step in steps if rank in step.group.ranks and not (
            rank == faulty and step is left_out)] for rank in self.world.ranks}
        stuck = False
        while any(plans.values()) and not stuck:
            stuck = True
            for rank, plan in plans.items():
                if plan and (members := self._find_ready(rank, plans)):
                    step, stuck = plan[0], False
                    for member in members:
                        plans[member].pop(0)
                    self._carry_out(step, members)
        for rank, plan in plans.items():
            self._note(rank, plan[0] if plan else None, FOREVER_S)

    def _find_ready(self, rank: int, plans: dict[int, list[Step]]) -> tuple[int, ...]:
        """Return the ranks that make a rank's next step together; none if some are not there yet."""
        step = plans[rank][0]
        there = all(plans[other] and (plans[other][0].kind, plans[other][0].group) == (step.kind, step.group)
                    for other in step.group.ranks)
        return step.group.ranks if there else ()

    def _carry_out(self, step: Step, members: tuple[int, ...]) -> None:
        last_s = max(self._now_s[rank] for rank in members)
        stalls, sender = self._random.random() < 0.5, self._random.choice(members)
        for rank in members:
            if step.is_async:
                self._entered[rank, step.group.name] += 1
                continue
            self._note(rank, step, last_s)
            self._note(rank, step, last_s + step.lasts_s, is_stalled=stalls and rank == sender, is_moving=not stalls)

    def _note(
        self, rank: int, step: Step | None, end_s: float, is_stalled: bool = False, is_moving: bool = False
    ) -> None:
        """Note what a rank does until `end_s`: at a step, which it enters if it was not in it, or after the script."""
        begin_s = self._now_s[rank]
        if end_s <= begin_s:
            return
        self._now_s[rank] = end_s
        is_shared = step is not None and step.group.name != ""
        line = step.line if step else 0  # steps count from 1
        if is_shared and step and not (self.spans[rank] and self.spans[rank][-1].sample.frames[0].line == line):
            self._entered[rank, step.group.name] += 2 if step.kind == "send" and rank == step.group.ranks[0] else 1
        frames = [Frame(FrameKind.SCRIPT, "/home/me/train.py", line, "main")]
        if step and is_shared and step.kind != "wait":  # a wait for asynchronous work shows no function of torch
            file = "autograd/graph.py" if step.kind == "backward" else "distributed/distributed_c10d.py"
            function = "_engine_run_backward" if step.kind == "backward" else step.kind
            if step.kind == "send" and rank != step.group.ranks[0]:
                function = "recv"
            frames.append(Frame(FrameKind.LIBRARY, f"{SITE}torch/{file}", 1, function))
        kind = step.kind if step else ""
        sample = RankSample(
            rank, f"n{rank // 2}", tuple(frames), {"debug": "t", "file": "D"}.get(kind, "S"), has_ended=step is None,
            cores=1.0 if kind == "compute" else 0.0, spins=self._uses_gpus, unacked_bytes=100 if is_stalled else 0,
            sequences=tuple(CollectiveSeq(self._entered[rank, group.name], format_ranges(group.ranks), group.name)
                            for group in self._groups if rank in group.ranks),
            waits_in=step.group.name if step and is_shared and kind != "wait" else "")
        self.spans[rank].append(Span(begin_s, sample, kind == "compute", 1e6 * (is_moving or kind == "load")))

    def snapshots(self, interval_s: float) -> Iterator[tuple[float, list[RankSample]]]:
        """Yield snapshots, and their times, until nothing changes any more."""
        end_s = max(spans[-1].begin_s for spans in self.spans.values()) + 3 * interval_s
        time_s = self._random.uniform(0, interval_s)
        while time_s < end_s:
            yield time_s, [self._sample(rank, time_s + self._random.uniform(0, SKEW_S)) for rank in self.world.ranks]
            time_s += interval_s

    def _sample(self, rank: int, at_s: float) -> RankSample:
        spans = self.spans[rank]
        now = bisect([span.begin_s for span in spans], at_s) - 1
        ends = [span.begin_s for span in spans[1:now + 1]] + [at_s]
        busy_s = sum(span.cpu_rate * (end_s - span.begin_s) for span, end_s in zip(spans, ends, strict=False))
        moved = sum(span.byte_rate * (end_s - span.begin_s) for span, end_s in zip(spans, ends, strict=False))
        return spans[now].sample._replace(busy_s=busy_s, moved_bytes=int(moved))
