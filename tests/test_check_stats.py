"""Findings and notes of a check, from generated measurements."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

import networkx
import pytest

from mpiddp.check import PASSES
from mpiddp.check.stats.findings import (
    allreduce_results,
    find_all,
    note_gloo_allreduce,
    note_missing_peers,
    note_mpi,
)
from mpiddp.check.stats.link_findings import expected_bandwidth
from mpiddp.check.stats.outliers import PeerSample, score_all
from mpiddp.check.stats.schema import LINK_METRICS, RANK_METRICS, Measurements, RankInfo, no_measurements
from mpiddp.check.stats.tournament import can_meet, rounds_needed, shuffled_tournament, tournament
from tests.benchmarks import accusing
from tests.messages import find, message
from tests.support import first_of

Way = tuple[int, int]
GB = 1e9


def who(nodes: int, ranks: int = 1, kinds: str = "", switches: int = 0, host: str = "") -> tuple[RankInfo, ...]:
    """Return the ranks of nodes n0, n1 and so on; `kinds` has a letter for each node, or all are alike."""
    return tuple(RankInfo(host or f"n{node}", node, local, f"cuda:{local}", kinds[node] if kinds else "cpu",
                     f"s{node % switches}" if switches else "") for node in range(nodes) for local in range(ranks))


class Lab:
    """Nodes that are measured: `share` tells what is left of a usual value, for a metric and whom it is of."""

    def __init__(self, ranks: tuple[RankInfo, ...], share: Callable[[str, tuple[int, ...]], float], noise: float = 0.05,
                 seed: int = 0, passes: int = PASSES) -> None:
        self.noise, self.random = noise, random.Random(seed)
        nodes = {one.node for one in ranks}
        self.measured = no_measurements(ranks)._replace(links={name: {} for name in LINK_METRICS})
        links = [link for some in tournament(len(nodes)) for pair in some for link in (pair, pair[::-1])]
        for name, usual in (("latency", 2e-4), ("bandwidth", 10 * GB), ("retransmits", 0.0)):
            for link in links:
                values = [self.noisy(usual) * share(name, link) for _ in range(passes)]
                if name == "retransmits":
                    values = [max(0.0, share(name, link) - 1)] * passes
                if name == "latency" and link[0] > link[1]:
                    values = self.measured.links[name][link[::-1]]
                self.measured.links[name][link] = values
        self.measured.by_rank["matrix"] = {
            rank: [self.noisy(1e12) * share("matrix", (rank,)) for _ in range(passes)] for rank in range(len(ranks))}

    def noisy(self, value: float) -> float:
        """Return a value with log-normal noise."""
        return value * self.random.lognormvariate(0, self.noise)


def said(lab: Lab) -> list[str]:
    """Return the lines of the verdict."""
    return [one.text for one in find_all(lab.measured)]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 63, 64])
def test_all_meet_each_other_once(count: int) -> None:
    met = tournament(count)
    assert sorted(pair for some in met for pair in some) == list(itertools.combinations(range(count), 2))
    assert len(met) == count - 1 + count % 2
    assert all(len({*itertools.chain(*some)}) == 2 * len(some) for some in met)


def test_nobody_meets_nobody() -> None:
    assert tournament(0) == tournament(1) == []


@pytest.mark.parametrize("count", [65, 128, 500, 1024])
def test_of_many_each_meets_others_that_are_far_apart(count: int) -> None:
    met = tournament(count)
    pairs = [pair for some in met for pair in some]
    assert len(met) == rounds_needed(count) <= 10
    assert len(set(pairs)) == len(pairs) == len(met) * (count // 2)
    graph = networkx.Graph(pairs)
    assert len(graph) == count
    assert networkx.diameter(graph) <= 6


def test_each_pass_has_the_same_pairs_in_another_order() -> None:
    passes = [shuffled_tournament(12, number) for number in range(PASSES)]
    assert all(sorted(one) == sorted(tournament(12)) for one in passes)
    assert len({str(one) for one in passes}) == PASSES


def test_the_rule() -> None:
    """In every pass worse than the median by a tenth and five deviations, more of few: not in one pass less."""
    metric, alike = RANK_METRICS["matrix"], {peer: [100.0, 100.0, 100.0] for peer in range(20)}

    def is_odd(*passes: float) -> bool:
        return score_all(metric, {**alike, -1: [*passes]})[-1].is_outlier

    assert is_odd(80, 80, 80) and not is_odd(95, 95, 95)
    assert not is_odd(80, 80, 100)
    assert is_odd(80, 80) and not is_odd(80, 95) and not is_odd(80)  # it lacks a pass, or two
    assert not is_odd(130, 130, 130)
    alike.update({peer: [100.0 + peer % 2 * 10] * 3 for peer in range(20)})  # deviations of 5 %
    assert not is_odd(90, 90, 90) and is_odd(75, 75, 75)
    assert {peers: round(1 - math.exp(-PeerSample(metric, [[1.0] * 3] * peers).threshold(3)), 2)
            for peers in (1, 2, 3, 20)} == {1: 0.41, 2: 0.27, 3: 0.22, 20: 0.12}
    assert score_all(metric, {"x": [1.0]}) == {}
    slow = {peer: [1e9] * 3 for peer in range(20)}
    assert not score_all(RANK_METRICS["tmp-write"], {**slow, -1: [6e8] * 3})[-1].is_outlier  # no training feels that
    assert score_all(RANK_METRICS["tmp-write"], {**slow, -1: [4e8] * 3})[-1].is_outlier


def test_a_fault_counts_also_where_the_machine_is_slow_in_a_pass() -> None:
    passes = {peer: [100.0, 50.0, 100.0] for peer in range(5)}
    scores = score_all(RANK_METRICS["matrix"], {**passes, -1: [60.0, 30.0, 60.0]})
    assert [key for key, score in scores.items() if score.is_outlier] == [-1]
    assert scores[-1].ratio == pytest.approx(0.6)


def test_what_lacks_a_pass_is_beside_the_worst_one() -> None:
    """It may be the one in which all were slow."""
    passes = {peer: [100.0, 50.0, 100.0] for peer in range(5)}
    for seen, is_odd in (([60.0, 60.0], False), ([60.0, 30.0], False), ([30.0, 30.0], True)):
        assert score_all(RANK_METRICS["matrix"], {**passes, -1: seen})[-1].is_outlier == is_odd


def test_a_link_that_lacks_a_pass_is_told_all_the_same() -> None:
    lab = Lab(who(6), lambda name, of: 0.3 if name == "bandwidth" and of == (2, 4) else 1.0)
    del lab.measured.links["bandwidth"][2, 4][2]
    (found,) = find_all(lab.measured)
    assert found.links == ((2, 4),)
    del lab.measured.links["bandwidth"][2, 4][1]
    assert find_all(lab.measured) == []
    quick = Lab(who(6), lambda name, of: 0.3 if name == "bandwidth" and of == (2, 4) else 1.0, passes=1)
    assert [one.links for one in find_all(quick.measured)] == [((2, 4),)]


@pytest.mark.parametrize("size", [3, 4, 12])
@pytest.mark.parametrize(("sends", "receives", "name"), [
    (0.5, 1.0, "check/slow_sender"), (1.0, 0.1, "check/slow_receiver"), (0.5, 0.5, "check/slow_both_ways"),
])
def test_a_slow_node_is_named_with_its_direction(size: int, sends: float, receives: float, name: str) -> None:
    def share(name: str, of: tuple[int, ...]) -> float:
        return 1.0 if name != "bandwidth" else min(sends if of[0] == 1 else 1.0, receives if of[-1] == 1 else 1.0)

    for seed in range(10):
        lab = Lab(who(size), share, seed=seed)
        (found,) = find_all(lab.measured)
        (fields,) = find(name, found.text, host="n1")
        assert float(fields["ratio"]) == pytest.approx(min(sends, receives), rel=0.2)
        assert found.hosts == ("n1",)


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_noise_accuses_nobody(size: int, noise: float) -> None:
    accused = [seed for seed in range(100) if said(Lab(who(size, 2), lambda *_: 1.0, noise, seed))]
    assert len(accused) <= 2, accused


@pytest.mark.parametrize(("noise", "left"), [(0.03, 0.6), (0.15, 0.1)])
def test_a_bad_node_of_three_shows(noise: float, left: float) -> None:
    missed = [seed for seed in range(100) for lab in
              [Lab(who(3), lambda name, of: left if name == "bandwidth" and 2 in of else 1.0, noise, seed)]
              if not any(one.hosts == ("n2",) for one in find_all(lab.measured))]
    assert len(missed) <= 4, missed


def test_two_bad_nodes_of_four_show() -> None:
    lab = Lab(who(4), lambda name, of: 0.3 if name == "bandwidth" and {0, 3} & {*of} else 1.0)
    assert {host for one in find_all(lab.measured) for host in one.hosts} == {"n0", "n3"}


def test_a_slow_link_is_no_nodes_fault() -> None:
    lab = Lab(who(6), lambda name, of: 0.4 if name == "bandwidth" and of == (2, 4) else 1.0)
    (found,) = find_all(lab.measured)
    assert (found.subject, found.hosts, found.links) == ("link", (), ((2, 4),))
    assert find("check/slow_link", found.text, sender="n2", receiver="n4")
    assert found.ratio == pytest.approx(0.4, abs=0.05)


def test_latency_and_lost_segments() -> None:
    lab = Lab(who(5), lambda name, of: 25.0 if name == "latency" and 3 in of else 1.0)
    (line,) = said(lab)
    (fields,) = find("check/high_latency", line, host="n3", pairs="4 pairs")
    assert 4.6 <= float(fields["value"].removesuffix(" ms")) <= 5.2
    assert 0.18 <= float(fields["median"].removesuffix(" ms")) <= 0.21
    lab = Lab(who(3), lambda name, of: 1.021 if name == "retransmits" and of[0] == 2 else 1.0)
    assert said(lab) == [message("check/lost_segments_sent", host="n2", share="2.1 %")]


def test_a_switch_is_accused_in_place_of_its_nodes() -> None:
    def share(name: str, of: tuple[int, ...]) -> float:
        return 0.5 if name == "bandwidth" and any(node % 3 == 1 for node in of) else 1.0

    (found,) = find_all(Lab(who(12, switches=3), share).measured)
    assert found.subject == "switch"
    assert found.hosts == ("n1", "n4", "n7", "n10")
    assert find("check/slow_both_ways", found.text, host="switch s1, n[1,4,7,10]")


def test_two_nodes_compare_their_directions() -> None:
    (found,) = find_all(Lab(who(2), lambda name, of: 0.4 if name == "bandwidth" and of == (0, 1) else 1.0).measured)
    assert (found.subject, found.hosts) == ("link", ())
    assert find("check/slow_direction", found.text, sender="n0", receiver="n1")


def test_kinds_are_not_mixed() -> None:
    def share(_: str, of: tuple[int, ...]) -> float:
        return 0.3 if max(of) > 5 else 1.0

    lab = Lab(who(8, kinds="aaaaaabb"), share)
    assert said(lab) == []
    lab = Lab(who(8, kinds="aaaaaabb"), lambda name, of: share(name, of) * (0.5 if 2 in of else 1.0))
    assert {host for one in find_all(lab.measured) for host in one.hosts} == {"n2"}


def test_a_slow_rank_and_a_slow_node_by_themselves() -> None:
    lab = Lab(who(6, 4), lambda name, of: 0.7 if name == "matrix" and of == (9,) else 1.0)
    (line,) = said(lab)
    assert find("check/slow_rank", line, host="n2", rank=9, device="cuda:1", metric="matrix product", peers="23 ranks")
    lab = Lab(who(3, 2), lambda name, of: 0.5 if name == "matrix" and of[0] in (2, 3) else 1.0)
    (line,) = said(lab)
    assert find("check/slow_node", line, host="n1", metric="matrix product", peers="4 ranks")


def own(**values: list[float]) -> Measurements:
    """Return measurements of nodes that are the same in all passes."""
    given = {name.replace("_", "-"): {rank: [value] * PASSES for rank, value in enumerate(found)}
             for name, found in values.items()}
    return no_measurements(who(3))._replace(by_rank=given)


@pytest.mark.parametrize(("figures", "words"), [
    (own(clock=[0.0, 0.001, 3.0]), message("check/clock_ahead", host="n2", offset="3.0 s")),
    (own(clock=[0.0, -3.0, -3.01]), message("check/clock_ahead", host="n0", offset="3.0 s")),
    (own(clock=[0.0, -3.0, 0.0]), message("check/clock_behind", host="n1", offset="3.0 s")),
    (own(shm_size=[3.8 * 2**30, 3.8 * 2**30, 2**24], shm_free=[3.7 * 2**30, 3.8 * 2**30, 2**23]),
     message("check/worse_value", host="n2", metric="size of /dev/shm", value="16 MiB", median="3.8 GiB")),
])
def test_what_a_node_has_is_told_with_its_unit(figures: Measurements, words: str) -> None:
    (found,) = find_all(figures)
    assert found.text == words
    assert len(found.hosts) == 1


def test_words_of_ranks_and_ranks_that_did_not_answer() -> None:
    figures = own()._replace(reports={0: ["a fault"]}, lost=dict.fromkeys((1, 2), "no reply"))
    assert [one.text for one in find_all(figures)] == ["n0: a fault", "n1: no reply", "n2: no reply"]


def test_what_mpi_and_the_backend_say_of_each_other() -> None:
    ways = {"bandwidth": {(0, 1): [1e9], (1, 0): [1.4e9]}, "latency": {(0, 1): [1e-4], (1, 0): [1e-4], (0, 2): [1e-4]}}
    mpis = {"bandwidth": {(0, 1): [11e9], (1, 0): [11e9]}, "latency": {(0, 1): [1e-5], (1, 0): [1e-5]}}
    slow, silent = note_mpi(own()._replace(links=ways, mpi_links=mpis), "nccl")
    assert slow == message("check/slow_nccl", rate="1.2 GB/s", mpi="11 GB/s")
    assert silent == message("check/mpi_silent", pairs="n[0,2]", backend="nccl")
    assert note_mpi(own()._replace(links=mpis, mpi_links=mpis), "gloo") == []


def test_what_most_nodes_tell_leaves_nobody_out() -> None:
    line = "a fault"
    (found,) = find_all(own()._replace(reports={rank: [line] for rank in range(3)}))
    assert (found.text, found.hosts) == (f"3 nodes: {line}", ())


@pytest.mark.parametrize(("unmet", "words", "hosts"), [
    ({(0, 1), (1, 2)}, message("check/unreachable_node", host="n1", others="2 other nodes"), ("n1",)),
    ({(0, 2)}, message("check/unreachable_nodes", nodes="n0 and n2"), ()),
    ({(0, 1), (0, 2), (1, 2)}, message("check/unreachable_nodes", nodes="3 nodes"), ()),
])
def test_a_way_on_which_nothing_comes_through(unmet: set[Way], words: str, hosts: tuple[str, ...]) -> None:
    met = {*itertools.combinations(range(3), 2)} - unmet
    (found,) = find_all(own()._replace(links={"latency": {pair: [1e-4] for pair in met}}, unreachable=frozenset(unmet)))
    assert (found.text, found.hosts) == (words, hosts)


class Tournament:
    """Nodes that meet as a check lets them; `reaches` tells whether something comes through between two."""

    def __init__(self, size: int, reaches: Callable[[int, int], bool]) -> None:
        self.failing = 0  # rounds in which some fail
        met: set[Way] = set()
        unreachable: set[Way] = set()
        for some in shuffled_tournament(size, 0):
            pairs = [pair for pair in some if can_meet(pair, unreachable)]
            through = [pair for pair in pairs if reaches(*pair)]
            unreachable.update({*pairs} - {*through})
            self.failing += len(through) < len(pairs)
            met.update(through)
        self.findings = find_all(no_measurements(who(size))._replace(
            links={"latency": {pair: [1e-4] * PASSES for pair in met}}, unreachable=frozenset(unreachable)))

    @property
    def accused(self) -> set[int]:
        """The nodes that are to be left out."""
        return {int(host[1:]) for one in self.findings for host in one.hosts}


@pytest.mark.parametrize(("size", "bad"), [
    (8, {1, 2, 3}), (16, {3, 4, 5}), (64, {*range(8)}), (64, {*range(16, 24)}), (64, {*range(31)}), (256, {7, 8, 9}),
    (1024, {*range(40)}),
])
def test_nodes_that_are_cut_off_are_named_and_none_beside_them(size: int, bad: set[int]) -> None:
    seen = Tournament(size, lambda *pair: not bad & {*pair})
    assert seen.accused == bad
    assert seen.failing < 8  # each takes as long as a meeting may


@pytest.mark.parametrize("seeds", first_of([range(60), range(60, 300)]), ids=str)
def test_no_good_node_is_named_whoever_is_cut_off(seeds: range) -> None:
    """Up to half of the nodes, neighbours or not; where nobody can be named, that much is told."""
    named = 0
    for seed in seeds:
        chance = random.Random(seed)
        size = chance.choice([3, 4, 5, 6, 8, 12, 16, 33, 64, 65, 100])
        number, first = chance.randint(1, max(1, (size - 1) // 2)), chance.randrange(size)
        bad = {*chance.sample(range(size), number)} if seed % 2 else {(first + at) % size for at in range(number)}
        seen = Tournament(size, lambda *pair, bad=bad: not bad & {*pair})  # type: ignore[misc]
        assert seen.accused <= bad, seed
        assert seen.findings
        assert seen.failing <= 16
        named += seen.accused == bad
    assert named > 0.95 * len(seeds)


@pytest.mark.parametrize(("size", "part", "named"), [(64, 4, True), (64, 16, True), (8, 3, True), (64, 32, False),
                                                     (4, 2, False), (64, 0, False)])
def test_a_part_that_reaches_itself_alone_is_named_if_it_is_the_smaller_one(size: int, part: int, named: bool) -> None:
    """As a switch's nodes whose way to the others is down; or all of them, if nothing comes through at all."""
    seen = Tournament(size, lambda one, other: part > 0 and (one < part) == (other < part))
    assert seen.accused == ({*range(part)} if named else set())
    assert named or seen.findings[0].text == message("check/unreachable_nodes", nodes=f"{size} nodes")
    assert seen.failing <= 17


