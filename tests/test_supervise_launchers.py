"""Restarts under each launcher: Flux with a stand-in; PALS, PBS and Kubernetes as plain functions."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from mpiddp.supervise import allocation
from mpiddp.supervise.__main__ import (
    count_ranks_per_node,
    describe_surrounding_launcher,
    make_plan,
    parse_arguments,
)
from mpiddp.supervise.allocation import Allocation
from mpiddp.supervise.command import Command, CommandError, identify_launcher, make_command, parse_command
from mpiddp.systems import schedulers
from mpiddp.systems.launchers import HYDRA, LAUNCHERS, MPIRUN, NO_LAUNCHER, PALS, SRUN, JobStep, Launcher
from mpiddp.systems.schedulers import FLUX, NO_SCHEDULER, SLURM, Scheduler
from tests import processes
from tests.messages import find, message
from tests.support import (
    EXAMPLES,
    MPIS,
    ROOT,
    Mpi,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

FLUX_FOLDER = ROOT / "tests/standins/flux-supervise"
PALS_PATH = "/opt/cray/pe/pals/1.2.11/bin/mpiexec"  # on NCAR's Derecho; /opt/cray/pals/1.8/bin/mpiexec on ALCF's Aurora
OPEN_MPI_SAYS, HYDRA_SAYS = "mpirun (Open MPI) 4.1.4", "HYDRA build details:"
STEPPERS = [row for row in LAUNCHERS if row.step_options]
JOB = ("python", "-m", "mpiddp", "train.py")


def read_command(words: str, path: str = "") -> Command:
    """Return the command that starts JOB; `8`, an option's value, is also the name of a program."""
    return parse_command((*words.split(), *JOB), HYDRA_SAYS, {"python", "8"}.__contains__, path)


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
BY_MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "HYDI_CONTROL_FD": "7"}


@pytest.mark.parametrize(("environ", "launcher", "command"), [
    (STEP, "srun", "srun"), ({**STEP, "SLURM_PROCID": "1"}, "srun", "srun"),
    ({**STEP, "SLURM_PROCID": "1", "SLURM_PTY_PORT": "40001"}, "srun", "srun"),
    ({**STEP, **BY_MPICH, "SLURM_PTY_PORT": "40001"}, "MPICH's or Intel MPI's mpiexec", "mpiexec"),
    (BY_MPICH, "MPICH's or Intel MPI's mpiexec", "mpiexec"),
    ({**STEP, **BY_MPICH, "PMI_SIZE": "1"}, "MPICH's or Intel MPI's mpiexec", "mpiexec"),  # one in each of two tasks
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI's mpirun", "mpirun"),
    ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "8"}, "flux run", "flux run"),
    ({"ALPS_APP_PE": "1"}, "aprun", "aprun"),  # which does not say how many it starts
    ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}, "torchrun", "mpirun"),
])
def test_a_supervisor_is_no_rank(environ: dict[str, str], launcher: str, command: str) -> None:
    words = message("supervise/already_a_rank", launcher=launcher, command=command)
    assert describe_surrounding_launcher(environ) == words


@pytest.mark.parametrize("environ", [
    {}, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
    {**BY_MPICH, "PMI_SIZE": "1"}, {"ALPS_APP_PE": "0"}, {**STEP, "SLURM_PTY_PORT": "40001"},
], ids=["shell", "batch script", "step of one task", "mpiexec -n 1", "aprun", "srun --pty"])
def test_a_supervisor_in_a_batch_script_or_a_single_task(environ: dict[str, str]) -> None:
    assert describe_surrounding_launcher(environ) == ""


