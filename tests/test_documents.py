"""Each command line in a document runs as it stands there, or in the test that a table names; links lead somewhere."""

from __future__ import annotations

import ast
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.cluster.cluster import RUN
from tests.support import DEADLINE_S, EXAMPLES, MPIS, ROOT, check, need, on_path, single_node_environ
from tests.test_readme import FIRST

FOLDERS = ("", ".github", "batch", "batch/*", "examples", "mpiddp", "mpiddp/*", "tests", "tests/*")
DOCUMENTS = sorted({path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md".lstrip("/"))})
PROGRAMS = (
    "LLsub", "accelerate", "bsub", "ch-run", "conda", "flux", "grep", "ibrun", "jq", "jsrun", "kill", "mpiexec",
    "mpirun", "nohup", "pip", "pkill", "py-spy", "pytest", "python", "python3", "qsub", "salloc", "sbatch", "scancel",
    "scontrol", "srun", "tests/gpu/run", "tests/run", "tests/simulation/run", "torchrun", "ulimit")
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ +)*(?:{'|'.join(map(re.escape, PROGRAMS))})(?: +\S.*)?")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")

# Commands that do not run as they stand in a document: the test that runs each, and words that its file must have.
RUN_BY = {
    "sbatch job.sh": ("tests/test_readme.py::test_the_batch_script_of_ten_lines", "job.sh"),
    "srun --mpi=pmix --cpus-per-task=$SLURM_CPUS_PER_TASK python -m mpiddp train.py": (
        "tests/test_readme.py::test_the_batch_script_of_ten_lines", "job.sh"),
    "flux run -N2 -n8 -c8 -g1 python -m mpiddp train.py": (
        "tests/test_batch_launchers.py::test_flux", '"flux", "batch"'),
    "mpiexec -n 8 --ppn 4 --cpu-bind none python -m mpiddp train.py": (
        "tests/test_batch_launchers.py::test_pals", "--ppn 2 --cpu-bind none"),
    "srun python -m mpiddp train.py": ("tests/test_batch.py::test_a_script_says_hello", '"cray.sh"'),
    'COMMAND="shifter python -m mpiddp train.py"': (
        "tests/test_batch_launchers.py::test_what_srun_is_told", '"shifter '),
    "srun --mpi=list": ("tests/test_compatibility.py::test_srun_that_offers_nothing_fitting", "launch/fitting_option"),
    "sbatch srun_pmix.sh": ("tests/test_batch.py::test_a_script_says_hello", '"srun_pmix.sh"'),
    "sbatch llsub.sh": ("tests/test_batch.py::test_a_script_says_hello", '"llsub.sh"'),
    "LLsub llsub.sh": ("tests/test_batch.py::test_llsub", '"LLsub"'),
    "mpiexec -n 2 python main.py": ("tests/test_api.py::test_a_program_that_fails_ends_the_job", "own_end"),
    "python -m mpiddp --no-init main.py": (
        "tests/test_gpus.py::test_a_device_that_fails_when_it_is_first_used_is_reported", "-m mpiddp --no-init"),
    "scancel --signal=USR1": (
        "tests/test_batch.py::test_a_training_that_is_stopped_and_requeued_comes_to_the_same_weights",
        '"scancel", "--signal=USR1"'),
    "srun --mpi=pmix ch-run --bind=/tmp:/tmp IMAGE -- python -m mpiddp train.py": (
        "tests/test_containers.py::test_hello_from_containers_on_two_nodes", '"ch-run"'),
    "scancel --signal=USR2 JOB": (
        "tests/test_interactive.py::test_a_script_that_hangs_says_where_under_srun", '"scancel", "--signal=USR2"'),
    "pkill -USR2 -f '^rank .*train.py'": (
        "tests/test_interactive.py::test_a_script_that_hangs_says_where", "pkill"),
    "python -m mpiddp.where": ("tests/test_where_command.py::test_a_job_of_three_nodes_answers", "WHERE"),
    "scancel --signal=QUIT 48211.0": (
        "tests/test_where_command.py::test_a_sigquit_asks_and_ends_nothing", '"scancel", "--signal=QUIT"'),
    "mpiexec -n 2 python -m mpiddp --stall 90 tests/hangs/training.py 3600 60 digits.pt": (
        "tests/hangs/test_hangs.py::test_a_training_is_not_reported_as_hanging", "training.py"),
    "python -m mpiddp.supervise --nodes 2 --max-restarts 10 srun --mpi=pmix python -m mpiddp train.py --checkpoint c": (
        "tests/test_supervise.py::test_faults_on_three_nodes", "mpiddp.supervise --nodes 2"),
    "python -m tests.benchmarks.staging_model": (
        "tests/test_staging.py::test_a_model_of_many_nodes", "tests.benchmarks.staging_model"),
    **{command: ("tests/test_stage.py::test_three_nodes_read_once", word) for command, word in (
        ("srun --mpi=pmix python -m mpiddp --stage train.py", '"--stage"'),
        ("python -m tests.benchmarks.staging", "tests.benchmarks.staging"))},
    "srun -n1 --pty bash": ("tests/test_steps.py::test_mpirun_in_a_step", "-n1"),
    **{command: ("tests/test_log_files.py::test_the_documents_commands_find_the_odd_rank", f'"{command.split()[0]} ')
       for command in (
           """grep '"first": true' logs/48211/ranks.json""",
           r"""jq -r '.[] | select(.status != 0) | "\(.rank) \(.host) \(.status) \(.last)"' logs/48211/ranks.json""")},
    "mpirun python -m mpiddp --show fold train.py": (
        "tests/test_fold.py::test_numbers_are_listed_or_their_range_is_told", '"--show", "fold"'),
    "python -m mpiddp -m cProfile -o FILE train.py": (
        "tests/test_exit.py::test_a_profiler_of_the_script_alone", "cProfile"),
    "python -m cProfile -o FILE -m mpiddp train.py": (
        "tests/test_exit.py::test_a_profiler_that_runs_us_writes_its_results", "cProfile"),
    **{f"python -m tests.benchmarks.{name}": (
        f"tests/benchmarks/test_benchmarks.py::test_{name}", f'"tests.benchmarks.{name}", ')
       for name in ("startup", "threads", "failure", "scale", "flood", "asking", "recovery", "restarts", "output",
                    "accusing", "site", "hold")},
    "python -m tests.benchmarks.questions 100000": (
        "tests/benchmarks/test_benchmarks.py::test_questions", "tests.benchmarks.questions"),
    **dict.fromkeys(("python -m mpiddp.doctor --site site.toml", "python -m mpiddp.doctor --site FILE"), (
        "tests/test_site_profile.py::test_the_profiles_of_centres_are_right", '"--site", ')),
    "mpiexec -n 2 python -m mpiddp -m pytest -x tests": ("tests/test_api.py::test_pytest_in_ranks", '"-m", "pytest"'),
    **dict.fromkeys(
        ("mpirun -n 2 python -m mpiddp.hold &", "python -m mpiddp.run examples/hello_world.py",
         "python -m mpiddp.run train.py", "python -m mpiddp.run --end"),
        ("tests/test_hold.py::test_a_script_runs_as_it_is_on_disk_now", '"mpiddp.run"')),
    "python -m mpiddp.run --wait examples/hello_world.py": (
        "tests/test_hold.py::test_a_script_waits_for_a_hold", '"--wait"'),
    "python -m mpiddp.supervise --max-restarts 3 python -m mpiddp.run train.py": (
        "tests/test_hold.py::test_the_supervisor_restarts_a_script_in_a_hold", '"--max-restarts"'),
    "python -m mpiddp.run --renew": ("tests/test_hold.py::test_packages_are_renewed", '"--renew"'),
    "python -m mpiddp.run -i": ("tests/test_hold.py::test_ctrl_c_at_a_prompt", '"-i"'),
    "python -m tests.cpython": ("tests/cpython/test_cpython.py::test_the_command", '"tests.cpython"'),
    "python -m tests.holds": ("tests/test_hold.py::test_the_command", '"tests.holds"'),
    "python -m tests.scripts": ("tests/scripts/test_scripts.py::test_the_command", '"tests.scripts"'),
    "python -m tests.benchmarks.checking": (
        "tests/test_check.py::test_a_bad_node_is_named", "tests.benchmarks.checking"),
    "srun --mpi=pmix python -m mpiddp.check": ("tests/test_check.py::test_a_bad_node_is_named", "mpiddp.check"),
    **dict.fromkeys(
        (("srun --mpi=pmix python -m mpiddp.check --suspects bad-$SLURM_JOB_ID.txt "
          '|| echo "the check: status $?"'),
         ("python -m mpiddp.supervise --nodes 2 --exclude bad-$SLURM_JOB_ID.txt "
         "srun --mpi=pmix python -m mpiddp train.py")),
        ("tests/test_check.py::test_the_documents_batch_script_trains_without_the_bad_node", "README")),
    "jq -r '.links.bandwidth_bytes_per_s[]? | [.from, .to, .values[0]] | @tsv' check.json": (
        "tests/test_check.py::test_what_is_asked_for_is_written", '"jq", "-r"'),
    "mpiexec -n 2 python -m mpiddp tests/benchmarks/stopping.py": (
        "tests/benchmarks/test_benchmarks.py::test_stopping", "tests/benchmarks/stopping.py"),
    **{f"tests/simulation/run {option}": (
        "tests/simulation/test_simulation.py::test_the_command", "tests/simulation/run")
       for option in ("--seeds 10000", "--seeds 1000 --ranks 10000", "--trace 7")},
    "python -m mpiddp --dry-run --facts facts.json": (
        "tests/test_dry_run.py::test_a_job_writes_the_facts_and_the_desk_finds_its_plan", '"--dry-run", "--facts"'),
    "tests/gpu/run --wheels wheels --table table.md": (
        "tests/test_gpu_run.py::test_a_machine_without_a_network", '"--wheels", "wheels", "--table", "table.md"'),
    "python -m pip download --dest wheels --only-binary=:all: -c tests/constraints.txt -r tests/gpu/requirements.txt": (
        "tests/test_gpu_run.py::test_a_machine_without_a_network", "pip download"),
    "tests/gpu/run --table table.md": ("tests/test_gpu_run.py::test_a_python_without_torch", "tests/gpu/run"),
    **dict.fromkeys(("pip install .", "pip install '.[examples]'", "pip install '.[mpich]'", FIRST), (
        "tests/test_readme.py::test_the_first_command_trains", "FIRST")),
    "mpirun --hostfile hosts -x PATH python -m mpiddp train.py": (
        "tests/test_hostfile.py::test_hosts_of_a_file", '"-x", "PATH"'),
    "mpiexec -f hosts -n 6 python -m mpiddp train.py": (
        "tests/test_hostfile.py::test_hosts_of_a_file", "-f {hosts} -n 2"),
    "mpiexec -machinefile hosts -n 6 python -m mpiddp train.py": (
        "tests/cluster/test_ssh.py::test_uneven_ranks_on_three_nodes", "mpiexec -machinefile {hosts}"),
    "python -m mpiddp.supervise --hostfile hosts --nodes 2 mpirun python -m mpiddp train.py": (
        "tests/cluster/test_ssh.py::test_a_job_starts_again_on_the_spare_node", "mpiddp.supervise --hostfile {hosts}"),
    **dict.fromkeys(("mpirun -n 2 mpiddp train.py", "pip uninstall mpiddp"), (
        "tests/test_readme.py::test_the_first_command_trains", 'mpiexec -n 2 mpiddp')),
    "python -m tests.left_out": (
        "tests/test_layers.py::test_each_test_is_selected_once_and_what_is_left_out_has_a_reason", "tests.left_out"),
    **dict.fromkeys(("python -m mpiddp.doctor", "python -m mpiddp.doctor job.sh"), (
        "tests/test_doctor.py::test_the_command", '"mpiddp", "doctor"')),
    "python -m tests.pictures trace.json": ("tests/test_readme.py::test_the_pictures_are_drawn", "pictures.trace_svg"),
}
# What sets up and runs the tests: a script of ours that has these words.
SET_UP = {
    "tests/run": (".ci/run", "tests/run"),
    "tests/run --all": ("tests/run", "--all"),
    "tests/run tests/test_plan.py": ("tests/run", 'pytest "$@"'),
    "pip install mpich": ("tests/run", "make_venv mpich mpi4py mpich"),
    "pip install drawsvg": ("tests/constraints.txt", "drawsvg=="),
    "pip install py-spy": ("tests/constraints.txt", "py-spy=="),
}
# Names of what others start, which mpiddp takes the place of; the one line of our own syntax; a launcher of one centre;
# Flux's commands.
NAMED = {
    "python -m mpi4py main.py",
    "LLsub batch.sh", "accelerate config", "accelerate launch", "accelerate launch …", "conda activate",
    "python -m torch.distributed.launch …", "mpirun --tag-output", "srun --label",
    "srun --output=%x-%j.%t.out", "torchrun …",
    "ibrun python -m mpiddp train.py",
    "flux alloc", "flux batch", "flux cancel", "flux job timeleft", "scontrol show",
    "flux run -o pmi=off", "scontrol requeue", "srun --mpi=none",
}


