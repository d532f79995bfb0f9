"""Lines of many ranks, folded: as plain functions, and on streams that are drawn at random."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.output import line_merger
from mpiddp.output.line_merger import LineMerger, MergedLines, format_rank_bits
from mpiddp.output.streams import DropPolicy, Prefixer, Splitter, add_prefix, split_for_pipe
from mpiddp.output.terminal import ProgressBar, ProgressBars
from mpiddp.output.upstream import decode_lines, encode_lines
from tests.messages import message

FOUR = 0b1111


def bits(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in ranks)


def singles(lines: Sequence[MergedLines]) -> list[MergedLines]:
    copies = [MergedLines(one.ranks, one.stream, one.lines.copy(), one.others) for one in lines]
    return [one.split_off(1) for one in copies for _ in range(len(one.lines))]


def screen(lines: Sequence[MergedLines]) -> list[str]:
    found = [f"[{format_rank_bits(one.ranks)}] {line}" for one in lines for line in str(one).split("\n")]
    assert found == [f"[{format_rank_bits(one.ranks)}] {one}" for one in singles(lines)]
    return found


def say(one: LineMerger, rank: int, lines: Sequence[str], now_s: float = 0.0, stream: int = 1) -> None:
    if lines:
        one.add(rank, MergedLines(1 << rank, stream, list(lines)), now_s)


def folded(streams: Sequence[Sequence[str]], order: Sequence[int] = (), window_s: float = 1.0) -> list[str]:
    """Return what is shown when ranks say lines, each all of its own at once, or one at a time in an order of ranks."""
    one = LineMerger(bits(range(len(streams))), window_s)
    if order:
        left = [list(lines) for lines in streams]
        for rank in order:
            one.add(rank, MergedLines(1 << rank, 1, [left[rank].pop(0)]), 0.0)
    else:
        for rank, lines in enumerate(streams):
            say(one, rank, lines)
    return screen([*one.pop_ready(0.0), *one.pop_all()])


@pytest.mark.parametrize(("streams", "shown"), [
    ([["Loading weights"]] * 4, ["[0-3] Loading weights"]),
    ([[f"step 100 loss 0.312{rank}"] for rank in range(4)], ["[0-3] step 100 loss 0.3120…0.3123"]),
    ([["loss 0.5"], ["loss 0.25"], ["loss 0.5"]], ["[0-2] loss {0.25,0.5}"]),
    ([["x 1e-05"], ["x -3"]], ["[0-1] x {-3,1e-05}"]),
    ([["at 2026-11-24"], ["at 2026-11-25"]], ["[0-1] at 2026-11-{24,25}"]),
    ([["a", "b"], ["b"], ["a", "odd", "b"]], ["[0,2] a", "[2] odd", "[0-2] b"]),
    ([["a", "a", "a"], ["a", "a"]], ["[0-1] a", "[0-1] a", "[0] a"]),
    ([[f"step {step} loss 0.{step}" for step in range(6)], ["step 3 loss 0.9"]],
     ["[0] step 0 loss 0.0", "[0] step 1 loss 0.1", "[0] step 2 loss 0.2", "[0-1] step 3 loss {0.3,0.9}",
      "[0] step 4 loss 0.4", "[0] step 5 loss 0.5"]),
    ([["a\0b"], ["a1b"]], ["[0] a\0b", "[1] a1b"]),
    ([["x\0y1z"], ["x1y\0z"]], ["[0] x\0y1z", "[1] x1y\0z"]),
    ([["only some"], [], ["only some"], []], ["[0,2] only some"]),
    ([[f"step {step} of 9 loss 0.{step + rank}" for step in range(3)] for rank in (0, 5)],
     [f"[0-1] step {step} of 9 loss {{0.{step},0.{step + 5}}}" for step in range(3)]),
    ([["a 1", "b 2 x", "c 3"], ["a 2", "b 2 y", "c 4"]],
     ["[0-1] a {1,2}", "[0] b 2 x", "[1] b 2 y", "[0-1] c {3,4}"]),
    ([["\033[32mINFO\033[0m ready"], ["INFO ready"]], ["[0-1] \033[32mINFO\033[0m ready"]),
    ([["\033[1;31m0.5\033[m of 7"], ["\033[2m0.25\033[m of 7"]], ["[0-1] \033[1;31m{0.25,0.5}\033[m of 7"]),
    ([[f"rank {rank} at {step}" for step in range(4)] for rank in range(2)],
     [f"[0-1] rank {{0,1}} at {step}" for step in range(4)]),
    ([[f"rank {rank} at {step}" for step in range(0, 4, 1 + rank)] for rank in range(2)],
     ["[0-1] rank {0,1} at 0", "[0] rank 0 at 1", "[0-1] rank {0,1} at 2", "[0] rank 0 at 3"]),
])
def test_what_is_shown(streams: list[list[str]], shown: list[str]) -> None:
    assert folded(streams) == shown


def test_a_line_that_one_rank_alone_says_stands_before_what_all_say_after_it() -> None:
    streams = [[f"line {number}" for number in range(1000)] for _ in range(64)]
    streams[17].insert(500, "odd")
    expected = [f"[0-63] line {number}" for number in range(1000)]
    assert folded(streams) == [*expected[:500], "[17] odd", *expected[500:]]


def test_lines_wait_for_a_window_after_the_last_rank_that_joined() -> None:
    one = LineMerger(FOUR, 1.0)
    for rank, at_s in ((0, 0.0), (1, 0.9), (2, 1.8)):
        assert one.pop_ready(at_s) == []
        one.add(rank, MergedLines(1 << rank, 1, ["a"]), at_s)
    assert one.next_due_s() == 2.8
    assert one.pop_ready(2.7, is_due=True) == one.pop_ready(9.0) == []
    assert screen(one.pop_ready(2.8, is_due=True)) == ["[0-2] a"]
    assert one.next_due_s() is None
    for number in range(7):  # not for ever
        one.add(number % 4, MergedLines(1 << number % 4, 1, [f"b {number}"]), 10.0 + 0.9 * number)
    assert screen(one.pop_ready(15.5, is_due=True))[0].startswith("[0-3] b 0…3")


def test_a_rank_alone_is_shown_at_once() -> None:
    one = LineMerger(4, 1.0)
    one.add(2, MergedLines(4, 1, ["a", "a", "b"]), 0.0)
    assert screen(one.pop_ready(0.0)) == ["[2] a", "[2] a", "[2] b"]
    one.add(2, MergedLines(4, 2, ["c"]), 0.0)
    assert screen(one.pop_all()) == ["[2] c"]
    assert one.pop_ready(0.0) == []


def test_only_equal_lines_are_merged_if_numbers_are_kept() -> None:
    """Also across nodes, and with lines that only some ranks print between them."""
    one = LineMerger(FOUR, 1.0, keeps_numbers=True)
    for rank in range(4):
        one.add(rank, MergedLines(1 << rank, 1, ["begin", f"value {rank // 2}", "between", "end"]), 0.0)
    assert screen(one.pop_all()) == ["[0-3] begin", "[0-1] value 0", "[2-3] value 1", "[0-3] between", "[0-3] end"]


def test_nobody_waits_for_ranks_that_have_ended() -> None:
    one = LineMerger(FOUR, 1.0)
    say(one, 0, ["a"], stream=2)
    one.remove_ranks(2 + 4)
    assert one.pop_ready(0.0) == []
    one.remove_ranks(8)
    assert [(line.stream, str(line)) for line in one.pop_ready(0.0)] == [(2, "a")]


def say_many(one: LineMerger, word: str, thousands: int, now_s: float) -> None:
    """Let rank 0 say a thousand lines at a time."""
    for thousand in range(thousands):
        say(one, 0, [f"{word} {1000 * thousand + number}" for number in range(1000)], now_s)


def test_a_rank_that_is_far_ahead_is_held_back_until_the_others_are_known_to_be_silent() -> None:
    one, most = LineMerger(FOUR, 1.0), line_merger.MAX_LINES_AHEAD // 1000
    say_many(one, "line", most, 0.0)
    assert not one.is_ahead(0)
    say(one, 0, ["one more"], 0.5)
    assert one.is_ahead(0)
    assert not one.is_ahead(1)
    assert one.pop_ready(0.9) == []
    say_many(one, "step", most, 1.5)
    assert len(screen(one.pop_ready(1.5))) == (2 * most - 1) * 1000 + 1
    assert not one.is_ahead(0)
    say(one, 1, ["one more"], 1.6)
    assert one.pop_ready(1.6) == []


def test_who_hurries_waits_for_nobody_where_very_many_lines_wait() -> None:
    one = LineMerger(FOUR, 1.0, hurries=True)
    say_many(one, "line", line_merger.MAX_LINES_AHEAD // 1000, 0.0)
    assert len(screen(one.pop_ready(0.0))) == line_merger.MAX_LINES_AHEAD // 2


def test_lines_that_take_much_room_are_not_kept() -> None:
    one = LineMerger(FOUR, 1.0)
    for number in range(20):
        say(one, 0, [f"{number} {'x' * 2**20}"], 0.0)
    assert len(one.pop_ready(0.0)) == 20 - 15


def test_blocks_that_are_cut_leave_nothing_behind() -> None:
    one = LineMerger(3, 1.0)
    for number in range(10):
        say(one, 0, [f"a {number}", "b", "c"])
        for line in (f"a {number}", "odd", "c"):
            say(one, 1, [line])
        one.pop_ready(0.0)
    one.pop_all()
    assert one._size == one._pending_count == 0


def test_places_that_are_used_up_are_made_anew() -> None:
    streams = [["a", "b"], [*(f"own {'x' * number}" for number in range(50)), "b"]]
    one = LineMerger(3, 1.0)
    for rank, lines in enumerate(streams):
        for line in lines:
            one.add(rank, MergedLines(1 << rank, 1, [line]), 0.0)
    shown = screen(one.pop_all())
    assert shown[0] == "[0] a"
    assert shown[-1] == "[0-1] b"
    assert len(shown) == 52


WORDS = st.sampled_from(["a", "b", "step 1", "step 2", "step 3", "loss 0.5 of 7", "loss 0.25 of 7", "x\0001", "", "…",
                         "\033[1;31mstep 1\033[m", "\033[2mstep 1"])
STREAMS = st.lists(st.lists(WORDS | st.text("ab1\0-. ", max_size=6), max_size=12), min_size=1, max_size=6)


def covers(shown: MergedLines, line: str) -> bool:
    """Tell whether a merged line shows a rank's: the same words, and its numbers are listed, or within the range."""
    own = MergedLines(0, 0, [line])
    if own.masks != shown.masks:
        return False
    values = [{*column} for column in zip(shown.numbers, *shown.others, strict=True)]
    return all(number in several if len(several) <= 3 else
               min(map(float, several)) <= float(number) <= max(map(float, several))
               for several, number in zip(values, own.numbers, strict=True))