@pytest.mark.parametrize("mpi", first_of([MPIS["mpich"], MPIS["openmpi4"], MPIS["openmpi5"]]), ids=lambda mpi: mpi.name)
@pytest.mark.parametrize("starts_another", [True, False])
def test_a_launcher_around_the_supervisor_is_refused_once(mpi: Mpi, starts_another: bool, tmp_path: Path) -> None:
    """Whether or not the supervised command has a launcher too."""
    command = mpiexec_command(mpi, 2)[0 if starts_another else -1:]
    done = mpiexec(mpi, 2, *command, "-m", "mpiddp", EXAMPLES / "hello_world.py", cwd=tmp_path,
                   module="mpiddp.supervise")
    assert (done.returncode, done.stdout.count("hello")) == (2, 0), done.stdout
    assert len(find("supervise/already_a_rank", done.stderr)) == 1, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("program", "path", "version", "launcher"), [
    ("srun", "/usr/bin/srun", "", SRUN), ("mpiexec", PALS_PATH, "", PALS),
    ("/opt/cray/pals/1.8/bin/mpiexec", "/opt/cray/pals/1.8/bin/mpiexec", "mpiexec version 1.8.0", PALS),
    ("mpiexec", "/home/pals/mpich/bin/mpiexec.hydra", HYDRA_SAYS, HYDRA), ("mpirun", "", OPEN_MPI_SAYS, MPIRUN),
    ("mpiexec", "/opt/cray/pe/mpich/bin/mpiexec", "", HYDRA), ("python", PALS_PATH, "", NO_LAUNCHER),
    ("fluxion", "", "", NO_LAUNCHER), ("mpirun5", "", OPEN_MPI_SAYS, MPIRUN), ("mpiexec_mpt", "", "", HYDRA),
    ("mpirun_rsh", "", "", NO_LAUNCHER), ("mpiexec", PALS_PATH, OPEN_MPI_SAYS, PALS),
])
def test_whose_a_command_is(program: str, path: str, version: str, launcher: object) -> None:
    assert identify_launcher(program, path, version) is launcher


@pytest.mark.parametrize(("words", "path", "started"), [
    ("flux run -c 8 -g1 -n4", "", "flux run --nodes=2 --ntasks=4 --requires=hosts:n1,n3 --job-name=s -c 8 -g1"),
    ("/opt/flux/bin/flux run -x -o pmi=pmix", "",
     "/opt/flux/bin/flux run --nodes=2 --ntasks=4 --requires=hosts:n1,n3 --job-name=s -x -o pmi=pmix"),
    ("mpiexec -n 4 --ppn 2 --depth 8 --cpu-bind depth --env A=7", PALS_PATH,
     "mpiexec -n 4 --ppn 2 --hosts n1,n3 --depth 8 --cpu-bind depth --env A=7"),
    ("mpiexec -np=4 -ppn 2", "", "mpiexec -n 4 -hosts n1,n3 -ppn 2"),
    ("srun -n4 --ntasks-per-node=2 -c 8", "",
     "srun --overlap --nodes=2 --ntasks=4 --nodelist=n1,n3 --job-name=s -c 8"),
])
def test_the_command_on_two_nodes(words: str, path: str, started: str) -> None:
    found = make_command(read_command(words, path), JobStep(("n1", "n3"), 2, "s", ["A"]))
    assert tuple(found) == (*started.split(), *JOB)


def test_two_hyphens_before_the_command() -> None:
    assert parse_arguments(["--nodes", "2", "--", "srun", "--", "a"]).command == ["srun", "--", "a"]


@pytest.mark.parametrize(("words", "nodes", "ranks"), [
    ("srun", 2, 0), ("srun -n 4", 2, 2), ("srun --ntasks 4", 4, 1), ("srun -n4 --ntasks-per-node=2", 2, 2),
    ("srun --ntasks-per-node 3", 5, 3), ("flux run --ntasks=8", 4, 2), ("flux run --tasks-per-node=3", 4, 3),
    ("mpiexec -ppn 2", 3, 2), ("srun -n 4 -n 6", 3, 2),
])
def test_the_ranks_of_a_node(words: str, nodes: int, ranks: int) -> None:
    assert count_ranks_per_node(read_command(words), nodes) == ranks


@pytest.mark.parametrize(("words", "error"), [
    ("srun -n 5", message("supervise/ranks_indivisible", ranks=5, nodes=2)),
    ("srun -n 4 --ntasks-per-node=4", message("supervise/ranks_contradict", ranks=4, per_node=4, nodes=2)),
    ("srun -n 0", message("supervise/ranks_not_positive", option="-n", value=0)),
    ("flux run -nall", message("supervise/ranks_not_positive", option="-n", value="all")),
    *((f"flux run {option}", message("supervise/node_options", option=option, launcher="flux run"))
      for option in ("-N2", "--requires=fast")),
    ("mpiexec --hosts n1",
     message("supervise/host_options", option="--hosts", launcher="MPICH's or Intel MPI's mpiexec")),
    *((f"mpiexec {words}", message("supervise/hostfile_option", option=words.split()[0], program="mpiexec", file="h",
                                   launcher="MPICH's or Intel MPI's mpiexec"))
      for words in ("-f h", "--hostfile=h", "-machinefile h")),
    ("flux alloc -n 4", message("supervise/other_subcommand", command="flux alloc", launcher="flux run")),
])
def test_ranks_and_nodes_that_do_not_fit(words: str, error: str) -> None:
    with pytest.raises(CommandError, match=f"^{re.escape(error)}$"):
        count_ranks_per_node(read_command(words), 2)


