"""Scripts that start in a hold: ranks that stay between them."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpiddp.hold import protocol, registry
from mpiddp.hold.communicator import Links, Meeting, SocketCommunicator, meet
from mpiddp.hold.prompt import read_ranks
from mpiddp.hold.server import KILL_DELAY_S
from mpiddp.ipc.authentication import connect
from mpiddp.ipc.channel import Channel, Codec, listen
from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.holds import ALL_REDUCE, Hold, Remains, run_many
from tests.messages import find
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPICH_FIRST,
    MPIS,
    ROOT,
    Mpi,
    alone,
    check,
    check_hello,
    mpiexec,
    need,
    on_path,
    single_node_environ,
)

TOKEN = "token"

@pytest.fixture(scope="module", params=MPICH_FIRST)
def hold(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hold]:
    """Give a hold to tests that leave it as it was."""
    with contextlib.closing(Hold(request.param, tmp_path_factory.mktemp("home"))) as hold:
        yield hold.wait_until_ready()
        hold.end()


@pytest.mark.mpi
def test_a_script_runs_as_it_is_on_disk_now(hold: Hold, tmp_path: Path) -> None:
    check_hello(hold.run(EXAMPLES / "hello_world.py"), 2)
    (script := tmp_path / "train.py").write_text("import part\n" + ALL_REDUCE)
    for text in ("one", "two"):
        (tmp_path / "part.py").write_text(f"print({text!r})\n")
        done = check(hold.run(script, "--show", "0"))
        lines = done.stdout.splitlines()
        assert sorted(lines) == sorted([text, text, "0 of 2", "1 of 2"])
        assert "2 ranks on 1 node" in done.stderr


@pytest.mark.mpi
def test_arguments_folder_and_output_options_are_the_runs(hold: Hold, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ.get('MPIDDP_SHOW'))"
    options = "--quiet", "--prefix", "--log-dir", tmp_path / "logs"
    done = check(hold.run(*options, "-c", code, "--lr", "a b", cwd=tmp_path))
    words = f"['--lr', 'a b'] {tmp_path} None"
    assert sorted(re.sub(r"^\[(\d) .*?\] ", r"\1 ", line) for line in done.stdout.splitlines()) == [
        f"{rank} {words}" for rank in range(2)]
    assert len(list(tmp_path.glob("logs/*/rank-*.log"))) == 2


@pytest.mark.mpi
def test_named_variables_are_passed_on(hold: Hold) -> None:
    code = "import os; print(os.environ.get('SEVEN'), os.environ.get('EIGHT'))"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hold.environ, "SEVEN", "a b")
        patch.setitem(hold.environ, "EIGHT", "8")
        done = check(hold.run("--env", "SEVEN", "--quiet", "-c", code))
    assert done.stdout == "a b None\n" * 2
    assert check(hold.run("--env", "SEVEN", "-c", code), 2).stderr == (
        "mpiddp.run: --env SEVEN: this shell has no variable of this name\n")


@pytest.mark.mpi
@pytest.mark.parametrize(("code", "status", "cause"), [
    ("raise ValueError('seven')", 1, "ValueError: seven"), ("sys.exit(7)", 7, "sys.exit(7)"),
    ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"), ("os.abort()", 134, "SIGABRT"),
])
def test_a_rank_that_fails_ends_its_run_alone(hold: Hold, code: str, status: int, cause: str) -> None:
    script = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {code}\ntime.sleep(600)"
    done = check(hold.run("-c", script), status)
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    assert cause in report["cause"]
    assert len(check(hold.run("-c", ALL_REDUCE)).stdout.splitlines()) == 2


WAITS = "import os, time\nprint('began\\n', end='', flush=True)\ntime.sleep(600)"


def await_began(run: subprocess.Popen[str]) -> None:
    """Return when both ranks of a script have begun."""
    assert run.stdout is not None
    seen = 0
    for line in run.stdout:
        seen += line == "began\n"
        if seen == 2:
            return
    raise AssertionError(run.wait())


@pytest.mark.mpi
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_client_ends_the_run_alone(hold: Hold, number: signal.Signals, status: int) -> None:
    with hold.start("-c", WAITS) as run:
        await_began(run)
        run.send_signal(number)
        assert run.stdout is not None
        text = run.stdout.read()
        assert run.wait(DEADLINE_S) == status
    assert len(find("launch/outside_signal", text, signal=number.name)) == 1
    check(hold.run("-c", ALL_REDUCE))


@pytest.mark.mpi
def test_a_second_interrupt_ends_ranks_in_native_code(hold: Hold) -> None:
    code = ("import os, time, torch, torch.distributed as dist\nprint('began\\n', end='', flush=True)\n"
            "if os.environ['RANK'] == '0': dist.all_reduce(torch.ones(1))\nelse: dist.barrier()")
    with hold.start("-c", code) as run:
        await_began(run)
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        time.sleep(2.0)
        run.send_signal(signal.SIGINT)
        assert run.wait(DEADLINE_S) == 130
    check(hold.run("-c", ALL_REDUCE))


@pytest.mark.mpi
def test_a_second_interrupt_ends_ranks_that_ignore_signals(hold: Hold) -> None:
    code = "import signal\nfor number in (2, 15): signal.signal(number, signal.SIG_IGN)\n" + WAITS
    with hold.start("-c", code) as run:
        await_began(run)
        run.send_signal(signal.SIGINT)
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        assert run.wait(DEADLINE_S + KILL_DELAY_S) == 130
    check(hold.run("-c", ALL_REDUCE))


@pytest.mark.mpi
def test_where_asks_the_run_and_not_its_hold(hold: Hold) -> None:
    with hold.start("-c", WAITS) as run:
        await_began(run)
        ask, environ = (str(hold.mpi.python), "-m", "mpiddp.where"), hold.environ
        deadline = time.monotonic() + DEADLINE_S  # the run can be found a moment after its start
        while "<string>:3" not in (said := processes.run(*ask, timeout=DEADLINE_S, env=environ, cwd=ROOT).stdout):
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        run.send_signal(signal.SIGTERM)
        assert run.wait(DEADLINE_S) == 143
    assert "<string>:3" in said
    assert "not shown" not in said
    assert check(processes.run(*ask, timeout=DEADLINE_S, env=environ, cwd=ROOT)).stdout.count("rank") > 1  # the hold's


@pytest.mark.mpi
def test_its_help_is_its_own(hold: Hold) -> None:
    assert "--end        end the hold" in check(hold.run("--help")).stdout


@pytest.mark.mpi
def test_a_client_that_is_killed_ends_the_run_and_what_it_has_started(hold: Hold) -> None:
    daemon = "import subprocess; subprocess.Popen(['sleep', '611'], start_new_session=True)\n"
    with hold.start("-c", daemon + WAITS) as run:
        await_began(run)
        refused = hold.run("-c", ALL_REDUCE)
        assert refused.returncode == 3
        assert refused.stderr == "mpiddp.run: another script runs in this hold; --wait waits for it\n"
        run.kill()
    check(hold.run("--wait", "-c", ALL_REDUCE))
    running = processes.with_mark(hold.environ[processes.MARK]).values()
    assert [words for words in running if "611" in words] == []


@pytest.mark.mpi
def test_a_client_that_reads_slowly_gets_everything(hold: Hold) -> None:
    count = 200_000
    with hold.start("--quiet", "-c", f"for number in range({count}): print('a line of some length', number)") as run:
        assert run.stdout is not None
        first = run.stdout.readline()
        time.sleep(1.0)
        lines = [first, *run.stdout]
        assert run.wait(DEADLINE_S) == 0
    numbers = [int(line.split()[-1]) for line in lines if line.startswith("a line of some length")]
    assert sorted(numbers) == sorted([*range(count), *range(count)])


def talk(hold: Hold, *messages: protocol.FromClient) -> Channel[protocol.FromClient, protocol.ToClient]:
    """Return a client's connection that has sent these messages."""
    (path,) = hold.home.glob("mpiddp/*.hold")
    found = registry.Hold(**json.loads(path.read_text()))
    channel = Channel[protocol.FromClient, protocol.ToClient](
        connect((found.address, found.port), found.token, DEADLINE_S, DEADLINE_S), Codec(protocol.ToClient))
    for message in messages:
        assert channel.send(message)
    return channel


