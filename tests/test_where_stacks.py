"""Where ranks are: stacks, and what follows from many of them."""

from __future__ import annotations

import json
import sys
import tracemalloc
from typing import Any

import pytest

from mpiddp.base.text import format_ranges
from mpiddp.failure import stack
from mpiddp.failure.stack import Frame, FrameKind
from mpiddp.ipc.channel import Codec, FrameReader, encode
from mpiddp.where import __main__ as where_command
from mpiddp.where.dumper import format_calls
from mpiddp.where.outliers import build_snapshot, find_free_ranks
from mpiddp.where.protocol import Progress, Sample, SampleRequest, SnapshotReply
from mpiddp.where.service import SnapshotCollector, parse_children
from mpiddp.where.snapshot import ChildProcess, CollectiveSeq, RankSample, as_json, format_table, from_json
from mpiddp.where.stall import StallDetector
from tests.messages import message
from tests.support import first_of

SITE = "/env/lib/python3.11/site-packages/"
STEP = Frame(FrameKind.SCRIPT, "/home/me/train.py", 92, "step")
MAIN = Frame(FrameKind.SCRIPT, "/home/me/train.py", 120, "<module>")
LOAD = Frame(FrameKind.SCRIPT, "/home/me/train.py", 88, "load_batch")
ITEM = Frame(FrameKind.SCRIPT, "/home/me/dataset.py", 17, "__getitem__")


def library(file: str, function: str, line: int = 1) -> Frame:
    return Frame(FrameKind.LIBRARY, SITE + file, line, function)


def collective(name: str) -> tuple[Frame, ...]:
    return (library("torch/distributed/c10d_logger.py", "wrapper"),
            library("torch/distributed/distributed_c10d.py", name))


REDUCES = (MAIN, STEP, *collective("all_reduce"))
BACKWARD = (MAIN, STEP, library("torch/_tensor.py", "backward"),
            library("torch/autograd/graph.py", "_engine_run_backward"))
LOADS = (MAIN, library("torch/utils/data/dataloader.py", "__next__"),
         library("torch/utils/data/dataloader.py", "_get_data"),
         library("torch/utils/data/dataloader.py", "_try_get_data"), Frame(FrameKind.PYTHON, "/usr/queue.py", 4, "get"))
IDLE = (library("torch/utils/data/_utils/worker.py", "_worker_loop"),
        Frame(FrameKind.PYTHON, "/usr/queues.py", 4, "get"))


def rank(number: int, frames: tuple[Frame, ...] = REDUCES, **fields: object) -> RankSample:
    return RankSample(number, f"n{number // 4}", frames, **{"state": "S", **fields})  # type: ignore[arg-type]


