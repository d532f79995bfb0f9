"""The command line and its variables."""

from __future__ import annotations

import argparse
import json
import re
from datetime import timedelta
from pathlib import Path

import pytest

from mpiddp import __version__
from mpiddp.base.config import DryRunShape, LaunchConfig, OutputFilter, Script
from mpiddp.cli import read_config
from mpiddp.options.table import options_to_variables
from tests.messages import find, message
from tests.support import EXAMPLES, ROOT, Mpi, alone, bare_starts, check, free_port, mpiexec, noise

pytestmark = pytest.mark.light


@pytest.mark.parametrize(("arguments", "config"), [
    (["t.py"], LaunchConfig(Script("t.py"))),
    (["t.py", "--backend", "x", "-m", "--"], LaunchConfig(Script("t.py", ("--backend", "x", "-m", "--")))),
    (["--", "-t.py", "--"], LaunchConfig(Script("-t.py", ("--",)))),
    (["-m", "a.b", "--", "--quiet"], LaunchConfig(Script("a.b", ("--", "--quiet"), is_module=True))),
    (["--quiet", "-m", "a"], LaunchConfig(Script("a", is_module=True), quiet=True)),
    (["--backend", "gloo", "--no-init", "t.py"], LaunchConfig(Script("t.py"), backend="gloo", init=False)),
    (["--explain", "t.py"], LaunchConfig(Script("t.py"), explain=0)),
    (["--explain=3"], LaunchConfig(explain=3)),
    (["--explain", "1", "t.py"], LaunchConfig(Script("t.py"), explain=1)),
    (["--explain", "--quiet", "t.py", "1"], LaunchConfig(Script("t.py", ("1",)), explain=0, quiet=True)),
    (["--startup_timeout=5", "--abort_grace", "2", "--no_init", "t.py", "--a_b"],
     LaunchConfig(Script("t.py", ("--a_b",)), startup_timeout_s=5, abort_grace_s=2, init=False)),
    (["--quiet", "-c", "print(1)", "-c", "x"], LaunchConfig(Script("print(1)", ("-c", "x"), is_code=True), quiet=True)),
    (["--group-timeout", "90", "t.py"], LaunchConfig(Script("t.py"), group_timeout=timedelta(seconds=90))),
    (["--pass-local-rank", "t.py", "1"], LaunchConfig(Script("t.py", ("1",)), local_rank_option="--local-rank")),
    (["--pass-local-rank=--local_rank", "t.py"], LaunchConfig(Script("t.py"), local_rank_option="--local_rank")),
    (["--dry-run", "--nodes", "2", "--ranks-per-node=4", "t.py"], DryRunShape(2, 4)),
    (["--startup-timeout=5", "--exit-timeout", "1.5", "t.py"],
     LaunchConfig(Script("t.py"), startup_timeout_s=5, exit_timeout_s=1.5)),
    (["--abort-grace", "2", "--prefix", "t.py"],
     LaunchConfig(Script("t.py"), abort_grace_s=2, prefix="[{rank} {host}] ")),
    (["--prefix", "{time:%H:%M} {rank:3}: ", "t.py"], LaunchConfig(Script("t.py"), prefix="{time:%H:%M} {rank:3}: ")),
    (["--prefix=> ", "t.py"], LaunchConfig(Script("t.py"), prefix="> ")),
    (["--error-file", "/e.json", "--log-dir", "/logs", "--show", "0,4,local-1", "t.py"],
     LaunchConfig(Script("t.py"), error_file="/e.json", log_dir="/logs",
                  output_filter=OutputFilter(False, frozenset({0, 4}), frozenset({1})))),
    (["--show", "none", "t.py"], LaunchConfig(Script("t.py"), output_filter=OutputFilter(all_ranks=False))),
])
def test_arguments(arguments: list[str], config: LaunchConfig | DryRunShape) -> None:
    assert read_config(arguments, {}) == config


