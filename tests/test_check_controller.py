"""Rank 0's part in a check: which ranks meet, and ranks that do not reply. No rank is real."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mpiddp.base.errors import LocalLaunchError
from mpiddp.check import PASSES, controller, rpc, workers
from mpiddp.check.bench import machine, network, timeouts
from mpiddp.check.bench.network import Benchmark, LinkResult, Transfer
from mpiddp.check.bench.rank import RankResult
from mpiddp.check.controller import Controller
from mpiddp.check.rpc import RemoteError, RpcController
from mpiddp.check.stats.findings import find_all
from mpiddp.check.stats.schema import Measurements, RankInfo
from mpiddp.check.stats.tournament import split_into_turns
from mpiddp.check.workers import Identity
from tests.messages import message

Part = Callable[..., Any]
LOCAL = 4  # ranks of a node
GOOD = LinkResult(1e-4, (Transfer(10**9, 0.0, 1.0),), None)
SLOW = LinkResult(1e-4, (Transfer(10**9, 0.0, 2.0),), None)


class Ranks(RpcController):
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

    def issend(self, order: rpc.Call, rank: int, _: int) -> Any:
        """Take an order to a rank, which answers at once."""
        if order.method in self.parts:
            answer = self.perform(order.method, rank, order.arguments)
            if answer is not self.LOST:
                self.answers.append((rank, (order.number, answer)))
        return SimpleNamespace(Test=lambda: True)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nobody for long, and receive what stands in line."""
    monkeypatch.setattr(rpc, "REPLY_GRACE_S", 0.0)
    monkeypatch.setattr(controller, "PASS_PAUSE_S", 0.0)
    monkeypatch.setattr(controller, "MEETING_TIMEOUT_S", 0.1)
    monkeypatch.setattr(rpc, "receive_message", lambda comm, _: comm.answers.pop(0) if comm.answers else None)


@pytest.mark.parametrize(("answer", "words"), [
    (Ranks.LOST, "rank 1 on n1"), (None, "rank 1 on n1"),
    (RemoteError("OSError: full"), "rank 1 on n1 (OSError: full)"),
])
def test_a_rank_that_does_not_say_who_it_is_is_why_there_is_no_check(answer: object, words: str) -> None:
    ranks = Ranks(3, {"identify": lambda rank: (
        answer if rank == 1 else Identity(RankInfo(f"n{rank}", rank, 0), "", {}))})
    with pytest.raises(LocalLaunchError) as raised:
        Controller(ranks, 3, 0.1)
    assert raised.value.actual == message("check/ranks_not_ready", count=1, size=3, seconds=0.1, ranks=words)


def test_ranks_that_have_answered_hear_of_rank_0_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "KEEPALIVE_S", 0.05)
    sent: list[tuple[str, int]] = []
    ranks = Ranks(3, {"identify": lambda rank: Ranks.LOST if rank == 2 else rank})
    answer = ranks.issend

    def issend(order: rpc.Call, rank: int, tag: int) -> Any:
        sent.append((order.method, rank))
        return answer(order, rank, tag)

    monkeypatch.setattr(ranks.comm, "issend", issend)
    assert ranks.call("identify", {1: (), 2: ()}, 0.3, "to say who it is") == {1: 1}
    assert ranks.lost.keys() == {2}
    assert ("keepalive", 1) in sent and ("keepalive", 2) not in sent


