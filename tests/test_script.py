"""A script finds what it finds under plain `python`, and its workers too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mpiddp.base.config import Script
from mpiddp.discovery.script import has_should_stop, read_script_facts
from tests import processes
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    PROGRAMS,
    ROOT,
    Mpi,
    alone,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    noise,
    on_path,
    single_node_environ,
)

pytestmark = pytest.mark.light

ARGUMENTS = ["--epochs", "3", "--", "-m", "--backend", "a b"]


def observe(mpi: Mpi, *command: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> tuple[dict, list[str]]:
    """Return what observe.py sees when it is started so, and the lines it prints after."""
    first, *rest = check(alone(mpi, *command, cwd=cwd, env=env)).stdout.splitlines()
    return json.loads(first), rest


def same(mpi: Mpi, *script: object, cwd: Path, env: dict[str, str] | None = None) -> dict:
    """Fail unless a script sees the same under `python` and under `python -m mpiddp`; return what."""
    plain, plain_end = observe(mpi, *script, cwd=cwd, env=env)
    ours, ours_end = observe(mpi, "-m", "mpiddp", *script, cwd=cwd, env=env)
    assert ours == plain
    assert ours_end == plain_end == ["thread True", "atexit True"]
    return ours


def test_a_script_sees_what_python_shows_it(quick: Mpi) -> None:
    seen = same(quick, "programs/observe.py", *ARGUMENTS, cwd=ROOT / "tests")
    assert seen["argv"] == ["programs/observe.py", *ARGUMENTS]
    assert [seen[method][1] for method in ("fork", "spawn", "forkserver")] == [True] * 3


def test_the_command_line_in_proc_says_which_rank_it_is(quick: Mpi) -> None:
    """The process's name, by which `pkill python` finds it, is what it was; a process that is forked has both, too."""
    code = "import os; print(open('/proc/self/cmdline').read().rstrip('\\0 '), open('/proc/self/comm').read(), end='')"
    done = check(mpiexec(quick, 2, "-c", f"{code}; os.fork() or print('SPT_NOENV' in os.environ)", "--lr", "1"))
    name = Path(quick.python).name
    assert sorted(set(done.stdout.splitlines())) == ["False", *[
        f"rank {rank}: -c --lr 1 {name}" for rank in range(2)]]