def commands(text: str) -> list[str]:
    """Return the command lines in a document: those in shell blocks, in indented blocks, and between backquotes."""
    blocks = [body for language, body in FENCE.findall(text) if language in ("", "bash", "console", "sh")]
    rest = FENCE.sub("", text)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()] + INDENTED.findall(rest)
    spans = [" ".join(span.split()) for span in SPAN.findall(INDENTED.sub("", rest))]
    return [line for one in (*lines, *spans)
            if COMMAND.fullmatch(line := one.partition(" # ")[0].strip()) and (" " in line or line == "tests/run")]


CENTRES = (ROOT / "batch/README.md").read_text().split("\n## Your centre's line, and ours\n")[1]
NAMED |= {command for command in commands(CENTRES) if "mpiddp" not in command}  # what centres tell their users to type
FOUND = sorted({command for path in DOCUMENTS for command in commands(path.read_text())})
PIECES = {one for one in FOUND if any(f"{one} " in other for other in FOUND if other not in NAMED)}
AS_THEY_STAND = [one for one in FOUND if one not in {*RUN_BY, *SET_UP, *NAMED, *PIECES}]


def test_commands_are_found_wherever_they_stand() -> None:
    text = ("Type `mpirun -n 2 x` or `srun\n--mpi=pmix y`, not `mpirun` or `rank 2`; `tests/run` too.\n\n"
            "    A=1 sbatch z\n    sbatched\n\n```sh\n$ pip install a\n```\n\n```python\nkill -1 b\n```\n")
    assert commands(text) == ["pip install a", "A=1 sbatch z", "mpirun -n 2 x", "srun --mpi=pmix y", "tests/run"]