def test_bad_links_between_good_nodes_take_no_more_time_than_there_is() -> None:
    bad = {pair for pair in itertools.combinations(range(64), 2) if random.Random(str(pair)).random() < 0.3}
    assert Tournament(64, lambda *pair: pair not in bad).failing < 40


def test_nodes_with_one_hostname_are_numbered() -> None:
    lab = Lab(who(4, host="localhost"), lambda name, of: 0.3 if name == "bandwidth" and of[0] == 1 else 1.0)
    (found,) = find_all(lab.measured)
    assert find("check/slow_sender", found.text, host="localhost (node 1)")
    assert (found.hosts, found.nodes) == ((), (1,))


def inside(slow: dict[Way, float], nodes: int = 3) -> Measurements:
    """Return figures of ways between three ranks of each node, the same in all passes."""
    ranks = who(nodes, 3)
    ways = {(one, two): [slow.get((one, two), 1.0) * 1e9 * (1 + (one + two) % 3 / 100)] * 4
            for node in range(nodes) for one, two in itertools.permutations(range(3 * node, 3 * node + 3), 2)}
    return no_measurements(ranks)._replace(inside_links={"bandwidth": ways})


def test_a_slow_way_inside_a_node() -> None:
    (found,) = find_all(inside({(3, 4): 0.5}))
    assert find("check/slow_link_inside", found.text, host="n1", sender="rank 3 (cuda:0)", receiver="rank 4 (cuda:1)")
    assert found.hosts == ("n1",)
    (found,) = find_all(inside({(1, 2): 0.5}, nodes=1))
    assert find("check/slow_link_inside", found.text, host="n0", sender="rank 1 (cuda:1)", receiver="rank 2 (cuda:2)")
    (found,) = find_all(inside(dict.fromkeys(itertools.permutations(range(3, 6), 2), 0.5)))
    assert find("check/slow_links_inside", found.text, host="n1")[0]["ratio"].startswith("0.5")