def test_a_linked_script_finds_its_folder(quick: Mpi, tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(PROGRAMS / "observe.py")
    assert same(quick, link, cwd=tmp_path)["path0"] == str(PROGRAMS)


def test_a_module_sees_what_python_shows_it(quick: Mpi) -> None:
    same(quick, "-m", "tests.programs.observe", *ARGUMENTS, cwd=ROOT)


def test_safe_path_is_respected(quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "observe.py"
    shutil.copy(PROGRAMS / "observe.py", script)
    same(quick, script, cwd=tmp_path, env={"PYTHONSAFEPATH": "1"})


@pytest.mark.parametrize(("module", "line"), first_of([
    ("package", "relative package package.__main__ ['-x']"),
    ("package.inner.program", "relative package.inner package.inner.program ['-x']"),
]))
def test_relative_imports_under_m(quick: Mpi, module: str, line: str) -> None:
    for launcher in ([], ["-m", "mpiddp"]):
        assert check(alone(quick, *launcher, "-m", module, "-x", cwd=PROGRAMS)).stdout == line + "\n"


def test_the_console_script_is_the_module(quick: Mpi) -> None:
    command = Path(ROOT / ".venvs/base/bin/mpiddp")
    done = check(alone(quick, command, "--quiet", "-m", "package", "-x", cwd=PROGRAMS))
    assert done.stdout == "relative package package.__main__ ['-x']\n"


@pytest.mark.thorough("test_a_loaders_worker_can_end_its_programs")
@pytest.mark.torch
def test_workers_of_every_kind_beside_mpi(quick: Mpi) -> None:
    done = check(mpiexec(quick, 2, PROGRAMS / "loader_workers.py"))
    assert done.stdout == "2 2\n" * 2
    assert noise(done) == []


def test_a_forked_child_that_exits_leaves_the_job_alone(quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text("import os, sys\nimport torch.distributed as dist\n"
                      "if os.fork() == 0:\n    sys.exit(0)\n"  # torch's gloo group, if alive, hangs in such a child
                      "assert os.wait()[1] == 0\ndist.init_process_group()\ndist.barrier()\nprint('done')\n")
    assert check(mpiexec(quick, 2, "--no-init", script)).stdout == "done\n" * 2


def test_standard_input_reaches_rank_0(quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "reads.py"
    script.write_text("import os, sys\nif os.environ['RANK'] == '0':\n    print(sys.stdin.read().strip())\n")
    (tmp_path / "input").write_text("hello\n")
    shell = tmp_path / "start.sh"
    shell.write_text(f'exec "$@" < {tmp_path}/input\n')
    done = processes.run("sh", str(shell), *mpiexec_command(quick, 2, "-m", "mpiddp", script), timeout=60,
                         env=single_node_environ(quick), cwd=ROOT)
    assert check(done).stdout == "hello\n"


@pytest.mark.parametrize(("source", "asks"), [
    ("import mpiddp\nif mpiddp.should_stop(): pass", True),
    ("from mpiddp import should_stop as over\ndef train():\n    return [over() for _ in 'ab']", True),
    ("class Loop:\n    def over(self):\n        import mpiddp.api\n        return mpiddp.api.should_stop()", True),
    ("import mpiddp\nprint(mpiddp.restart_count)", False),
    ("import stopper\nprint(stopper.should_stop)", False),
    ("'mpiddp.should_stop()'", False), ("import mpiddp\nmpiddp.should_stop(", False),
])
def test_whether_a_script_asks_when_to_stop(source: str, asks: bool, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(source)
    assert has_should_stop(Script(str(script), (), False)) == asks


def test_whether_a_module_asks_when_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No parent of it is imported for that."""
    (inner := tmp_path / "asking" / "inner").mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("raise RuntimeError")
    (inner / "__init__.py").write_text("raise RuntimeError")
    (inner / "__main__.py").write_text("from mpiddp import should_stop")
    monkeypatch.syspath_prepend(tmp_path)
    assert has_should_stop(Script("asking.inner", (), True))
    assert not has_should_stop(Script("asking.outer", (), True))


@pytest.mark.parametrize(("line", "options", "reads"), [
    ('p.add_argument("--local_rank", type=int, default=0)', ("--local_rank",), False),
    ("p.add_argument('--local_rank', '--local-rank', type=int)", ("--local_rank", "--local-rank"), False),
    ('p.add_argument("--local-rank", default=os.environ["LOCAL_RANK"])', ("--local-rank",), True),
    ('p.add_argument("--local")', (), False)])
def test_an_option_of_the_scripts_own_for_its_local_rank(
    line: str, options: tuple[str, ...], reads: bool, tmp_path: Path
) -> None:
    (script := tmp_path / "old.py").write_text(f"import argparse, os\np = argparse.ArgumentParser()\n{line}\n")
    facts = read_script_facts(Script(str(script)))
    assert (facts.local_rank_options, facts.reads_local_rank) == (options, reads)


def test_what_a_script_imports_may_know_of_ranks(quick: Mpi, tmp_path: Path) -> None:
    """As a package whose __main__.py does nothing but call its main()."""
    (tmp_path / "parts.py").write_text("import os\ndef main():\n    print(os.environ['RANK'] + '\\n', end='')\n")
    (tmp_path / "entry.py").write_text("from parts import main\nmain()\n")
    done = check(mpiexec(quick, 2, "-m", "entry", env=on_path(tmp_path)))
    assert sorted(done.stdout.split()) == ["0", "1"]
    assert "independent-ranks" not in done.stderr


@pytest.mark.parametrize(("option", "own", "is_named"), [
    ("--log_dir=logs", "--epochs", True), ("--show", "--show-images", True), ("--show", "--show", False)])
def test_an_option_of_ours_behind_the_script(
    quick: Mpi, tmp_path: Path, option: str, own: str, is_named: bool
) -> None:
    (script := tmp_path / "train.py").write_text(
        f"import argparse\nparser = argparse.ArgumentParser(allow_abbrev=False)\nparser.add_argument('{own}')\n"
        "parser.parse_args()\n")
    done = check(mpiexec(quick, 2, script, option), 2)
    (report,) = find("launch/failed_rank", done.stderr)
    words = message("launch/option_behind_script", option=option.partition("=")[0].replace("_", "-"))
    assert report["cause"].endswith(words) == is_named


def test_each_rank_may_have_a_script_of_its_own(quick: Mpi, tmp_path: Path) -> None:
    """As `mpirun -n 1 server.py : -n 1 worker.py`."""
    for name in ("server", "worker"):
        (tmp_path / f"{name}.py").write_text(
            "import torch.distributed as dist\nranks = [None] * dist.get_world_size()\n"
            f"dist.all_gather_object(ranks, '{name}')\nprint(*ranks, flush=True)\n")
    rank = [str(quick.python), "-m", "mpiddp"]
    command = [*mpiexec_command(quick, 1)[:-1], *rank, str(tmp_path / "server.py"), ":", "-n", "1", *rank,
               str(tmp_path / "worker.py")]
    done = check(processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(quick), cwd=ROOT))
    assert done.stdout == "server worker\n" * 2
    command.insert(command.index(":"), "--quiet")  # an argument of the script's
    command.insert(command.index("mpiddp") + 1, f"--log-dir={tmp_path}")
    done = processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(quick), cwd=ROOT)
    assert done.returncode == 3
    assert done.stderr.count("mpiddp: cannot start: options-differ\n") == len(
        find("launch/options_differ", done.stderr, option="log_dir", value="set", other="not set")) == 1