def test_what_an_interpreter_tells_is_read() -> None:
    text = f"""  File "/home/me/my data/train.py", line 88 in load batch
  File "{stack.PYTHON_FOLDER}threading.py", line 320 in wait
  File "{SITE}torch/x.py", line ??? in forward
  File "/home/me/train.py", line 120 in <module>
  File "{stack.OUR_FOLDER}runner/script.py", line 40 in run
  File "<frozen runpy>", line 88 in _run_code
  File "{stack.OUR_FOLDER}launch.py", line 100 in launch
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
    found = stack.parse_dump(text)
    assert [(one.kind, one.line, one.function) for one in found] == [
        (FrameKind.SCRIPT, 120, "<module>"), (FrameKind.LIBRARY, 0, "forward"), (FrameKind.PYTHON, 320, "wait"),
        (FrameKind.SCRIPT, 88, "load batch")]


@pytest.mark.parametrize(("frames", "name"), [
    (REDUCES, "all_reduce"), (BACKWARD, "backward"), (LOADS, ""), ((MAIN, LOAD), ""), ((), ""),
    ((MAIN, library("torch/nn/parallel/distributed.py", "forward"), library("torch/nn/linear.py", "forward")), ""),
    ((MAIN, Frame(FrameKind.OURS, stack.OUR_FOLDER + "api.py", 3, "should_stop"),
      Frame(FrameKind.OURS, stack.OUR_FOLDER + "waiting.py", 3, "wait")), "should_stop"),
])
def test_the_collective_that_a_stack_ends_in(frames: tuple[Frame, ...], name: str) -> None:
    assert stack.find_collective(frames) == name
    assert stack.frames_from_json(stack.frames_to_json(frames)) == frames


def dump(*threads: tuple[int, list[tuple[str, int, str]]]) -> str:
    """Return what `py-spy dump --json` prints of threads and their calls."""
    return json.dumps([{"pid": 7, "thread_id": 140, "thread_name": None, "os_thread_id": number, "frames": [
        {"name": function, "filename": file, "short_filename": "", "line": line} for file, line, function in calls]}
        for number, calls in threads])


def test_what_py_spy_prints_is_read() -> None:
    """The thread whose number is that of the process is its main thread."""
    other = 8, [(f"{stack.PYTHON_FOLDER}threading.py", 1002, "Thread._bootstrap")]
    main = 7, [("/me/a.py", 4, "Model.step.<locals>.inner"), ("/me/a.py", 0, "<module>"),
               ("<frozen runpy>", 88, "_run_code"), (f"{stack.OUR_FOLDER}launch.py", 100, "launch")]
    assert stack.parse_py_spy(dump(other, main), 7) == [
        Frame(FrameKind.SCRIPT, "/me/a.py", 0, "<module>"), Frame(FrameKind.SCRIPT, "/me/a.py", 4, "inner")]


@pytest.mark.parametrize("text", ["", "Error: Permission denied", "[", "{}", "[7]", "[{}]", "[]", dump((8, []))])
def test_what_py_spy_prints_besides_a_stack_is_no_stack(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        stack.parse_py_spy(text, 7)


def test_another_threads_stack_is_none() -> None:
    assert stack.parse_dump(f'  File "{stack.PYTHON_FOLDER}threading.py", line 1002 in _bootstrap\n') == []
    assert stack.classify_file(f"/dev/shm/mirror{stack.PYTHON_FOLDER}queue.py") is stack.FrameKind.PYTHON
    assert not stack.is_pythons(f"{stack.PYTHON_FOLDER}site-packages/torch/distributed/distributed_c10d.py")


def test_a_program_that_is_installed_is_the_script() -> None:
    found = stack.parse_dump(f"""  File "{SITE}torch/distributed/distributed_c10d.py", line 2 in all_reduce
  File "{SITE}trainer/loop.py", line 9 in step
  File "{SITE}trainer/__main__.py", line 3 in <module>