@pytest.mark.parametrize(("ranks", "words"), [
    (who(1), message("check/one_rank")), (who(1, 4), message("check/one_node")), (who(2), message("check/two_nodes")),
    (who(4, kinds="aaab"), message("check/rank_without_peers", ranks="rank 3 (b)")),
])
def test_what_has_nothing_to_compare_it_with_is_told(ranks: tuple[RankInfo, ...], words: str) -> None:
    links = {"latency": {(0, 1): [1e-4]}}
    assert note_missing_peers(no_measurements(ranks)._replace(links=links))[0] == words
    assert note_missing_peers(no_measurements(who(3))) == []
    assert note_missing_peers(no_measurements(who(2))) == []  # without links


def test_a_figure_of_nothing_is_told_as_such() -> None:
    assert [one.text for one in find_all(own(matrix=[1e12, 1e12, 0.0]))] == [
        message("check/slow_node", host="n2", metric="matrix product", ratio="0", peers="2 ranks")]


def test_an_all_reduce_of_gloo_below_the_links_is_no_fault() -> None:
    lab = Lab(who(3), lambda *_: 1.0, noise=0.0).measured._replace(allreduce={2**26: 2**26 / 3e9 * 4 / 3})
    assert note_gloo_allreduce(lab, "gloo") == [message("check/slow_gloo", rate="3.0 GB/s", links="10 GB/s")]
    assert note_gloo_allreduce(lab, "nccl") == []