@settings(max_examples=100, deadline=None, database=None)
@given(streams=STREAMS, data=st.data())
def test_no_line_is_lost_and_those_of_a_rank_stay_in_order(streams: list[list[str]], data: st.DataObject) -> None:
    """Ranks take turns at random, on two nodes; now and then a window passes, and a rank's node hands on its lines."""
    ranks = len(streams)
    nodes = {"m": LineMerger(bits(range(0, ranks, 2)), 0.25), "n": LineMerger(bits(range(1, ranks, 2)), 0.25)}
    root, now_s, shown = LineMerger(bits(range(ranks)), 1.0), 0.0, list[MergedLines]()

    def hand_on(rest: bool = False) -> None:
        for name, node in nodes.items():
            for lines in decode_lines(encode_lines(node.pop_all() if rest else node.pop_ready(now_s, is_due=True))):
                root.add(name, lines, now_s)
        shown.extend(root.pop_all() if rest else root.pop_ready(now_s, is_due=True))

    turns = data.draw(st.permutations([rank for rank, lines in enumerate(streams) for _ in lines]))
    left = [list(lines) for lines in streams]
    for rank in turns:
        many = data.draw(st.integers(1, 3)) if left[rank] else 0
        say(nodes["mn"[rank % 2]], rank, left[rank][:many], now_s)
        del left[rank][:many]
        now_s += data.draw(st.sampled_from([0.0, 0.1, 0.3, 2.0]))
        hand_on()
    hand_on(rest=True)
    shown = singles(shown)
    for rank, lines in enumerate(streams):
        own = [one for one in shown if one.ranks >> rank & 1]
        assert len(own) == len(lines)
        assert all(itertools.starmap(covers, zip(own, lines, strict=True)))
    assert sum(one.ranks.bit_count() for one in shown) == sum(map(len, streams))