def ask(hold: Hold, code: str) -> protocol.StartRun:
    """Return the request to run some code."""
    python = f"Python {platform.python_version()} of {hold.mpi.python.parent.parent}"
    return protocol.StartRun(json.dumps(["--quiet", "-c", code]), "{}", str(ROOT), python, waits=False, has_input=False,
                             is_prompt=False)


@pytest.mark.mpi
def test_a_signal_that_comes_at_once_counts(hold: Hold) -> None:
    channel = talk(hold, ask(hold, "import time; time.sleep(600)"), protocol.Signal(signal.SIGTERM))
    status = None
    while status is None:
        status = next((one.status for one in channel.receive(DEADLINE_S) if isinstance(one, protocol.RunOver)), None)
    channel.close()
    assert status == 143


@pytest.mark.mpi
@pytest.mark.thorough("test_a_client_that_is_killed_ends_the_run_and_what_it_has_started")
def test_a_client_that_ends_at_once_does_no_harm_to_the_next_run(hold: Hold) -> None:
    talk(hold, ask(hold, "pass")).close()
    check(hold.run("--wait", "-c", f"import time; time.sleep({KILL_DELAY_S + 2})"))


@pytest.mark.mpi
@pytest.mark.parametrize(("line", "status"), [
    ('"$@" >&-', 0), ('"$@" 2>&- >&-', 0), ('"$@" | head -1; exit ${PIPESTATUS[0]}', 120)])
