"""The outlier rule: in every pass, worse than the peers' median by more than a tenth and by more than noise explains.

A pass without a value does not count, but more than half of the passes must have one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .schema import Key, Metric, Passes

MIN_LOSS = 0.1  # share of the peers' median that slows a training: in each step all ranks wait for the slowest
FALSE_ALARM_RATE = 1e-3  # probability that any of n equal values is called an outlier
SIGMA_PER_MAD = 1.4826  # a normal distribution's standard deviation, in median absolute deviations
LEAVE_ONE_OUT_MAX = 64  # more values share one sample: a single one hardly changes its median
TINY = 1e-12  # stands for a rate of 0, which has no logarithm

median = statistics.median


class Score(NamedTuple):
    """How a value compares with its `peers`: its best pass, the median of their best passes, and the ratio of both."""

    is_outlier: bool
    value: float
    peer_median: float
    ratio: float
    peers: int


class PeerSample:
    """A value's peers: their median in each pass, and their deviation over all passes."""

    def __init__(self, metric: Metric, passes: Sequence[Passes]) -> None:
        self._metric, self.count = metric, len(passes)
        self.medians = median_passes(passes)
        values = [value for peer in passes for value in peer]
        middle = median(values)
        self.deviation = median([abs(loss(metric, value, middle)) for value in values])
        self.best_median = median([best(metric, peer) for peer in passes])

    def threshold(self, passes: int) -> float:
        """Return the loss() that an outlier exceeds in each of `passes` passes.

        A normal value is below -z with a probability of at most exp(-z^2/2), in all of k passes with its k-th power.
        With z = sqrt(2 ln(n / FALSE_ALARM_RATE) / k), the false alarms of n equal values stay below that rate, if the
        deviation is known. Estimating the median and the deviation from n peers adds factors of 1 + 0.8/n (the root of
        1 + pi/2n) and 1 + 3.1/n (Student's t at 3.4 standard deviations, to first order): so MIN_LOSS is scaled by
        1 + 4/n.
        """
        noise = SIGMA_PER_MAD * math.sqrt(2 * math.log(self.count / FALSE_ALARM_RATE) / passes) * self.deviation
        if not self._metric.unit:
            return max(self._metric.min_difference, noise)
        return max(-math.log(1 - self._metric.min_loss), (1 + 4 / self.count) * -math.log(1 - MIN_LOSS), noise)

    def score(self, passes: Passes) -> Score:
        """Return how a value compares; if it lacks a pass, it is compared with the peers' worst pass alone.

        It is not known which pass it lacks.
        """
        is_complete = len(passes) >= len(self.medians)
        worst = min if self._metric.higher_is_better else max
        medians = self.medians if is_complete else [worst(self.medians)] * len(passes)
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
    """Return how much worse a value is than a reference: the logarithm of the ratio, or the difference of shares."""
    if not metric.unit:
        return reference - value if metric.higher_is_better else value - reference
    log_ratio = math.log(max(reference, TINY) / max(value, TINY))
    return log_ratio if metric.higher_is_better else -log_ratio


def ratio(metric: Metric, value: float, reference: float) -> float:
    """Return 1 for a value as good as the reference or better, 0.5 for half the bandwidth or twice the latency."""
    lost = max(0.0, loss(metric, value, reference))
    if not metric.unit:
        return max(0.0, 1 - lost)
    return 0.0 if metric.higher_is_better and not value else math.exp(-lost)


def best(metric: Metric, passes: Passes) -> float:
    """Return the best pass."""
    return max(passes) if metric.higher_is_better else min(passes)


def score_all(
    metric: Metric, values: Mapping[Key, Passes], peer_keys: Collection[Key] | None = None
) -> dict[Key, Score]:
    """Return how each value compares with the others, or only with those of `peer_keys`; no score without a peer."""
    peers = {key: passes for key, passes in values.items() if passes and (peer_keys is None or key in peer_keys)}
    shared = PeerSample(metric, [*peers.values()]) if len(peers) > LEAVE_ONE_OUT_MAX else None
    scores = {}
    for key, passes in values.items():
        others = [] if shared else [peer for other, peer in peers.items() if other != key]
        if passes and (shared or others):
            scores[key] = (shared or PeerSample(metric, others)).score(passes)
    return scores


def typical(scores: Collection[Score]) -> tuple[float, float, float]:
    """Return the medians of the scores' values, peer medians and ratios."""
    return (median([score.value for score in scores]), median([score.peer_median for score in scores]),
            median([score.ratio for score in scores]))
