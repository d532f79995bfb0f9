"""Months of a job of 1,000 nodes, simulated: what mpiddp.supervise decides, beside two policies that know nothing.

    python -m tests.benchmarks.recovery [--quick] [--svg FILE]

The rule is the package's own, mpiddp/supervise/decision.py. What is made up is the world around it, by the constants
here. FAULTS, for 1,000 nodes and a day, are those of two clusters of Meta's (Kokolis et al., Revisiting Reliability in
Large-Scale Machine Learning Research Clusters, 2025: 2.34 and 6.50).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpiddp.failure.root_cause import ReportKind
from mpiddp.supervise.decision import Action, Attempt, Limits, decide

NODES, SPARES, CLUSTER, RANKS = 1000, 16, 1100, 8  # of the job, beside it, in all; ranks of a node
NAMES = [str(node) for node in range(CLUSTER)]
HOURS = 30 * 24.0
FAULTS = (2.0, 6.0)
LEMON = 10.0  # times the rate of another node
SHARES = {"lost": 0.2, "device": 0.4, "crash": 0.2, "exception": 0.2}  # of faults; an exception is of no node
STEPS_PER_HOUR = 1000
CHECKPOINT_H = 1.0  # what is done since the last one is lost
RESTART_H, REQUEUE_H = 2 / 60, 0.5  # a start in the allocation; one with a wait in the queue
REPAIR_H = 24.0  # for a node that is lost, or whose device is at fault
STICKY, AGAIN_H = 0.5, 0.5  # a device that is at fault once more often is so again, after so long
BUG_AFTER_H = 10 / 60  # a step at which the script always fails is so far from the checkpoint
STOPPED_H, MORNING_H = 2.0, 12.0  # until a person mends the script: told that the job has stopped; by looking

Choose = Callable[["Month", Attempt], str]


class Outcome(NamedTuple):
    """What a month came to: hours lost, attempts, healthy nodes left out, and the lemon's faults until it was out."""

    lost_h: float
    attempts: int
    healthy_out: int
    lemon_faults: int
    lemon_out_after: int | None


