"""Groups ranks by location and finds the outliers. Pure functions, fast enough for 100,000 ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..base.text import format_duration, format_ranges
from ..failure import stack
from ..failure.stack import Frame, FrameKind
from .snapshot import Activity, ChildProcess, Location, RankGroup, RankSample, Snapshot

POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
MISMATCH = "ranks wait in different collectives: one of them skipped a call, or made an extra one"
BUSY_CORES = 0.3  # a main thread that uses more computes or busy-waits
IDLE_CORES = 0.1  # a main thread that uses less is waiting
MAX_RANGES = 20  # of ranks, in a sentence
MAX_CHILDREN_SHOWN = 3
NATIVE = "native code that holds the GIL"
BUSY_WAITING = "busy-waiting for a GPU or in MPI"
FREE = (Activity.BUSY, Activity.LOADER, Activity.ELSEWHERE, Activity.STOPPED, Activity.KERNEL)
FAILURE_FORMAT = "{}:{} {}"
FAILURE_PATTERN = re.compile(r"(.*):(\d+) (.*)")

Members = Mapping[Location, Sequence[RankSample]]
Outliers = tuple[set[int], list[str]]  # the ranks, and findings


def build_snapshot(samples: Sequence[RankSample]) -> Snapshot:
    """Return where the ranks are, and which are outliers."""
    locations: dict[tuple[object, ...], Location] = {}  # by all that locate() reads: many ranks are alike
    members: dict[Location, list[RankSample]] = {}
    for sample in samples:
        key = (sample.frames, sample.state, sample.wchan, sample.cores >= BUSY_CORES, sample.cores < IDLE_CORES,
               sample.has_answered, sample.has_ended, bool(sample.native),
               tuple(child._replace(pid=0) for child in sample.children))
        if key not in locations:
            locations[key] = locate(sample)
        members.setdefault(locations[key], []).append(sample)
    outliers, findings = find_outliers(members)
    groups = [group for location, located in members.items() for group in split_outliers(location, located, outliers)]
    return Snapshot(tuple(sorted(groups, key=lambda group: (not group.is_outlier, len(group.ranks), group.ranks))),
                    (*findings, *explain_hidden_stacks(samples)), format_steps(samples))


def split_outliers(location: Location, samples: Sequence[RankSample], outliers: set[int]) -> Iterator[RankGroup]:
    """Yield the outliers at a location, then the other ranks."""
    for is_outlier in (True, False):
        if members := [sample for sample in samples if (sample.rank in outliers) == is_outlier]:
            numbers = {sample.sequences[0].number if len(sample.sequences) == 1 else 0 for sample in members}
            is_common = len(numbers) == 1 and location.activity is Activity.COLLECTIVE
            yield RankGroup(location, tuple(sample.rank for sample in members),
                            tuple(dict.fromkeys(sample.host for sample in members)), is_outlier,
                            numbers.pop() if is_common else 0)


def find_outliers(members: Members) -> Outliers:
    """Return the outliers, and findings about them; `members` are the ranks at each location."""
    held, others = partition(members, lambda location: location.activity.is_held)
    silent, rest = partition(others, lambda location: location.activity is Activity.SILENT)
    has_no_reference = (held or silent) and len(rest) == 1
    outliers, findings = compare_running(rest) if rest and not has_no_reference else (set(), [])
    return outliers | (collect_ranks(held) if rest else set()), [*format_states({**held, **silent}), *findings]


def compare_running(members: Members) -> Outliers:
    """Compare ranks that can run; return as find_outliers() does."""
    waiting, rest = partition(members, lambda location: location.activity.is_waiting)
    busy, others = partition(rest, lambda location: location.activity is Activity.BUSY)
    if waiting and others:
        loading, elsewhere = partition(others, lambda location: location.activity is Activity.LOADER)
        state = f"not {describe_wait(waiting)}"
        return collect_ranks(others), [*format_states(loading), *format_states(elsewhere, state)]
    if waiting and busy:
        state = f"busy and not {describe_wait(waiting)} (slow, or {BUSY_WAITING})"
        is_minority = 2 * len(collect_ranks(busy)) <= len(collect_ranks(members))
        return collect_ranks(busy) if is_minority else set(), format_states(busy, state)
    has_settled = not busy or all(sample.spins for samples in members.values() for sample in samples)
    late, findings = find_late_ranks(members) if has_settled else (set(), [])
    if late:
        return late, findings
    outliers, more = compare_waiting(members) if waiting else compare_locations(members)
    return outliers, [*findings, *more]


def compare_waiting(members: Members) -> Outliers:
    """Compare ranks that all wait for others; return as find_outliers() does."""
    common = majority_location(members)
    if len(members) == 1:
        ((location, samples),) = members.items()
        if len({sample.sequences for sample in samples}) > 1:
            return set(), []
        is_suspect = location.activity is Activity.COLLECTIVE
        suspect = "; if this persists, suspect the network or a device" if is_suspect else ""
        return set(), [f"all ranks are {describe_location(location)}{suspect}"]
    majority, rest = partition(members, lambda location: location == common)
    findings = [f"{format_subject(collect_ranks({location: samples}))} {describe_location(location)}"
                for group in (rest, majority) for location, samples in group.items()]
    has_pairs = any(location.collective in POINT_TO_POINT for location in members)
    if common is None or has_pairs:
        is_mismatch = not has_pairs and not any(location.activity is Activity.ENDED for location in members)
        return set(), [*findings, MISMATCH] if is_mismatch else findings
    return collect_ranks(rest), [*findings[:-1], f"the others are {describe_location(common)}"]


def compare_locations(members: Members) -> Outliers:
    """Compare ranks if none waits for others in torch's own code; return as find_outliers() does."""
    _, others = partition(members, lambda location: location.activity is Activity.BUSY)
    if not others:
        return set(), [f"all ranks are busy: computing, or {BUSY_WAITING}"]
    common = majority_location(members)
    outliers = {location: samples for location, samples in others.items() if common and location != common}
    return collect_ranks(outliers), format_states(outliers, "not where most other ranks are")


