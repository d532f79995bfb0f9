"""Which of the ranks are odd: what follows from one look at all of them, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..plan.words import ranges
from .seen import HELD, WAITING, At, Place, Rank

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
    return f"rank {found[0]} is" if len(found) == 1 else f"ranks {ranges(found, SHOWN)} are"
