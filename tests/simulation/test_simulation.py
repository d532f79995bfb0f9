"""Simulated jobs: nothing that must not be in thousands of them, and every planted bug is found."""

from __future__ import annotations

import re
from random import Random

import pytest

from mpiddp.agent import events
from tests import processes
from tests.messages import message
from tests.simulation.job import simulate, simulate_many
from tests.simulation.planted import BUGS, planted
from tests.simulation.world import Shape, World
from tests.support import ROOT, check, first_of

SEEDS = 1000  # of each part, which processes simulate side by side
MOST_SEEDS = 10_000  # in which a bug has to be found


@pytest.mark.parametrize("first", first_of([part * SEEDS for part in range(4)], 2))
def test_jobs_with_faults_end_as_they_should(first: int) -> None:
    wrong = {seed: violated for seed in range(first, first + SEEDS) if (violated := simulate(seed).violations)}
    assert wrong == {}


def test_a_seed_tells_the_same_story_again() -> None:
    stories: list[list[str]] = [[], []]
    for story in stories:
        simulate(7, story.append)
    assert stories[0] == stories[1] != []


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    with planted(bug):
        assert any(fails(seed) for seed in range(MOST_SEEDS))


@pytest.mark.process
def test_the_command() -> None:
    command = str(ROOT / "tests/simulation/run")
    table = check(processes.run(command, "--seeds=500", timeout=60)).stdout
    assert re.search("^500 jobs in .* 0 not as they should be$", table)
    story = check(processes.run(command, "--trace=7", timeout=60)).stdout
    assert "rank 0 sends StartCoordinator(" in story
    assert story.endswith("as it should be\n")


def fails(seed: int) -> bool:
    """Tell whether the job of a seed does what it must not, or comes to no end."""
    try:
        return bool(simulate(seed).violations)
    except (AssertionError, RecursionError):
        return True


@pytest.mark.parametrize("ranks", [1000, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_the_last_of_many_ranks_raises(ranks: int) -> None:
    """The job ends within two seconds of its own clock, with one report and one status."""
    world = World(Shape(ranks // 8, 8), Random(1))
    world.schedule(5.0, world.ranks[-1].fail, "raise", 7)
    world.run(until_s=100.0)
    assert [report.root_cause.first.rank for report in world.printed] == [ranks - 1]
    assert max(agent.gone_s or 1e9 for agent in world.agents) < 7.0
    assert {agent.status for agent in world.agents} == {7}


@pytest.mark.parametrize("kind", ["raise", "SIGKILL", "stop", "all ranks", "agent"])
def test_orders_of_many_ranks(kind: str) -> None:
    assert simulate_many(kind, 500, 1) == []


LONG = Shape(2, 3, script_s=1000.0)


def test_ranks_that_wait_for_one_that_has_ended() -> None:
    """That is said after ten seconds, and ends the job in time."""
    world = World(LONG, Random(1))
    for rank in world.ranks[1:]:
        rank.waits = True
    world.schedule(5.0, world.ranks[0].end_script)
    world.run(until_s=20.0)
    assert world.said == [message("launch/deadlock", cause="others wait in vain", limit="300 s")]
    assert all(rank.alive for rank in world.ranks)
    world.run(until_s=400.0)
    assert [report.root_cause.first.cause for report in world.printed] == ["others wait in vain"]
    assert [line for line in world.said[1:] if "still waiting" not in line] == []
    assert not any(rank.alive for rank in world.ranks)
    assert {agent.status for agent in world.agents} == {1}


def test_ranks_that_wait_in_vain_while_none_has_ended() -> None:
    """It is looked for while rank 0 is idle alone, and the time counts from when it was found."""
    world = World(LONG, Random(1))
    for rank in world.ranks:
        rank.waits = True
    for at_s, is_idle in ((5.0, False), (10.0, True), (15.0, False), (100.0, True), (105.0, True)):
        world.schedule(at_s, world.server.post, events.OwnRankIdle(is_idle))
    said = message("launch/deadlock", cause="others wait in vain", limit="300 s")
    for until_s, lines in ((9.0, []), (14.0, [said]), (99.0, [said]), (390.0, [said, said])):
        world.run(until_s=until_s)
        assert world.said == lines
        assert all(rank.alive for rank in world.ranks)
    world.run(until_s=420.0)
    assert [report.root_cause.first.cause for report in world.printed] == ["others wait in vain"]
    assert not any(rank.alive for rank in world.ranks)


def test_ranks_that_wait_for_one_that_works_are_not_ended() -> None:
    """One that has ended long before the others, which wait for one that computes: nothing is said."""
    world = World(LONG, Random(1))
    for rank in world.ranks[2:]:
        rank.waits = True
    world.schedule(5.0, world.ranks[0].end_script)
    world.run(until_s=1100.0)
    assert [line for line in world.said if "still waiting" not in line] == []
    assert world.printed == []
    assert all(rank.left for rank in world.ranks)


@pytest.mark.parametrize("seed", [
    484,  # the last selection of the root cause came a rounding before the time for reports was over
    321,  # the job ended before the agents of all ranks had joined it
])
def test_a_job_that_went_wrong_once(seed: int) -> None:
    assert simulate(seed).violations == []