def test_the_documents_are_read() -> None:
    named = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert named >= {"README.md", "batch/README.md", "batch/interactive.md", "examples/README.md", "mpiddp/PROBLEMS.md",
                     "mpiddp/README.md", "mpiddp/check/README.md", "tests/benchmarks/README.md",
                     "tests/faults/README.md"}
    assert len(AS_THEY_STAND) >= 15


def test_no_table_names_a_command_that_is_in_no_document() -> None:
    assert sorted({*RUN_BY, *SET_UP, *NAMED} - set(FOUND)) == []


@pytest.mark.parametrize("command", RUN_BY)
def test_the_test_that_runs_a_command_is_there(command: str) -> None:
    (file, name), words = RUN_BY[command][0].split("::"), RUN_BY[command][1]
    source = (ROOT / file).read_text()
    assert name in {one.name for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)}
    assert words in source


@pytest.mark.parametrize("command", SET_UP)
def test_what_sets_up_and_runs_the_tests(command: str) -> None:
    file, words = SET_UP[command]
    assert words in (ROOT / file).read_text()


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a folder with a training script and our examples, one that all nodes see if the test has a cluster."""
    shared = request.node.callspec.params["command"].startswith(ON_CLUSTER)
    found = RUN / f"documents-{time.monotonic_ns()}" if shared and request.getfixturevalue("cluster") else tmp_path
    found.mkdir(exist_ok=True)
    (found / "examples").symlink_to(EXAMPLES)
    shutil.copy(EXAMPLES / "distributed.py", found / "train.py")
    yield found
    shutil.rmtree(found)


ON_CLUSTER = ("srun ", "sbatch ", "salloc ")
LIKE_OTHERS = {  # test_matrix.py, test_api.py, test_cli.py, test_check_start.py or another command here is their like
    "mpirun -n 2 python -m mpiddp --pass-local-rank=--local_rank train.py",
    "srun --mpi=pmix python -m mpiddp --check train.py",
    "mpirun -n 2 python -m mpiddp examples/hello_world.py", "python -m mpiddp examples/hello_world.py",
    "srun --mpi=pmix -N1 -n2 python -m mpiddp examples/hello_world.py",
    "salloc -N3 --ntasks-per-node=2 srun --mpi=pmix python -m mpiddp examples/hello_world.py",
    "srun --mpi=pmix -N3 --ntasks-per-node=2 python -m mpiddp examples/hello_world.py",
    "sbatch --wait -N3 --ntasks-per-node=2 --output=out.txt --wrap='mpirun python -m mpiddp examples/hello_world.py'",
    "mpiexec -n 2 python -m mpiddp examples/hello_world.py", "mpiexec -n 2 python -m mpiddp train.py",
    "mpirun -n 2 python -m mpiddp train.py", "mpirun -n 2 python -m mpiddp --show 0 examples/hello_world.py",
    "mpiexec -n 4 python examples/coupled.py", "srun --mpi=pmi2 python -m mpiddp train.py",
    "mpirun -n 2 python -m mpiddp --explain=1 examples/hello_world.py",
    "mpirun -n 2 python -m mpiddp --facts facts.json --explain train.py", "python -m venv --system-site-packages VENV",
}
SAID = re.compile(r"\] hello from \[|^epoch 9: loss 0\.0|^trainer \d/2: loss ", re.MULTILINE)  # once by a rank


def ranks(command: str) -> int:
    """Return how many ranks of a command's job say something."""
    if ("examples/" not in command and "train.py" not in command) or "--explain" in command:
        return 0
    if "--show 0" in command:
        return 1
    return 6 if "-N3" in command else 2 if re.search("-n ?[24] ?", command) else 1  # half of coupled.py's four train


