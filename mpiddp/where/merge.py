"""Ranks that stand at one place, merged, and which of them are odd. Pure functions, for a hundred thousand ranks."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from . import stack
from .stack import Frame, Kind

BUSY = 0.3  # of a core: a rank that uses more computes
WAITS = 0.1  # of a core: a rank that uses less waits


class At(enum.Enum):
    """What a rank is at, as far as can be seen from outside."""

    LOST = "out of reach: the sentinel does not answer"
    GONE = "gone"
    STOPPED = "stopped, by SIGSTOP or a debugger"
    KERNEL = "held by the kernel"
    SILENT = "silent: no stack came"
    ENDED = "at the end of the script"
    COLLECTIVE = "waiting"
    COMPUTING = "computing"
    LOADER = "waiting for a worker of its DataLoader"
    ELSEWHERE = "standing"


Place = tuple[At, str]  # what ranks are at, and where in words
Standing = Mapping[Place, tuple[int, ...]]  # which ranks are where
HELD = (At.LOST, At.GONE, At.STOPPED, At.KERNEL, At.SILENT)
WAITING = (At.COLLECTIVE, At.ENDED)
BETWEEN_TWO = ("send", "recv", "batch_isend_irecv", "send_object_list", "recv_object_list")


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
    many processors it used, or waited for, while it was looked at, `busy_s` for how long it did so since its start, its
    children too. `steps` is how often it has asked should_stop(), -1
    for never. `heard` tells whether its sentinel has answered, `ended` that its script has come to its end.
    """

    rank: int
    host: str
    frames: tuple[Frame, ...] = ()
    state: str = ""
    kernel: str = ""
    cores: float = 0.0
    busy_s: float = 0.0
    steps: int = -1
    heard: bool = True
    ended: bool = False
    workers: tuple[Worker, ...] = ()


class Group(NamedTuple):
    """Ranks at one place. `ranks` and `hosts` are folded into words by whoever prints them."""

    at: At
    place: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    odd: bool


class Picture(NamedTuple):
    """Where the ranks of a job are: groups, the smallest first, and what follows from them, in sentences."""

    groups: tuple[Group, ...]
    findings: tuple[str, ...]


def picture(ranks: Sequence[Rank]) -> Picture:
    """Return where ranks are, and which are odd."""
    kinds: dict[tuple[object, ...], Place] = {}  # the many ranks at one place are looked at once
    places: dict[Place, list[Rank]] = {}
    for one in ranks:
        key = (one.frames, one.state, one.kernel, one.cores >= BUSY, one.cores < WAITS, one.heard, one.ended,
               one.workers)
        if key not in kinds:
            at = what_at(one)
            kinds[key] = at, place(one, at)
        places.setdefault(kinds[key], []).append(one)
    standing = {key: tuple(one.rank for one in group) for key, group in places.items()}
    odd, findings = find(standing, {one.rank: one.steps for one in ranks})
    groups = [Group(at, words, standing[at, words], tuple(dict.fromkeys(one.host for one in group)),
                    (at, words) in odd)
              for (at, words), group in places.items()]
    return Picture(tuple(sorted(groups, key=lambda one: (not one.odd, len(one.ranks), one.ranks))), findings)


def standing(ranks: Iterable[Rank]) -> Iterator[tuple[int, str]]:
    """Yield the ranks that wait for no other, and in words where they are in their scripts."""
    for one in ranks:
        at = what_at(one)
        if at not in WAITING and (not one.frames or one.frames[-1].kind is not Kind.OURS):
            yield one.rank, place(one, at) or at.value


def what_at(one: Rank) -> At:
    """Tell what a rank is at."""
    if not one.heard:
        return At.LOST
    if one.state in ("", "X", "Z"):
        return At.GONE
    if one.state in ("T", "t"):
        return At.STOPPED
    if one.state == "D" and not one.frames:
        return At.KERNEL
    if one.ended:
        return At.ENDED
    if not one.frames:
        return At.SILENT
    name = stack.collective(one.frames)
    if name and (name != "backward" or one.cores < WAITS):
        return At.COLLECTIVE
    if one.cores >= BUSY:
        return At.COMPUTING
    return At.LOADER if stack.waits_for_loader(one.frames) else At.ELSEWHERE