@pytest.mark.parametrize("option", ["--hosts", "-hostlist"])
def test_pals_nodes_are_ours_to_choose(option: str) -> None:
    error = message("supervise/host_options", option=option, launcher="PALS's mpiexec")
    with pytest.raises(CommandError, match=f"^{re.escape(error)}$"):
        read_command(f"mpiexec {option} n1", PALS_PATH)


@pytest.mark.parametrize("option", ["--hostfile", "-f"])
def test_pals_hostfile_is_ours_to_read(option: str) -> None:
    error = message("supervise/hostfile_option", option=option, launcher="PALS's mpiexec", program="mpiexec", file="n1")
    with pytest.raises(CommandError, match=f"^{re.escape(error)}$"):
        read_command(f"mpiexec {option} n1", PALS_PATH)


def messages_of(launcher: Launcher, given: Allocation) -> list[str]:
    """Return supervise's errors for wrong commands of a launcher, in an allocation of two nodes."""
    path, version = PALS_PATH if launcher is PALS else "", OPEN_MPI_SAYS if launcher is MPIRUN else HYDRA_SAYS
    said = []
    for options, *words in [
        *([[], option, "n1"] for option in launcher.chooses), *([[], option, "x"] for option in launcher.counts),
        *([[], option, "0"] for option in launcher.per_node), [[], launcher.counts[0], "3"],
        [[], launcher.counts[0], "4", launcher.per_node[0], "4"], [["--nodes", "3"]], [["--min-nodes", "3"]], [[]],
    ]:
        command = (*launcher.words, *words, *JOB)
        try:
            read_parts = parse_command(command, version, {"python", "n1", "x"}.__contains__, path)
            assert read_parts.launcher is launcher
            make_plan(parse_arguments([*options, *command]), read_parts, given)
        except CommandError as error:
            said.append(str(error))
    with pytest.raises(CommandError) as caught:
        parse_command((*launcher.words, "nothing"), version, {"python"}.__contains__, path)
    return [*said, str(caught.value)]


@pytest.mark.parametrize("launcher", STEPPERS, ids=lambda row: row.name)
@pytest.mark.parametrize("system", [SLURM, FLUX, NO_SCHEDULER], ids=lambda row: row.name)
def test_no_message_names_another_launchers_option(launcher: Launcher, system: Scheduler) -> None:
    """Options of supervise itself, such as --nodes, may have the same name as a launcher's."""
    counted = [*launcher.chooses, *launcher.counts, *launcher.per_node]
    said = messages_of(launcher, Allocation(("n1", "n2"), 0, system))
    assert len(said) == len(counted) + 6
    options = {option for row in STEPPERS for option in (*row.chooses, *row.counts, *row.per_node)}
    foreign = options - {*counted, "--nodes", "--exclude"}
    for text in said:
        if system is SLURM:
            text = text.replace(", or --ntasks-per-node to sbatch", "")
        assert not {option for option in foreign if re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text)}, text
    assert system is SLURM or not any("sbatch" in text for text in said if launcher is not SRUN)


def test_no_launchers_row_lacks_words() -> None:
    for row in STEPPERS:
        assert row.counts, row.name
        assert row.per_node, row.name
        assert row.system is None or row.system.begin
        assert not {*row.chooses} & {*row.counts, *row.per_node}


@pytest.mark.parametrize(("lines", "nodes", "ranks"), [
    ("n1\nn1\nn2\nn2\n", ("n1", "n2"), 2),  # mpiprocs=2, and place=scatter
    ("n1\nn2\nn1\nn2\n", ("n1", "n2"), 2),
    ("x1001c0s0b0n0.site.gov\nx1000c0s0b0n0.site.gov\n", ("x1001c0s0b0n0.site.gov", "x1000c0s0b0n0.site.gov"), 1),
    ("n1\n" * 4 + "n2\n" * 2, ("n1", "n2"), 2),  # chunks of different sizes
    ("", (), 0),
])
def test_the_nodes_of_a_pbs_job(tmp_path: Path, lines: str, nodes: tuple[str, ...], ranks: int) -> None:
    (tmp_path / "nodes").write_text(lines)
    environ = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert allocation.find_allocation(environ, "") == Allocation(nodes, ranks)


