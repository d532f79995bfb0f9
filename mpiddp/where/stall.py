"""Detects hangs: no rank makes progress, or none can go on. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..base.text import format_duration, format_ranges, join_names
from ..failure import stack
from ..failure.root_cause import NOBODY, Report, ReportKind
from ..failure.stack import make_stall_fingerprint
from .outliers import MAX_RANGES, POINT_TO_POINT, classify_activity, describe_location, locate, waiting_calls
from .snapshot import Activity, RankSample

MAX_INTERVAL_S = 10.0  # between two snapshots
SNAPSHOTS_PER_LIMIT = 5  # within the time after which a stall is reported
# A rank that uses more than this between two snapshots has made progress:
IDLE_CORES = 0.02  # CPU time of the rank and its descendants
CLOCK_GRAIN_S = 0.02  # the kernel counts user and system time in hundredths of a second, each
IDLE_BYTES_PER_S = 4096
IDLE_FAULTS_PER_S = 20  # plus 20: a waiting rank that answers its agent has up to 10
DEADLOCK_STATUS = 1  # as of --exit-timeout


class StallDetector:
    """Compares each snapshot of all ranks with the one before."""

    def __init__(self, limit_s: float) -> None:
        """Report a stall when it has lasted for `limit_s`, and again when its length has doubled."""
        self._limit_s = self._next_s = limit_s
        self._samples: dict[int, RankSample] = {}
        self._updated_s = self._moved_s = 0.0
        self._reported: dict[int, str] = {}  # why a rank's progress is not visible
        self.stalled_s = 0.0  # length of the stall when it was last reported; 0 while ranks make progress

    @property
    def interval_s(self) -> float:
        """The time to the next snapshot."""
        return min(MAX_INTERVAL_S, self._limit_s / SNAPSHOTS_PER_LIMIT)

    def update(self, samples: Sequence[RankSample], now_s: float) -> str:
        """Take samples of all ranks at `now_s`, on any monotonic clock; return a line to print, empty for none."""
        before = self._samples
        self._samples = {sample.rank: merge_sample(before.get(sample.rank, sample), sample) for sample in samples}
        passed_s, self._updated_s = now_s - self._updated_s, now_s
        if before.keys() != self._samples.keys() or all(sample.has_ended for sample in samples) or any(
                has_moved(before[rank], sample, passed_s) for rank, sample in self._samples.items()):
            self._moved_s, self._next_s = now_s, self._limit_s
            stalled_s, self.stalled_s = self.stalled_s, 0.0
            return f"ranks make progress again after {format_duration(stalled_s)}" if stalled_s else ""
        stalled_s = now_s - self._moved_s
        if stalled_s < self._next_s:
            return ""
        hidden = [sample for sample in samples
                  if not sample.has_answered or (sample.unseen and not sample.has_ended)]
        if hidden:
            return self._report_hidden(hidden)
        self._next_s, self.stalled_s = 2 * stalled_s, stalled_s
        return f"no rank has made progress for {format_duration(stalled_s)}"

    def _report_hidden(self, hidden: Sequence[RankSample]) -> str:
        """Return that hangs cannot be detected, once for each rank and reason."""
        reasons = {sample.rank: sample.unseen if sample.has_answered else "its agent does not answer"
                   for sample in hidden}
        new = {rank: reason for rank, reason in reasons.items() if self._reported.get(rank) != reason}
        if not new:
            return ""
        self._reported.update(new)
        (first, reason), more = next(iter(new.items())), len(new) - 1
        others = f"; also affected: {more:,} more rank{'s' * (more > 1)}" if more else ""
        return f"--stall cannot detect hangs, because of rank {first}: {reason}{others}"


def merge_sample(before: RankSample, now: RankSample) -> RankSample:
    """Merge a new sample into the last one; missing fields keep their value."""
    if not now.has_answered:
        return before
    latest = now if now.sequences or now.steps else before
    return now._replace(frames=now.frames or before.frames, sequences=latest.sequences, steps=latest.steps)


def has_moved(before: RankSample, now: RankSample, passed_s: float) -> bool:
    """Return whether a rank is at another place than in its sample `passed_s` ago, or has made progress since."""
    if now.has_ended and before.has_ended:  # it only polls for the others
        return False
    is_elsewhere = make_stall_fingerprint(now.frames) != make_stall_fingerprint(before.frames)
    return (now.has_ended != before.has_ended or is_elsewhere
            or now.steps != before.steps or now.sequences != before.sequences
            or not is_idle(now.busy_s - before.busy_s, passed_s)
            or now.faults - before.faults > IDLE_FAULTS_PER_S * (passed_s + 1)
            or now.moved_bytes - before.moved_bytes > IDLE_BYTES_PER_S * passed_s)


def is_idle(busy_s: float, passed_s: float) -> bool:
    """Return whether a process that was `busy_s` on a core in `passed_s` has done nothing."""
    return busy_s <= IDLE_CORES * passed_s + CLOCK_GRAIN_S


class DeadlockDetector:
    """Compares each snapshot of all ranks with the one before."""

    def __init__(self) -> None:
        self._samples: dict[int, RankSample] = {}
        self._updated_s = 0.0

    def update(self, samples: Sequence[RankSample], now_s: float) -> Report | None:
        """Take samples of all ranks at `now_s`, on any monotonic clock.

        Return a report if two snapshots show a deadlock, without progress between them or data on its way, else None.
        """
        before, passed_s = self._samples, now_s - self._updated_s
        self._samples, self._updated_s = {sample.rank: sample for sample in samples}, now_s
        is_still = before.keys() == self._samples.keys() and not any(
            sample.unacked_bytes or has_moved(before[sample.rank], sample, passed_s) for sample in samples)
        return find_wait_for_finished(samples) or find_mismatch(samples) if is_still else None


def find_wait_for_finished(samples: Sequence[RankSample]) -> Report | None:
    """Return a report if each rank waits in a collective or has ended, and one waits for a rank that has ended.

    A rank that computes or saves a file, or that did not answer, rules that out: others may wait for it.
    """
    ended = [sample for sample in samples if classify_activity(sample) is Activity.ENDED]
    living = [sample for sample in samples if classify_activity(sample) is not Activity.ENDED]
    if not all(map(is_in_collective, living)):
        return None
    missed = {sample.rank: [other for other in ended if has_missed_call(other, sample)] for sample in living}
    first = next((sample for sample in living if missed[sample.rank]), None)
    if first is None:
        return None
    name = awaited_call(first)
    waiting = [sample for sample in living
               if missed[sample.rank] == missed[first.rank] and awaited_call(sample) == name]
    awaited = missed[first.rank]
    wait, have = "waits" if len(waiting) == 1 else "wait", "has" if len(awaited) == 1 else "have"
    cause = (f"{name_ranks(waiting)} {wait} in {name} for {name_ranks(awaited)}, "
             f"which {have} finished the script")
    call = waiting_calls([first]).get(first.rank, "")
    return Report(NOBODY, "", ReportKind.UNREACHABLE, cause, DEADLOCK_STATUS, call)


def find_mismatch(samples: Sequence[RankSample]) -> Report | None:
    """Return a report if all ranks of a process group wait in collectives of it, but not in the same one.

    A rank that may go on by itself rules that out, and so does what is not visible: a GPU's work, a rank's sockets.
    """
    if not all(is_blocked(sample) for sample in samples):
        return None
    groups: dict[tuple[str, str], dict[int, tuple[int, RankSample]]] = {}  # by ranks and name, then by rank
    for sample in (sample for sample in samples if not sample.has_ended):
        for number, names, group in sample.sequences:
            if group == sample.waits_in:
                groups.setdefault((names, group), {})[sample.rank] = number, sample
    for (names, _), waiting in groups.items():
        calls = {awaited_call(sample) for _, sample in waiting.values()}
        numbers = {number for number, _ in waiting.values()}
        if (len(calls) > 1 or len(numbers) > 1) and calls.isdisjoint(POINT_TO_POINT) and (
                parse_ranks(names) <= waiting.keys()):
            cause = f"ranks wait in different collectives: {describe_calls(waiting.values(), len(numbers) > 1)}"
            return Report(NOBODY, "", ReportKind.UNREACHABLE, cause, DEADLOCK_STATUS)
    return None


def is_blocked(sample: RankSample) -> bool:
    """Return whether a rank certainly waits in a collective, or has ended."""
    activity = classify_activity(sample)
    is_waiting = activity is Activity.ENDED or (activity is Activity.COLLECTIVE and not sample.spins)
    return is_waiting and not sample.unseen


def describe_calls(waiting: Iterable[tuple[int, RankSample]], with_numbers: bool) -> str:
    """Return `rank 0 on n07 in barrier (train.py:9 main), ranks 1-3 in …`, with sequence numbers if wanted."""
    calls: dict[str, list[RankSample]] = {}
    for number, sample in waiting:
        call = describe_location(locate(sample))
        calls.setdefault(f"{call} at sequence number {number:,}" if with_numbers else call, []).append(sample)
    listed = [f"{name_ranks(samples)} {call}" for call, samples in calls.items()]
    return join_names(listed)


def is_in_collective(sample: RankSample) -> bool:
    """Return whether a rank waits in a collective; a rank that uses a GPU may do so in any function of torch."""
    return classify_activity(sample) is Activity.COLLECTIVE or (
        sample.has_answered and sample.spins and stack.is_in_torch(sample.frames))


def has_missed_call(ended: RankSample, waiting: RankSample) -> bool:
    """Return whether a rank has ended without making a call for which another rank waits."""
    if stack.find_collective(waiting.frames) == "should_stop":
        return ended.steps < waiting.steps
    numbers = {(names, group): number for number, names, group in ended.sequences}
    return any(numbers.get((names, group), number) < number if numbers else ended.rank in parse_ranks(names)
               for number, names, group in waiting.sequences)  # without numbers, it has destroyed its groups


def parse_ranks(names: str) -> set[int]:
    """Return the ranks in the output of format_ranges(), without those that it only counts."""
    pairs = [part.partition("-") for part in names.partition(" and ")[0].split(",") if part]
    return {rank for first, _, last in pairs for rank in range(int(first), int(last or first) + 1)}


def awaited_call(sample: RankSample) -> str:
    """Return the name of the call in which a rank waits."""
    return stack.find_collective(sample.frames) or "torch"


def name_ranks(samples: Sequence[RankSample]) -> str:
    """Return `rank 3 on n07`, or `ranks 0-2,5`."""
    first = samples[0]
    return (f"rank {first.rank} on {first.host}" if len(samples) == 1 else
            f"ranks {format_ranges((sample.rank for sample in samples), MAX_RANGES)}")
