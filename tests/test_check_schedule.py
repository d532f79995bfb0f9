"""The schedule of a check: which ranks meet, and ranks that do not reply. No rank is real but rank 0."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

from mpiddp.check import PASSES, schedule, steps
from mpiddp.check.bench import machine, network, pairs, timeouts
from mpiddp.check.bench.network import Benchmark, LinkResult, Transfer
from mpiddp.check.bench.rank import RankResult
from mpiddp.check.schedule import Place, Schedule
from mpiddp.check.stats.findings import find_all
from mpiddp.check.stats.schema import Measurements, RankInfo
from mpiddp.check.stats.tournament import split_into_turns
from mpiddp.check.steps import Answer, Ranks, Reply, StepResult
from tests.messages import message

Part = Callable[..., Any]
LOCAL = 4  # ranks of a node
GOOD = LinkResult(1e-4, (Transfer(10**9, 0.0, 1.0),), None)
SLOW = LinkResult(1e-4, (Transfer(10**9, 0.0, 2.0),), None)


class Failure(NamedTuple):
    """What a piece of work returns to stand for an error that it raises."""

    text: str


class FakeRanks(Ranks):
    """Ranks of this process alone: `parts` are what each piece of work returns, for a rank and its arguments.

    None stands for another rank that did not join in time. A rank that returns LOST does not reply.
    """

    LOST = object()

    def __init__(self, size: int, parts: Mapping[str, Part]) -> None:
        self.replies: list[tuple[int, Reply]] = []
        self.worked: list[tuple[str, int, tuple[Any, ...]]] = []
        self.answers: list[tuple[int, Answer]] = []
        self.parts, self.broken = parts, set[int]()
        super().__init__(cast(Any, SimpleNamespace(size=size, rank=0, issend=self.issend, replies=self.replies)))

    def issend(self, answer: Answer, rank: int, _: int) -> Any:
        """Note rank 0's answer; each rank receives it at once."""
        self.answers.append((rank, answer))
        return SimpleNamespace(Test=lambda: True)

    def step(self, work: Part, arguments: Mapping[int, tuple[Any, ...]], limit_s: float, doing: str) -> StepResult:
        """Let the others work, one after the other, and then rank 0."""
        name = work.__name__.lstrip("_")

        def perform(rank: int) -> Any:
            self.worked.append((name, rank, arguments[rank]))
            result = self.parts[name](rank, *arguments[rank])
            if isinstance(result, Failure) or not getattr(result, "computes", True):
                self.broken.add(rank)
            return result

        def perform_on_rank_0(*_: object) -> Any:
            result = perform(0)
            if isinstance(result, Failure):
                raise RuntimeError(result.text)
            if result is None:
                raise TimeoutError
            self.can_meet = 0 not in self.broken
            return result

        for rank in range(1, self.size):
            result = perform(rank) if rank in arguments and rank not in self.lost else None
            if result is not self.LOST:
                failure = f"{doing}: RuntimeError: {result.text}" if isinstance(result, Failure) else ""
                self.replies.append((rank, Reply(self._number + 1, None if failure else result, failure,
                                                 rank not in self.broken)))
        return super().step(perform_on_rank_0, arguments, limit_s, doing)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nobody for long, and receive what stands in line."""
    monkeypatch.setattr(steps, "REPLY_GRACE_S", 0.0)
    monkeypatch.setattr(schedule, "PASS_PAUSE_S", 0.0)
    monkeypatch.setattr(schedule, "MEETING_TIMEOUT_S", 0.1)
    monkeypatch.setattr(steps, "receive_message", lambda comm, _: comm.replies.pop(0) if comm.replies else None)


def identify(_: float) -> None:
    """Stand for a piece of work of that name."""


def test_a_rank_that_was_lost_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for it to receive an answer."""
    ranks = FakeRanks(3, {"identify": lambda rank: FakeRanks.LOST if rank == 1 else rank})
    assert ranks.step(identify, {0: (), 1: (), 2: ()}, 0.0, "identification").results == {0: 0, 2: 2}
    monkeypatch.setattr(steps, "REPLY_GRACE_S", 600.0)
    began = time.monotonic()
    assert ranks.step(identify, {0: (), 1: (), 2: ()}, 0.0, "identification").results == {0: 0, 2: 2}
    assert time.monotonic() - began < 300
    assert {rank for rank, _ in ranks.answers} == {2}
    assert ranks.out == {1} and ranks.lost.keys() == {1}


def test_a_late_reply_is_no_reply_to_a_later_step() -> None:
    ranks = FakeRanks(3, {"identify": lambda rank: FakeRanks.LOST if rank == 1 else rank})
    ranks.replies.append((1, Reply(7, "late", "", True)))
    seen = ranks.step(identify, dict.fromkeys(range(3), ()), 0.0, "identification")
    assert seen.done == {0, 2} and ranks.lost.keys() == {1}