@pytest.mark.parametrize(("counts", "ranks"), [((2, 2), 2), ((4, 1), 1)])
def test_the_nodes_of_a_grid_engine_job(tmp_path: Path, counts: tuple[int, int], ranks: int) -> None:
    """As Grid Engine 8.1.9 writes the file."""
    lines = (f"n{number} {count} all.q@n{number} UNDEFINED\n" for number, count in enumerate(counts, 4))
    (tmp_path / "hosts").write_text("".join(lines))
    environ = {"JOB_ID": "7", "SGE_ROOT": "/var/lib/gridengine", "PE_HOSTFILE": str(tmp_path / "hosts")}
    assert allocation.find_allocation(environ, "") == Allocation(("n4", "n5"), ranks)
    assert allocation.find_allocation({}, str(tmp_path / "hosts")) == Allocation(("n4", "n5"), ranks)


def test_a_node_file_that_is_gone(quick: Mpi, tmp_path: Path) -> None:
    environ = {**single_node_environ(quick), "PBS_NODEFILE": str(tmp_path / "gone")}
    done = processes.run(str(quick.python), "-m", "mpiddp.supervise", str(quick.mpiexec), "true", timeout=60,
                         env=environ, cwd=tmp_path)
    error = message("supervise/unreadable_file", file=tmp_path / "gone", error="No such file or directory")
    assert (done.returncode, done.stderr) == (2, f"mpiddp.supervise: {error}\n")


@pytest.mark.parametrize("lines", ["w-0.w.ns.svc slots=2\nw-1.w.ns.svc slots=2\n", "w-0.w.ns.svc:2\nw-1.w.ns.svc:2\n"])
def test_the_nodes_of_an_mpi_job_of_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """In the MPI operator's formats for Open MPI, and for Intel MPI and MPICH."""
    (tmp_path / "hostfile").write_text(lines)
    monkeypatch.setattr(schedulers, "KUBERNETES_HOSTS", str(tmp_path / "hostfile"))
    found = Allocation(("w-0.w.ns.svc", "w-1.w.ns.svc"), 2)
    assert allocation.find_allocation({"K_MPI_JOB_ROLE": "launcher"}, "") == found
    assert allocation.find_allocation({"K_MPI_JOB_ROLE": "worker"}, "") == Allocation((), 0)


@pytest.fixture
def flux(quick: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment of a `flux batch` script on three nodes, with a stand-in for Flux."""
    need(quick.missing())
    (tmp_path / "up").write_text("node[1-3]\n")
    (tmp_path / "timeleft").write_text(f"{2**32 - 1}\n")
    environ = single_node_environ(quick)
    ours = {"PATH": f"{FLUX_FOLDER}:{environ['PATH']}", "FLUX_URI": "local:///stand-in",
            "FLUX_ENCLOSING_ID": "ƒ6PMw2aL7", "FLUX_STANDIN": str(tmp_path),
            "FLUX_STANDIN_MPIEXEC": shlex.join([str(quick.mpiexec), *quick.options])}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    return {**environ, **ours}


def test_what_flux_says_of_an_allocation(flux: dict[str, str]) -> None:
    folder = Path(flux["FLUX_STANDIN"])
    given = Allocation(("node1", "node2", "node3"), 0, FLUX)
    assert allocation.find_allocation(flux, "") == given
    assert allocation.find_allocation({**flux, "FLUX_TASK_RANK": "0"}, "") == Allocation((), 0)
    assert allocation.find_time_left_s() == float("inf")
    (folder / "timeleft").write_text("77\n")
    assert 70 < allocation.find_time_left_s() <= 77
    assert allocation.find_silent_nodes(given, given.nodes) == ()
    (folder / "up").write_text("node1\nnode3\n")
    assert allocation.find_silent_nodes(given, given.nodes) == ("node2",)
    (folder / "up").write_text("\n")  # Flux does not answer: nothing is known of its nodes
    assert allocation.find_silent_nodes(given, given.nodes) == ()


LOSES_A_NODE = """\
import os, signal, sys
import torch.distributed as dist
import mpiddp
dist.barrier()
if mpiddp.restart_count == 0 and dist.get_rank() == 1:
    with open(sys.argv[1], "w") as file:
        file.write("node[1,3]")
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def supervised(mpi: Mpi, folder: Path, *words: object) -> list[str]:
    return [str(mpi.python), "-m", "mpiddp.supervise", "--dir", str(folder), "--history", str(folder / "h.json"),
            *map(str, words)]


def test_a_lost_node_is_left_out_under_flux(quick: Mpi, tmp_path: Path, flux: dict[str, str]) -> None:
    """Two ranks of the stand-in: Flux no longer lists the node, and the job moves to the spare one."""
    (tmp_path / "train.py").write_text(LOSES_A_NODE)
    command = supervised(quick, tmp_path, "--nodes", 2, "flux", "run", "-n", 2, "-c", 1, quick.python, "-m", "mpiddp",
                         "--quiet", tmp_path / "train.py", tmp_path / "up")
    environ = processes.marked(flux)
    done = check(processes.run(*command, timeout=100, env=environ, cwd=ROOT))
    assert not processes.leftovers(environ)
    attempts = json.loads((tmp_path / "h.json").read_text())["attempts"]
    assert [(one["action"], one["nodes"]) for one in attempts] == [
        ("again", ["node1", "node2"]), ("done", ["node1", "node3"])], done.stderr
    (restart,) = find("supervise/restart", done.stderr, limit=3)
    assert restart["details"].endswith(f" without node2: {message('supervise/node_silent', node='node2')}")
    jobs = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("run ")]
    expected = (r"run --nodes=2 --ntasks=2 --requires=hosts:node1,(node\d) --job-name=mpiddp-\w+ -c 1 \S+python -m "
                "mpiddp .*")
    hosts = [found[1] for line in jobs if (found := re.fullmatch(expected, line))]
    assert hosts == ["node2", "node3"], jobs