def test_variables_are_defaults_and_the_command_line_wins() -> None:
    environ = {"MPIDDP_BACKEND": "nccl", "MPIDDP_NO_INIT": "1", "MPIDDP_STARTUP_TIMEOUT": "7", "MPIDDP_QUIET": "yes",
               "MPIDDP_EXIT_TIMEOUT": "9"}
    assert read_config(["t.py"], environ) == LaunchConfig(
        Script("t.py"), backend="nccl", init=False, startup_timeout_s=7, exit_timeout_s=9, quiet=True)
    config = read_config(["--backend", "gloo", "--startup-timeout", "8", "t.py"], environ)
    assert isinstance(config, LaunchConfig)
    assert (config.backend, config.startup_timeout_s) == ("gloo", 8)
    assert read_config(["t.py"], {"MPIDDP_QUIET": "0"}) == LaunchConfig(Script("t.py"))
    empty = {"MPIDDP_STARTUP_TIMEOUT": "", "MPIDDP_BIND": "", "MPIDDP_BACKEND": "", "MPIDDP_EXPLAIN": ""}
    assert read_config(["t.py"], empty) == LaunchConfig(Script("t.py"))


def test_a_variable_that_no_option_has_is_noted() -> None:
    config = read_config(["t.py"], {"MPIDDP_STARTUP_TIMOUT": "7", "MPIDDP_FROBNICATE": "1", "MPIDDPS": "2"})
    assert isinstance(config, LaunchConfig)
    assert config.startup_timeout_s == LaunchConfig().startup_timeout_s
    assert config.unknown_variables == (
        "MPIDDP_FROBNICATE", "MPIDDP_STARTUP_TIMOUT (did you mean MPIDDP_STARTUP_TIMEOUT?)")


@pytest.mark.parametrize(("arguments", "environ", "words"), [
    ([], {}, message("launch/no_script")),
    (["-m"], {}, message("launch/no_module")),
    (["-c"], {}, message("launch/no_code")),
    *((words, {}, message("launch/script_on_stdin")) for words in (["-"], ["--quiet", "-", "a"], ["--", "-"])),
    (["--bind", "cores", "t.py"], {}, message("launch/invalid_choice", option="--bind", value="'cores'")),
    (["t.py"], {"MPIDDP_BIND": "cores"}, message(
        "launch/invalid_variable", variable="MPIDDP_BIND", choices="auto, none, launcher", value="'cores'")),
    (["t.py"], {"MPIDDP_SHOW": "first"}, f"MPIDDP_SHOW {message('launch/invalid_show', value=repr('first'))}"),
    (["--pass-local-rank=local", "t.py"], {}, message("launch/invalid_option_name", value="'local'")),
    (["--frobnicate", "t.py"], {}, message("launch/unrecognized_arguments", arguments="--frobnicate")),
    (["--back", "gloo", "t.py"], {}, message("launch/unrecognized_arguments", arguments="--back")),
    *((words, {}, message("launch/number_of_processes_is_the_launchers", option=option)) for words, option in (
        (["--nproc-per-node", "2", "t.py"], "--nproc-per-node"),
        (["--quiet", "--nproc_per_node=2", "t.py"], "--nproc_per_node=2"))),
    (["--log-dri", "x", "t.py"], {}, message("launch/similar_option", option="--log-dri", similar="--log-dir")),
    (["--pass-local-rank", "--local_rank", "t.py"], {}, message(
        "launch/local_rank_wants_equals", option="--local_rank")),
    (["--master-port=29500", "t.py"], {}, message("launch/address_and_port_are_chosen")),
    (["--rdzv_endpoint=a:1", "--tee", "3", "t.py"], {}, message("launch/address_and_port_are_chosen")),
    *(([option, value, "t.py"], {}, message("launch/seconds_out_of_range", value=value)) for option, value in (
        ("--startup-timeout", "-5"), ("--startup-timeout", "nan"), ("--group-timeout", "1e300"),
        ("--abort-grace", "0"))),
    (["--startup-timeout", "soon", "t.py"], {}, message("launch/invalid_seconds", value="'soon'")),
    (["--dry-run", "--nodes", "2"], {}, message("launch/incomplete_dry_run")),
    (["--dry-run", "--nodes", "0", "--ranks-per-node", "1"], {}, message("launch/invalid_number", value="'0'")),
    (["--explain=x", "t.py"], {}, message("launch/invalid_rank", value="'x'")),
    (["--interface=10.99.0.0/33", "t.py"], {}, message("launch/invalid_interface", value="'10.99.0.0/33'")),
    (["--threads", "²", "t.py"], {}, message("launch/invalid_number", value="'²'")),
    (["--port", "65535", "t.py"], {}, message("launch/invalid_port", value="'65535'")),
    (["--explain", "--dry-run", "--facts", "f"], {}, message("launch/with_dry_run", option="--explain")),
    (["-n4", "--dry-run", "--facts", "f"], {}, message("launch/with_dry_run", option="-n")),
    (["--show", "first", "t.py"], {}, message("launch/invalid_show", value="'first'")),
    (["--traceback", "slow", "t.py"], {}, message("launch/invalid_word", usual="short", other="full", value="'slow'")),
    (["--no-agent", "--log-dir", "logs", "--stall", "9", "t.py"], {},
     message("launch/option_needs_agent", options="--log-dir, --stall")),
    (["--stage-keep", "t.py"], {}, message("launch/option_needs_another", option="--stage-keep", needed="--stage")),
    (["t.py"], {"MPIDDP_STARTUP_TIMEOUT": "0"},
     f"MPIDDP_STARTUP_TIMEOUT {message('launch/seconds_out_of_range', value=0)}"),
    (["t.py"], {"MPIDDP_QUIET": "perhaps"}, message(
        "launch/invalid_variable", variable="MPIDDP_QUIET", value="'perhaps'",
        choices="1, true, yes, on, 0, false, no, off")),
])
def test_wrong_usage_is_one_line(arguments: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        read_config(arguments, environ)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_need_neither_mpi_nor_torch(option: str, quick: Mpi) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['mpi4py', 'torch', 'psutil'])); "
    done = check(alone(quick, "-c", blocked + f"sys.argv[1:] = ['{option}']; import runpy; "
                                              "runpy.run_module('mpiddp', run_name='__main__', alter_sys=True)"))
    assert ("usage:" if option == "--help" else f"mpiddp {__version__}\n") in done.stdout
    assert done.stderr == ""


