"""Ranks at one place, merged; and which of them differ from the others. Pure functions, for 100,000 ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..base.text import format_duration, format_ranges
from ..failure import stack
from ..failure.stack import Frame, FrameKind
from .snapshot import HELD, WAITING, At, Group, Picture, Place, Rank, Worker

BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
UNLIKE = "they wait in unlike calls: one of them has left a call out, or makes one that the others do not make"
SHOWN = 20  # ranges of ranks in a sentence

Members = Mapping[Place, Sequence[Rank]]
Found = tuple[set[int], list[str]]  # the ranks that are odd, and sentences


def find(members: Members) -> Found:
    """Return which ranks are odd, and sentences about them; `members` are the ranks at each place."""
    held = {place: ranks for place, ranks in members.items() if place.at in HELD}
    silent = {place: ranks for place, ranks in members.items() if place.at is At.SILENT}
    rest = {place: ranks for place, ranks in members.items() if place not in held and place not in silent}
    alone = (held or silent) and len(rest) == 1  # there is nothing to compare it with
    odd, findings = compare(rest) if rest and not alone else (set(), [])
    return odd | (numbers(held) if rest else set()), [*sentences({**held, **silent}), *findings]


def compare(members: Members) -> Found:
    """Return what find() does of ranks that nothing holds."""
    waiting = {place: ranks for place, ranks in members.items() if place.at in WAITING}
    busy = {place: ranks for place, ranks in members.items() if place.at is At.BUSY}
    others = {place: ranks for place, ranks in members.items() if place not in waiting and place not in busy}
    if waiting and others:
        loading = {place: ranks for place, ranks in others.items() if place.at is At.LOADER}
        standing = {place: ranks for place, ranks in others.items() if place not in loading}
        return numbers(others), [*sentences(loading), *sentences(standing, f"not {meeting(waiting)}")]
    if waiting and busy:
        words = f"busy, and not {meeting(waiting)}: slow, or spinning as GPUs and MPI let them"
        return numbers(busy) if 2 * len(numbers(busy)) <= len(numbers(members)) else set(), sentences(busy, words)
    counts = not busy or all(one.spins for ranks in members.values() for one in ranks)
    late, told = behind(members) if counts else (set(), [])
    if late:
        return late, told
    odd, findings = compare_waiting(members) if waiting else compare_places(members)
    return odd, [*told, *findings]


def compare_waiting(members: Members) -> Found:
    """Return what find() does where all ranks wait for others."""
    common = majority(members)
    if len(members) == 1:
        (place,) = members
        where = f"all ranks are {own_words(place)}"
        lasts = ": where that lasts, the network or a device stands still" if place.at is At.COLLECTIVE else ""
        return set(), [] if len(sequences(members)) > 1 else [where + lasts]
    odd = {place: ranks for place, ranks in members.items() if place != common}
    lines = [f"{ranks_in_words(numbers({place: ranks}))} {own_words(place)}" for place, ranks in odd.items()]
    if common is None or any(place.collective in BETWEEN_TWO for place in members):
        more = [f"{ranks_in_words(numbers({common: members[common]}))} {own_words(common)}"] if common else []
        is_plain = not any(place.at is At.ENDED or place.collective in BETWEEN_TWO for place in members)
        unlike = [UNLIKE] if is_plain else []
        return set(), [*lines, *more, *unlike]
    return numbers(odd), [*lines, f"the others are {own_words(common)}"]


def compare_places(members: Members) -> Found:
    """Return what find() does where no rank waits for others in torch's own code."""
    others = {place: ranks for place, ranks in members.items() if place.at is not At.BUSY}
    if not others:
        return set(), ["all ranks are busy: they work, or spin as GPUs and MPI let them"]
    common = majority(members)
    odd = {place: ranks for place, ranks in others.items() if place != common} if common else {}
    return numbers(odd), sentences(odd, "not where most are")