@pytest.mark.mpi
@pytest.mark.parametrize("command", [
    pytest.param(command, marks=[pytest.mark.cluster] * command.startswith(ON_CLUSTER)
                 + [pytest.mark.thorough] * (command in LIKE_OTHERS) + [pytest.mark.light] * ("--facts" in command))
    for command in AS_THEY_STAND])
def test_a_command_as_it_stands(command: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """Where a debugger asks what to do, it is told to go on, and to leave."""
    assert command.split()[0] not in ("kill", "pkill"), "it would end other processes: name the test that runs it"
    mpi = MPIS["mpich" if command.startswith("mpiexec") or "pmi2" in command else "openmpi4"]
    need(mpi.missing())
    said = ["sh", "-c", f"printf 'continue\\nquit\\n' | {command}"]
    where = on_path(ROOT)
    if command.startswith(ON_CLUSTER):
        env = {**mpi.environ(), **where}
        done = request.getfixturevalue("cluster").run(*said, timeout=DEADLINE_S, env=env, cwd=folder)
    else:
        done = processes.run(*said, timeout=DEADLINE_S, env={**single_node_environ(mpi), **where}, cwd=folder)
    files = [path.read_text() for path in folder.glob("*.txt")]  # where the command sends its output
    assert len(SAID.findall("".join([check(done).stdout, *files]))) == ranks(command), (done.stdout, done.stderr)


ANCHOR = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
LINKS = [(path, target, anchor) for path in DOCUMENTS for target, anchor in LINK.findall(path.read_text())]


@pytest.mark.parametrize(("path", "target", "anchor"), LINKS, ids=[f"{path.relative_to(ROOT)}-{target}-{anchor}"
                                                                  for path, target, anchor in LINKS])
def test_a_link_leads_somewhere(path: Path, target: str, anchor: str) -> None:
    found = path.parent / target if target else path
    assert found.exists()
    if anchor:
        headings = ANCHOR.findall(found.read_text())
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