def test_an_answer_is_kept_until_it_is_received() -> None:
    """MPI reads its memory until then."""
    is_received = False
    ranks = FakeRanks(2, {"identify": lambda rank: rank})
    ranks._comm = cast(Any, SimpleNamespace(size=2, rank=0, replies=ranks.replies, issend=lambda *_: (
        SimpleNamespace(Test=lambda: is_received))))
    ranks.step(identify, {}, 0.0, "identification")
    assert len(ranks._sent) == 1
    is_received = True
    ranks.step(identify, {}, 0.0, "identification")
    assert ranks._sent == []


def test_each_rank_knows_who_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that takes no part, and receives rank 0's answer."""
    answer = Answer(frozenset({1}), frozenset({3}), 7.0)
    sent: list[Reply] = []
    comm = SimpleNamespace(rank=2, size=4, isend=lambda reply, *_: (
        sent.append(reply) or SimpleNamespace(wait=lambda: None)))  # type: ignore[func-returns-value]
    monkeypatch.setattr(steps, "receive_message", lambda *_: (0, answer))
    ranks = Ranks(cast(Any, comm))
    assert ranks.step(identify, {0: (), 1: (), 3: ()}, 9.0, "identification") == StepResult({}, frozenset({0, 3}), 7.0)
    assert sent == [Reply(1, None, "", True)]
    assert ranks.out == {3}


def test_a_rank_does_not_wait_for_rank_0_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(steps, "receive_message", lambda *_: None)
    ranks = Ranks(cast(Any, SimpleNamespace(rank=1, size=2, isend=lambda *_: None)))
    with pytest.raises(TimeoutError, match=message("check/no_answer", seconds=1)):
        ranks.step(identify, {}, 9.0, "identification")