def behind(members: Members) -> Found:
    """Return which ranks have not entered a collective that others of their process group have, and sentences of it.

    They are odd where the number counts collectives alone, as NCCL's does, and others are ahead in every group.
    """
    ranks = [one for some in members.values() for one in some]
    numbers_of: dict[tuple[str, str], dict[int, list[int]]] = {}
    for one in ranks:
        for number, names, group in one.entered:
            numbers_of.setdefault((names, group), {}).setdefault(number, []).append(one.rank)
    late: set[int] = set()
    told = []
    same = Counter(names for names, _ in numbers_of)
    for (names, group), found in sorted(numbers_of.items(), key=lambda one: sum(map(len, one[1].values()))):
        last = max(found)
        of_ranks = f" of ranks {names}" if len(numbers_of) > 1 else ""
        of_group = f" (group {group})" if same[names] > 1 else ""
        others = f"rank {found[last][0]}" if len(found[last]) == 1 else "others"
        for number, some in sorted(found.items()):
            if number < last:
                late.update(some)
                told.append(f"{ranks_in_words(some)} at sequence {number:,}{of_ranks}{of_group}, {others} at {last:,}")
    ahead = {one.rank for one in ranks} - late
    if not all(one.spins for one in ranks) or len(late) > len(ahead):
        late = set()
    return late, told


def sequences(members: Members) -> set[tuple[object, ...]]:
    """Return how far ranks are, each way once."""
    return {one.entered for ranks in members.values() for one in ranks}


def meeting(waiting: Iterable[Place]) -> str:
    """Return in words where ranks wait for others."""
    names = sorted({one.collective for one in waiting} - {""})
    return f"in {' or '.join(names)}, where others wait" if names else "at the end of the script, where others are"


def own_words(place: Place) -> str:
    """Return in words where ranks wait."""
    if place.at is At.ENDED:
        return str(place.at.value)
    return f"in {place.collective} ({place.words.rpartition(' → ')[0].rpartition(' → ')[2]})"


def sentences(members: Members, words: str = "") -> list[str]:
    """Return a sentence for each state of the ranks at some places."""
    by_state: dict[str, list[int]] = {}
    for place, ranks in members.items():
        by_state.setdefault(words or place.at.value, []).extend(one.rank for one in ranks)
    return [f"{ranks_in_words(ranks)} {state}" for state, ranks in by_state.items()]


def numbers(members: Members) -> set[int]:
    """Return the ranks at some places."""
    return {one.rank for ranks in members.values() for one in ranks}


def majority(members: Members) -> Place | None:
    """Return the place of more than half of the ranks, if there is one."""
    largest = max(members, key=lambda place: len(members[place]))
    return largest if 2 * len(members[largest]) > len(numbers(members)) else None


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return `rank 3 is`, or `ranks 0-2,5 are`."""
    found = sorted(ranks)
    return f"rank {found[0]} is" if len(found) == 1 else f"ranks {format_ranges(found, SHOWN)} are"


BUSY = 0.3  # of a processor: a main thread that uses more is at work, or spins
IDLE = 0.1  # of a processor: one that uses less waits
SHOWN_CHILDREN = 3
NATIVE = "native code, which holds the interpreter"
FREE = (At.BUSY, At.LOADER, At.ELSEWHERE, At.STOPPED, At.KERNEL)
FAILED_AT = "{}, line {}, in {}"
FAILED = re.compile(r"(.*), line (\d+), in (.*)")


def picture(ranks: Sequence[Rank]) -> Picture:
    """Return where ranks are, and which are odd."""
    known: dict[tuple[object, ...], Place] = {}  # the many ranks at one place are looked at once
    members: dict[Place, list[Rank]] = {}
    for one in ranks:
        key = (one.frames, one.state, one.kernel, one.cores >= BUSY, one.cores < IDLE, one.heard, one.ended,
               bool(one.native), tuple(worker._replace(pid=0) for worker in one.workers))
        if key not in known:
            known[key] = place_of(one)
        members.setdefault(known[key], []).append(one)
    odd, findings = find(members)
    groups = [group for place, found in members.items() for group in groups_of(place, found, odd)]
    return Picture(tuple(sorted(groups, key=lambda one: (not one.odd, len(one.ranks), one.ranks))),
                   (*findings, *unshown(ranks)), step_of(ranks))


def groups_of(place: Place, ranks: Sequence[Rank], odd: set[int]) -> Iterator[Group]:
    """Yield the ranks at one place: those that are odd, and those that are not."""
    for is_odd in (True, False):
        if some := [one for one in ranks if (one.rank in odd) == is_odd]:
            numbers = {one.entered[0].number if len(one.entered) == 1 else 0 for one in some}
            yield Group(place, tuple(one.rank for one in some), tuple(dict.fromkeys(one.host for one in some)), is_odd,
                        numbers.pop() if len(numbers) == 1 and place.at is At.COLLECTIVE else 0)


def unshown(ranks: Iterable[Rank]) -> Iterator[str]:
    """Yield why native code hides the stacks of ranks, and of processes that they have forked."""
    hidden: dict[str, list[int]] = {}
    for one in ranks:
        for reason in {one.native, *(worker.native for worker in one.workers)} - {""}:
            hidden.setdefault(reason, []).append(one.rank)
    for reason, some in hidden.items():
        yield f"what native code hides of rank{'s' * (len(some) > 1)} {format_ranges(some, SHOWN)}: {reason}"


def step_of(ranks: Iterable[Rank]) -> str:
    """Return in words at which steps ranks are, and for how long."""
    stepping = [one for one in ranks if one.steps]
    if not stepping:
        return ""
    first, last = min(one.steps for one in stepping), max(one.steps for one in stepping)
    age = format_duration(min(one.step_age_s for one in stepping))
    return f"step {first:,} for {age}" if first == last else f"steps {first:,} to {last:,}, the last one for {age}"


def places_of(ranks: Iterable[Rank]) -> dict[int, str]:
    """Return in words where ranks are."""
    return {one.rank: place.words or str(place.at.value) for one in ranks for place in [place_of(one)]}


def calls_of(ranks: Iterable[Rank]) -> dict[int, str]:
    """Return the script's innermost line of each rank that waits for others there, as reports have it."""
    return {one.rank: FAILED_AT.format(*found[-1][1:]) for one in ranks if place_of(one).at is At.COLLECTIVE
            and (found := [frame for frame in one.frames if frame.file == one.frames[0].file])}