class Month:
    """A job, its nodes, and what goes wrong."""

    def __init__(self, seed: int, choose: Choose) -> None:
        self.random = random.Random(seed)
        self.choose = choose
        self.rate = self.random.uniform(*FAULTS) / 1000 / 24
        self.lemon = self.random.randrange(NODES)
        self.bug_s = self.random.uniform(0, HOURS)
        self.bug_mended = False
        self.bad: dict[int, float] = {}  # nodes that are lost, or whose device is at fault, until when
        self.gone: set[int] = set()  # of these, those that do not answer
        self.away: dict[int, float] = {}  # nodes that policy or batch system have left out, until when
        self.now = self.lost_h = 0.0
        self.attempts = self.healthy_out = self.lemon_faults = 0
        self.lemon_out: int | None = None
        self.history: list[Attempt] = []
        self.allocate()

    def allocate(self) -> None:
        """Let the batch system give nodes: not those that it knows to be lost, or that were left out."""
        free = [node for node in range(CLUSTER) if node not in self.gone and self.away.get(node, 0) <= self.now]
        self.pool = free[:NODES + SPARES]
        self.used = self.pool[:NODES]
        self.history = []

    def run(self) -> Outcome:
        """Return what the month came to."""
        while self.now < HOURS:
            attempt, worked_h = self.attempt()
            self.attempts += 1
            self.now += worked_h
            if self.now >= HOURS:
                break
            self.lost_h += min(worked_h, self.random.uniform(0, CHECKPOINT_H))
            self.history.append(attempt)
            begun = self.now
            what = self.choose(self, attempt)
            self.now += {"again": RESTART_H, "requeue": REQUEUE_H, "stop": STOPPED_H + REQUEUE_H}[what]
            self.bug_mended |= what == "stop" or self.now - self.bug_s > MORNING_H
            self.lost_h += self.now - begun
            if what != "again":
                self.allocate()
        return Outcome(self.lost_h, self.attempts, self.healthy_out, self.lemon_faults, self.lemon_out)

    def attempt(self) -> tuple[Attempt, float]:
        """Return how the next attempt ends, and after how many hours."""
        self.bad = {node: until for node, until in self.bad.items() if until > self.now}
        self.gone &= self.bad.keys()
        used = set(self.used)
        if dead := sorted(self.gone & used):
            return self.ended(dead[0], "lost", RESTART_H)
        weights = NODES - 1 + (LEMON if self.lemon in used else 1)
        found = [(self.random.expovariate(self.rate * weights), -1)]
        found += [(self.random.expovariate(1 / AGAIN_H), node) for node in sorted(self.bad.keys() & used)]
        after_h, node = min(found)
        if not self.bug_mended and self.now + after_h > self.bug_s:
            after_h = max(BUG_AFTER_H, self.bug_s - self.now)
            return self.ended(self.used[0], "bug", after_h)
        if node >= 0:
            return self.ended(node, "device", after_h)
        kind = self.random.choices(list(SHARES), list(SHARES.values()))[0]
        lemon = self.lemon in used and self.random.random() < LEMON / weights
        node = self.lemon if lemon and kind != "exception" else self.random.choice(self.used)
        self.lemon_faults += node == self.lemon and kind != "exception" and self.lemon_out is None
        if kind == "lost" or (kind == "device" and self.random.random() < STICKY):
            self.bad[node] = self.now + after_h + REPAIR_H
        if kind == "lost":
            self.gone.add(node)
        return self.ended(node, kind, after_h)

    def ended(self, node: int, kind: str, hours: float) -> tuple[Attempt, float]:
        """Return an attempt as mpiddp.supervise would note it."""
        rank, steps = self.used.index(node) * RANKS + self.random.randrange(RANKS), int(hours * STEPS_PER_HOUR)
        as_reported = {
            "lost": (ReportKind.UNREACHABLE, "ended together with its agent, for an unknown reason"),
            "crash": (ReportKind.PROCESS_EXIT, "killed by SIGSEGV (Segmentation fault)"),
            "device": (ReportKind.SECONDARY, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
            "bug": (ReportKind.ERROR, "KeyError: 'label'"),
            "exception": (ReportKind.ERROR, f"OSError: {self.random.random()}"),
        }
        reported, cause = as_reported[kind]
        silent, device = (NAMES[node],) if kind == "lost" else (), cause if kind == "device" else ""
        return Attempt(tuple(map(NAMES.__getitem__, self.used)), hours * 3600, 1, reported, cause, "train.py:9 step",
                       rank, NAMES[node], device=device, silent=silent, steps=steps), hours

    def leave_out(self, nodes: Sequence[int]) -> None:
        """Note that nodes are left out, until they are repaired."""
        for node in nodes:
            self.away[node] = self.now + REPAIR_H
            if node == self.lemon:
                self.lemon_out = self.lemon_faults if self.lemon_out is None else self.lemon_out
                self.away[node] = HOURS
            elif not any(node in (int(one.host),) and one.kind != ReportKind.ERROR for one in self.history):
                self.healthy_out += 1


def ours(month: Month, _: Attempt) -> str:
    """Do what mpiddp.supervise does."""
    found = decide(month.history, [NAMES[node] for node in month.pool], Limits(NODES, NODES, 10**9))
    month.leave_out([*map(int, found.without)])
    if found.action is Action.AGAIN:
        month.used = [*map(int, found.nodes)]
    return found.action.value


def requeue(month: Month, _: Attempt) -> str:
    """Queue the job again, whatever has happened."""
    return "requeue"


def swap(month: Month, _: Attempt) -> str:
    """Replace the first node by a spare, whatever has happened; queue the job again where there is none."""
    used = set(month.used)
    spare = next((node for node in month.pool if node not in used and month.away.get(node, 0) <= month.now), None)
    if spare is None:
        return "requeue"
    month.leave_out(month.used[:1])
    month.used = [*month.used[1:], spare]
    return "again"


POLICIES = {"mpiddp.supervise": ours, "always requeue": requeue, "swap the first node": swap}


def compare(months: int) -> dict[str, list[Outcome]]:
    """Return what the same months came to with each policy."""
    return {name: [Month(seed, choose).run() for seed in range(months)] for name, choose in POLICIES.items()}


def show(found: dict[str, list[Outcome]]) -> None:
    """Print a line for each policy."""
    mean_h = {name: statistics.mean(one.lost_h for one in outcomes) for name, outcomes in found.items()}
    first = next(iter(mean_h.values()))
    for name, outcomes in found.items():
        out = [one.lemon_out_after for one in outcomes if one.lemon_out_after is not None]
        print(f"{name:20} {mean_h[name]:6.1f} h lost in a month, {first / mean_h[name]:.2f}; "
              f"{statistics.mean(one.attempts for one in outcomes):.0f} attempts; healthy nodes left out: "
              f"{sum(one.healthy_out for one in outcomes)}; lemon out in {len(out)} months, after "
              f"{max(out, default=0)} of its faults at most")


def draw(found: dict[str, list[Outcome]], file: str) -> None:
    """Draw the hours lost in each month, sorted, a line for each policy."""
    import drawsvg

    wide, high, left, colours = 640, 320, 60, ("#06c", "#c60", "#999")
    most = max(one.lost_h for outcomes in found.values() for one in outcomes)
    drawing = drawsvg.Drawing(wide + left + 20, high + 60, font_family="sans-serif")
    drawing.append(drawsvg.Rectangle(0, 0, drawing.width, drawing.height, fill="white"))
    for hours in range(0, int(most) + 1, 50):
        top = 20 + high * (1 - hours / most)
        drawing.append(drawsvg.Line(left, top, left + wide, top, stroke="#ddd"))
        drawing.append(drawsvg.Text(f"{hours} h", 12, left - 8, top + 4, text_anchor="end"))
    for number, (name, outcomes) in enumerate(found.items()):
        lost = sorted(one.lost_h for one in outcomes)
        lost = lost[::max(1, len(lost) // 100)] + lost[-1:]
        points = [(left + wide * at / max(1, len(lost) - 1), 20 + high * (1 - hours / most))
                  for at, hours in enumerate(lost)]
        drawing.append(drawsvg.Lines(*(value for point in points for value in point), fill="none",
                                     stroke=colours[number], stroke_width=2))
        drawing.append(drawsvg.Text(name, 13, left + 12, 40 + 18 * number, fill=colours[number]))
    words = f"{len(next(iter(found.values()))):,} months, those with the fewest hours lost first"
    drawing.append(drawsvg.Text(words, 12, left + wide / 2, high + 48, text_anchor="middle"))
    drawing.save_svg(file)


def main() -> None:
    """Print the comparison, and draw it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="ten months")
    parser.add_argument("--svg", help="draw the hours lost")
    given = parser.parse_args()
    found = compare(10 if given.quick else 1000)
    show(found)
    if given.svg:
        draw(found, given.svg)


if __name__ == "__main__":
    main()
