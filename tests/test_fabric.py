"""Rank 0's part in a check: whom it lets meet, and what it makes of ranks that do not answer. No rank is real."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mpiddp.check import crew, fabric, inspection, works
from mpiddp.check.crew import Crew, Trouble
from mpiddp.check.history import OwnPast
from mpiddp.check.inspection import QUICK, Extent, Inspection
from mpiddp.check.progress import Progress
from mpiddp.check.works import Met
from mpiddp.compare.doubt import LOOKS
from mpiddp.compare.figures import Figures, Who
from mpiddp.compare.judge import judge
from mpiddp.errors import LonelyLaunchError
from mpiddp.measure import deadlines
from mpiddp.measure.meeting import Pace, Parts, Trial, Ways
from mpiddp.measure.own import Own

Part = Callable[..., Any]
LOCAL = 4  # ranks of a node
WHOLE = Extent()
FULL = (Trial(10**9, 0.0, 1.0),)
WAYS = Ways(1e-4, FULL, FULL, -1.0)
SLOWER = (Trial(10**9, 0.0, 2.0),)
SLOW = Ways(1e-4, FULL, SLOWER, -1.0)


class Ranks(Crew):
    """Ranks in this process: `works` are what each piece of work returns, for a rank and its arguments.

    One that returns LOST does not answer.
    """

    LOST = object()

    def __init__(self, size: int, works: Mapping[str, Part]) -> None:
        self.answers: list[tuple[int, tuple[int, Any]]] = []
        self.ordered: list[tuple[str, int, tuple[Any, ...]]] = []
        self.parts = works
        self.comm: Any = SimpleNamespace(size=size, issend=self.issend, answers=self.answers)
        ours = {name: self.on_rank_0(name) for name in works}
        super().__init__(self.comm, ours, lambda rank: f"rank {rank} on n{rank}")

    def on_rank_0(self, name: str) -> Part:
        """Return rank 0's part in a piece of work, which takes a deadline first."""
        return lambda _, *arguments: self.perform(name, 0, arguments)

    def perform(self, name: str, rank: int, arguments: tuple[Any, ...]) -> Any:
        """Return a rank's answer."""
        self.ordered.append((name, rank, arguments))
        return self.parts[name](rank, *arguments)

    def issend(self, order: crew.Order, rank: int, _: int) -> Any:
        """Take an order to a rank, which answers at once."""
        if order.work in self.parts:
            answer = self.perform(order.work, rank, order.arguments)
            if answer is not self.LOST:
                self.answers.append((rank, (order.number, answer)))
        return SimpleNamespace(Test=lambda: True)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nobody for long, and receive what stands in line."""
    monkeypatch.setattr(crew, "GRACE_S", 0.0)
    monkeypatch.setattr(inspection, "APART_S", 0.0)
    monkeypatch.setattr(fabric, "MEETING_LIMIT_S", 0.1)
    monkeypatch.setattr(crew, "receive", lambda comm, _: comm.answers.pop(0) if comm.answers else None)


@pytest.mark.parametrize(("answer", "words"), [
    (Ranks.LOST, "rank 1 on n1"), (None, "rank 1 on n1"), (Trouble("OSError: full"), "rank 1 on n1 (OSError: full)"),
])
def test_a_rank_that_does_not_say_who_it_is_is_why_there_is_no_check(answer: object, words: str) -> None:
    ranks = Ranks(3, {"who": lambda rank: answer if rank == 1 else (Who(f"n{rank}", rank, 0), "")})
    with pytest.raises(LonelyLaunchError) as raised:
        Inspection(ranks, 3, Extent(), Progress(), 0.1)
    assert raised.value.found == (
        f"1 of the check's ranks did not say who they are, for which they had 0.1 s: {words}")


def test_ranks_that_have_answered_hear_of_rank_0_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "REST_S", 0.05)
    sent: list[tuple[str, int]] = []
    ranks = Ranks(3, {"who": lambda rank: Ranks.LOST if rank == 2 else rank})
    answer = ranks.issend

    def issend(order: crew.Order, rank: int, tag: int) -> Any:
        sent.append((order.work, rank))
        return answer(order, rank, tag)

    monkeypatch.setattr(ranks.comm, "issend", issend)
    assert ranks.do("who", {1: (), 2: ()}, 0.3, "to say who it is") == {1: 1}
    assert ranks.lost.keys() == {2}
    assert ("rest", 1) in sent and ("rest", 2) not in sent


def usual(**others: Part) -> dict[str, Part]:
    """Return what ranks answer of which nothing is odd, but for `others`."""
    return {
        "who": lambda rank: (Who(f"n{rank // LOCAL}", rank // LOCAL, rank % LOCAL, f"cuda:{rank % LOCAL}"),
                             f"machine {rank // LOCAL}"),
        "own": lambda *_: Own({}, []), "clock": lambda *_: {}, "meet": lambda *_: Met(None, WAYS),
        "connect": lambda *_: True, "stream": lambda *_: WAYS, "reduce": lambda *_: 0.01, **others}


def checked(
    nodes: int, extent: Extent = WHOLE, /, **others: Part
) -> tuple[Ranks, Figures, dict[str, tuple[str, ...]]]:
    """Return the ranks after a check, its figures, and the hosts to leave out for each finding."""
    ranks = Ranks(nodes * LOCAL, usual(**others))
    figures = Inspection(ranks, nodes * LOCAL, extent, Progress(), 0.1).run(None)
    return ranks, figures, {one.words: one.hosts for one in judge(figures)}


def met(ranks: Ranks, work: str, one: int) -> int:
    """Return in how many of these orders a rank has a part."""
    return sum(one in (rank, arguments[0]) for name, rank, arguments in ranks.ordered if name == work)


@pytest.mark.parametrize(("extent", "stays", "looks"), [
    (QUICK, False, 1), (QUICK, True, LOOKS), (Extent(), False, LOOKS), (Extent(), True, LOOKS)])
def test_a_quick_check_looks_again_as_long_as_something_is_odd(extent: Extent, stays: bool, looks: int) -> None:
    own: Counter[int] = Counter()

    def measure(rank: int, *_: object) -> Own:
        own[rank] += 1
        return Own({"matrix": 5e11 if rank == LOCAL and (own[rank] == 1 or stays) else 1e12}, [])

    figures = Inspection(Ranks(4 * LOCAL, usual(own=measure)), 4 * LOCAL, extent, Progress(), 0.1).run(None)
    assert own[LOCAL] == 1 + looks
    assert bool(judge(figures)) == stays


@pytest.mark.parametrize(("slow_looks", "begun"), [(1, [0.0]), (2, [0.0, 1.0]), (9, [0.0, 1.0, 2.0])])
def test_later_looks_do_not_follow_each_other_at_once(
    slow_looks: int, begun: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a busy moment does not show in all of them; where the first one clears all, nothing is waited for."""
    now = [0.0]
    looks: list[float] = []

    def own(rank: int, _: float, only: frozenset[str] | None) -> Own:
        looks.extend([now[0]] * (rank == LOCAL and only is not None))
        return Own({"matrix": 0.5 if rank == LOCAL and len(looks) < slow_looks else 1.0}, [])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(inspection, "APART_S", 1.0)
    monkeypatch.setattr(inspection, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    checked(4, QUICK, own=own)
    assert looks == begun


@pytest.mark.parametrize(("second_s", "looks"), [(2.2, 3), (2.4, 2)])
def test_what_is_waited_between_later_looks_takes_nothing_of_their_time(
    second_s: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five seconds the first later look takes 0.4, the second more; then there is time for one like that, or not."""
    now, orders = [0.0], 2 * 6  # of a look
    lasts, met = (0.0, 0.4, second_s, second_s), [0]

    def meet(rank: int, *_: object) -> Met:
        now[0] += lasts[met[0] // orders] / orders
        met[0] += 1
        return Met(None, WAYS._replace(latency_s=0.1) if rank in (2 * LOCAL, 3 * LOCAL) else WAYS)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(inspection, "APART_S", 1.0)
    monkeypatch.setattr(inspection, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert checked(4, QUICK, meet=meet)[2]
    assert met[0] == (1 + looks) * orders
    assert now[0] == pytest.approx(1.0 + second_s * (looks - 1))


@pytest.mark.parametrize(("extent", "slow_looks", "looks"), [
    (QUICK, 9, LOOKS), (QUICK, 2, 2), (QUICK, 1, 1), (Extent(), 9, LOOKS), (Extent(), 1, LOOKS)])
def test_one_bad_way_is_told(extent: Extent, slow_looks: int, looks: int) -> None:
    """It takes two later looks to accuse it, also where a check is to be over soon; one of them may clear it."""
    met: Counter[int] = Counter()

    def stream(rank: int, partner: int, *_: object) -> Ways:
        is_bad = (rank // LOCAL, partner // LOCAL) == (0, 1)
        met[rank] += is_bad
        return SLOW if is_bad and met[rank] <= slow_looks else WAYS

    figures = Inspection(Ranks(8 * LOCAL, usual(stream=stream)), 8 * LOCAL, extent, Progress(), 0.1).run(None)
    words = ["n0 to n1: at 0.50 of the median of 55 ways"] if slow_looks > looks else []
    assert [one.words for one in judge(figures)] == words
    assert met[0] == 1 + looks


def test_a_quick_check_looks_again_as_long_as_a_node_is_worse_than_it_was(tmp_path: Path) -> None:
    """All are slow for two looks: nothing is odd beside the others, but would be beside the nodes' own past."""
    looks: Counter[int] = Counter()
    slow = 0

    def own(rank: int, *_: object) -> Own:
        looks[rank] += 1
        return Own({"matrix": 0.85e12 if looks[rank] <= slow else 1e12}, [])

    for slow, accused in ((0, False), (0, False), (0, False), (0, False), (2, False), (9, True)):  # noqa: B007
        looks.clear()
        past = OwnPast(str(tmp_path / "past"))
        figures = Inspection(Ranks(2 * LOCAL, usual(own=own)), 2 * LOCAL, QUICK, Progress(), 0.1).run(past)
        assert judge(figures) == []
        assert any("of its own median" in one.words for one in past.judge(figures)) == accused
        past.keep(figures)
    assert looks[LOCAL] == 1 + LOOKS


def test_a_device_that_does_not_compute_is_not_asked_again() -> None:
    """It would wait for it, and others' figures are in doubt meanwhile."""
    looks: Counter[int] = Counter()

    def own(rank: int, *_: object) -> Own:
        looks[rank] += 1
        shm = {"shm-write": 1e8 if rank in (LOCAL, 2 * LOCAL) else 1e9} if rank % LOCAL == 0 else {}
        return Own(shm, ["cuda:0 has not answered within 10 s"] * (rank == LOCAL), rank != LOCAL)

    _, _, found = checked(6, own=own)
    assert looks[LOCAL] == 1 and looks[2 * LOCAL] == 1 + LOOKS
    assert [words.partition(":")[0] for words in found] == ["n1", "n2"]


def test_where_nothing_is_odd_all_meet() -> None:
    ranks, figures, found = checked(4)
    assert found == {}
    assert len(figures.ways["large"]) == 4 * 3
    assert len(figures.inside["large"]) == 4 * LOCAL * (LOCAL - 1)
    assert met(ranks, "meet", 8) == 2 * 3


@pytest.mark.parametrize("extent", [WHOLE, QUICK])
@pytest.mark.parametrize(("slow_looks", "accused"), [(3, False), (4, True)])
def test_what_ranks_measure_is_looked_at_three_times_more_also_where_meetings_take_long(
    slow_looks: int, accused: bool, extent: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for each rank of a meeting: after the first look at pairs there is no time for another one."""
    now, looks, meetings = [0.0], [0] * 4 * LOCAL, [0]
    monkeypatch.setattr(inspection, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    slow = Ways(1e-4, (Trial(10**9, 0.0, 2.0),), (Trial(10**9, 0.0, 2.0),), -1.0)

    def own(rank: int, *_: object) -> Own:
        looks[rank] += 1
        now[0] += 0.1
        return Own({"matrix": 0.8 if rank == 5 and looks[rank] <= slow_looks else 1.0}, [])

    def meet(rank: int, partner: int, *_: object) -> Met:
        now[0] += 1
        meetings[0] += 1
        return Met(None, slow if 3 * LOCAL in (rank, partner) else WAYS)

    found = checked(4, extent, own=own, meet=meet)[2]
    assert looks[5] == 4
    assert meetings[0] == 2 * 2 * 6
    assert any("rank 5" in words for words in found) == accused, found


@pytest.mark.parametrize(("worse", "over_mpi"), [
    ({"small": SLOWER, "large": SLOWER}, False), ({"large": SLOWER}, False), ({"resent": 0.1}, False),
    ({"latency_s": 1.0}, True), ({"latency_s": 1.0, "large": SLOWER}, True)])
@pytest.mark.parametrize("aged", [False, True])
def test_mpi_is_met_again_where_latency_is_in_doubt(
    worse: dict[str, Any], over_mpi: bool, aged: bool, tmp_path: Path
) -> None:
    """Or where nodes are put beside their past, which knows no doubt of its own about ways."""
    usually = WAYS._replace(resent=0.0)
    ranks = Ranks(8 * LOCAL, usual(
        who=lambda rank: (Who(f"n{rank // LOCAL}", rank // LOCAL, rank % LOCAL), f"machine {rank // LOCAL}"),
        meet=lambda rank, *_: Met(None, usually._replace(**worse) if rank == 2 * LOCAL else usually)))
    past = OwnPast(str(tmp_path / "past")) if aged else None
    figures = Inspection(ranks, 8 * LOCAL, WHOLE, Progress(), 0.1).run(past)
    orders = [arguments[3] for name, _, arguments in ranks.ordered if name == "meet"]
    first, later = orders[:8 * 7], orders[8 * 7:]
    assert {*first} == {True} and {*later} == {over_mpi or aged}
    looks = {name: len(figures.ways[name][2, 3]) for name in figures.ways}
    assert looks == dict.fromkeys(("latency", "small", "large", "resent"), 1 + LOOKS) | (
        {} if over_mpi or aged else {"latency": 1})
    assert [one.hosts for one in judge(figures)] == [("n2",)] * len({*worse} - {"small"})


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("over_mpi", [False, True])
def test_what_two_ranks_do_when_they_meet(streams: bool, over_mpi: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[object, Parts]] = []
    monkeypatch.setattr(works, "meet", lambda channel, *rest: done.append((channel, rest[-1])) or WAYS)
    monkeypatch.setattr(works, "OverMpi", lambda *_: "MPI")
    one = works_on("cpu")
    one._pairs = cast(Any, SimpleNamespace(channel=lambda *_: "backend"))
    found = one.meet(time.monotonic() + 1, 1, Pace(), streams, over_mpi)
    assert found == Met(WAYS if over_mpi else None, WAYS)
    assert done == [("MPI", Parts())] * over_mpi + [("backend", Parts(large=not streams))]


def test_a_card_that_is_not_the_first_ranks_is_seen() -> None:
    """Rank 9, the second one of n2, reaches no other node: its first rank does."""
    ranks, figures, found = checked(8, stream=lambda rank, partner, _, whole: (
        None if not whole and 9 in (rank, partner) else WAYS))
    assert found == {"n2: nothing comes through to 3 other nodes": ("n2",)}
    assert figures.unmet and not figures.unmet_inside
    assert met(ranks, "stream", 9) == 2 * (3 + LOCAL - 1)


def test_a_rank_that_does_not_connect_does_not_stream() -> None:
    ranks, _, found = checked(8, connect=lambda rank, partner: None if 9 in (rank, partner) else True)
    assert found == {"n2: nothing comes through to 3 other nodes": ("n2",)}
    assert not [1 for name, rank, arguments in ranks.ordered if name == "stream" and rank == 9 and not arguments[2]]


@pytest.mark.parametrize(("deaf", "words"), [
    ({(5, 6)}, "n1: nothing comes through between rank 5 (cuda:1) and rank 6 (cuda:2)"),
    ({(4, 5), (5, 6), (5, 7)}, "n1: nothing comes through between rank 5 (cuda:1) and 3 others"),
    ({(4, 5), (6, 7)}, "n1: nothing comes through between 2 pairs of its ranks"),
])
def test_ranks_of_a_node_between_which_nothing_comes_through(deaf: set[tuple[int, int]], words: str) -> None:
    _, figures, found = checked(3, stream=lambda rank, partner, _, whole: (
        None if whole and (min(rank, partner), max(rank, partner)) in deaf else WAYS))
    assert found == {words: ("n1",)}
    assert figures.unmet_inside == deaf


def test_a_node_of_many_ranks_that_reach_nobody_takes_no_long_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LOCAL", 64)
    ranks, _, _ = checked(1, stream=lambda *_: None)
    assert met(ranks, "stream", 9) == 2 * 3


def test_an_all_reduce_without_an_end_is_told() -> None:
    _, figures, found = checked(2, reduce=lambda rank, size, _: 0.01 if size < 2**12 or rank == 1 else None)
    assert found == {"an all-reduce of 4 KiB came to its end on 1 of 8 ranks": ()}
    assert figures.unreduced == (2**12, 1)
    _, figures, found = checked(2, reduce=lambda rank, *_: Trouble("reduce: RuntimeError: x") if rank == 1 else None)
    assert found == {"n0: reduce: RuntimeError: x": ("n0",)}


def test_a_broken_device_is_told_and_its_partners_are_not() -> None:
    """What it answers to its first meeting keeps it from the next one."""
    def meet(rank: int, partner: int, *_: object) -> Any:
        return Trouble("meet: RuntimeError: CUDA error") if rank == 8 else None if partner == 8 else Met(None, WAYS)

    ranks, figures, found = checked(8, meet=meet)
    assert found == {"n2: meet: RuntimeError: CUDA error": ("n2",)}
    assert figures.unmet == frozenset()
    assert met(ranks, "meet", 8) == 2
    assert met(ranks, "reduce", 8) == 0


def test_a_device_that_does_not_compute_meets_nobody() -> None:
    ranks, figures, found = checked(4, own=lambda rank, *_: Own({}, ["broken"] * (rank == 8), rank != 8))
    assert found == {"n2: broken": ("n2",)}
    assert met(ranks, "meet", 8) == met(ranks, "stream", 8) == met(ranks, "reduce", 8) == 0
    assert len(figures.ways["large"]) == 3 * 2


def test_nobody_is_told_to_meet_a_rank_that_is_lost() -> None:
    ranks, figures, found = checked(2, stream=lambda rank, partner, *_: (
        Ranks.LOST if rank == 5 else None if partner == 5 else WAYS))
    assert list(found) == ["n1: did not answer: a meeting within its node took more than 0 s"]
    assert met(ranks, "stream", 5) == 2
    assert figures.unmet_inside == frozenset()


def works_on(device: str) -> works.Works:
    """Return a rank's part on a device, which needs no job."""
    found = works.Works.__new__(works.Works)
    found._device, found._silent = torch.device(device), set()
    found._comm = found._env = cast(Any, SimpleNamespace(rank=0))
    return found


def test_a_device_whose_backend_waits_holds_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL waits for another rank when the two first meet, without a deadline."""
    used: list[tuple[str, int]] = []
    monkeypatch.setattr(works, "GIVING_UP_S", 0.05)
    monkeypatch.setattr(deadlines, "use_device", lambda name: used.append((name, threading.get_ident())))
    one, ident = works_on("cuda:3"), threading.get_ident
    here = one._within(time.monotonic() + 5, ident)
    assert used == [("cuda:3", here)] and here != ident()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        one._within(time.monotonic() + 0.1, lambda: time.sleep(5))
    assert time.monotonic() - began < 2
    assert works_on("cpu")._within(time.monotonic(), ident) == ident()
    assert len(used) == 2


def test_an_error_of_mpi_does_not_say_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: object) -> None:
        raise RuntimeError("MPI_ERR_OTHER: known error not in list")

    monkeypatch.setattr(works, "meet", meet)
    one = works_on("cpu")
    assert one._over_mpi(time.monotonic() + 1, 1, Pace()) is None
    assert one._silent == {1}
