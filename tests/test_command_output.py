"""What commands print on stdout where it is full, closed, left by its reader, or its encoding lacks characters."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from functools import partial

import pytest

from mpiddp.where import registry
from tests import processes
from tests.support import DEADLINE_S, ROOT, Done, Mpi, alone, check, mpiexec_command, need, single_node_environ
from tests.test_where_command import CARD, GROUP, answer_as_job, listening, state

pytestmark = pytest.mark.light

__all__ = ["state"]

COMMANDS = ["mpiddp --help", "mpiddp --version", "mpiddp --dry-run --nodes 40 --ranks-per-node 4",
            "mpiddp --explain --quiet", "mpiddp.where --help", "mpiddp.supervise --help", "mpiddp.check --help",
            "mpiddp.where"]
FULL = "mpiddp: cannot write stdout: No space left on device\n"
ASCII = {"PYTHONIOENCODING": "ascii"}
PICTURE = json.dumps({"step": "", "findings": ["größer…"], "threads": {}, "groups": [{**GROUP, "ranks": [[0, 3]]}]})


def led(mpi: Mpi, command: str, where: str, **env: str) -> Done:
    """Run a module with its stdout led somewhere by a shell."""
    need(mpi.missing()[:1])
    return processes.run("sh", "-c", f'"$0" -m {command} {where}', str(mpi.python), timeout=DEADLINE_S, cwd=ROOT,
                         env={**single_node_environ(mpi), **env})


def unheard(mpi: Mpi, command: str, **env: str) -> Done:
    """Run a module whose stdout nobody reads any more."""
    source, sink = os.pipe()
    os.close(source)
    try:
        return subprocess.run([mpi.python, "-m", *command.split()], stdout=sink, stderr=subprocess.PIPE, text=True,
                              timeout=DEADLINE_S, cwd=ROOT, env={**single_node_environ(mpi), **env})
    finally:
        os.close(sink)


@pytest.mark.parametrize("command", COMMANDS)
def test_lost_answers(command: str, quick: Mpi, state: dict[str, str]) -> None:
    with listening(partial(answer_as_job, picture=PICTURE)) as port:
        registry.write_endpoint(CARD._replace(port=port))
        assert check(led(quick, command, "> /dev/full", **state), 120).stderr == FULL
        assert check(led(quick, command, ">&-", **state), 120).stderr == FULL.replace(
            "No space left on device", "Bad file descriptor")
        assert check(unheard(quick, command, **state), 120).stderr == ""


@pytest.mark.parametrize("command", [*COMMANDS, "mpiddp.where --json"])
def test_an_encoding_that_lacks_characters(command: str, quick: Mpi, state: dict[str, str]) -> None:
    with listening(partial(answer_as_job, picture=PICTURE)) as port:
        registry.write_endpoint(CARD._replace(port=port))
        done = check(alone(quick, "-m", *command.split(), env={**state, **ASCII}))
        assert done.stderr == ""
        assert done.stdout.isascii()
        assert "gr??er?" in done.stdout or command != "mpiddp.where"


def test_a_pipe_that_does_not_block_and_is_full(quick: Mpi) -> None:
    """As another program leaves a terminal, or a pipe, that it shares with the command."""
    need(quick.missing()[:1])
    source, sink = os.pipe()
    with os.fdopen(source, "rb") as reader:
        fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(sink, False)
        with subprocess.Popen([quick.python, "-m", "mpiddp", "--help"], stdout=sink, cwd=ROOT,
                              env=single_node_environ(quick)) as command:
            os.close(sink)
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(2)  # the reader is slow
            assert reader.read().decode() == check(alone(quick, "-m", "mpiddp", "--help")).stdout
            assert command.wait(DEADLINE_S) == 0


@pytest.mark.torch
def test_the_table_of_a_check_that_cannot_be_written(quick: Mpi) -> None:
    """The launcher sees neither this nor another status of a rank's own: the rank's stdout is led away."""
    need(quick.missing())
    _, *rest = mpiexec_command(quick, 1, "-m", "mpiddp.check", "--quick", "--nodes-only")
    at = rest.index(str(quick.python))
    shell = ["sh", "-c", 'exec "$0" "$@" > /dev/full']
    done = processes.run(str(quick.mpiexec), *rest[:at], *shell, *rest[at:], timeout=DEADLINE_S,
                         env=single_node_environ(quick), cwd=ROOT)
    assert done.returncode in (1, 120), done.stderr  # 1 if a node happens to be an outlier
    assert FULL in done.stderr
