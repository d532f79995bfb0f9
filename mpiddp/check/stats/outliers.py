"""The outlier rule: in every pass, worse than the peers' median by more than a tenth and by more than noise explains.

A pass without a value does not count, but more than half of the passes need one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .schema import Key, Metric, Passes

MIN_LOSS = 0.1  # share of the peers' median: what a training feels, as all ranks wait for the slowest in each step
FALSE_ALARM_RATE = 1e-3  # that any of n alike values is called an outlier
SIGMA_PER_MAD = 1.4826  # a normal distribution's standard deviation, in median absolute deviations
LEAVE_ONE_OUT_MAX = 64  # of more values all are compared with the same sample, whose median one of them hardly moves
TINY = 1e-12  # stands for a rate of 0, which has no logarithm

median = statistics.median


class Score(NamedTuple):
    """How a value compares with its `peers`: its best pass, the median of theirs, and the ratio of both."""

    is_outlier: bool
    value: float
    peer_median: float
    ratio: float
    peers: int


class PeerSample:
    """The values that one is compared with: their median in each pass, and their deviation over all passes."""

    def __init__(self, metric: Metric, passes: Sequence[Passes]) -> None:
        self._metric, self.count = metric, len(passes)
        self.medians = median_passes(passes)
        values = [value for peer in passes for value in peer]
        middle = median(values)
        self.deviation = median([abs(loss(metric, value, middle)) for value in values])
        self.best_median = median([best(metric, peer) for peer in passes])

    def threshold(self, passes: int) -> float:
        """Return the loss, as loss() counts it, that an outlier exceeds in each of `passes` passes.

        A normal value is below -z with a probability of at most exp(-z^2/2), in k passes with its k-th power. With
        z = sqrt(2 ln(n / FALSE_ALARM_RATE) / k), n alike values stay together below that rate. This takes a known
        deviation. The median and the deviation of n peers are uncertain by factors of 1 + 0.8/n (the root of
        1 + pi/2n) and 1 + 3.1/n (Student's t at 3.4 standard deviations, to first order): so MIN_LOSS counts 1 + 4/n
        times.
        """
        noise = SIGMA_PER_MAD * math.sqrt(2 * math.log(self.count / FALSE_ALARM_RATE) / passes) * self.deviation
        if not self._metric.unit:
            return max(self._metric.min_difference, noise)
        return max(-math.log(1 - self._metric.min_loss), (1 + 4 / self.count) * -math.log(1 - MIN_LOSS), noise)

    def score(self, passes: Passes) -> Score:
        """Return how a value compares; if it lacks a pass, it is an outlier only beside the peers' worst pass.

        Which pass it lacks is not known.
        """
        is_complete = len(passes) >= len(self.medians)
        medians = self.medians if is_complete else [worst(self._metric, self.medians)] * len(passes)
        threshold = self.threshold(min(len(passes), len(medians)))
        is_worse = all(loss(self._metric, value, peers) > threshold
                       and abs(value - peers) > self._metric.min_difference
                       for value, peers in zip(passes, medians, strict=False))
        value = best(self._metric, passes)
        return Score(2 * len(passes) > len(self.medians) and is_worse, value, self.best_median,
                     ratio(self._metric, value, self.best_median), self.count)


def by_pass(values: Collection[Passes]) -> list[list[float]]:
    """Return the values of each pass."""
    return [[passes[number] for passes in values if number < len(passes)] for number in range(max(map(len, values)))]


def median_passes(values: Collection[Passes]) -> Passes:
    """Return the median of the values in each pass."""
    return [*map(median, by_pass(values))]


def loss(metric: Metric, value: float, reference: float) -> float:
    """Return how much worse a value is than a reference: the logarithm of their ratio, for shares the difference."""
    if not metric.unit:
        return reference - value if metric.higher_is_better else value - reference
    log_ratio = math.log(max(reference, TINY) / max(value, TINY))
    return log_ratio if metric.higher_is_better else -log_ratio


def ratio(metric: Metric, value: float, reference: float) -> float:
    """Return how good a value is: 1 like the reference or better, 0.5 for half the bandwidth or twice the latency."""
    lost = max(0.0, loss(metric, value, reference))
    if not metric.unit:
        return max(0.0, 1 - lost)
    return 0.0 if metric.higher_is_better and not value else math.exp(-lost)


def best(metric: Metric, passes: Passes) -> float:
    """Return the best pass."""
    return max(passes) if metric.higher_is_better else min(passes)


def worst(metric: Metric, passes: Passes) -> float:
    """Return the worst pass."""
    return min(passes) if metric.higher_is_better else max(passes)


def score_all(
    metric: Metric, values: Mapping[Key, Passes], peer_keys: Collection[Key] | None = None
) -> dict[Key, Score]:
    """Return how each value compares with the others, if given with those of `peer_keys`; none without a peer."""
    peers = {key: passes for key, passes in values.items() if passes and (peer_keys is None or key in peer_keys)}
    shared = PeerSample(metric, [*peers.values()]) if len(peers) > LEAVE_ONE_OUT_MAX else None
    scores = {}
    for key, passes in values.items():
        others = [] if shared else [peer for other, peer in peers.items() if other != key]
        if passes and (shared or others):
            scores[key] = (shared or PeerSample(metric, others)).score(passes)
    return scores
