"""Ranks that stand at one place, merged. Pure functions, for a hundred thousand ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ..plan.words import duration, ranges
from . import stack
from .odd import SHOWN, find
from .seen import At, Group, Picture, Place, Rank, Worker
from .stack import Frame, Kind

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
        yield f"what native code hides of rank{'s' * (len(some) > 1)} {ranges(some, SHOWN)}: {reason}"


def step_of(ranks: Iterable[Rank]) -> str:
    """Return in words at which steps ranks are, and for how long."""
    stepping = [one for one in ranks if one.steps]
    if not stepping:
        return ""
    first, last = min(one.steps for one in stepping), max(one.steps for one in stepping)
    age = duration(min(one.step_age_s for one in stepping))
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
            and not any(frame.kind is Kind.OURS for frame in stack.after_script(one.frames))}


def failed_at(one: Rank, where: str) -> Rank:
    """Return a rank whose script has raised, as it was before: `where` is the line, as in reports."""
    found = FAILED.fullmatch(where)
    file, line, function = found.groups() if found else (where, "0", "")
    return one._replace(frames=(Frame(Kind.SCRIPT, file, int(line), function),), state="S", kernel="", cores=0.0)


def place_of(one: Rank) -> Place:
    """Return where a rank is."""
    at, name = what_at(one), stack.collective(one.frames)
    if at is At.ENDED:
        return Place(at, "")
    words = NATIVE if one.native and not one.frames else stack.in_words(one.frames)
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
    words = NATIVE if worker.native else stack.in_words(worker.frames)
    return f"its child: {' → '.join(filter(None, (worker.program, words, kernel, how)))}"
