"""Kill agents and relays at random moments of jobs that train and print: `python -m tests.helper_kills N [MPI]`.

A job has four ranks. Some of their eight helpers get SIGKILL, one after another: while the job starts, while it trains,
and as it comes to its end. That is a success, an exception of one rank, or a SIGKILL that it gets.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil

from tests import processes
from tests.support import DEADLINE_S, MPIS, PROGRAMS, ROOT, Mpi, mpiexec_command, single_node_environ

PROGRAM = PROGRAMS / "trains_and_prints.py"
RANKS = 4
HELPERS = [(rank, kind) for rank in range(RANKS) for kind in ("agent", "relay")]
MOMENTS = "start", "training", "end"
ENDS = "normal", "normal", "raise", "kill"
WAYS = "--prefix", "--log-dir", "--show=fold"
TITLE = re.compile(r"mpiddp: (agent|output) of rank (\d+) on ")
RANK_VARIABLES = "PMI_RANK", "OMPI_COMM_WORLD_RANK"
LETTERS = str.maketrans("abcdefghij", "0123456789")
TRAINING_S = 3.0
OUTPUT_LOST = 120
SHOWING_S = 7.0  # for what a job has printed that fails: folded lines wait for others
FEWEST = 3  # kills in a job


class Kill(NamedTuple):
    """A helper that was killed: of which rank, when, and the time by which it was dead."""

    rank: int
    kind: str
    moment: str
    dead_s: float


class Outcome(NamedTuple):
    """What became of a job: its helpers that were killed, its weights, what is not as it should be, and its output."""

    kills: list[Kill]
    weights: set[str]
    problems: list[str]
    output: str


def run(mpi: Mpi, random: Random, number: int, expected: set[str]) -> Outcome:
    """Run a job, kill so many of its helpers, and return what is not as it should be; `expected` are its weights."""
    end, failing, way = random.choice(ENDS) if number else "normal", random.randrange(RANKS), random.choice(WAYS)
    victims = random.sample(HELPERS, number)
    plan = {moment: [one for one in victims if random.randrange(3) == at] for at, moment in enumerate(MOMENTS)}
    plan["training"] += [one for one in victims if not any(one in planned for planned in plan.values())]
    with tempfile.TemporaryDirectory(prefix="mpiddp-kills-") as name:
        folder = Path(name)
        env = processes.marked(single_node_environ(mpi))
        options = [way, folder / "logs"] if way == "--log-dir" else [way]
        command = mpiexec_command(mpi, RANKS, "-m", "mpiddp", *options, PROGRAM, folder, end, failing)
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            job = processes.start(command, env, ROOT, stdout=out, stderr=err)
            try:
                kills, go_s = disturb(job, folder, env[processes.MARK], plan, random)
                status = job.wait(processes.PATIENCE * DEADLINE_S)
            except subprocess.TimeoutExpired:
                kills, go_s, status = [], 0.0, None
            finally:
                processes.end_tree(job.pid)
        said, errors = (folder / "out").read_text(errors="replace"), (folder / "err").read_text(errors="replace")
        weights = {one.read_text() for one in folder.glob("weights.*")}
        until_s = go_s if end == "normal" else go_s - SHOWING_S
        problems = [*wrong_lines(folder, said, kills, until_s, way), *wrong_end(status, end, failing, kills, errors)]
        if number and weights != expected:
            problems.append(f"weights {weights}")
        if left := processes.leftovers(env):
            problems.append(f"left behind: {left}")
        story = f"{end} of rank {failing}, {way}, status {status}, {kills}"
        return Outcome(kills, weights, problems, f"{story}\n{said[-500:]}\n{errors[-3000:]}")


def disturb(
    job: subprocess.Popen[str], folder: Path, mark: str, plan: dict[str, list[tuple[int, str]]], random: Random
) -> tuple[list[Kill], float]:
    """Kill helpers as planned, and let the job come to its end; return the kills, and when that was allowed."""
    kills: list[Kill] = []
    go_s = 0.0
    for moment in MOMENTS:
        if moment == "end":
            wait_for(job, lambda: len(list(folder.glob("weights.*"))) == RANKS)
            go_s = time.time()
            (folder / "go").touch()
        elif moment == "training":
            wait_for(job, lambda: len(list(folder.glob("lines.*"))) == RANKS)
        else:
            wait_for(job, lambda: len(helpers(mark)) == len(HELPERS))
        for victim in plan[moment]:
            time.sleep(random.uniform(0, TRAINING_S if moment == "training" else 0.3) / max(1, len(plan[moment])))
            if (process := helpers(mark).get(victim)) is not None:
                with contextlib.suppress(psutil.Error):
                    process.kill()
                    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                        time.sleep(0.001)
                kills.append(Kill(*victim, moment, time.time()))
    return kills, go_s


def wait_for(job: subprocess.Popen[str], has_come: object) -> None:
    """Return when a moment has come, or the job has ended; raise TimeoutExpired if neither does in time."""
    assert callable(has_come)
    deadline = time.monotonic() + processes.PATIENCE * DEADLINE_S
    while not has_come() and job.poll() is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(job.args, DEADLINE_S)
        time.sleep(0.01)


def helpers(mark: str) -> dict[tuple[int, str], psutil.Process]:
    """Return the helpers of a job, by rank and kind; one that has no title yet is in /, and the relay is the older."""
    found: dict[tuple[int, str], psutil.Process] = {}
    untitled: dict[int, list[psutil.Process]] = {rank: [] for rank in range(RANKS)}
    for process, words in processes.with_mark(mark).items():
        with contextlib.suppress(psutil.Error, OSError):
            if title := TITLE.match(" ".join(words)):
                found[int(title[2]), "agent" if title[1] == "agent" else "relay"] = process
            elif process.cwd() == "/" and "mpiddp" in words:
                env = process.environ()
                untitled[next(int(env[name]) for name in RANK_VARIABLES if name in env)].append(process)
    for rank, some in untitled.items():
        missing = [kind for kind in ("relay", "agent") if (rank, kind) not in found]
        for kind, process in zip(missing, sorted(some, key=lambda one: one.pid), strict=False):
            found[rank, kind] = process
    return found


def wrong_lines(folder: Path, said: str, kills: list[Kill], until_s: float, way: str) -> list[str]:
    """Return which lines are missing of those before a time, but for what a relay may have had that was killed."""
    shown = {tuple(int(one.translate(LETTERS)) for one in line) for line in re.findall("<([a-j]+):([a-j]+)>", said)}
    problems = []
    for rank in range(RANKS):
        relays = {rank, 0} if way == "--show=fold" else {rank}
        lost_s = max((one.dead_s for one in kills if one.kind == "relay" and one.rank in relays), default=0.0)
        record = folder / f"lines.{rank}"
        lines = [line.split() for line in record.read_text().splitlines()] if record.exists() else []
        missing = [int(number) for number, at_s in lines
                   if lost_s < float(at_s) < until_s and (rank, int(number)) not in shown]
        if missing or not lines:
            problems.append(f"rank {rank} misses {len(missing)} of {len(lines)} lines: {missing[:10]}")
    return problems


def wrong_end(status: int | None, end: str, failing: int, kills: list[Kill], errors: str) -> list[str]:
    """Return what is wrong with a job's exit status, and with what it has said on stderr."""
    killed = {(one.rank, one.kind) for one in kills}
    reported = [int(rank) for rank in re.findall(r"^(?:\[.*?\] )?mpiddp: failed: rank (\d+) on ", errors, re.M)]
    problems = ["a traceback"] if end == "normal" and "Traceback" in errors else []
    for one in kills:
        name = "agent" if one.kind == "agent" else "output relay"
        times = len(re.findall(f"mpiddp: the {name} of rank {one.rank} on .* exited unexpectedly", errors))
        if times > 1 or (times == 0 and one.moment == "training"):
            problems.append(f"the death of rank {one.rank}'s {one.kind} is said {times} times")
    if end == "normal":
        allowed = {0, OUTPUT_LOST} if any(kind == "relay" for _, kind in killed) else {0}
        if reported:
            problems.append(f"ranks {reported} are reported of a job without a fault")
    elif end == "raise":
        allowed = {1}
        if failing not in reported:
            problems.append(f"rank {failing} has raised, ranks {reported} are reported")
    else:
        allowed = set(range(1, 256))  # the launcher's own, of the signals of all ranks
        is_seen = (0, "agent") not in killed
        if reported != [failing] and (is_seen or reported):
            problems.append(f"rank {failing} was killed, ranks {reported} are reported")
    return problems if status in allowed else [*problems, f"status {status}, not {allowed}"]