MANY = """
import random, sys
from pathlib import Path
from mpiddp.output.line_merger import LineMerger, MergedLines
random.seed(int(sys.argv[1]))
nodes = [LineMerger(0xff << first, 0.25) for first in range(0, 10_000, 8)]
root, odd, shown, now_s = LineMerger((1 << 10_000) - 1, 1.0), {}, [], 0.0
for step in range(10):
    for at in random.sample(range(1250), 1250):
        for rank in random.sample(range(8 * at, 8 * at + 8), 8):
            lines = ["epoch begins", f"step {step} loss {random.random():.4f}"]
            if random.random() < 1e-4:
                odd[rank, step] = f"odd {'x' * random.randrange(99)}"
                lines.insert(1, odd[rank, step])
            nodes[at].add(rank, MergedLines(1 << rank, 1, lines), now_s)
        for one in nodes[at].pop_ready(now_s, is_due=True):
            root.add(at, one, now_s)
    shown += root.pop_ready(now_s, is_due=True)
    now_s += 2
for at, node in enumerate(nodes):
    for one in node.pop_all():
        root.add(at, one, now_s)
shown += root.pop_all()
shown = [one.split_off(1) for one in shown for _ in range(len(one.lines))]
assert sum(one.ranks.bit_count() for one in shown) == 10 * 2 * 10_000 + len(odd)
assert sum(str(one).startswith("epoch") for one in shown) == 10, len(shown)
assert sorted(str(one) for one in shown if one.ranks.bit_count() == 1) == sorted(odd.values())
assert len(shown) == 20 + len(odd)
print(len(odd), Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])  # kB (man 5 proc)
"""