""")
    assert [one.kind for one in found] == [FrameKind.SCRIPT, FrameKind.SCRIPT, FrameKind.LIBRARY]


WORKERS = (ChildProcess(77, IDLE, "S"), ChildProcess(78, (LOAD, ITEM), "S", "pipe_read"))
REDUCE, BROADCAST = ({"collective": "all_reduce", "place": "train.py:92 step"},
                     {"collective": "broadcast", "place": "train.py:120 <module>"})
ALL_WAIT = message("where/all_in_collective", **REDUCE)
ALL_BUSY, DIFFERENT = message("where/all_busy"), message("where/different_collectives")


def absent(ranks: str) -> str:
    return message("where/not_in_collective", ranks=ranks, collective="all_reduce")


def busy(ranks: str, name: str = "all_reduce") -> str:
    return message("where/busy_outside_collective", ranks=ranks, collective=name)


def within(ranks: str, call: dict[str, str]) -> str:
    return message("where/in_collective", ranks=ranks, **call)


def at_end(ranks: str) -> str:
    return message("where/at_script_end", ranks=ranks)


def silent(ranks: str) -> str:
    return message("where/no_stack_received", ranks=ranks)


def hidden(ranks: str) -> str:
    return message("where/native_stack_hidden", ranks=ranks, reason="no py-spy")


@pytest.mark.parametrize(("ranks", "outliers", "findings"), [
    ([rank(0), rank(1), rank(2, (MAIN, LOAD, ITEM))], [2], [absent("rank 2 is")]),
    ([rank(0), rank(1, (MAIN, LOAD))], [1], [absent("rank 1 is")]),
    ([rank(0), rank(1), rank(2, (MAIN, STEP), cores=0.97)], [2], [busy("rank 2 is")]),
    ([rank(0), *(rank(one, (MAIN, STEP), cores=0.97) for one in (1, 2, 3))], [], [busy("ranks 1-3 are")]),
    ([rank(0), rank(1, (), state="T"), rank(2)], [1], [message("where/stopped", ranks="rank 1 is")]),
    ([rank(0), rank(1, (), state="D", wchan="fuse_get_req"), rank(2, (MAIN, LOAD))], [1, 2],
     [message("where/uninterruptible", ranks="rank 1 is"), absent("rank 2 is")]),
    ([rank(0), rank(1), rank(2, has_answered=False)], [2], [f"rank 2 is {message('where/rank_unreachable')}"]),
    ([rank(0), rank(1, ()), rank(2, (MAIN, LOAD))], [2], [silent("rank 1 is"), absent("rank 2 is")]),
    ([rank(0), rank(1), rank(2, has_ended=True)], [2], [at_end("rank 2 is"), within("the others are", REDUCE)]),
    ([rank(0), rank(1, has_ended=True), rank(2, has_ended=True)], [0],
     [within("rank 0 is", REDUCE), at_end("the others are")]),
    ([rank(0), rank(1), rank(2, (MAIN, *collective("broadcast")))], [2],
     [within("rank 2 is", BROADCAST), within("the others are", REDUCE)]),
    ([rank(0), rank(1, (MAIN, *collective("broadcast")))], [],
     [within("rank 0 is", REDUCE), within("rank 1 is", BROADCAST), DIFFERENT]),
    ([rank(0), rank(1), rank(2, (MAIN, *collective("recv")))], [], None),  # two of a pipeline's three
    ([rank(one, children=WORKERS) for one in range(3)], [], [ALL_WAIT]),
    ([rank(0, BACKWARD), rank(1, BACKWARD, cores=0.2)], [1], [busy("rank 1 is", "backward")]),
    ([rank(one, (MAIN, STEP), cores=1.0) for one in range(3)], [], [ALL_BUSY]),
    ([rank(0, (MAIN, STEP)), rank(1, (MAIN, STEP)), rank(2, (MAIN, LOAD))], [2],
     [message("where/not_where_most_are", ranks="rank 2 is")]),
    ([rank(0, (MAIN, STEP)), rank(1, (MAIN, LOAD))], [], []),
    ([rank(0), rank(1, ())], [], [silent("rank 1 is")]),
    ([rank(0), rank(1, LOADS, children=WORKERS)], [1], [message("where/waiting_for_loader", ranks="rank 1 is")]),
    ([rank(0), rank(1, (), wchan="hrtimer_nanosleep", native="no py-spy"), rank(2)], [1],
     [absent("rank 1 is"), hidden("rank 1")]),
    ([rank(0), rank(1, (), cores=1.0, native="no py-spy"), rank(2)], [1], [busy("rank 1 is"), hidden("rank 1")]),
])
def test_what_follows(ranks: list[RankSample], outliers: list[int], findings: list[str] | None) -> None:
    found = build_snapshot(ranks)
    assert sorted(number for group in found.groups if group.is_outlier for number in group.ranks) == outliers
    assert findings is None or list(found.findings) == findings


WORLD, PAIR = ("0-2", "0"), ("0-1", "1")


def behind(ranks: str, number: int, others: str, last: int) -> str:
    return message("where/sequence_behind", ranks=ranks, number=number, others=others, last=last)


def behind_in_group(ranks: str, number: int, members: str, others: str, last: int) -> str:
    return message("where/sequence_behind_in_group", ranks=ranks, number=number, members=members, others=others,
                   last=last)


@pytest.mark.parametrize(("entered", "outliers", "findings"), [
    ([[7], [7], [7]], [], [ALL_WAIT]),
    ([[7], [6], [7]], [1], [behind("rank 1 is", 6, "other ranks", 7)]),
    ([[7], [6], [5]], [], [behind("rank 2 is", 5, "rank 0", 7), behind("rank 1 is", 6, "rank 0", 7)]),
    ([[7, 4], [6, 5], [7]], [], [behind_in_group("rank 0 is", 4, "0-1", "rank 1", 5),
                                 behind_in_group("rank 1 is", 6, "0-2", "other ranks", 7)]),
])
def test_ranks_at_one_line_that_have_entered_different_collectives(
    entered: list[list[int]], outliers: list[int], findings: list[str]
) -> None:
    """NCCL counts only collectives; gloo also counts sends, and a rank that sends less is no outlier."""
    for spins in (True, False):
        ranks = [rank(number, sequences=tuple(CollectiveSeq(count, *group) for count, group in zip(
            counts, (WORLD, PAIR), strict=False)), spins=spins) for number, counts in enumerate(entered)]
        found = build_snapshot(ranks)
        assert list(found.findings) == findings
        late = [one for group in found.groups if group.is_outlier for one in group.ranks]
        assert late == (outliers if spins else [])


def test_the_sequence_and_the_step_are_shown() -> None:
    ranks = [rank(number, sequences=(CollectiveSeq(18204, "0-1", "0"),), steps=7, step_age_s=250 - number)
             for number in (0, 1)]
    found = build_snapshot(ranks)
    assert found.step == message("where/step", step=7, age="4 min 9 s")
    assert format_table(found)[0].endswith("→ all_reduce (sequence 18,204)")
    assert from_json(as_json(found), 10**6) == found
    moved = build_snapshot([ranks[0], ranks[1]._replace(steps=9)])
    assert moved.step == message("where/steps", first=7, last=9, age="4 min 9 s")


def test_a_worker_that_its_rank_waits_for() -> None:
    found = build_snapshot([rank(0), rank(1, LOADS, children=WORKERS), rank(2, children=WORKERS[:1])])
    assert [group.ranks for group in found.groups] == [(1,), (0, 2)]
    assert found.groups[0].location.line == (
        "train.py:120 <module> → __next__; "
        "its child: train.py:88 load_batch → dataset.py:17 __getitem__ → pipe_read()")


def test_what_native_code_hides() -> None:
    worker = ChildProcess(78, (), "S", "futex_do_wait", native="no py-spy")
    found = build_snapshot([rank(0), rank(1, (), wchan="hrtimer_nanosleep", native="no py-spy"),
                            rank(2, LOADS, children=(worker,))])
    native = message("where/native_code")
    assert [group.location.line for group in found.groups if group.is_outlier] == [
        f"{native} → hrtimer_nanosleep()",
        f"train.py:120 <module> → __next__; its child: {native} → futex_do_wait()"]
    assert found.findings[-1] == hidden("ranks 1-2")
    assert find_free_ranks([rank(1, (), native="no py-spy")]) == {1}


def test_two_process_groups_of_the_same_ranks() -> None:
    ranks = [rank(number, sequences=(CollectiveSeq(7, "0-1", "0"), CollectiveSeq(3 + number, "0-1", "4")))
             for number in (0, 1)]
    assert build_snapshot(ranks).findings == (message(
        "where/sequence_behind_in_named_group", ranks="rank 0 is", number=3, group=4, members="0-1", others="rank 1",
        last=4),)


def test_a_child_that_runs_another_program() -> None:
    (waits,) = parse_children('[[77, [], "S", "do_nanosleep", "my sleep", ""]]')
    found = build_snapshot([rank(0), rank(1, (MAIN, LOAD), children=(waits,))])
    assert found.groups[0].location.line.endswith("; its child: my sleep → do_nanosleep()")


def test_a_deep_stack_is_told_in_part() -> None:
    frames = [STEP._replace(line=number, file="/" + "数" * 400) for number in range(90)]
    found = stack.frames_from_json(stack.frames_to_json(frames))
    assert [one.line for one in found] == [*range(8), *range(58, 90)]
    assert len(found[0].file) == 300


ODD = "a\nb\rc\x85d\u2028e\tf\udcff"  # all that breaks lines, and what is no text


def test_names_that_break_lines() -> None:
    """Of files, functions, programs and process groups: no format of ours is broken by what it holds."""
    frames = (Frame(FrameKind.SCRIPT, ODD, 3, ODD),)
    children = json.dumps([(77, stack.frames_to_lists(frames), "S", ODD, ODD, "")])
    told = Sample(1, stack.frames_to_json(frames), "S", ODD, 0.0, 1.0, 0, False, children,
                       Progress(9, 1.0, json.dumps([(7, "0-1", ODD)]), False))
    collector = SnapshotCollector()
    collector.request(5, {0: 0}, {0: "n1"})
    collector.take(0, read(encode(told)))
    (found,) = collector.samples
    assert (found.frames, found.sequences) == (frames, (CollectiveSeq(7, "0-1", ODD),))
    assert found.children == (ChildProcess(77, frames, "S", ODD, ODD),)
    assert all(line.isprintable() for line in format_table(build_snapshot(collector.samples)))
    assert from_json(as_json(build_snapshot(collector.samples)), 1) == build_snapshot(collector.samples)


def test_a_rank_whose_answer_cannot_be_read_does_not_void_the_others() -> None:
    told = Sample(1, stack.frames_to_json((MAIN, LOAD)), "S", "", 0.0, 1.0, 0, False, "")
    collector = SnapshotCollector()
    collector.request(5, {0: 0, 1: 1}, {0: "n1", 1: "n2"})
    collector.take(0, told)
    collector.take(1, told._replace(children="[[7]]"))
    assert [one.has_answered for one in collector.samples] == [True, False]


def test_a_snapshot_without_signals_is_no_answer_to_who_wants_more() -> None:
    """It begins anew, and both get it; who wants less gets what is under way."""
    collector = SnapshotCollector()
    assert collector.request(-4, {0: 0}, {0: "n1"}, signals=False) == [(0, SampleRequest(1, signals=False))]
    assert collector.request(5, {0: 0}, {0: "n1"}) == [(0, SampleRequest(2))]
    assert collector.request(-4, {0: 0}, {0: "n1"}, signals=False) == []
    told = Sample(1, stack.frames_to_json((MAIN, LOAD)), "S", "", 0.0, 1.0, 0, False, "")
    assert collector.take(0, told) == []
    assert [requester for requester, _ in collector.take(0, told._replace(number=2))] == [-4, 5]


def test_a_stack_with_names_that_break_lines() -> None:
    code = compile("def f(): return frame()\nresult = f()", "a\nb\rc\x85d\u2028.py", "exec")
    names: dict[str, Any] = {"frame": sys._getframe}
    exec(code, names)
    text = format_calls(names["result"])
    found = stack.parse_dump(text)
    assert (found[-1].function, found[-1].file) == ("f", "a\\nb\rc\x85d\u2028.py")


def test_a_look_that_shows_nothing_of_a_rank_is_no_movement() -> None:
    stall, said = StallDetector(10.0), []
    for second in range(0, 40, 2):
        now = rank(0, sequences=(CollectiveSeq(7, "0-1", "0"),), steps=3)
        seen = [now, now._replace(sequences=(), steps=0), now._replace(frames=()),
                now._replace(has_answered=False, frames=())]
        said.append(stall.update([seen[second // 2 % 4]], float(second)))
    assert [line for line in said if line] == [
        message("where/no_progress", time=f"{at_s} s") for at_s in (10, 20)]


def test_a_rank_that_is_never_seen_moves_if_it_works() -> None:
    """It has no window, or keeps silent: the kernel tells what it uses."""
    stall = StallDetector(10.0)
    said = [stall.update([rank(0, (), state="R", busy_s=float(now)), rank(1, ())], float(now))
            for now in range(0, 40, 2)]
    assert [line for line in said if line] == []
    said = [stall.update([rank(0, (), state="R", busy_s=40.0), rank(1, ())], float(now)) for now in range(40, 56, 2)]
    assert [line for line in said if line] == [message("where/no_progress", time="10 s")]


@pytest.mark.parametrize(("ticks", "moves"), [(2, False), (5, True)])
def test_two_ticks_of_the_kernels_clock_are_no_movement(ticks: int, moves: bool) -> None:
    """Who uses almost nothing crosses a hundredth of a second now and then, in its own time and the kernel's."""
    stall = StallDetector(4.0)
    said = [stall.update([rank(0, busy_s=0.01 * ticks * (look % 3)), rank(1)], look * 0.8) for look in range(12)]
    assert any(said) != moves


