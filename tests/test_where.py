"""Where ranks are: stacks, and what follows from many of them."""

from __future__ import annotations

import tracemalloc

import pytest

from mpiddp.beside.asking import Shown, Whereabouts
from mpiddp.beside.lines import decode, encode
from mpiddp.where import stack
from mpiddp.where.merge import Rank, Worker, picture, ranges
from mpiddp.where.stack import Frame, Kind
from mpiddp.where.survey import Survey
from mpiddp.where.table import from_json

SITE = "/env/lib/python3.11/site-packages/"
STEP = Frame(Kind.SCRIPT, "/home/me/train.py", 92, "step")
MAIN = Frame(Kind.SCRIPT, "/home/me/train.py", 120, "<module>")
LOAD = Frame(Kind.SCRIPT, "/home/me/train.py", 88, "load_batch")
ITEM = Frame(Kind.SCRIPT, "/home/me/dataset.py", 17, "__getitem__")


def library(file: str, function: str, line: int = 1) -> Frame:
    return Frame(Kind.LIBRARY, SITE + file, line, function)


def collective(name: str) -> tuple[Frame, ...]:
    return (library("torch/distributed/c10d_logger.py", "wrapper"),
            library("torch/distributed/distributed_c10d.py", name))


REDUCES = (MAIN, STEP, *collective("all_reduce"))
BACKWARD = (MAIN, STEP, library("torch/_tensor.py", "backward"),
            library("torch/autograd/graph.py", "_engine_run_backward"))
LOADS = (MAIN, library("torch/utils/data/dataloader.py", "__next__"),
         library("torch/utils/data/dataloader.py", "_get_data"),
         library("torch/utils/data/dataloader.py", "_try_get_data"), Frame(Kind.PYTHON, "/usr/queue.py", 4, "get"))
IDLE = (library("torch/utils/data/_utils/worker.py", "_worker_loop"), Frame(Kind.PYTHON, "/usr/queues.py", 4, "get"))


def rank(number: int, frames: tuple[Frame, ...] = REDUCES, **fields: object) -> Rank:
    return Rank(number, f"n{number // 4}", frames, **{"state": "S", **fields})  # type: ignore[arg-type]


