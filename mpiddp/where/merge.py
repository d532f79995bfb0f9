"""Ranks that stand at one place, merged, and which of them are odd. Pure functions, for a hundred thousand ranks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from . import stack
from .stack import Frame, Kind

BUSY = 0.3  # of a processor: a main thread that uses more is at work, or spins
IDLE = 0.1  # of a processor: one that uses less waits
SHOWN_CHILDREN = 3
BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")


class At(enum.Enum):
    """What a rank is at, as far as can be seen from outside."""

    LOST = "out of reach: the sentinel does not answer"
    GONE = "gone"
    STOPPED = "stopped, by SIGSTOP or a debugger"
    KERNEL = "held by the kernel"
    SILENT = "silent: it has printed no stack"
    ENDED = "at the end of the script"
    COLLECTIVE = "waiting"
    BUSY = "busy"
    LOADER = "waiting for a worker of its DataLoader"
    ELSEWHERE = "standing"


HELD = (At.LOST, At.GONE, At.STOPPED, At.KERNEL)
WAITING = (At.COLLECTIVE, At.ENDED)


class Worker(NamedTuple):
    """A process that a rank has forked: a DataLoader's worker, or another one. Fields as in Rank."""

    pid: int
    frames: tuple[Frame, ...] = ()
    state: str = ""
    kernel: str = ""


class Rank(NamedTuple):
    """A rank as its sentinel has seen it.

    `frames` is the stack of its main thread, outermost first, empty where it did not answer. `state` is the letter of
    /proc/PID/stat, empty for a process that is gone, `kernel` the kernel's function that it sleeps in. `cores` is how
    much of a processor its main thread used, or waited for, while it was looked at. `busy_s` is what it and its
    descendants have used since their start, `moved_bytes` what they have read and written. `heard` tells whether its
    sentinel has answered, `ended` that its script has come to its end.
    """

    rank: int
    host: str
    frames: tuple[Frame, ...] = ()
    state: str = ""
    kernel: str = ""
    cores: float = 0.0
    busy_s: float = 0.0
    moved_bytes: int = 0
    heard: bool = True
    ended: bool = False
    workers: tuple[Worker, ...] = ()


class Place(NamedTuple):
    """Where ranks are: the name of the collective that they wait in, empty for none, and their line in words."""

    at: At
    words: str
    collective: str = ""


class Group(NamedTuple):
    """Ranks at one place, on hosts."""

    place: Place
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    odd: bool = False


class Picture(NamedTuple):
    """Where the ranks of a job are: groups, the odd ones first, then the small ones; and sentences about them."""

    groups: tuple[Group, ...]
    findings: tuple[str, ...]

    @property
    def odd(self) -> Group | None:
        """The first group that is odd, if there is one."""
        return self.groups[0] if self.groups and self.groups[0].odd else None


def picture(ranks: Sequence[Rank]) -> Picture:
    """Return where ranks are, and which are odd."""
    known: dict[tuple[object, ...], Place] = {}  # the many ranks at one place are looked at once
    members: dict[Place, list[Rank]] = {}
    for one in ranks:
        key = (one.frames, one.state, one.kernel, one.cores >= BUSY, one.cores < IDLE, one.heard, one.ended,
               tuple(worker._replace(pid=0) for worker in one.workers))
        if key not in known:
            known[key] = place_of(one)
        members.setdefault(known[key], []).append(one)
    groups = [Group(place, tuple(one.rank for one in group), tuple(dict.fromkeys(one.host for one in group)))
              for place, group in members.items()]
    odd, findings = find(groups)
    groups = [group._replace(odd=group.place in odd) for group in groups]
    return Picture(tuple(sorted(groups, key=lambda one: (not one.odd, len(one.ranks), one.ranks))), tuple(findings))


def candidates(ranks: Iterable[Rank]) -> Iterator[tuple[int, str]]:
    """Yield the ranks for which others may have waited, and in words where they are."""
    for one in ranks:
        place = place_of(one)
        if place.at not in WAITING and not any(frame.kind is Kind.OURS for frame in stack.after_script(one.frames)):
            yield one.rank, place.words or place.at.value


def place_of(one: Rank) -> Place:
    """Return where a rank is."""
    at, name = what_at(one), stack.collective(one.frames)
    if at is At.ENDED:
        return Place(at, "")
    words = stack.in_words(one.frames)
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
    if not one.frames:
        return At.KERNEL if one.state == "D" else At.SILENT
    name = stack.collective(one.frames)
    if name and (name != stack.BACKWARD_NAME or one.cores < IDLE):
        return At.COLLECTIVE
    if one.cores >= BUSY or name:
        return At.BUSY
    return At.LOADER if stack.waits_for_loader(one.frames) else At.ELSEWHERE