def test_a_clients_own_streams(hold: Hold, line: str, status: int) -> None:
    code = "for number in range(100_000): print('seven', number)"
    done = check(processes.run("bash", "-c", line, "bash", *hold.command("--quiet", "-c", code), timeout=DEADLINE_S,
                               cwd=ROOT, env=hold.environ), status)
    assert "Traceback" not in done.stderr
    check(hold.run("--wait", "-c", "pass"))


@pytest.mark.mpi
def test_nohup_protects_a_run(hold: Hold) -> None:
    command = ["nohup", *hold.command("--quiet", "-c", "print('began', flush=True); import time; time.sleep(1.5)")]
    with processes.start(command, hold.environ, ROOT, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "began\n"
        run.send_signal(signal.SIGHUP)
        assert run.wait(DEADLINE_S) == 0


@pytest.mark.mpi
def test_a_hold_that_nobody_could_find_ends(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "mpiddp").touch()
    done = mpiexec(quick, 2, module="mpiddp.hold", env={"XDG_STATE_HOME": str(tmp_path)})
    assert check(done, 3).stderr.count("mpiddp: cannot start: hold-failed\n") == 1
    assert "by which mpiddp.run finds the hold" in done.stderr


@pytest.mark.mpi
@pytest.mark.thorough("single runs")
def test_a_hundred_runs_leave_nothing(hold: Hold) -> None:
    check(hold.run("-c", ALL_REDUCE))
    before = Remains(hold)
    run_many(hold, 100, seed=7)
    after = Remains(hold)
    assert after.descriptors == before.descriptors
    assert all(rss < 2**24 + was for rss, was in zip(after.rss, before.rss, strict=True))


@pytest.mark.mpi
@pytest.mark.thorough("single runs")
def test_the_command(quick: Mpi) -> None:
    done = check(alone(quick, "-m", "tests.holds", "--runs", "10", timeout=180))
    assert re.match(r"descriptors \[(.+)\] -> \[\1\], ", done.stdout), done.stdout
    assert len(re.findall(r": median \d+\.\d+ s of \d+$", done.stdout, re.MULTILINE)) == 2


@pytest.mark.mpi
def test_the_ranks_stop_together(hold: Hold) -> None:
    code = """
import mpiddp, os, signal
for step in range(10**6):
    if mpiddp.should_stop():
        break
    if step == 20 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGUSR1)
print(f"stopped at {step}\\n", end="")
raise SystemExit(75)
"""
    done = check(hold.run("--quiet", "-c", code), 75)
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("stopped at ")


@pytest.mark.mpi
def test_each_run_has_random_numbers_of_its_own(hold: Hold) -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item(), flush=True)"
    texts = [line for _ in range(2) for line in check(hold.run("--quiet", "-c", code)).stdout.splitlines()]
    assert len({word for text in texts for word in text.split()}) == 12


@pytest.mark.mpi
def test_mpi_is_the_holds(hold: Hold) -> None:
    done = check(hold.run("-c", "from mpi4py import MPI"), 1)
    (report,) = find("launch/failed_rank", done.stderr)
    assert "MPI's world is the hold's" in report["cause"]