def partition(members: Members, predicate: Callable[[Location], bool]) -> tuple[Members, Members]:
    """Return the ranks at locations that satisfy a predicate, and the other ranks."""
    matches = {location: samples for location, samples in members.items() if predicate(location)}
    return matches, {location: samples for location, samples in members.items() if location not in matches}


def find_late_ranks(members: Members) -> Outliers:
    """Return the ranks that have entered fewer collectives than others of their process group, and findings.

    They are outliers only if the sequence numbers count only collectives, as NCCL's do, and others are ahead in each
    group.
    """
    samples = [sample for located in members.values() for sample in located]
    groups: dict[tuple[str, str], dict[int, list[int]]] = {}  # (ranks, name): sequence number: ranks
    for sample in samples:
        for number, names, group in sample.sequences:
            groups.setdefault((names, group), {}).setdefault(number, []).append(sample.rank)
    late: set[int] = set()
    findings = []
    groups_of_ranks = Counter(names for names, _ in groups)
    for (names, group), ranks_by_number in sorted(groups.items(), key=lambda item: sum(map(len, item[1].values()))):
        last = max(ranks_by_number)
        where = f" in the process group of ranks {names}" if len(groups) > 1 else ""
        where = f" in process group {group} (ranks {names})" if groups_of_ranks[names] > 1 else where
        others = f"rank {ranks_by_number[last][0]}" if len(ranks_by_number[last]) == 1 else "other ranks"
        for number, ranks in sorted(ranks_by_number.items()):
            if number < last:
                late.update(ranks)
                findings.append(f"{format_subject(ranks)} at sequence number {number:,}{where}, {others} at {last:,}")
    ahead = {sample.rank for sample in samples} - late
    if not all(sample.spins for sample in samples) or len(late) > len(ahead):
        late = set()
    return late, findings


def describe_wait(waiting: Iterable[Location]) -> str:
    """Return where ranks wait for others, such as `in all_reduce, where other ranks wait`."""
    names = sorted({location.collective for location in waiting} - {""})
    return (f"in {' or '.join(names)}, where other ranks wait" if names else
            "at the end of the script, where other ranks are")


def describe_location(location: Location) -> str:
    """Return where ranks wait: the collective, and the line of the script that calls it."""
    if location.activity is Activity.ENDED:
        return str(location.activity.value)
    return f"in {location.collective} ({location.line.rpartition(' → ')[0].rpartition(' → ')[2]})"


def format_states(members: Members, state: str = "") -> list[str]:
    """Return a sentence for each activity of the ranks; `state` replaces the activity's description."""
    by_state: dict[str, list[int]] = {}
    for location, samples in members.items():
        by_state.setdefault(state or location.activity.value, []).extend(sample.rank for sample in samples)
    return [f"{format_subject(ranks)} {text}" for text, ranks in by_state.items()]


def collect_ranks(members: Members) -> set[int]:
    """Return the ranks at all these locations."""
    return {sample.rank for samples in members.values() for sample in samples}


def majority_location(members: Members) -> Location | None:
    """Return the location of more than half of the ranks, None if there is none."""
    largest = max(members, key=lambda location: len(members[location]))
    return largest if 2 * len(members[largest]) > len(collect_ranks(members)) else None


def format_subject(ranks: Iterable[int]) -> str:
    """Return `rank 3 is`, or `ranks 0-2,5 are`."""
    ordered = sorted(ranks)
    return f"rank {ordered[0]} is" if len(ordered) == 1 else f"ranks {format_ranges(ordered, MAX_RANGES)} are"