def test_an_all_reduce_is_expected_to_be_as_fast_as_the_slowest_node() -> None:
    (result,) = allreduce_results(no_measurements(who(4))._replace(allreduce={10**9: 1.0}))
    assert result.bus_bandwidth == pytest.approx(1.5e9)
    lab = Lab(who(4), lambda _, of: 0.5 if of[0] == 2 else 1.0, noise=0.0)
    assert expected_bandwidth(lab.measured) == pytest.approx(5 * GB)
    assert expected_bandwidth(own()) is None


def test_a_thousand_nodes_are_judged_in_seconds() -> None:
    lab = Lab(who(1024, 8), lambda name, of: 0.5 if name == "bandwidth" and of[0] % 100 == 7 else 1.0)
    begun = time.process_time()
    found = find_all(lab.measured)
    took_s = time.process_time() - begun
    assert sorted(node for one in found for node in one.nodes) == list(range(7, 1024, 100))
    assert took_s < 60


@pytest.mark.parametrize("seeds", first_of([range(15), range(15, 60)]), ids=str)
def test_bad_nodes_are_found_and_nobody_else_is_accused(seeds: range) -> None:
    results = [accusing.compare(seed) for seed in seeds]
    ours = [outcomes["mpiddp.check"] for _, outcomes in results]
    assert sum(one.found for one in ours) > len(seeds)
    assert not [seed for seed, one in zip(seeds, ours, strict=True) if one.missed or one.accused or one.links_accused]
    assert len(accusing.lines(results)) == 1 + 5 * len(accusing.RULES)