def test_no_attempt_begins_that_fluxs_limit_would_end(quick: Mpi, tmp_path: Path, flux: dict[str, str]) -> None:
    (tmp_path / "timeleft").write_text("29\n")
    done = processes.run(*supervised(quick, tmp_path, "flux", "run", "-n", 3, "sh", "-c", "exit 7"), timeout=60,
                         env=flux, cwd=ROOT)
    assert done.returncode == 75, done.stderr
    reason = message("supervise/walltime_near", left="29 s")
    assert message("supervise/requeue", reason=reason) in done.stderr


@pytest.mark.parametrize("number", [
    signal.SIGINT, signal.SIGQUIT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_signal_ends_a_job_of_flux(quick: Mpi, tmp_path: Path, flux: dict[str, str], number: signal.Signals) -> None:
    """SIGINT must be sent twice, SIGQUIT ends only `flux run`, and SIGTERM is forwarded to the tasks."""
    environ = processes.marked(flux)
    process = processes.start(supervised(quick, tmp_path, "flux", "run", "-n", 3, "sh", "-c", "echo READY; sleep 600"),
                              environ, ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(3))
        assert said == 3 * "READY\n"
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
    finally:
        processes.end_tree(process.pid)
        left = processes.leftovers(environ)
    assert not left
    assert process.returncode, said
    assert [one["action"] for one in json.loads((tmp_path / "h.json").read_text())["attempts"]] == ["stop"], said
    assert ("\ncancel " in (tmp_path / "log").read_text()) == (number == signal.SIGQUIT)


@pytest.mark.parametrize(("variables", "words", "error"), [
    ({}, "flux run -n 2", message("supervise/outside_allocation", launcher="flux run", system="Flux",
                                  commands="flux batch or flux alloc")),
    ({}, "srun -n 2", message("supervise/outside_allocation", launcher="srun", system="Slurm",
                              commands="sbatch or salloc")),
    ({"FLUX_URI": "local:///stand-in"}, "flux run", message("supervise/ranks_unknown", launcher="flux run")),
])
def test_a_command_that_lacks_something(
    quick: Mpi, tmp_path: Path, flux: dict[str, str], variables: dict[str, str], words: str, error: str
) -> None:
    environ = {name: value for name, value in flux.items() if name != "FLUX_URI"}
    done = processes.run(str(quick.python), "-m", "mpiddp.supervise", *words.split(), "true", timeout=60,
                         env={**environ, **variables}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"mpiddp.supervise: {error}\n")
    assert not list(tmp_path.glob(".mpiddp*"))


def test_fewer_nodes_get_as_many_ranks_each(quick: Mpi, tmp_path: Path, flux: dict[str, str]) -> None:
    """-n applies to --nodes: on fewer nodes, as --min-nodes allows, the ranks per node stay the same."""
    options = ("--nodes", 4, "--min-nodes", 2, "flux", "run", "-n", 8, "true")
    check(processes.run(*supervised(quick, tmp_path, *options), timeout=60, env=flux, cwd=ROOT))
    assert "run --nodes=3 --ntasks=6 --requires=hosts:node1,node2,node3 " in (tmp_path / "log").read_text()