@pytest.mark.parametrize("ends", ["hangs", "fails"])
def test_a_device_that_tells_nothing_of_itself_is_of_its_types_kind(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank says who it is all the same."""
    def ask(*_: object) -> Any:
        if ends == "fails":
            raise RuntimeError("CUDA error: unknown error")
        time.sleep(600)

    monkeypatch.setattr(timeouts, "DEVICE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(timeouts, "use_device", lambda _: None)
    monkeypatch.setattr(machine, "rank_kind", ask)
    place = cast(Any, SimpleNamespace(node_rank=1, local_rank=2))
    began = time.monotonic()
    found = machine.describe_rank(place, torch.device("cuda", 2))
    assert (found.node, found.local_rank, found.kind) == (1, 2, "cuda")
    assert time.monotonic() - began < 300


def usual(**others: Part) -> dict[str, Part]:
    """Return what ranks answer of which nothing is odd, but for `others`."""
    return {"measure": lambda *_: RankResult({}, []), "clock": lambda *_: {}, "meet": lambda *_: (None, GOOD),
            "connect": lambda *_: True, "stream": lambda *_: GOOD, "reduce": lambda *_: 0.01, **others}


def named(name: str) -> Part:
    """Return a function of that name."""
    def work() -> None:
        raise AssertionError(name)

    work.__name__ = name
    return work


def prepared(ranks: FakeRanks, device: str = "cuda", machines: str = "") -> Schedule:
    """Return the schedule of ranks, LOCAL on each node; `machines` has a letter for each node's machine."""
    infos = [RankInfo(f"n{rank // LOCAL}", rank // LOCAL, rank % LOCAL, f"{device}:{rank % LOCAL}")
             for rank in range(ranks.size)]
    places = [Place(info.node, machines[info.node] if machines else f"machine {info.node}", device == "cpu")
              for info in infos]
    benchmarks = SimpleNamespace(**{name: named(name) for name in ("clock", "meet", "connect", "stream", "reduce")})
    return Schedule(ranks, places, infos, cast(Any, None), cast(Any, benchmarks))


def checked(
    nodes: int, /, passes: int = PASSES, **others: Part
) -> tuple[FakeRanks, Measurements, dict[str, tuple[str, ...]]]:
    """Return the ranks after a check, what was measured, and the hosts to exclude for each finding."""
    ranks = FakeRanks(nodes * LOCAL, usual(**others))
    measured = prepared(ranks).run_passes(passes, True)
    return ranks, measured, {one.text: one.hosts for one in find_all(measured)}


def met(ranks: FakeRanks, work: str, one: int) -> int:
    """Return in how many of these steps a rank has a part."""
    return sum(one in (rank, arguments[0]) for name, rank, arguments in ranks.worked if name == work)


@pytest.mark.parametrize("slow_passes", range(PASSES + 1))
def test_a_link_and_a_rank_are_accused_that_are_slow_in_every_pass(slow_passes: int) -> None:
    own: Counter[int] = Counter()
    met: Counter[int] = Counter()

    def measure(rank: int, *_: object) -> RankResult:
        own[rank] += 1
        return RankResult({"matrix": 0.5e12 if rank == LOCAL and own[rank] <= slow_passes else 1e12}, [])

    def stream(rank: int, partner: int, *_: object) -> LinkResult:
        is_bad = (rank // LOCAL, partner // LOCAL) == (2, 3)
        met[rank] += is_bad
        return SLOW if is_bad and met[rank] <= slow_passes else GOOD

    found = checked(8, measure=measure, stream=stream)[2]
    assert list(found) == ([
        message("check/slow_rank", host="n1", rank=4, device="cuda:0", metric="matrix product", ratio="0.50",
                peers="31 ranks"),
        message("check/slow_link", sender="n2", receiver="n3", ratio="0.50", links="55 links"),
    ] if slow_passes == PASSES else [])
    assert {*own.values()} == {PASSES}


def test_ranks_alone_measure_no_links() -> None:
    ranks = FakeRanks(LOCAL, usual(measure=lambda *_: RankResult({"matrix": 1e12}, [])))
    measured = prepared(ranks).run_passes(PASSES, False)
    assert measured.by_rank["matrix"][0] == [1e12] * PASSES
    assert measured.links == measured.inside_links == measured.allreduce == {}


def test_one_rank_reduces_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LOCAL", 1)
    ranks, measured, _ = checked(1)
    assert measured.allreduce == {} and met(ranks, "reduce", 0) == 0


def test_nodes_of_one_machine_take_turns() -> None:
    """With what they measure themselves, and none of them is in two meetings at a time."""
    one = prepared(FakeRanks(4 * LOCAL, usual()), "cpu", "abab")
    assert one._turns(range(16)) == [[*range(8)], [*range(8, 16)]]
    assert split_into_turns({(0, 1): {"a", "b"}, (2, 3): {"a", "b"}}) == [[(0, 1)], [(2, 3)]]


def test_a_device_that_does_not_compute_is_not_asked_again() -> None:
    """Each time may take a minute."""
    looks: Counter[int] = Counter()

    def own(rank: int, *_: object) -> RankResult:
        looks[rank] += 1
        shm = {"shm-write": 1e8 if rank == 2 * LOCAL else 1e9} if rank % LOCAL == 0 else {}
        return RankResult(shm, ["cuda:0: a fault"] * (rank == LOCAL), rank != LOCAL)

    _, _, found = checked(6, measure=own)
    assert looks[LOCAL] == 1 and looks[2 * LOCAL] == PASSES
    assert [words.partition(":")[0] for words in found] == ["n1", "n2"]


def test_where_nothing_is_odd_all_meet() -> None:
    ranks, figures, found = checked(4)
    assert found == {}
    assert len(figures.links["bandwidth"]) == 4 * 3
    assert len(figures.inside_links["bandwidth"]) == 4 * LOCAL * (LOCAL - 1)
    assert met(ranks, "meet", 8) == PASSES * 2 * 3


@pytest.mark.parametrize("streams", [False, True])
def test_what_two_ranks_do_when_they_meet(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[object, Benchmark]] = []
    monkeypatch.setattr(network, "benchmark_link", lambda transport, *rest: done.append((transport, rest[-1])) or GOOD)
    monkeypatch.setattr(pairs, "mpi_transport", lambda *_: "MPI")
    one = works_on("cpu")
    one._groups = cast(Any, SimpleNamespace(transport=lambda *_: "backend"))
    assert one.meet(time.monotonic() + 1, 1, 0.1, streams) == (GOOD, GOOD)
    assert done == [("MPI", Benchmark.FULL), ("backend", Benchmark.LATENCY if streams else Benchmark.FULL)]


def test_a_card_that_is_not_the_first_ranks_is_seen() -> None:
    """Rank 9, the second one of n2, reaches no other node: its first rank does."""
    ranks, figures, found = checked(8, stream=lambda rank, partner, _, whole: (
        None if not whole and 9 in (rank, partner) else GOOD))
    assert found == {message("check/unreachable_node", host="n2", others="5 other nodes"): ("n2",)}
    assert figures.unreachable and not figures.unreachable_inside
    assert met(ranks, "stream", 9) == 2 * (5 + PASSES * (LOCAL - 1))


def test_a_rank_that_does_not_connect_does_not_stream() -> None:
    ranks, _, found = checked(8, connect=lambda rank, partner: None if 9 in (rank, partner) else True)
    assert found == {message("check/unreachable_node", host="n2", others="5 other nodes"): ("n2",)}
    assert not [1 for name, rank, arguments in ranks.worked if name == "stream" and rank == 9 and not arguments[2]]


@pytest.mark.parametrize(("deaf", "words"), [
    ({(5, 6)}, message("check/unreachable_rank", host="n1", rank="rank 5 (cuda:1)", others="rank 6 (cuda:2)")),
    ({(4, 5), (5, 6), (5, 7)}, message("check/unreachable_rank", host="n1", rank="rank 5 (cuda:1)", others="3 others")),
    ({(4, 5), (6, 7)}, message("check/unreachable_ranks", host="n1", count=2)),
])
def test_ranks_of_a_node_between_which_nothing_comes_through(deaf: set[tuple[int, int]], words: str) -> None:
    _, figures, found = checked(3, stream=lambda rank, partner, _, whole: (
        None if whole and (min(rank, partner), max(rank, partner)) in deaf else GOOD))
    assert found == {words: ("n1",)}
    assert figures.unreachable_inside == deaf


def test_a_node_of_many_ranks_that_reach_nobody_takes_no_long_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LOCAL", 64)
    ranks, _, _ = checked(1, stream=lambda *_: None)
    assert met(ranks, "stream", 9) == 2 * 5


def test_an_all_reduce_without_an_end_is_told() -> None:
    _, figures, found = checked(2, reduce=lambda rank, size, _: 0.01 if size < 2**12 or rank == 1 else None)
    assert found == {message("check/incomplete_allreduce", size="4 KiB", count=1, ranks="8 ranks"): ()}
    assert figures.incomplete_allreduce == (2**12, 1)
    broken = Failure("x")
    _, figures, found = checked(2, reduce=lambda rank, *_: broken if rank == 1 else None)
    assert found == {"n0: all-reduce of 1,024 bytes: RuntimeError: x": ("n0",)}


def test_a_broken_device_is_told_and_its_partners_are_not() -> None:
    """What it answers to its first meeting keeps it from the next one."""
    def meet(rank: int, partner: int, *_: object) -> Any:
        if 8 in (rank, partner):
            return Failure("CUDA error") if rank == 8 else None
        return (None, GOOD)

    ranks, figures, found = checked(8, meet=meet)
    assert found == {"n2: link benchmark with another node: RuntimeError: CUDA error": ("n2",)}
    assert figures.unreachable == frozenset()
    assert met(ranks, "meet", 8) == 2
    assert met(ranks, "reduce", 8) == 0


def test_a_device_that_does_not_compute_meets_nobody() -> None:
    ranks, figures, found = checked(4, measure=lambda rank, *_: RankResult({}, ["broken"] * (rank == 8), rank != 8))
    assert found == {"n2: broken": ("n2",)}
    assert met(ranks, "meet", 8) == met(ranks, "stream", 8) == met(ranks, "reduce", 8) == 0
    assert len(figures.links["bandwidth"]) == 3 * 2


def test_nobody_is_told_to_meet_a_rank_that_is_lost() -> None:
    ranks, figures, found = checked(2, stream=lambda rank, partner, *_: (
        FakeRanks.LOST if rank == 5 else None if partner == 5 else GOOD))
    assert list(found) == [
        message("check/no_reply", host="n1", seconds=0, doing="link benchmark within its node")]
    assert met(ranks, "stream", 5) == 2
    assert figures.unreachable_inside == frozenset()


def works_on(device: str) -> pairs.PairBenchmarks:
    """Return a rank's part on a device, which needs no job."""
    found = pairs.PairBenchmarks.__new__(pairs.PairBenchmarks)
    found._device, found._silent_over_mpi = torch.device(device), set()
    found._comm, found._rank = cast(Any, None), 0
    return found


def test_a_device_whose_backend_waits_holds_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL waits for another rank when the two first meet, without a deadline."""
    used: list[tuple[str, int]] = []
    monkeypatch.setattr(pairs, "BACKEND_GRACE_S", 0.05)
    monkeypatch.setattr(timeouts, "use_device", lambda name: used.append((name, threading.get_ident())))
    one, ident = works_on("cuda:3"), threading.get_ident
    here = one._on_device(time.monotonic() + 5, ident)
    assert used == [("cuda:3", here)] and here != ident()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        one._on_device(time.monotonic() + 0.1, lambda: time.sleep(600))
    assert time.monotonic() - began < 300
    assert works_on("cpu")._on_device(time.monotonic(), ident) == ident()
    assert len(used) == 2


def test_an_error_of_mpi_does_not_say_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: object) -> None:
        raise RuntimeError("MPI_ERR_OTHER: known error not in list")

    monkeypatch.setattr(network, "benchmark_link", meet)
    one = works_on("cpu")
    assert one._over_mpi(time.monotonic() + 1, 1, 0.1) is None
    assert one._silent_over_mpi == {1}