@pytest.mark.alone
def test_help_takes_few_starts_of_python(quick: Mpi) -> None:
    """It takes 0.05 s where a bare Python takes 0.02."""
    assert bare_starts(quick, "-m", "mpiddp", "--help") < 6


def test_dry_run_needs_neither_mpi_nor_torch(quick: Mpi) -> None:
    arguments = ["--dry-run", "--nodes", "2", "--ranks-per-node", "4", "train.py"]
    blocked = ("import sys; sys.modules.update(dict.fromkeys(['mpi4py', 'torch', 'psutil'])); "
               f"sys.argv[1:] = {arguments}; import runpy; "
               "runpy.run_module('mpiddp', run_name='__main__', alter_sys=True)")
    done = check(alone(quick, "-c", blocked, env={"SLURM_JOB_NODELIST": "n[07-08]"}))
    for host, first in (("n07", 0), ("n08", 4)):
        assert message("launch/planned_ranks", host=host, first=first, last=first + 3) in done.stdout
    last = done.stdout.split("rank 7:\n")[1]
    for line in ("RANK=7", "WORLD_SIZE=8", "LOCAL_RANK=3", "NODE_RANK=1", "MASTER_ADDR=<address of n07>"):
        assert f"  {line}\n" in last


@pytest.mark.alone
def test_dry_run_takes_few_starts_of_python(quick: Mpi) -> None:
    """It takes 0.1 s where a bare Python takes 0.02."""
    assert bare_starts(quick, "-m", "mpiddp", "--dry-run", "--nodes", 2, "--ranks-per-node", 4, "train.py") < 10


def test_explain_says_where_each_variable_comes_from(quick: Mpi) -> None:
    done = check(mpiexec(quick, 2, "--explain=1", EXAMPLES / "hello_world.py",
                         env={"MASTER_PORT": "29500", "OMP_NUM_THREADS": "3"}))
    head, *rest = done.stdout.splitlines()
    (found,) = find("launch/explained_software", head, device="cpu")
    optional = "" if (ROOT / ".git").exists() else "?"  # in an unpacked archive
    assert re.fullmatch(r"Python 3\.\S+, torch 2\.\S+, MPICH \S+, mpi4py \S+, mpiddp \S+"
                        rf"(; \S+/hello_world.py at git \S+){optional}", found["software"])
    lines = {line.split("=")[0]: line for line in rest}
    rank = message("launch/explained_variable", variable="RANK", value=1, source="MPI (rank in the job)")
    assert lines["RANK"] == rank + message("launch/launcher_agrees", variables="PMI_RANK")
    assert lines["MASTER_PORT"].endswith(message(
        "launch/overridden_value", former="MASTER_PORT=29500 in the environment"))
    assert lines["OMP_NUM_THREADS"] == message(
        "launch/explained_variable", variable="OMP_NUM_THREADS", value=3, source="the environment (set by the user)")
    assert "hello from" not in done.stdout
    assert "MASTER_PORT=29500 on rank 0" in done.stderr