def place(one: Rank, at: At) -> str:
    """Return in words where a rank is."""
    if at is At.ENDED:
        return ""
    words = stack.in_words(one.frames)
    if one.kernel and at in (At.KERNEL, At.SILENT, At.ELSEWHERE):
        words = f"{words} → {one.kernel}()" if words else f"{one.kernel}()"
    for worker in odd_workers(one):
        where = stack.in_words(worker.frames)
        kernel = f"{worker.kernel}()" if worker.kernel else ""
        how = {"T": "stopped", "t": "stopped", "D": "in the kernel", "Z": "gone"}.get(worker.state, "")
        words += f"; its child {worker.pid}: {' → '.join(part for part in (where, kernel, how) if part)}"
    return words


def odd_workers(one: Rank) -> list[Worker]:
    """Return the children that a rank may wait for: those that do not wait for work themselves."""
    return [worker for worker in one.workers if not stack.is_idle_worker(worker.frames)][:3]


def find(standing: Standing, steps: Mapping[int, int]) -> tuple[set[Place], tuple[str, ...]]:
    """Return which places are odd, and sentences about them: what follows from what is seen, and no more."""
    held = {key for key in standing if key[0] in HELD}
    waiting = {key for key in standing if key[0] in WAITING}
    computing = {key for key in standing if key[0] is At.COMPUTING}
    others = standing.keys() - held - waiting - computing
    if held:
        return held if len(held) < len(standing) else set(), told(standing, held)
    if waiting and others:
        loading = {key for key in others if key[0] is At.LOADER}
        return others, (*told(standing, loading), *told(standing, others - loading, f"not {meeting(waiting)}"))
    if waiting and computing:
        if 2 * count(standing, computing) > count(standing, standing):
            return set(), told(standing, computing, "computing: this is no standstill")
        return computing, told(standing, computing, f"computing, and not {meeting(waiting)} yet: slow, not hanging")
    if waiting:
        return among_waiting(standing, steps)
    if not others:
        return set(), ("all ranks are computing: this is no standstill",)
    odd = set(standing) - {majority(standing)} - computing if majority(standing) else set()
    return odd, told(standing, odd, "not where most are")


def meeting(waiting: Collection[Place]) -> str:
    """Return in words where ranks wait for others."""
    names = sorted({words.rpartition(" → ")[2] for at, words in waiting if at is At.COLLECTIVE})
    return f"in {' or '.join(names)}, where others wait" if names else "at the end of the script, where others are"


def among_waiting(standing: Standing, steps: Mapping[int, int]) -> tuple[set[Place], tuple[str, ...]]:
    """Return which of the places are odd where all ranks wait for others."""
    if len(standing) > 1:
        common = majority(standing)
        odd = set(standing) - {common} if common else set()
        lines = [line for key in sorted(odd or standing, key=lambda key: standing[key])
                 for line in told(standing, [key], own_words(key))]
        return odd, (*lines, f"the others are {own_words(common)}" if common else "these do not meet")
    (at, _), = standing
    if at is At.ENDED:
        return set(), ("every rank is at the end of its script",)
    counts = {number for number in steps.values() if number >= 0}
    if len(counts) > 1:
        behind = [rank for rank, number in steps.items() if number == min(counts)]
        words = f"all wait at one place, but {ranks_in_words(behind)} in step {min(counts):,} of up to {max(counts):,}"
        return set(), (words,)
    name = own_words(next(iter(standing))).split()[1]
    if name in BETWEEN_TWO:
        return set(), (f"all ranks wait in {name}: nobody does what they wait for",)
    return set(), (f"all ranks wait in the same {name}: the network or a device stands still",)


def own_words(key: Place) -> str:
    """Return in words where ranks of one place wait."""
    at, words = key
    line, _, name = words.rpartition(" → ")
    return at.value if at is At.ENDED else f"in {name} ({line.rpartition(' → ')[2]})"


def told(standing: Standing, places: Iterable[Place], words: str = "") -> tuple[str, ...]:
    """Return a sentence for each state of the ranks at some places."""
    by_state: dict[str, list[int]] = {}
    for key in places:
        by_state.setdefault(words or key[0].value, []).extend(standing[key])
    return tuple(f"{ranks_in_words(ranks)} {state}" for state, ranks in by_state.items())


def count(standing: Standing, places: Iterable[Place]) -> int:
    """Return how many ranks are at some places."""
    return sum(len(standing[key]) for key in places)


def majority(standing: Standing) -> Place | None:
    """Return the place where more than half of the ranks are, if there is one."""
    return next((key for key in standing if 2 * len(standing[key]) > count(standing, standing)), None)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3 is`, or `ranks 0-2,5 are`."""
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {ranges(ranks)} are"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as 0-2,5: a long list only in part."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    words = ["-".join(map(str, part)) for part in parts]
    return ",".join(words[:20]) + (f" and {len(words) - 20:,} more ranges" if len(words) > 20 else "")