def explain_hidden_stacks(samples: Iterable[RankSample]) -> Iterator[str]:
    """Yield why there is no stack of ranks, or of their children, that are in native code."""
    hidden: dict[str, list[int]] = {}
    for sample in samples:
        for reason in {sample.native, *(child.native for child in sample.children)} - {""}:
            hidden.setdefault(reason, []).append(sample.rank)
    for reason, ranks in hidden.items():
        names = f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks, MAX_RANGES)}"
        yield f"no stack of {names} while native code holds the GIL: {reason}"


def format_steps(samples: Iterable[RankSample]) -> str:
    """Return the ranks' steps in words, and their age; empty if the script counts none."""
    stepping = [sample for sample in samples if sample.steps]
    if not stepping:
        return ""
    first, last = min(sample.steps for sample in stepping), max(sample.steps for sample in stepping)
    age = format_duration(min(sample.step_age_s for sample in stepping))
    return (f"at step {first:,}, reached {age} ago" if first == last else
            f"at steps {first:,} to {last:,}, the latest one reached {age} ago")


def describe_locations(samples: Iterable[RankSample]) -> dict[int, str]:
    """Return where each rank is, in words."""
    return {sample.rank: location.line or str(location.activity.value)
            for sample in samples for location in [locate(sample)]}


def waiting_calls(samples: Iterable[RankSample]) -> dict[int, str]:
    """Return the script's innermost line of each rank in a collective, formatted as in failure reports."""
    return {sample.rank: FAILURE_FORMAT.format(*lines[-1][1:]) for sample in samples
            if locate(sample).activity is Activity.COLLECTIVE
            and (lines := [frame for frame in sample.frames if frame.file == sample.frames[0].file])}


def find_free_ranks(samples: Iterable[RankSample]) -> set[int]:
    """Return the ranks that do not wait for another rank: others may be waiting for them."""
    return {sample.rank for sample in samples if locate(sample).activity in FREE
            and not any(frame.kind is FrameKind.OURS for frame in stack.list_called_frames(sample.frames))}


def move_to_failure(sample: RankSample, where: str) -> RankSample:
    """Return a failed rank's sample at the line at which it failed, `where`, formatted as in failure reports."""
    match = FAILURE_PATTERN.fullmatch(where)
    file, line, function = match.groups() if match else (where, "0", "")
    return sample._replace(frames=(Frame(FrameKind.SCRIPT, file, int(line), function),), state="S", wchan="", cores=0.0)


def locate(sample: RankSample) -> Location:
    """Return where a rank is."""
    activity, name = classify_activity(sample), stack.find_collective(sample.frames)
    if activity is Activity.ENDED:
        return Location(activity, "")
    line = NATIVE if sample.native and not sample.frames else stack.format_short(sample.frames)
    if sample.wchan and activity in (Activity.KERNEL, Activity.SILENT, Activity.ELSEWHERE):
        line = " → ".join(filter(None, (line, f"{sample.wchan}()")))
    if activity in (Activity.LOADER, Activity.ELSEWHERE):
        working = [child for child in sample.children if not stack.is_idle_worker(child.frames)]
        line = "; ".join([line, *dict.fromkeys(map(describe_child, working[:MAX_CHILDREN_SHOWN]))])
    return Location(activity, line, name if activity is Activity.COLLECTIVE else "")


def classify_activity(sample: RankSample) -> Activity:
    """Return what a rank does."""
    states = {"": Activity.GONE, "X": Activity.GONE, "Z": Activity.GONE, "T": Activity.STOPPED, "t": Activity.STOPPED}
    if not sample.has_answered:
        return Activity.LOST
    if sample.state in states:
        return states[sample.state]
    if sample.has_ended:
        return Activity.ENDED
    if not sample.frames and (sample.state == "D" or not sample.native):
        return Activity.KERNEL if sample.state == "D" else Activity.SILENT
    name = stack.find_collective(sample.frames)
    if name and (name != stack.BACKWARD_NAME or sample.cores < IDLE_CORES):
        return Activity.COLLECTIVE
    if sample.cores >= BUSY_CORES or name:
        return Activity.BUSY
    return Activity.LOADER if stack.is_waiting_for_loader(sample.frames) else Activity.ELSEWHERE


def describe_child(child: ChildProcess) -> str:
    """Return where a child process is, in words."""
    state = {"T": "stopped", "t": "stopped", "D": "in uninterruptible sleep"}.get(child.state, "")
    wchan = f"{child.wchan}()" if child.wchan else ""
    line = NATIVE if child.native else stack.format_short(child.frames)
    return f"its child: {' → '.join(filter(None, (child.program, line, wchan, state)))}"