def child(worker: Worker) -> str:
    """Return in words where a process is that a rank has forked."""
    how = {"T": "stopped", "t": "stopped", "D": "held by the kernel"}.get(worker.state, "")
    kernel = f"{worker.kernel}()" if worker.kernel else ""
    return f"its child: {' → '.join(filter(None, (stack.in_words(worker.frames), kernel, how)))}"


def find(groups: Sequence[Group]) -> tuple[set[Place], list[str]]:
    """Return which places are odd, and sentences about them: what follows from one look, and no more."""
    held = [one for one in groups if one.place.at in HELD]
    silent = [one for one in groups if one.place.at is At.SILENT]
    told = sentences([*held, *silent])
    rest = [one for one in groups if one not in held and one not in silent]
    odd, findings = compare(rest) if rest and not (held and len(rest) == 1) else (set(), [])
    return odd | (places(held) if rest else set()), told + findings


def compare(groups: Sequence[Group]) -> tuple[set[Place], list[str]]:
    """Return what find() does of ranks that nothing holds."""
    waiting = [one for one in groups if one.place.at in WAITING]
    busy = [one for one in groups if one.place.at is At.BUSY]
    others = [one for one in groups if one not in waiting and one not in busy]
    if waiting and others:
        loading = [one for one in others if one.place.at is At.LOADER]
        standing = [one for one in others if one not in loading]
        return places(others), [*sentences(loading), *sentences(standing, f"not {meeting(waiting)}")]
    if waiting and busy:
        words = f"busy, and not {meeting(waiting)}: slow, or spinning as GPUs and MPI let them"
        return places(busy) if 2 * count(busy) <= count(groups) else set(), sentences(busy, words)
    if waiting:
        return compare_waiting(waiting)
    if not others:
        return set(), ["all ranks are busy: they work, or spin as GPUs and MPI let them"]
    common = majority(groups)
    odd = [one for one in others if one is not common] if common else []
    return places(odd), sentences(odd, "not where most are")


def compare_waiting(groups: Sequence[Group]) -> tuple[set[Place], list[str]]:
    """Return what find() does where all ranks wait for others."""
    common = majority(groups)
    if len(groups) == 1:
        where = own_words(groups[0])
        return set(), [f"all ranks are {where}: where that lasts, the network or a device stands still"
                       if groups[0].place.at is At.COLLECTIVE else f"all ranks are {where}"]
    if common is None or any(one.place.collective in BETWEEN_TWO for one in groups):
        return set(), [f"{ranks_in_words(one.ranks)} {own_words(one)}" for one in groups]
    odd = [one for one in groups if one is not common]
    lines = [f"{ranks_in_words(one.ranks)} {own_words(one)}" for one in odd]
    return places(odd), [*lines, f"the others are {own_words(common)}"]


def meeting(waiting: Iterable[Group]) -> str:
    """Return in words where ranks wait for others."""
    names = sorted({one.place.collective for one in waiting} - {""})
    return f"in {' or '.join(names)}, where others wait" if names else "at the end of the script, where others are"


def own_words(group: Group) -> str:
    """Return in words where ranks of a group wait."""
    at, words, name = group.place
    return at.value if at is At.ENDED else f"in {name} ({words.rpartition(' → ')[0].rpartition(' → ')[2]})"


def sentences(groups: Iterable[Group], words: str = "") -> list[str]:
    """Return a sentence for each state of the ranks in some groups."""
    by_state: dict[str, list[int]] = {}
    for one in groups:
        by_state.setdefault(words or one.place.at.value, []).extend(one.ranks)
    return [f"{ranks_in_words(ranks)} {state}" for state, ranks in by_state.items()]


def places(groups: Iterable[Group]) -> set[Place]:
    """Return the places of groups."""
    return {one.place for one in groups}


def count(groups: Iterable[Group]) -> int:
    """Return how many ranks are in groups."""
    return sum(len(one.ranks) for one in groups)


def majority(groups: Sequence[Group]) -> Group | None:
    """Return the group that has more than half of the ranks, if there is one."""
    largest = max(groups, key=lambda one: len(one.ranks))
    return largest if 2 * len(largest.ranks) > count(groups) else None


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3 is`, or `ranks 0-2,5 are`."""
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {ranges(ranks)} are"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as 0-2,5: a long list only in part."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    words = ["-".join(map(str, part)) for part in parts]
    return ",".join(words[:20]) + (f" and {len(words) - 20:,} more ranges" if len(words) > 20 else "")