def test_a_rank_that_was_lost_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has not even received its order."""
    ranks = Ranks(3, {"identify": lambda rank: Ranks.LOST if rank == 1 else rank})
    answer = ranks.issend
    monkeypatch.setattr(ranks.comm, "issend", lambda order, rank, tag: (
        SimpleNamespace(Test=lambda: False) if rank == 1 else answer(order, rank, tag)))
    assert ranks.call("identify", {0: (), 1: (), 2: ()}, 0.0, "to say who it is") == {0: 0, 2: 2}
    monkeypatch.setattr(rpc, "REPLY_GRACE_S", 600.0)
    began = time.monotonic()
    assert ranks.call("identify", {0: (), 1: (), 2: ()}, 0.0, "to say who it is") == {0: 0, 2: 2}
    ranks.dismiss()
    assert time.monotonic() - began < 300


@pytest.mark.parametrize(("silence_s", "patience_s"), [(1.0, 0.1), (0.1, 1.0)])
def test_a_rank_waits_for_rank_0_as_long_as_a_start_may_take(
    silence_s: float, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "CONTROLLER_TIMEOUT_S", silence_s)
    monkeypatch.setattr(rpc, "receive_message", lambda *_: None)
    with pytest.raises(TimeoutError, match=message("check/no_request", seconds=1)):
        rpc.worker_loop(cast(Any, None), {}, patience_s)


@pytest.mark.parametrize("ends", ["hangs", "fails"])
def test_a_device_that_tells_nothing_of_itself_claims_nothing(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank says who it is all the same."""
    def ask(*_: object) -> Any:
        if ends == "fails":
            raise RuntimeError("CUDA error: unknown error")
        time.sleep(600)

    monkeypatch.setattr(timeouts, "DEVICE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(timeouts, "use_device", lambda _: None)
    monkeypatch.setattr(machine, "claimed_rates", ask)
    monkeypatch.setattr(machine, "rank_kind", ask)
    place = cast(Any, SimpleNamespace(node_rank=1, local_rank=2))
    began = time.monotonic()
    found = workers.identify(place, torch.device("cuda", 2), "nccl")
    assert (found.info.node, found.info.local_rank, found.info.kind, found.claims) == (1, 2, "cuda", {})
    assert time.monotonic() - began < 300


def test_hardware_claims_by_the_backend_that_serves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(timeouts, "use_device", lambda _: None)
    monkeypatch.setattr(machine, "claimed_rates", lambda _, backend, __: asked.append(backend) or {})
    monkeypatch.setattr(machine, "rank_kind", lambda *_: "X")
    place = cast(Any, SimpleNamespace(node_rank=0, local_rank=0))
    for device in ("cuda:0", "cpu"):
        workers.identify(place, torch.device(device), "cpu:gloo,cuda:nccl")
    assert asked == ["nccl", "gloo"]


def usual(**others: Part) -> dict[str, Part]:
    """Return what ranks answer of which nothing is odd, but for `others`."""
    return {
        "identify": lambda rank: Identity(
            RankInfo(f"n{rank // LOCAL}", rank // LOCAL, rank % LOCAL, f"cuda:{rank % LOCAL}"),
            f"machine {rank // LOCAL}", {}),
        "measure": lambda *_: RankResult({}, []), "clock": lambda *_: {}, "meet": lambda *_: (None, GOOD),
        "connect": lambda *_: True, "stream": lambda *_: GOOD, "reduce": lambda *_: 0.01, **others}


def checked(
    nodes: int, /, passes: int = PASSES, **others: Part
) -> tuple[Ranks, Measurements, dict[str, tuple[str, ...]]]:
    """Return the ranks after a check, what was measured, and the hosts to exclude for each finding."""
    ranks = Ranks(nodes * LOCAL, usual(**others))
    measured = Controller(ranks, nodes * LOCAL, 0.1).run_passes(passes, True)
    return ranks, measured, {one.text: one.hosts for one in find_all(measured)}


def met(ranks: Ranks, work: str, one: int) -> int:
    """Return in how many of these orders a rank has a part."""
    return sum(one in (rank, arguments[0]) for name, rank, arguments in ranks.ordered if name == work)


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
    ranks = Ranks(LOCAL, usual(measure=lambda *_: RankResult({"matrix": 1e12}, [])))
    measured = Controller(ranks, LOCAL, 0.1).run_passes(PASSES, False)
    assert measured.by_rank["matrix"][0] == [1e12] * PASSES
    assert measured.links == measured.inside_links == measured.allreduce == {}


def test_one_rank_reduces_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LOCAL", 1)
    ranks, measured, _ = checked(1)
    assert measured.allreduce == {} and met(ranks, "reduce", 0) == 0


def test_nodes_of_one_machine_take_turns() -> None:
    """With what they measure themselves, and none of them is in two meetings at a time."""
    ranks = Ranks(4 * LOCAL, usual(identify=lambda rank: Identity(
        RankInfo(f"n{rank // LOCAL}", rank // LOCAL, rank % LOCAL), "ab"[rank // LOCAL % 2], {})))
    one = Controller(ranks, 4 * LOCAL, 0.1)
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
    assert len(figures.links["large"]) == 4 * 3
    assert len(figures.inside_links["large"]) == 4 * LOCAL * (LOCAL - 1)
    assert met(ranks, "meet", 8) == PASSES * 2 * 3


@pytest.mark.parametrize("streams", [False, True])
def test_what_two_ranks_do_when_they_meet(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[object, Benchmark]] = []
    monkeypatch.setattr(network, "benchmark_link", lambda channel, *rest: done.append((channel, rest[-1])) or GOOD)
    monkeypatch.setattr(workers, "mpi_channel", lambda *_: "MPI")
    one = works_on("cpu")
    one._groups = cast(Any, SimpleNamespace(channel=lambda *_: "backend"))
    assert one.meet(time.monotonic() + 1, 1, 0.1, streams) == (GOOD, GOOD)
    assert done == [("MPI", Benchmark.FULL), ("backend", Benchmark.LATENCY if streams else Benchmark.FULL)]


def test_a_card_that_is_not_the_first_ranks_is_seen() -> None:
    """Rank 9, the second one of n2, reaches no other node: its first rank does."""
    ranks, figures, found = checked(8, stream=lambda rank, partner, _, whole: (
        None if not whole and 9 in (rank, partner) else GOOD))
    assert found == {message("check/unreachable_node", host="n2", others="3 other nodes"): ("n2",)}
    assert figures.unreachable and not figures.unreachable_inside
    assert met(ranks, "stream", 9) == 2 * (3 + PASSES * (LOCAL - 1))


def test_a_rank_that_does_not_connect_does_not_stream() -> None:
    ranks, _, found = checked(8, connect=lambda rank, partner: None if 9 in (rank, partner) else True)
    assert found == {message("check/unreachable_node", host="n2", others="3 other nodes"): ("n2",)}
    assert not [1 for name, rank, arguments in ranks.ordered if name == "stream" and rank == 9 and not arguments[2]]


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
    assert met(ranks, "stream", 9) == 2 * 3


def test_an_all_reduce_without_an_end_is_told() -> None:
    _, figures, found = checked(2, reduce=lambda rank, size, _: 0.01 if size < 2**12 or rank == 1 else None)
    assert found == {message("check/incomplete_allreduce", size="4 KiB", count=1, ranks="8 ranks"): ()}
    assert figures.incomplete_allreduce == (2**12, 1)
    broken = RemoteError("reduce: RuntimeError: x")
    _, figures, found = checked(2, reduce=lambda rank, *_: broken if rank == 1 else None)
    assert found == {"n0: reduce: RuntimeError: x": ("n0",)}


def test_a_broken_device_is_told_and_its_partners_are_not() -> None:
    """What it answers to its first meeting keeps it from the next one."""
    def meet(rank: int, partner: int, *_: object) -> Any:
        if 8 in (rank, partner):
            return RemoteError("meet: RuntimeError: CUDA error") if rank == 8 else None
        return (None, GOOD)

    ranks, figures, found = checked(8, meet=meet)
    assert found == {"n2: meet: RuntimeError: CUDA error": ("n2",)}
    assert figures.unreachable == frozenset()
    assert met(ranks, "meet", 8) == 2
    assert met(ranks, "reduce", 8) == 0


def test_a_device_that_does_not_compute_meets_nobody() -> None:
    ranks, figures, found = checked(4, measure=lambda rank, *_: RankResult({}, ["broken"] * (rank == 8), rank != 8))
    assert found == {"n2: broken": ("n2",)}
    assert met(ranks, "meet", 8) == met(ranks, "stream", 8) == met(ranks, "reduce", 8) == 0
    assert len(figures.links["large"]) == 3 * 2


def test_nobody_is_told_to_meet_a_rank_that_is_lost() -> None:
    ranks, figures, found = checked(2, stream=lambda rank, partner, *_: (
        Ranks.LOST if rank == 5 else None if partner == 5 else GOOD))
    assert list(found) == [
        message("check/no_reply", host="n1", seconds=0, doing="link benchmark within its node")]
    assert met(ranks, "stream", 5) == 2
    assert figures.unreachable_inside == frozenset()


def works_on(device: str) -> workers.WorkerMethods:
    """Return a rank's part on a device, which needs no job."""
    found = workers.WorkerMethods.__new__(workers.WorkerMethods)
    found._device, found._silent_over_mpi = torch.device(device), set()
    found._comm = found._env = cast(Any, SimpleNamespace(rank=0))
    return found


def test_a_device_whose_backend_waits_holds_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL waits for another rank when the two first meet, without a deadline."""
    used: list[tuple[str, int]] = []
    monkeypatch.setattr(workers, "BACKEND_GRACE_S", 0.05)
    monkeypatch.setattr(timeouts, "use_device", lambda name: used.append((name, threading.get_ident())))
    one, ident = works_on("cuda:3"), threading.get_ident
    here = one._with_timeout(time.monotonic() + 5, ident)
    assert used == [("cuda:3", here)] and here != ident()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        one._with_timeout(time.monotonic() + 0.1, lambda: time.sleep(600))
    assert time.monotonic() - began < 300
    assert works_on("cpu")._with_timeout(time.monotonic(), ident) == ident()
    assert len(used) == 2


def test_an_error_of_mpi_does_not_say_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: object) -> None:
        raise RuntimeError("MPI_ERR_OTHER: known error not in list")

    monkeypatch.setattr(network, "benchmark_link", meet)
    one = works_on("cpu")
    assert one._over_mpi(time.monotonic() + 1, 1, 0.1) is None
    assert one._silent_over_mpi == {1}