@pytest.mark.process
def test_ten_thousand_ranks_take_little_room() -> None:
    done = subprocess.run([sys.executable, "-c", MANY, "7"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    odd, kilobytes = map(int, done.stdout.split())
    assert odd > 3
    assert kilobytes < 200 * 1000


def test_numbers_of_more_digits_than_python_reads() -> None:
    (line,) = decode_lines(encode_lines([MergedLines(1 << 20_000, 1, ["a \udcff " + "7" * 5000])]))
    assert (line.ranks, line.stream, str(line)) == (1 << 20_000, 1, "a \udcff " + "7" * 5000)
    assert folded([["7" * 5000], ["8" * 5000]]) == ["[0-1] {" + "7" * 5000 + "," + "8" * 5000 + "}"]


def test_the_states_of_a_bar() -> None:
    one = Splitter()
    assert one.take(b"a\nb") == b"a"
    assert one.take(b"\r 10%") is None
    assert one.bar == b" 10%"
    assert one.take(b"\r 20%\r") is None
    assert one.bar == b" 20%"
    assert one.take(b"\nc") == b" 20%"
    assert one.bar == b""
    assert one.take(b"\nd\n\ne") == b"c\nd\n"
    assert one.take(b"\n") == b"e"
    assert one.take(b"win\r\ndos\r") == b"win"
    assert one.take(b"\nend") == b"dos"
    assert one.take(b"") == b"end"
    assert one.take(b"") is None
    assert one.take(b"\r50%\r") is None
    assert one.take(b"") == b"50%"
    assert one.bar == b""


def test_a_line_end_in_two_reads_is_no_bar() -> None:
    one = Splitter()
    assert one.take(b"dos\r") is None
    assert one.bar == b""
    assert one.take(b"\n\r") == b"dos"
    assert one.bar == b""
    assert one.take(b"\n10%\r") == b""
    assert one.take(b"20%\r") is None
    assert one.bar == b"20%"
    assert one.take(b"\n") == b"20%"


@pytest.mark.parametrize("reads", [[b"dos\r", b"\n"], [b"\r100%", b"\n"], [b"\r50%\r100%\r", b"\n"],
                                   [b"100%\r\r", b"\n"], [b"\r100%\r", b""]])
def test_a_line_is_shown_once_however_it_comes(reads: list[bytes]) -> None:
    one = Prefixer(lambda: b"> ")
    shown = b"".join(piece for data in (*reads, b"next\n") for piece in one.take(data, 0.0))
    assert shown == b"> " + (b"dos" if reads[0][:1] == b"d" else b"100%") + b"\n> next\n"


def test_a_line_that_is_very_long_is_taken_for_several() -> None:
    one = Splitter()
    assert one.take(b"x" * 60_000) is None
    assert one.take(b"x" * 60_000) == b"x" * 120_000
    assert one.take(b"y\n") == b"y"
    assert one.take(b"\r" + b"z" * 70_000) == b"z" * 70_000


def test_the_bar_of_the_lowest_rank_is_shown() -> None:
    bars = ProgressBars()
    bars.update([ProgressBar(3, 2, "3: 10%"), ProgressBar(1, 2, "1: 10%")])
    assert bars.take_changes() == [ProgressBar(1, 2, "1: 10%")]
    assert bars.take_changes() == []
    bars.update([ProgressBar(3, 2, "3: 20%")])
    assert bars.take_changes() == []
    bars.update([ProgressBar(1, 2, " ")])
    assert bars.take_changes() == [ProgressBar(1, 2, ""), ProgressBar(3, 2, "3: 20%")]
    bars.remove_ranks(bits([3]))
    assert bars.take_changes() == [ProgressBar(3, 2, "")]
    assert bars.lowest() is None


def test_pieces_are_whole_lines() -> None:
    found = split_for_pipe(add_prefix(b"\n".join([b"x" * 998] * 9 + [b"y" * 8998, b"z"]), b"> "))
    assert b"".join(found) == (b"> " + b"x" * 998 + b"\n") * 9 + b"> " + b"y" * 8998 + b"\n> z\n"
    assert [len(one) for one in found] == [4004, 4004, 1001, 9001, 4]


def test_what_is_dropped_is_counted() -> None:
    room = [True]
    one = DropPolicy(lambda: room[0])
    assert one.admit(1, b"a\nb") == b"a\n"
    room[0] = False
    assert one.admit(1, b"b\nc\nd") == b""
    assert one.admit(2, b"") == b""
    room[0] = True
    assert one.admit(1, b"\n").decode() == f"{message('launch/lines_dropped', count=2)}\nd\n"
    assert one.admit(1, b"e") == b""
    assert one.finish(1) == b"e"
    assert one.finish(1) == b""