def test_what_a_rank_uses_while_it_waits_at_its_end_is_no_movement() -> None:
    stall = StallDetector(10.0)
    said = [stall.update([rank(0, has_ended=True, busy_s=float(now)), rank(1)], float(now)) for now in range(0, 14, 2)]
    assert message("where/no_progress", time="10 s") in said


def test_for_whom_others_may_have_waited() -> None:
    reports = (MAIN, STEP, Frame(FrameKind.OURS, f"{stack.OUR_FOLDER}failure/exception.py", 9, "show"),
               Frame(FrameKind.PYTHON, f"{stack.PYTHON_FOLDER}traceback.py", 9, "format"))
    ranks = [rank(0, reports), rank(1, (MAIN, LOAD)), rank(2), rank(3, has_ended=True),
             rank(4, (MAIN, STEP), cores=1.0), rank(5, ()), rank(6, has_answered=False)]
    assert find_free_ranks(ranks) == {1, 4}


def test_a_picture_of_many_places_is_short_and_soon_there() -> None:
    ranks = [rank(number, (MAIN, STEP._replace(line=number), *collective("all_reduce"))) for number in range(10_000)]
    text = as_json(build_snapshot(ranks))
    assert len(text) < 100_000
    assert len(from_json(text, 10**6).groups) == 200