def main() -> int:
    """Run what the command line says; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.helper_kills", description=__doc__.partition("\n")[0])
    parser.add_argument("kills", type=int, metavar="N", help="how many helpers are killed")
    parser.add_argument("mpi", nargs="?", default="mpich", choices=list(MPIS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no job later than that")
    parser.add_argument("--weights", help="of an undisturbed job, as an earlier call has printed them")
    options = parser.parse_args()
    weights = {options.weights} if options.weights else set()
    return 0 if kill_helpers(MPIS[options.mpi], options.kills, options.seed, options.seconds, weights) else 1


def kill_helpers(
    mpi: Mpi, number: int, seed: int = 0, seconds: float = 1e9, expected: Collection[str] = frozenset()
) -> bool:
    """Kill so many helpers in jobs, print each problem and a count, and tell whether there was none.

    `expected` are the weights of an undisturbed job, which runs first where they are not given.
    """
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    random, kills, wrong, jobs, began = Random(seed), list[Kill](), 0, 0, time.monotonic()
    if not expected:
        outcome = run(mpi, random, 0, set())
        expected = outcome.weights
        print(f"weights {expected}", flush=True)
        if len(expected) != 1 or outcome.problems:
            print(f"undisturbed: {outcome.problems}\n{outcome.output}", flush=True)
            return False
    while len(kills) < number and time.monotonic() - began < seconds:
        outcome = run(mpi, random, random.randint(FEWEST, len(HELPERS)), set(expected))
        jobs, kills, wrong = jobs + 1, kills + outcome.kills, wrong + bool(outcome.problems)
        if outcome.problems:
            print(f"{outcome.problems}\n{outcome.output}", flush=True)
        kinds, moments = Counter(one.kind for one in kills), Counter(one.moment for one in kills)
        print(f"{mpi.title}: {len(kills)} kills ({dict(kinds)}, {dict(moments)}) in {jobs} jobs and "
              f"{time.monotonic() - began:.0f} s; {wrong} jobs not as they should be", flush=True)
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