def free(ranks: Iterable[Rank]) -> set[int]:
    """Return the ranks that are seen to wait for no others, so that others may have waited for them."""
    return {one.rank for one in ranks if place_of(one).at in FREE
            and not any(frame.kind is FrameKind.OURS for frame in stack.list_called_frames(one.frames))}


def failed_at(one: Rank, where: str) -> Rank:
    """Return a rank whose script has raised, as it was before: `where` is the line, as in reports."""
    found = FAILED.fullmatch(where)
    file, line, function = found.groups() if found else (where, "0", "")
    return one._replace(frames=(Frame(FrameKind.SCRIPT, file, int(line), function),), state="S", kernel="", cores=0.0)


def place_of(one: Rank) -> Place:
    """Return where a rank is."""
    at, name = what_at(one), stack.find_collective(one.frames)
    if at is At.ENDED:
        return Place(at, "")
    words = NATIVE if one.native and not one.frames else stack.format_short(one.frames)
    if one.kernel and at in (At.KERNEL, At.SILENT, At.ELSEWHERE):
        words = " → ".join(filter(None, (words, f"{one.kernel}()")))
    if at in (At.LOADER, At.ELSEWHERE):
        working = [worker for worker in one.workers if not stack.is_idle_worker(worker.frames)]
        words = "; ".join([words, *dict.fromkeys(map(child, working[:SHOWN_CHILDREN]))])
    return Place(at, words, name if at is At.COLLECTIVE else "")


def what_at(one: Rank) -> At:
    """Tell what a rank is at."""
    states = {"": At.GONE, "X": At.GONE, "Z": At.GONE, "T": At.STOPPED, "t": At.STOPPED}
    if not one.heard:
        return At.LOST
    if one.state in states:
        return states[one.state]
    if one.ended:
        return At.ENDED
    if not one.frames and (one.state == "D" or not one.native):
        return At.KERNEL if one.state == "D" else At.SILENT
    name = stack.find_collective(one.frames)
    if name and (name != stack.BACKWARD_NAME or one.cores < IDLE):
        return At.COLLECTIVE
    if one.cores >= BUSY or name:
        return At.BUSY
    return At.LOADER if stack.is_waiting_for_loader(one.frames) else At.ELSEWHERE


def child(worker: Worker) -> str:
    """Return in words where a process is that a rank has forked."""
    how = {"T": "stopped", "t": "stopped", "D": "held by the kernel"}.get(worker.state, "")
    kernel = f"{worker.kernel}()" if worker.kernel else ""
    words = NATIVE if worker.native else stack.format_short(worker.frames)
    return f"its child: {' → '.join(filter(None, (worker.program, words, kernel, how)))}"