@pytest.mark.parametrize("count", first_of([1_000, 10_000]))
def test_thousands_of_ranks_are_merged_in_little_memory(count: int) -> None:
    """What the coordinator does: read a line of JSON for each rank, merge, and write the picture."""
    answers = []
    groups = json.dumps([(18204 + number, "0-9999", str(number)) for number in range(20)])
    for number in range(count):
        frames = (MAIN, STEP._replace(line=number % 50), *collective("all_reduce"))
        answers.append(encode(Sample(1, stack.frames_to_json(frames), "S", "futex", 0.0, 1.0, 0, False, "",
                                          Progress(9, 1.0, groups, True))))
    collector = SnapshotCollector()
    ranks = range(count)
    assert len(collector.request(5, dict(zip(ranks, ranks, strict=True)), dict.fromkeys(ranks, "n1"))) == count
    tracemalloc.start()
    found = [collector.take(number, read(line)) for number, line in enumerate(answers)]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found[:-1] == [[]] * (count - 1)
    ((asker, shown),) = found[-1]
    assert asker == 5
    assert isinstance(shown, SnapshotReply)
    assert len(from_json(shown.snapshot, 10**6).groups) == 50
    assert most < 20e3 * count


def read(frame: bytes) -> Sample:
    (message,) = FrameReader(Codec(Sample)).feed(frame)
    assert isinstance(message, Sample)
    return message


def test_ranges() -> None:
    assert format_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_watching_names_other_jobs_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """To find them costs a connection to each, and a call of squeue."""
    statuses = iter([0, 0, 1])
    monkeypatch.setattr(where_command, "find_endpoint", lambda _: None)
    monkeypatch.setattr(where_command, "print_snapshot", lambda *_: next(statuses))
    monkeypatch.setattr(where_command, "describe_unseen", lambda _: "others")
    assert where_command.main(["--watch=0.001"]) == 1
    assert list(statuses) == []
    assert capfd.readouterr().err == "mpiddp.where: others\n"


@pytest.mark.parametrize(("option", "hint"), [("--jsn", "did you mean --json?"), ("--watch=0", "--watch 0: ")])
def test_wrong_usage_is_one_line_with_a_hint(option: str, hint: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert where_command.main([option]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("mpiddp.where: ") and hint in line