def test_what_faulthandler_prints_is_read() -> None:
    text = f"""Stack (most recent call first):
  File "/home/me/my data/train.py", line 88 in load batch
  File "{stack.PYTHON}threading.py", line 320 in wait
  File "{SITE}torch/x.py", line ??? in forward
  File "{stack.OURS}run/script.py", line 40 in run
  File "<frozen runpy>", line 88 in _run_code
  File "{stack.OURS}launch.py", line 100 in launch
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
    found = stack.read(text.splitlines())
    assert [(one.kind, one.line, one.function) for one in found] == [
        (Kind.LIBRARY, 0, "forward"), (Kind.PYTHON, 320, "wait"), (Kind.SCRIPT, 88, "load batch")]


@pytest.mark.parametrize(("frames", "name"), [
    (REDUCES, "all_reduce"), (BACKWARD, "backward"), (LOADS, ""), ((MAIN, LOAD), ""), ((), ""),
    ((MAIN, library("torch/nn/parallel/distributed.py", "forward"), library("torch/nn/linear.py", "forward")), ""),
    ((MAIN, Frame(Kind.OURS, stack.OURS + "api.py", 3, "should_stop"),
      Frame(Kind.OURS, stack.OURS + "waiting.py", 3, "wait")), "should_stop"),
])
def test_the_collective_that_a_stack_ends_in(frames: tuple[Frame, ...], name: str) -> None:
    assert stack.collective(frames) == name
    assert stack.from_text(stack.as_text(frames)) == frames


@pytest.mark.parametrize(("ranks", "odd", "finding"), [
    ([rank(0), rank(1), rank(2, (MAIN, LOAD, ITEM))], [2], "rank 2 is not in all_reduce, where others wait"),
    ([rank(0), rank(1, (MAIN, LOAD))], [1], "rank 1 is not in all_reduce, where others wait"),
    ([rank(0), rank(1), rank(2, (MAIN, STEP), cores=0.97)], [2],
     "rank 2 is computing, and not in all_reduce, where others wait yet: slow, not hanging"),
    ([rank(0), *(rank(one, (MAIN, STEP), cores=0.97) for one in (1, 2, 3))], [],
     "ranks 1-3 are computing: this is no standstill"),
    ([rank(0), rank(1, (), state="T"), rank(2)], [1], "rank 1 is stopped, by SIGSTOP or a debugger"),
    ([rank(0), rank(1, (), state="D", kernel="fuse_get_req")], [1], "rank 1 is held by the kernel"),
    ([rank(0), rank(1), rank(2, heard=False)], [2], "rank 2 is out of reach: the sentinel does not answer"),
    ([rank(0), rank(1), rank(2, ended=True)], [2], "rank 2 is at the end of the script"),
    ([rank(0), rank(1, ended=True), rank(2, ended=True)], [0], "rank 0 is in all_reduce (train.py:92 step)"),
    ([rank(0), rank(1), rank(2, (MAIN, *collective("broadcast")))], [2],
     "rank 2 is in broadcast (train.py:120 <module>)"),
    ([rank(0), rank(1, (MAIN, *collective("broadcast")))], [], "these do not meet"),
    ([rank(0), rank(1), rank(2)], [],
     "all ranks wait in the same all_reduce: the network or a device stands still"),
    ([rank(one, (MAIN, *collective("recv"))) for one in range(3)], [],
     "all ranks wait in recv: nobody does what they wait for"),
    ([rank(0), rank(1, LOADS)], [1], "rank 1 is waiting for a worker of its DataLoader"),
    ([rank(0, steps=7), rank(1, steps=7), rank(2, steps=6)], [],
     "all wait at one place, but rank 2 is in step 6 of up to 7"),
    ([rank(0, BACKWARD), rank(1, BACKWARD, cores=0.9)], [1],
     "rank 1 is computing, and not in backward, where others wait yet: slow, not hanging"),
    ([rank(one, (MAIN, STEP), cores=1.0) for one in range(3)], [], "all ranks are computing: this is no standstill"),
    ([rank(0, (MAIN, STEP)), rank(1, (MAIN, STEP)), rank(2, (MAIN, LOAD))], [2], "rank 2 is not where most are"),
    ([rank(0, (MAIN, STEP)), rank(1, (MAIN, LOAD))], [], None),
])
def test_what_follows(ranks: list[Rank], odd: list[int], finding: str | None) -> None:
    found = picture(ranks)
    assert [number for group in found.groups if group.odd for number in group.ranks] == odd
    assert found.findings == () if finding is None else finding in found.findings, found.findings


def test_a_worker_that_its_rank_waits_for() -> None:
    workers = (Worker(77, IDLE, "S"), Worker(78, (LOAD, ITEM), "S", "pipe_read"))
    found = picture([rank(0), rank(1, LOADS, workers=workers), rank(2)])
    assert found.groups[0].odd
    assert found.groups[0].place == (
        "train.py:120 <module> → __next__; "
        "its child 78: train.py:88 load_batch → dataset.py:17 __getitem__ → pipe_read()")


def test_ten_thousand_ranks_are_merged_in_two_seconds() -> None:
    """What the coordinator does: read a line of JSON for each rank, merge, and write the picture."""
    lines = []
    for number in range(10_000):
        frames = (MAIN, STEP._replace(line=number % 50), *collective("all_reduce"))
        lines.append(encode(Whereabouts(1, stack.as_text(frames), "S", "futex", number % 7, 1, False, "")))
    survey = Survey()
    ranks = range(10_000)
    assert len(survey.ask(-1, dict(zip(ranks, ranks, strict=True)), dict.fromkeys(ranks, "n1"))) == 10_000
    tracemalloc.start()
    found = [survey.hear(number, read(line)) for number, line in enumerate(lines)]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found[:-1] == [[]] * 9_999
    ((asker, shown),) = found[-1]
    assert asker == -1
    assert isinstance(shown, Shown)
    assert len(from_json(shown.picture).groups) == 50
    assert most < 200e6


def read(line: bytes) -> Whereabouts:
    message = decode(line)
    assert isinstance(message, Whereabouts)
    return message


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