def test_explain_runs_no_script(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "alone.py").write_text("print('done')\n")
    done = check(mpiexec(quick, 2, "--explain", 1, script))
    assert "RANK=1 " in done.stdout
    assert "done" not in done.stdout
    assert "independent-ranks" not in done.stderr


def test_explain_of_a_rank_that_is_not_there(quick: Mpi) -> None:
    done = check(mpiexec(quick, 2, "--explain=2"), 2)
    assert done.stderr.count(message("launch/no_rank_to_explain", rank=2, last=1)) == 1


def test_options_by_the_names_of_their_variables() -> None:
    text = "--share-gpus lets ranks share one (--gpus-per-node=4), --device=cpu uses none; omit --backend"
    assert options_to_variables(text) == ("MPIDDP_SHARE_GPUS=1 lets ranks share one (--gpus-per-node=4), "
                                          "MPIDDP_DEVICE=cpu uses none; omit MPIDDP_BACKEND")


CODE = """
import json, os, sys, mpiddp, torch.distributed as dist
rank = dist.get_rank()
with mpiddp.process_group(backend="gloo"):
    dist.barrier()
print(json.dumps([rank, sys.argv, sys.path[0], __name__, os.getpid()]) + chr(10), end="", flush=True)
"""


def test_code_with_its_local_rank(quick: Mpi, tmp_path: Path) -> None:
    """As `python -c` has it; its second group finds variables of ours, which are not stale."""
    file = tmp_path / "map.json"
    done = check(mpiexec(quick, 2, "--map", file, "--pass-local-rank=--local_rank", "-c", CODE, "a", "-c"))
    found = sorted(map(json.loads, done.stdout.splitlines()))
    assert [one[:-1] for one in found] == [
        [rank, ["-c", f"--local_rank={rank}", "a", "-c"], "", "__main__"] for rank in (0, 1)]
    assert [one["pid"] for one in json.loads(file.read_text())] == [one[-1] for one in found]
    assert noise(done) == []


def test_code_that_does_not_compile(quick: Mpi) -> None:
    done = check(mpiexec(quick, 2, "-c", "if True print(1)"), 3)
    assert done.stderr.count("cannot start: script-error") == 1
    assert "<string>, line 1: SyntaxError" in done.stderr


def test_a_second_group_of_a_launched_job_has_ports_of_its_own(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "halves.py").write_text(
        "import os, mpiddp\nfrom mpi4py import MPI\nport = os.environ['MASTER_PORT']\n"
        "with mpiddp.process_group(MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)) as env:\n"
        "    print(f'{port} {env.rank} {env.master_port}\\n', end='')\n")
    port = str(free_port())
    done = check(mpiexec(quick, 2, "--no-init", script, env={"MPIDDP_PORT": port}))
    (first, one, second), (also, other, same) = (line.split() for line in sorted(done.stdout.splitlines()))
    assert (first, one, also, other) == (port, "0", port, "1")
    assert second == same != port


def test_what_nobody_has_is_told_once(quick: Mpi, tmp_path: Path) -> None:
    """A rank, a variable, and a part of the work for each rank; the logs are where the start says."""
    (script := tmp_path / "alone.py").write_text("print('done')\n")
    done = check(mpiexec(quick, 2, "--show=0,7", "--log-dir", tmp_path / "logs", script,
                         env={"MPIDDP_STARTUP_TIMOUT": "7"}))
    assert done.stderr.count(message("launch/no_such_rank", ranks=7, last=1)) == 1
    assert done.stderr.count(message(
        "launch/unknown_variable", variables="MPIDDP_STARTUP_TIMOUT (did you mean MPIDDP_STARTUP_TIMEOUT?)")) == 1
    assert done.stderr.splitlines().count(message("launch/independent_ranks_ran", ranks=2, advice="")) == 1
    (folder,) = (tmp_path / "logs").iterdir()
    assert f"\n  logs in {folder}\n" in done.stderr
    assert done.stdout == "done\n"