@pytest.mark.mpi
@pytest.mark.parametrize(("arguments", "words"), [
    (("--trace=x", "x.py"), "--trace is not possible in a hold"), (("--check", "x.py"), "--check is not possible"),
    (("-n", "2", "x.py"), "-n and --dry-run are for python -m mpiddp"), (("--no-such", "x.py"), "--no-such"),
    ((), "no script"), (("-i", "x.py"), "-i takes no script: x.py"),
    (("-i", "--show=0"), "--show=0 is not possible with -i"),
    (("--quiet", "--env", "HOME", "x.py"), "--wait and --env NAME precede all other options"),
])
def test_what_a_run_cannot_do(hold: Hold, arguments: tuple[str, ...], words: str) -> None:
    done = check(hold.run(*arguments), 2)
    assert words in done.stderr


@pytest.mark.mpi
def test_another_python_is_refused(hold: Hold) -> None:
    other = MPIS["impi" if hold.mpi.name == "mpich" else "mpich"]
    need(other.missing())
    done = processes.run(str(other.python), "-m", "mpiddp.run", "-c", "pass", timeout=DEADLINE_S, cwd=ROOT,
                         env=hold.environ)
    runs, this = (f"{mpi.python.parent.parent}" for mpi in (hold.mpi, other))
    assert done.returncode == 3
    assert re.fullmatch(rf"mpiddp.run: the hold runs Python \S+ of {runs}, and this is Python \S+ of {this}\n",
                        done.stderr)


@pytest.mark.mpi
def test_without_a_hold_it_says_how_to_start_one(quick: Mpi, tmp_path: Path) -> None:
    environ = {**single_node_environ(quick), "XDG_STATE_HOME": str(tmp_path)}
    done = processes.run(str(quick.python), "-m", "mpiddp.run", "x.py", timeout=DEADLINE_S, cwd=ROOT, env=environ)
    assert done.returncode == 3
    assert done.stderr == ("mpiddp.run: no hold of yours is ready, or none that this host can reach; start one: mpirun "
                           "python -m mpiddp.hold\n")


@pytest.mark.mpi
def test_a_template_that_is_killed_ends_the_hold(quick: Mpi, tmp_path: Path) -> None:
    with contextlib.closing(Hold(quick, tmp_path)) as hold:
        hold.wait_until_ready()
        with hold.start("-c", WAITS) as run:
            await_began(run)
            hold.templates()[-1].kill()
            assert run.wait(DEADLINE_S)
        assert hold.process.wait(DEADLINE_S) == 1
        assert re.search(r"^the template of rank \d on \S+ has ended: status -9$", text := hold.log.read_text(),
                         re.MULTILINE)
        assert len(find("launch/failed_rank", text)) == 1
        assert "Traceback" not in text


@pytest.mark.mpi
def test_ctrl_c_ends_a_hold(quick: Mpi, tmp_path: Path) -> None:
    with contextlib.closing(Hold(quick, tmp_path)) as hold:
        hold.wait_until_ready()
        hold.process.send_signal(signal.SIGINT)
        hold.process.wait(DEADLINE_S)
        assert "Traceback" not in hold.log.read_text()
        assert list(tmp_path.glob("mpiddp/*.hold")) == []


@pytest.mark.mpi
def test_a_hold_ends_whose_client_takes_nothing(quick: Mpi, tmp_path: Path) -> None:
    """Its output has filled all there is between them, and the rank has ended."""
    code = """
import os, threading, time
def speak():
    while True:
        print("x" * 9999)
threading.Thread(target=speak, daemon=True).start()
time.sleep(3)
os._exit(3)
"""
    with contextlib.closing(Hold(quick, tmp_path)) as hold:
        hold.wait_until_ready()
        with hold.start("--quiet", "-c", code) as run:
            assert run.stdout is not None
            run.stdout.readline()
            run.send_signal(signal.SIGSTOP)
            time.sleep(5.0)
            check(hold.run("--end"))
            assert hold.process.wait(DEADLINE_S) == 0
            run.kill()


