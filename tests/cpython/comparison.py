"""Run a module of CPython's tests in plain Python and in a rank, and compare them test by test."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tests import processes
from tests.support import MPIS, mpiexec_command, single_node_environ

from . import reasons
from .reasons import Reason, explain

MODULES = (
    "test_asyncio", "test_atexit", "test_faulthandler", "test_fork1", "test_gc", "test_io", "test_multiprocessing_fork",
    "test_multiprocessing_forkserver", "test_multiprocessing_spawn", "test_os", "test_pdb", "test_runpy", "test_signal",
    "test_subprocess", "test_threading", "test_wait4",
)
QUICK = MPIS["mpich"]
PLAIN, RANK = "python", "rank"
SUITE = Path(__file__).with_name("suite.py")
DEADLINE_S = 250  # for a module on an idle machine
MOST_RUNS = 3  # of a module with unexplained differences: tests of CPython's may fail on a busy machine
TESTS_ENDED = (0, 1)  # unittest's exit statuses
# Their modules have these two lines each. Not every installation of Python has the modules.
MULTIPROCESSING = "test_multiprocessing_"
MULTIPROCESSING_TEXT = """from test import _test_multiprocessing
_test_multiprocessing.install_tests_in_module_dict(globals(), {method!r})
"""


class Result(NamedTuple):
    """What came of a test, and why."""

    outcome: str
    reason: str = ""


NOT_RUN = Result("not run")
Results = dict[str, Result]  # by the tests' names
Difference = tuple[Result, Result]  # in plain Python and in a rank


class Comparison(NamedTuple):
    """A module's number of tests, what differs without an explanation, what is explained, and what explains nothing."""

    tests: int
    unexplained: dict[str, Difference]
    explained: dict[str, Reason]
    stale: list[Reason]


def list_missing_modules() -> list[str]:
    """Return the modules of CPython's tests that this Python lacks."""
    names = [f"test.{'_test_multiprocessing' if name.startswith(MULTIPROCESSING) else name}" for name in MODULES]
    return [name for name in names if importlib.util.find_spec(name) is None]


def run(module: str, way: str) -> Results:
    """Run a module's tests in a way, in a folder that is removed then, and return their results.

    If the process crashes or does not end in time, or if processes are left, this is a result, too; they are ended.
    """
    folder = Path(tempfile.mkdtemp(prefix="mpiddp-cpython-"))
    try:
        name = f"test.{module}"
        if module.startswith(MULTIPROCESSING):
            name, method = module, module.removeprefix(MULTIPROCESSING)
            (folder / f"{module}.py").write_text(MULTIPROCESSING_TEXT.format(method=method))
        arguments = [str(SUITE), str(folder / "results"), name]
        command = [str(QUICK.python), *arguments]
        if way == RANK:
            command = mpiexec_command(QUICK, 1, "-m", "mpiddp", "--quiet", *arguments)
        env = processes.marked({**single_node_environ(QUICK), "TMPDIR": str(folder)})
        end = run_to_end(command, env, folder)
        path = folder / "results"
        results = read_results(path.read_text().splitlines() if path.exists() else [])
        if end.outcome:
            results["the process"] = end
        if left := processes.leftovers(env):
            results["other processes"] = Result("left running", "\n".join(left))
        return results
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_to_end(command: list[str], env: dict[str, str], folder: Path) -> Result:
    """Run a command; return an outcome if it does not end as unittest does, and what it has printed."""
    with tempfile.TemporaryFile("w+", errors="backslashreplace") as output:
        process = processes.start(command, env, folder, stdout=output, stderr=output)
        try:
            status = process.wait(processes.PATIENCE * DEADLINE_S)
            outcome = "" if status in TESTS_ENDED else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            outcome = "did not end"
        finally:
            processes.end_tree(process.pid)
            process.wait()
        output.seek(0)
        return Result(outcome, output.read())


def read_results(lines: Iterable[str]) -> Results:
    """Return the tests' results from the lines that suite.py has written; one failure of a test is its result."""
    results: Results = {}
    for line in lines:
        test, *result = json.loads(line)
        if results.get(test, NOT_RUN).outcome != "failed":
            results[test] = Result(*result)
    return results


def find_differences(plain: Results, rank: Results) -> dict[str, Difference]:
    """Return the tests whose outcomes differ."""
    pairs = {test: (plain.get(test, NOT_RUN), rank.get(test, NOT_RUN)) for test in {**plain, **rank}}
    return {test: pair for test, pair in pairs.items() if pair[0].outcome != pair[1].outcome}


def compare(module: str, run: Callable[[str, str], Results] = run) -> Comparison:
    """Run a module both ways and compare them. A difference without an explanation has to come again each time."""
    plain = run(module, PLAIN)
    found = find_differences(plain, run(module, RANK))
    explained = {test: reason for test in found if (reason := explain(module, test))}
    unexplained = {test: pair for test, pair in found.items() if test not in explained}
    for _ in range(MOST_RUNS - 1):
        if unexplained:
            again = find_differences(run(module, PLAIN), run(module, RANK))
            unexplained = {test: again[test] for test in unexplained if test in again}
    stale = [reason for reason in reasons.REASONS if reason.module == module and reason not in explained.values()]
    return Comparison(len(plain), unexplained, explained, stale)
