"""The one rule of a check: what is odd is so in every pass, beside the median and the deviation of its peers.

A pass in which something has no figure does not count, but more than half of the passes have to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from .schema import Metric

LEAST = 0.1  # of the peers' median, by which a value has to be worse
CHANCE = 1e-3  # that among alike ones anybody is odd
SIGMA = 1.4826  # a normal distribution's standard deviation in its median absolute deviations
APART = 64  # among so many, each is compared with the others alone; among more, one hardly moves the median
SMALLEST = 1e-12  # a rate of nothing at all, whose logarithm is asked for

median = statistics.median
Key = TypeVar("Key", bound=Hashable)


class Score(NamedTuple):
    """How something is beside a number of `peers`: its best pass, the median of theirs, and the ratio of both."""

    odd: bool
    value: float
    level: float
    ratio: float
    peers: int


class Peers:
    """What a value is compared with: the median of some others in each pass, and their deviation over all passes."""

    def __init__(self, metric: Metric, passes: Sequence[Sequence[float]]) -> None:
        self._metric, self.count = metric, len(passes)
        self.levels = [median([one[at] for one in passes if at < len(one)]) for at in range(max(map(len, passes)))]
        values = [value for one in passes for value in one]
        middle = median(values)
        self.deviation = median([abs(loss(metric, value, middle)) for value in values])
        self.best = median([best(metric, one) for one in passes])

    def limit(self, passes: int) -> float:
        """Return how much worse a value may be in each of so many passes, as loss() counts it.

        A normal value is below -z with a probability of at most exp(-z^2/2), and in each of k passes with that to the
        power of k: of n values, none with CHANCE. That takes a deviation that is known. Of n peers both the median and
        the deviation are uncertain, by 1 + 0.8/n (the root of 1 + pi/2n) and 1 + 3.1/n (Student's t at 3.4 standard
        deviations, to the first order), and so LEAST counts 1 + 4/n times.
        """
        noise = SIGMA * math.sqrt(2 * math.log(self.count / CHANCE) / passes) * self.deviation
        if not self._metric.unit:
            return max(self._metric.floor, noise)
        return max(-math.log(1 - self._metric.matters), (1 + 4 / self.count) * -math.log(1 - LEAST), noise)

    def score(self, values: Sequence[float]) -> Score:
        """Return how the passes of something are: odd if it is worse in each, and in more than half of the peers'.

        Which passes it lacks is not known, so it has to be worse than the worst of them then.
        """
        whole = len(values) >= len(self.levels)
        levels = self.levels if whole else [worst(self._metric, self.levels)] * len(values)
        limit = self.limit(min(len(values), len(levels)))
        worse = [loss(self._metric, value, level) > limit
                 and abs(value - level) > self._metric.floor for value, level in zip(values, levels, strict=False)]
        value = best(self._metric, values)
        return Score(2 * len(values) > len(self.levels) and all(worse), value, self.best,
                     ratio(self._metric, value, self.best), self.count)


def loss(metric: Metric, value: float, level: float) -> float:
    """Return how much worse a value is than the level: a ratio's logarithm, of shares the difference."""
    if not metric.unit:
        return level - value if metric.more else value - level
    by = math.log(max(level, SMALLEST) / max(value, SMALLEST))
    return by if metric.more else -by


def ratio(metric: Metric, value: float, level: float) -> float:
    """Return how good a value is beside the level: 0.5 for half the bandwidth or twice the latency; 1 at most."""
    by = max(0.0, loss(metric, value, level))
    if not metric.unit:
        return max(0.0, 1 - by)
    return 0.0 if metric.more and not value else math.exp(-by)


def best(metric: Metric, values: Sequence[float]) -> float:
    """Return the best of the passes."""
    return max(values) if metric.more else min(values)


def worst(metric: Metric, values: Sequence[float]) -> float:
    """Return the worst of the passes."""
    return min(values) if metric.more else max(values)


def compare(
    metric: Metric, values: Mapping[Key, Sequence[float]], among: Collection[Key] | None = None
) -> dict[Key, Score]:
    """Return how each is beside the others that are `among` the peers, or all; nothing for what has no peer."""
    peers = {key: passes for key, passes in values.items() if passes and (among is None or key in among)}
    everyone = Peers(metric, list(peers.values())) if len(peers) > APART else None
    found = {}
    for key, passes in values.items():
        others = [theirs for other, theirs in peers.items() if other != key] if everyone is None else []
        if passes and (everyone or others):
            found[key] = (everyone or Peers(metric, others)).score(passes)
    return found


def odd(scores: Mapping[Key, Score]) -> set[Key]:
    """Return who is odd."""
    return {key for key, score in scores.items() if score.odd}