@pytest.mark.mpi
def test_a_template_that_never_comes_is_named(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import os, time\nif os.environ['_MPIDDP_HOLD_RANK'] == '1':\n    time.sleep(600)\n")
    done = mpiexec(quick, 2, "--preload", "hangs", module="mpiddp.hold",
                   env={**on_path(ROOT, tmp_path), "MPIDDP_STARTUP_TIMEOUT": "25"})
    assert "mpiddp: still waiting for rank 1 to import torch and what --preload names\n" in check(done, 3).stderr
    assert "  found    rank 1: no template within 25 s\n" in done.stderr


@pytest.mark.mpi
def test_a_package_that_cannot_be_preloaded_is_named(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "begins.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()")
    for name, why in (("no_such", "cannot import no_such: ModuleNotFoundError: No module named 'no_such'"),
                      ("begins", "begins starts a thread while it is imported: leave it out of --preload")):
        done = mpiexec(quick, 2, "--preload", f"json,{name}", module="mpiddp.hold", env=on_path(ROOT, tmp_path))
        assert check(done, 3).stderr.count("mpiddp: cannot start: hold-failed\n") == 1
        assert re.search(rf"^  found    {re.escape(why)} \(rank (0|1|0-1)\)$", done.stderr, re.MULTILINE)


# The prompt, waiting, and what is preloaded


@pytest.mark.mpi
def test_a_prompt_on_all_ranks(hold: Hold) -> None:
    """An error on one rank leaves it alive, and what is no Python is said once."""
    lines = """
1+1
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
rank
7 / rank if rank else "zero"
1/(1-rank)
def double(value):
    return 2 * value

1+
total = torch.ones(1) * double(rank)
dist.all_reduce(total)
total
input()
print("no end of line", end="")
"""
    done = check(hold.type(lines))
    assert done.stdout.splitlines() == ["[0-1] 2", "[0] 0", "[1] 1", "[0] 'zero'", "[1] 7.0", "[0] 1.0",
                                        "[0-1] tensor([2.])", "[0-1] no end of line"]
    assert [line for line in done.stderr.splitlines() if "Error:" in line] == [
        "[1] ZeroDivisionError: division by zero", "SyntaxError: invalid syntax",
        "[0-1] EOFError: EOF when reading a line"]
    check(hold.run("-c", ALL_REDUCE))


@pytest.mark.mpi
@pytest.mark.parametrize(("line", "status"), [
    ("exit()", 0), ("exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_a_prompt_ends(hold: Hold, line: str, status: int) -> None:
    check(hold.type(f"{line}\n1+1\n"), status)


@pytest.mark.mpi
def test_ctrl_c_at_a_prompt(hold: Hold) -> None:
    """It interrupts what the ranks do, or the line that is typed, and nothing else."""
    with contextlib.closing(processes.Terminal(hold.command("-i", "--quiet"), hold.environ)) as terminal:
        for line, answer in (("1+1", "[0-1] 2"), ("import time; print('be' + 'gan'); time.sleep(600)", "[0-1] began")):
            terminal.wait_for(">>> ")
            terminal.type(line + "\r")
            terminal.wait_for(answer)
        terminal.type("\x03")
        terminal.wait_for("[0-1] KeyboardInterrupt")
        terminal.wait_for(">>> ")
        terminal.type("not sent")
        terminal.wait_for("not sent")
        terminal.wait_for("KeyboardInterrupt", typing="\x03")  # readline may miss one, which comes between two keys
        terminal.wait_for(">>> ")
        terminal.type("2+3\r")
        terminal.wait_for("[0-1] 5")
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.wait() == 0


@pytest.mark.mpi
def test_a_debugger_on_rank_0(hold: Hold, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(
        "import os\nif os.environ['RANK'] == '0':\n    breakpoint()\n    seven = 7\n" + ALL_REDUCE)
    with contextlib.closing(processes.Terminal(hold.command("--quiet", script), hold.environ)) as terminal:
        terminal.type("print('typed before')\r")
        terminal.wait_for("(Pdb) typed before")
        for line in ("next", "print('se' + 'ven is', seven)", "continue"):
            terminal.wait_for("(Pdb) ")
            terminal.type(line + "\r")
            terminal.wait_for("\n")  # its echo
        terminal.wait_for("0 of 2")
        assert terminal.wait() == 0
        assert "seven is 7" in terminal.text


@pytest.mark.unit
@pytest.mark.parametrize(("text", "ranks"), [("0", {0}), ("0-2,8", {0, 1, 2, 8}), ("1,3", {1, 3})])
def test_the_ranks_of_a_prefix(text: str, ranks: set[int]) -> None:
    assert read_ranks(text) == ranks


@pytest.mark.mpi
def test_a_script_waits_for_another(hold: Hold) -> None:
    with hold.start("-c", WAITS) as first:
        await_began(first)
        with hold.start("--wait", "-c", ALL_REDUCE) as second, hold.start("--wait", "-c", "pass") as third:
            for one in (second, third):
                assert one.stdout is not None
                assert one.stdout.readline() == "mpiddp.run: waiting: another script runs in this hold\n"
            third.send_signal(signal.SIGTERM)
            assert third.wait(DEADLINE_S) == 143
            first.send_signal(signal.SIGTERM)
            assert first.wait(DEADLINE_S) == 143
            assert second.wait(DEADLINE_S) == 0


@pytest.mark.mpi
def test_the_supervisor_restarts_a_script_in_a_hold(hold: Hold, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(
        "import os\nassert os.environ['MPIDDP_RESTART_COUNT'] == '1' or os.environ['RANK'] == '0', 'seven'")
    done = check(processes.run(str(hold.mpi.python), "-m", "mpiddp.supervise", "--max-restarts", "3",
                               *hold.command(script), timeout=DEADLINE_S, cwd=ROOT, env=hold.environ))
    assert re.search(r"supervise: attempt 0 ended: rank 1 on \S+: AssertionError: seven\n", done.stderr)
    assert "mpiddp.supervise: restart 1 of 3\n" in done.stderr
    assert len(find("launch/failed_rank", done.stderr)) == 1


@pytest.mark.mpi
def test_a_script_waits_for_a_hold(quick: Mpi, tmp_path: Path) -> None:
    environ = processes.marked({**single_node_environ(quick), **on_path(ROOT), "XDG_STATE_HOME": str(tmp_path)})
    command = [str(quick.python), "-m", "mpiddp.run", "--wait", "-c", ALL_REDUCE]
    with processes.start(command, environ, ROOT, stdout=subprocess.PIPE) as run, \
            contextlib.closing(Hold(quick, tmp_path)) as hold:
        hold.wait_until_ready()
        assert run.wait(DEADLINE_S) == 0


@pytest.mark.mpi
def test_packages_are_renewed(quick: Mpi, tmp_path: Path) -> None:
    """Until then a run says that they have changed; if they cannot be imported then, the hold waits for better ones."""
    (package := tmp_path / "mine.py").write_text("X = 'one'")
    show = "--quiet", "-c", "import mine; print(mine.X)"
    with contextlib.closing(Hold(quick, tmp_path, "--preload", "mine", path=tmp_path)) as hold:
        hold.wait_until_ready()
        assert check(hold.run(*show)).stdout == "one\n" * 2
        package.write_text("X = 'the second'")
        done = check(hold.run(*show))
        assert done.stdout == "one\n" * 2
        assert done.stderr.splitlines()[0] == (
            f"mpiddp.run: warning: the hold imported {package} before the last change; to import everything again: "
            "python -m mpiddp.run --renew")
        with hold.start("-c", WAITS) as run:
            await_began(run)
            assert check(hold.run("--renew"), 3).stderr == "mpiddp.run: another script runs in this hold\n"
            run.send_signal(signal.SIGTERM)
        package.write_text("import sys, time; time.sleep(3); sys.exit('seven')")
        why = r"mpiddp.run: cannot import mine: SystemExit: seven \(rank (0|1|0-1)\)"
        with contextlib.closing(talk(hold, protocol.Renew())) as renewer:
            assert check(hold.run("--renew"), 3).stderr.startswith("mpiddp.run: the hold is not ready")
            waiter = hold.run("--wait", *show)
            (answer,) = renewer.receive(DEADLINE_S)
            assert isinstance(answer, protocol.Refused)
            assert re.fullmatch(why, f"mpiddp.run: {answer.reason}")
        lines = check(waiter, 3).stderr.splitlines()
        assert re.fullmatch(f"{why}; mend that, and then python -m mpiddp.run --renew", lines[-1])
        assert re.fullmatch(f"{why}; mend that, and then python -m mpiddp.run --renew\n",
                            check(hold.run(*show), 3).stderr)
        package.write_text("X = 'the third'")
        check(hold.run("--renew"))
        done = check(hold.run(*show))
        assert done.stdout == "the third\n" * 2
        assert "before the last change" not in done.stderr
        hold.end()


@pytest.mark.mpi
def test_a_hold_may_end_while_it_is_renewed(quick: Mpi, tmp_path: Path) -> None:
    with contextlib.closing(Hold(quick, tmp_path)) as hold:
        hold.wait_until_ready()
        with contextlib.closing(talk(hold, protocol.Renew())) as renewer:
            hold.end()
            with pytest.raises(EOFError):
                renewer.receive(DEADLINE_S)
        assert "Traceback" not in hold.log.read_text()


@pytest.mark.mpi
def test_what_is_typed_while_a_script_waits_is_its_own(hold: Hold) -> None:
    with hold.start("-c", WAITS) as first:
        await_began(first)
        with contextlib.closing(processes.Terminal(hold.command(
                "--wait", "--quiet", "-c", "import os\nif os.environ['RANK'] == '0': print('read', input())"),
                hold.environ)) as terminal:
            terminal.wait_for("waiting: another script runs")
            terminal.type("seven\r")
            terminal.wait_for("seven")
            first.send_signal(signal.SIGTERM)
            terminal.wait_for("read seven")
            assert terminal.wait() == 0


@pytest.mark.mpi
def test_a_script_gets_its_own_module_of_a_preloaded_ones_name(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import parts.names as names")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "names.py").write_text("X = 'preloaded'")
    (folder := tmp_path / "script" / "parts").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "names.py").write_text("X = 'own'")
    (script := folder.parent / "train.py").write_text("import parts.names, mine; print(parts.names.X, mine.names.X)")
    with contextlib.closing(Hold(quick, tmp_path, "--preload", "mine", path=tmp_path)) as hold:
        hold.wait_until_ready()
        assert check(hold.run("--quiet", script)).stdout == "own preloaded\n" * 2
        hold.end()


# On three nodes; the client is on the login node


@pytest.mark.thorough("the same on one node")
@pytest.mark.parametrize(("name", "pmi"), [("openmpi4", "pmix"), ("impi", "pmi2"), ("mpich", "pmi2")])
def test_a_hold_on_three_nodes(cluster: Cluster, name: str, pmi: str) -> None:
    (home := RUN / f"hold-{name}").mkdir()
    with contextlib.closing(Hold(MPIS[name], home, cluster=cluster, pmi=pmi)) as hold:
        hold.wait_until_ready()
        assert sorted(check(hold.run("-c", ALL_REDUCE)).stdout.split()) == sorted(
            word for rank in range(6) for word in (str(rank), "of", "6"))
        fails = "import os, time\nif os.environ['RANK'] == '5': raise ValueError(7)\ntime.sleep(60)"
        assert len(find("launch/failed_rank", check(hold.run("-c", fails), 1).stderr, rank=5, host="node3")) == 1
        done = check(hold.type("import os\n7 if os.environ['RANK'] == '5' else None\n1 + 1"))
        assert done.stdout == "[5] 7\n[0-5] 2\n"
        hold.end()


@pytest.mark.thorough("the same on one node")
def test_bad_days_on_three_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Each ends its run alone, and leaves nothing of it on any node."""
    (home := RUN / "hold-bad-days").mkdir()
    (package := home / "mine.py").write_text("X = 1\n")
    with contextlib.closing(Hold(MPIS["openmpi4"], home, "--preload", "mine", path=home, cluster=cluster,
                                 pmi="pmix")) as hold:
        hold.wait_until_ready()
        list_segments = "--wait", "--quiet", "--show", "fold", "-c", "import os; print(os.listdir('/dev/shm'))"
        before = check(hold.run(*list_segments)).stdout
        # A script that is on the login node alone, and one that is on the others alone.
        (here := tmp_path / "here.py").write_text(ALL_REDUCE)
        assert check(hold.run(here), 3).stderr.count("mpiddp: cannot start: ") == 1
        check(hold.run("-c", f"open('/tmp/there.py', 'w').write({ALL_REDUCE!r})"))
        assert not Path("/tmp/there.py").exists()
        assert len(check(hold.run("--quiet", "/tmp/there.py")).stdout.splitlines()) == 6
        # Another user.
        stranger = ("import os, sys, mpiddp.run as run; sys.argv[1:] = ['-c', 'pass']; run.read_request(sys.argv[1:])\n"
                    "os.setuid(65534); sys.exit(run.main())")  # who cannot read what that has imported
        done = cluster.run(str(hold.mpi.python), "-c", stranger, timeout=DEADLINE_S, env=hold.environ, cwd=ROOT)
        assert check(done, 3).stderr.startswith("mpiddp.run: no hold of yours is ready")
        # A client that is killed, and one whose terminal is closed; daemons, shared memory and a stopped rank.
        leaves = (
            "import os, signal, subprocess, multiprocessing.shared_memory as shm\n"
            "subprocess.Popen(['sleep', '613'], start_new_session=True)\n"
            "kept = shm.SharedMemory(create=True, size=2**20)\n"
            "if os.environ['RANK'] == '5':\n    print('began', flush=True)\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
            "import time; time.sleep(600)")
        with hold.start("--quiet", "-c", leaves) as run:
            assert run.stdout is not None
            assert "began\n" in run.stdout
            run.kill()
        assert check(hold.run(*list_segments)).stdout == before
        with contextlib.closing(processes.Terminal(hold.command("--quiet", "-c", leaves), hold.environ)) as terminal:
            terminal.wait_for("began")
            terminal.hang_up()
            assert check(hold.run(*list_segments)).stdout == before
        running = processes.with_mark(hold.environ[processes.MARK]).values()
        assert [words for words in running if "613" in words] == []
        # Packages that cannot be imported on one node.
        package.write_text("import socket\nassert socket.gethostname() != 'node3', 'seven'\n")
        assert re.search(r"cannot import mine: AssertionError: seven \(rank 4-5\)\n",
                         check(hold.run("--renew"), 3).stderr)
        package.write_text("X = 2\n")
        check(hold.run("--renew"))
        assert check(hold.run("--quiet", "--show", "fold", "-c", "import mine; print(mine.X)")).stdout == "[0-5] 2\n"
        hold.end()


# The communicator


def make_ranks(size: int) -> list[SocketCommunicator]:
    """Return the communicators of so many ranks in this process."""
    pairs = {rank: socket.socketpair() for rank in range(1, size)}
    links = [Links(0, size, {rank: ours for rank, (ours, _) in pairs.items()}),
             *(Links(rank, size, {0: its}) for rank, (_, its) in pairs.items())]
    return [SocketCommunicator(link, Meeting(rank, size, 0, True, "no MPI", "", 0, ""))
            for rank, link in enumerate(links)]


def on_all(ranks: list[SocketCommunicator], act: Callable[[SocketCommunicator], object]) -> list[object]:
    """Return what each rank makes of its communicator, all at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks))


@pytest.mark.unit
def test_messages_of_two_communicators_never_meet() -> None:
    ranks = make_ranks(3)
    others = [one.duplicate() for one in ranks]
    others[1].send("other", 0)
    ranks[1].send({"a": b"x" * 10**4}, 0)
    ranks[2].send(7, 0)

    def receive(one: SocketCommunicator, rank: int | None = None) -> object:
        deadline = time.monotonic() + DEADLINE_S
        while (found := one.receive(rank)) is None and time.monotonic() < deadline:
            pass
        return found

    assert receive(ranks[0], 2) == (2, 7)
    assert receive(ranks[0]) == (1, {"a": b"x" * 10**4})
    assert receive(others[0]) == (1, "other")
    assert ranks[0].receive() is None


@pytest.mark.unit
def test_reductions_follow_each_other() -> None:
    def reduce(one: SocketCommunicator) -> list[int]:
        reduction, found = one.make_reduction(), []
        for number in range(50):
            reduction.start((number * (one.rank + 3)) % 11).wait()
            found.append(reduction.result)
        one.finalize()
        return found

    expected = [max((number * (rank + 3)) % 11 for rank in range(4)) for number in range(50)]
    assert on_all(make_ranks(4), reduce) == [expected] * 4


@pytest.mark.process
def test_a_stranger_at_the_meeting_is_turned_away() -> None:
    listener = listen("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    with contextlib.closing(socket.create_connection(("127.0.0.1", port))) as stranger:
        stranger.sendall(os.urandom(48))
        meetings = [Meeting(rank, 2, 0, True, "no MPI", "127.0.0.1", port, TOKEN) for rank in range(2)]
        other = threading.Thread(target=lambda: meet(meetings[1], None, DEADLINE_S).send("here", 0))
        other.start()
        rank0 = meet(meetings[0], listener, DEADLINE_S)
        other.join()
        deadline = time.monotonic() + DEADLINE_S
        while (found := rank0.receive()) is None and time.monotonic() < deadline:
            pass
        assert found == (1, "here")


@pytest.mark.unit
def test_a_file_that_is_no_hold_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    holds = [registry.Hold(f"job-{number}", "n1", "127.0.0.1", 7, TOKEN, 2, float(number)) for number in range(2)]
    for one in holds:
        registry.write_hold(one)
    (tmp_path / "mpiddp" / "broken.hold").write_text("{")
    assert registry.read_holds() == holds[::-1]
    assert Path(registry.hold_path("job-0")).stat().st_mode & 0o777 == 0o600
    registry.remove_hold("job-0")
    assert registry.read_holds() == holds[1:]
