"""python -m mpiddp.doctor: what it reads in a job script, and what it prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.doctor.batch_script import NotABatchScript, read, read_from_text
from mpiddp.doctor.context import Host
from mpiddp.doctor.directives import Request
from mpiddp.doctor.launches import Launch, Program
from mpiddp.doctor.report import as_json, format_findings
from mpiddp.doctor.rules import RULES, check
from mpiddp.doctor.suggestion import suggest_all
from mpiddp.doctor.syntax import find_syntax_errors
from mpiddp.systems import launchers, schedulers
from mpiddp.systems.directives import Directives, TimeForm, parse_flux_time, parse_slurm_time
from mpiddp.systems.launchers import Launcher
from mpiddp.systems.schedulers import SLURM, Scheduler
from tests import support
from tests.messages import message
from tests.support import ROOT, Mpi, alone
from tests.test_doctor_rules import HEAD, START, AllHere, Here, findings, head, script


def launch(text: str, head: str = HEAD) -> Launch:
    """Return the only launch of a script."""
    (only,) = script(text, head).launches
    return only


DIRECTIVES = ", ".join(row.directives.sentinels[0] for row in schedulers.SCHEDULERS if row.directives)


@pytest.mark.parametrize(("content", "reason"), [
    (b"", message("doctor/empty")),
    (b"\n  \n", message("doctor/empty")),
    (b"\x7fELF\0\0", message("doctor/binary")),
    (b"#!/bin/bash\r\n#SBATCH -N 2\r\n", message("doctor/dos_lines")),
    (b"#!/bin/bash\n" + b"# line\n" * 200_000, message("doctor/too_large")),
    (b"#!/usr/bin/env python3\nprint()\n", message("doctor/python_script")),
    (b"import torch\nprint(torch)\n", message("doctor/python_script")),
    (b"#!/bin/tcsh\n#SBATCH -N 2\n", message("doctor/other_shell", shell="tcsh")),
    (b"dear diary,\n", message("doctor/no_job_script", directives=DIRECTIVES)),
    (b"#!/bin/bash\nexport A=1\nls -l\n", message("doctor/no_job_script", directives=DIRECTIVES)),
])
def test_a_file_that_is_no_job_script(tmp_path: Path, content: bytes, reason: str) -> None:
    (file := tmp_path / "job.sh").write_bytes(content)
    with pytest.raises(NotABatchScript) as caught:
        read(str(file))
    assert str(caught.value) == reason
    assert "\n" not in reason


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, message("doctor/folder")),
                         (tmp_path / "none.sh", message("doctor/unreadable", reason="No such file or directory"))):
        with pytest.raises(NotABatchScript) as caught:
            read(str(path))
        assert str(caught.value) == reason


def test_the_directives_of_slurm() -> None:
    head = """\
#!/bin/bash
#SBATCH -N 2 -n8 --tasks-per-node 4 -c8 # a comment
##SBATCH --account=NAME
#SBATCH --gres=gpu:a100:4 -t 1-12 --exclusive --job-name "two words"
# the next one wins
#SBATCH --nodes=3
"""
    read_script = script(START + "#SBATCH --qos=late\n", head)
    assert read_script.scheduler is SLURM
    assert read_script.options == {
        "nodes": "3", "ntasks": "8", "ntasks-per-node": "4", "cpus-per-task": "8", "gres": "gpu:a100:4",
        "walltime": "1-12", "exclusive": "", "job-name": "two words"}
    assert read_script.option_lines["nodes"] == 6
    assert [directive.line for directive in read_script.directives if directive.is_late] == [8]


@pytest.mark.parametrize(("head", "request_"), [
    ("#SBATCH -N2 --ntasks-per-node=4 --gres=gpu:4", Request(2, 8, 4, gpus_per_node=4)),
    ("#SBATCH -N2 -n8 --gpus-per-task=1", Request(2, 8, 4, gpus_per_node=4, gpus_per_task=1)),
    ("#SBATCH --nodes=2 --gpus-per-node=a100:4", Request(2, 2, 1, gpus_per_node=4)),
    ("#SBATCH --gpus=4", Request(1, 1, 1, gpus_per_node=4)),
    ("#SBATCH -n8", Request(None, 8, None)),
    ("#SBATCH -N1 -n1 --ntasks-per-node=2", Request(1, 1, 1)),
    ("#SBATCH -N2 --ntasks-per-gpu=1 -G8", Request(2, 8, 4, gpus_per_node=4)),
    ("#SBATCH -N2-4 --ntasks-per-node=4", Request(None, None, 4, unreadable=frozenset({"nodes"}))),
    ("#PBS -l select=2:ncpus=64:ngpus=4:mpiprocs=4 -l walltime=01:00:00", Request(2, 8, 4, 16, 4, None, 3600)),
    ("#PBS -l nodes=2:ppn=4:gpus=4,walltime=30:00", Request(2, 8, 4, None, 4, None, 1800)),
    ("#BSUB -nnodes 2\n#BSUB -W 1:30", Request(2, walltime_s=5400)),
    ('#BSUB -n 8\n#BSUB -R "span[ptile=4]"\n#BSUB -gpu "num=4:mode=exclusive_process"',
     Request(2, 8, 4, gpus_per_node=4)),
    ("#flux: -N2 -n8 -c8 -g1 -t 90m", Request(2, 8, 4, 8, 4, 1, 5400)),
])
def test_the_resources_of_a_job(head: str, request_: Request) -> None:
    assert script(START, f"#!/bin/bash\n{head}\n").request == request_


def test_times() -> None:
    assert [parse_slurm_time(text) for text in ("30", "30:30", "1:00:00", "1-0", "1-1:1", "1-1:1:1", "UNLIMITED")] == [
        1800, 1830, 3600, 86400, 90060, 90061, None]
    assert [parse_flux_time(text) for text in ("30", "30s", "1.5h", "1d", "x")] == [1800, 30, 5400, 86400, None]


@pytest.mark.parametrize("text", [
    START,
    "srun --mpi=pmix \\\n  --cpus-per-task=$SLURM_CPUS_PER_TASK \\\n  python -m mpiddp train.py",
    'SRUN="srun --mpi pmix"; CMD="python -m mpiddp train.py"; $SRUN -c 8 $CMD',
    'COMMAND="python -m mpiddp train.py"\neval "exec srun --mpi=pmix -c$SLURM_CPUS_PER_TASK $COMMAND"',
    'cmd=(srun --mpi=pmix)\ncmd+=(-c 8 python -m mpiddp "train.py")\n"${cmd[@]}"',
    "C=$((4 * SLURM_NNODES))\nsrun --mpi pmix -c${C:-2} python -m mpiddp train.py",
    "time srun --mpi=pmix -c 8 python -m mpiddp train.py 2>&1 | tee out.txt",
    "export P=python\nsrun --mpi=pmix -c 8 bash -c '$P -m mpiddp train.py'",
    "srun --mpi=pmix -c 8 bash <<'EOF'\nsource env.sh\npython -m mpiddp train.py\nEOF",
    "F=dir/train.py; srun --mpi=pmix -c 8 $(which python) -m mpiddp train.py",
    "start() {\n  srun --mpi=pmix -c 8 python -m mpiddp train.py\n}\nstart",
    "if a; then case $A in\n(a|b) for i in 1 2; do srun --mpi=pmix -c 8 python -m mpiddp train.py; done ;;\nesac; fi",
])
def test_a_launch_is_followed(text: str) -> None:
    """Through variables, eval, functions, arrays, arithmetic, branches, pipes and shells that are started."""
    found = launch(text)
    assert (found.launcher, found.options) == ("srun", {"mpi": "pmix", "cpus-per-task": "8"})
    assert (found.program, found.script, found.script_words) == (Program.MPIDDP, "train.py", ("train.py",))
    assert not found.has_unknown_options


def test_what_is_not_known_is_said() -> None:
    found = launch("srun $OPTIONS --mpi=pmix python -m mpiddp --log-dir $LOGS $SCRIPT --lr 1")
    assert found.has_unknown_options
    assert found.unknown == ("$OPTIONS", "$LOGS", "$SCRIPT")
    assert found.script == ""
    assert found.program_options == ("--log-dir", "$LOGS")


def test_a_launcher_that_is_not_known_is_the_word_as_written() -> None:
    found = launch("$LAUNCH python -m mpiddp a.py")
    assert (found.launcher, found.has_unknown_options, found.program) == ("$LAUNCH", True, Program.MPIDDP)
    assert launch("$TIME srun python -m mpiddp a.py").launcher == "srun"


def test_a_variable_that_depends_on_the_job_is_unknown() -> None:
    found = script('if [ "$(hostname)" = a ]; then N=1; else N=2; fi\nfor i in 1 2; do M=$i; done\nread -r K\n'
                   "srun -n $N -c $M -N $K python -m mpiddp a.py")
    assert found.launches[0].options == {"ntasks": "$N", "cpus-per-task": "$M", "nodes": "$K"}
    assert found.variables == {}


@pytest.mark.parametrize(("words", "wrappers", "container"), [
    ("apptainer exec --nv --bind /tmp,$PWD image.sif", 6, "apptainer"),
    ("singularity run --rocm image.sif bash -c 'exec numactl --membind=0", 7, "singularity"),
    ("shifter --image=a:b", 2, "shifter"),
    ("podman-hpc run --rm --gpu -v /a:/b a/b:1", 7, "podman-hpc"),
    ("numactl -N 0 -m 0 env -u A B=1", 9, ""),
    ("conda run --no-capture-output -n torch", 5, ""),
    ("nice -n 5 timeout -k 5 60", 7, ""),
])
def test_what_stands_before_the_program(words: str, wrappers: int, container: str) -> None:
    end = "'" if "'" in words else ""
    found = launch(f"srun {words} python -m mpiddp train.py{end}")
    assert (found.program, found.script, found.container) == (Program.MPIDDP, "train.py", container)
    assert len(found.wrapper_words) == wrappers


@pytest.mark.parametrize(("command", "program", "script_words"), [
    ("python -u -X dev -m mpiddp --prefix --show 0 -m pkg.train --lr 1", Program.MPIDDP, ("pkg.train", "--lr", "1")),
    ("mpiddp a.py", Program.MPIDDP, ("a.py",)),
    ("torchrun --standalone --nproc_per_node=4 --rdzv_backend c10d a.py --lr 1", Program.STARTER,
     ("a.py", "--lr", "1")),
    ("torchrun --nnodes 2 -m pkg.train", Program.STARTER, ("pkg.train",)),
    ("python3 -m torch.distributed.run --nproc-per-node 4 a.py", Program.STARTER, ("a.py",)),
    ("python -m torch.distributed.launch --use_env --nproc_per_node 4 a.py", Program.STARTER, ("a.py",)),
    ("accelerate launch --multi_gpu --config_file c.yaml --num_processes 8 a.py", Program.STARTER, ("a.py",)),
    ("deepspeed --num_gpus 4 a.py --deepspeed", Program.STARTER, ("a.py", "--deepspeed")),
    ("/env/bin/python3.11 a.py", Program.PYTHON, ("a.py",)),
])
def test_programs(command: str, program: Program, script_words: tuple[str, ...]) -> None:
    for start in ("", "srun "):
        found = launch(start + command)
        assert (found.program, found.script_words, found.launcher) == (program, script_words, start.strip())


@pytest.mark.parametrize(("command", "launcher", "options"), [
    ("mpirun -np 8 --map-by ppr:4:node:PE=8 -x PATH -x A=1 --bind-to none", "mpirun",
     {"ntasks": "8", "map-by": "ppr:4:node:PE=8", "ntasks-per-node": "4", "x": "PATH,A=1", "bind-to": "none"}),
    ("mpiexec -n 8 --ppn 4 --cpu-bind none", "mpiexec", {"ntasks": "8", "ntasks-per-node": "4", "cpu-bind": "none"}),
    ("mpiexec.hydra -bootstrap slurm -genv A 1 -ppn 2", "mpiexec.hydra",
     {"bootstrap": "slurm", "genv": "A 1", "ntasks-per-node": "2"}),
    ("mpirun --oversubscribe --mca btl tcp,self", "mpirun", {"oversubscribe": "", "mca": "btl tcp,self"}),
    ("flux run -N2 -n8 -c8 -g1 -o pmi=pmix -o cpu-affinity=off", "flux",
     {"nodes": "2", "ntasks": "8", "cpus-per-task": "8", "gpus-per-task": "1", "setopt": "pmi=pmix,cpu-affinity=off"}),
    ("jsrun -n 4 -a 1 -c7 --gpu_per_rs 1", "jsrun",
     {"sets": "4", "tasks-per-set": "1", "cpus-per-set": "7", "gpus-per-set": "1"}),
    ("ibrun -n 4", "ibrun", {"ntasks": "4"}),
    ("srun -lu -N2 --export=ALL,A=1 --exclusive --kill-on-bad-exit=1", "srun",
     {"label": "", "unbuffered": "", "nodes": "2", "export": "ALL,A=1", "exclusive": "", "kill-on-bad-exit": "1"}),
])
def test_launchers(command: str, launcher: str, options: dict[str, str]) -> None:
    found = launch(f"{command} python -m mpiddp a.py")
    assert (found.launcher, found.options, found.script) == (launcher, options, "a.py")


def test_a_launcher_within_a_launcher() -> None:
    found = launch("srun -N2 mpirun -n 4 python -m mpiddp a.py")
    assert (found.launcher, found.inner_launcher, found.program) == ("srun", "mpirun", Program.MPIDDP)


@pytest.mark.parametrize(("text", "quote"), [("echo \"a\n", '"'), ("echo it's\n", "'"), ("echo $(a\n", "$(")])
def test_where_reading_stops_is_said(text: str, quote: str) -> None:
    """What stands before is read."""
    read_script = script(f"{START}{text}srun python b.py\n")
    assert [launch.script for launch in read_script.launches] == ["train.py"]
    assert [(note.line, note.text) for note in read_script.not_followed] == [
        (7, message("doctor/unreadable_rest", line=7, sign=quote))]


def test_what_is_not_followed_is_said() -> None:
    text = ("source settings.sh\nsource venv/bin/activate\n. /etc/profile\n$TOOL --run\nsbatch next.sh\n"
            "srun $OPTIONS python -m mpiddp a.py\nsrun ./task.sh\n")
    assert [(note.line, note.text) for note in script(text).not_followed] == [
        (6, message("doctor/sourced_file", file="settings.sh")),
        (9, message("doctor/unknown_command", command="$TOOL")),
        (10, message("doctor/submitted_job")), (11, message("doctor/unknown_options", words="$OPTIONS")),
        (12, message("doctor/started_script", file="./task.sh"))]


def test_a_shell_script_that_the_job_script_writes_is_read() -> None:
    """What the batch shell expands in it has the values of the batch script."""
    text = ("ADDRESS=node1; F=dir/run.sh\ncat > $F <<EOF\nexport A=\\$B\nEOF\ncat >> $F <<-EOF\n"
            "\ttorchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$ADDRESS \\\\\n  a.py --a \\$A\nEOF\n"
            "cd dir; srun ./run.sh\n")
    found = launch(text)
    assert (found.program, found.script, found.followed) == (Program.STARTER, "a.py", "./run.sh")
    assert found.program_options == ("--nnodes=2", "--node_rank=$SLURM_NODEID", "--master_addr=node1")
    assert found.script_words == ("a.py", "--a", "$B")
    assert found.early == ("$SLURM_NODEID",)
    read_text = script("read -r -d '' TEXT <<'EOF'\npython -m mpiddp b.py\nEOF\nsrun bash -c \"$TEXT\"\n")
    assert read_text.launches[0].script == "b.py"


def test_a_second_script_gets_its_parameters(tmp_path: Path) -> None:
    """A function has others."""
    (tmp_path / "task.sh").write_text(
        'P=$1\nf() { date $1; }\nshift\nH=$1; shift\n$P -m torch.distributed.run --rdzv-endpoint=$H "$@"\n')
    (job := tmp_path / "job.sh").write_text(HEAD + "srun bash task.sh python $HEAD --nnodes=2 train.py --lr $LR\n")
    (found,) = read(str(job)).launches
    assert (found.name, found.script, found.followed) == ("torchrun", "train.py", "task.sh")
    assert found.program_options == ("--rdzv-endpoint=$HEAD", "--nnodes=2")
    assert found.script_words == ("train.py", "--lr", "$LR")


def test_our_own_scripts_are_read_and_give_no_finding() -> None:
    """Each starts mpiddp, and its script is known."""
    for file in sorted((ROOT / "batch").glob("*.sh")):
        found = read(str(file))
        assert [training.script for training in found.trainings] == ["train.py"] * (1 + (file.name == "enroot.sh"))
        assert [note.text for note in found.not_followed] == [
            message("doctor/unknown_command", command='$(python - "$CONFIG" <<\'END\' …')] * (
                file.name == "accelerate.sh")
        assert not any(training.has_unknown_options for training in found.trainings)
        assert check(found, AllHere()) == []


@pytest.mark.parametrize("start", ["cat > eval.sh <<EOF", "cat <<-'EOF' | sbatch", "if true; then cat > a.sh << EOF"])
def test_directives_in_a_here_document_are_those_of_another_script(start: str) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=1 --qos=$A\n#sbatch -a\n #SBATCH -b\n{START}EOF\n"
    read_script = script(f"{START}{start}\n{text}" + "fi\n" * start.startswith("if"))
    assert len(read_script.directives) == HEAD.count("#SBATCH")
    assert {"late-directive", "directive-text"}.isdisjoint(finding.rule for finding in check(read_script, AllHere()))
    late = script(f"{START}{start}\n{text}" + "fi\n" * start.startswith("if") + "#SBATCH --qos=a\n")
    assert "late-directive" in {finding.rule for finding in check(late, AllHere())}


def test_late_directives_count_for_the_other_rules() -> None:
    found = findings(("", f"cd a\n{HEAD.partition(chr(10))[2]}#SBATCH --time=1\n{START}"))
    assert {finding.rule for finding in found} == {"late-directive", "walltime"}


@pytest.mark.parametrize("text", [
    "srun --mpi=pmix -c 8 --gpus-per-node=4 python -m mpiddp train.py\n", "mpirun python -m mpiddp train.py\n",
    "python -m mpiddp train.py\n", "torchrun --nproc-per-node=4 train.py\n",
    "flux run -N2 -n8 -c8 -g1 python -m mpiddp train.py\n"])
def test_a_script_without_directives(text: str) -> None:
    """It may run in an allocation, of which nothing is known."""
    assert findings(("", text)) == []


def test_variables_of_the_submission() -> None:
    """A job has its own of the batch system's; the others are as they are here."""
    environ = {"SLURM_CPUS_PER_TASK": "64", "SLURM_NTASKS": "1", "LOGS": "/logs", "RANK": "7"}
    read_script = read_from_text("job.sh", HEAD + "srun -n $SLURM_NTASKS -c $SLURM_CPUS_PER_TASK python -m mpiddp "
                                 "--log-dir $LOGS ${LOGS:-/a}/b.py --rank ${RANK:-0}\n", environ)
    assert read_script.launches[0].options == {"ntasks": "8", "cpus-per-task": "8"}
    assert read_script.launches[0].program_options == ("--log-dir", "/logs")
    assert read_script.launches[0].script_words == ("/logs/b.py", "--rank", "${RANK:-0}")


def test_the_document_has_the_table_of_rules() -> None:
    text = (ROOT / "mpiddp/doctor/README.md").read_text()
    table = text.partition("## Rules")[2].partition("A rule says")[0]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == sorted(
        rule.name for rule in RULES)


def test_findings_as_text_and_as_json() -> None:
    read_script = script("srun --mpi=pmix python -m mpiddp --log-dri x train.py\n")
    found = check(read_script, Here())
    text = format_findings(read_script, found, 80, has_colours=True)
    wrong = message("doctor/unknown_option", option="--log-dri", hint="--log-dir")
    line = "    srun --mpi=pmix python -m mpiddp --log-dri x train.py"
    assert f"job.sh:6: \033[1;31merror\033[0m: {wrong} [unknown-option]\n{line}\n" in text
    assert "\n  write: --log-dir\n" in text
    assert "\n  write: srun --cpus-per-task=8\n" in text
    assert text.splitlines()[-1] == "job.sh: " + message("doctor/summary", findings="1 error, 1 warning", line=6)
    assert "\033" not in format_findings(read_script, found, 80, has_colours=False)
    answer = json.loads(as_json(read_script, found))
    assert [(finding["rule"], finding["severity"], finding["line"]) for finding in answer["findings"]] == [
        (finding.rule, finding.severity.name.lower(), finding.line) for finding in found]
    assert answer["findings"][0]["write"] == ["--log-dir"]
    assert answer["launches"] == []


GRID = Scheduler("Gridlock", submit="gridsub", directives=Directives(
    ("#GRID",), TimeForm(r"\d+ticks", "ticks", lambda text: int(text.removesuffix("ticks")), "{}00ticks"),
    {"m": "nodes", "until": "walltime"}, variables={"GRIDLOCK_TASKS": "ntasks"}, task_numbers=("GRIDRUN_RANK",)))
GRIDRUN = Launcher("gridrun", command="gridrun", program="gridrun", counts=("-n",), per_node=("--each",), system=GRID,
                   ranks_per_node="--each={}")


def test_a_row_is_enough_for_a_scheduler_and_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their directives, walltime and options are read, the rules hold for them, and the launch line is theirs."""
    monkeypatch.setattr(launchers, "LAUNCHERS", (*launchers.LAUNCHERS, GRIDRUN))
    monkeypatch.setattr(schedulers, "SCHEDULERS", (*schedulers.SCHEDULERS, GRID))
    read_script = script("gridrun -n 2 torchrun --nproc-per-node=4 --nnodes=2 --rdzv-endpoint=$A train.py\n",
                         "#!/bin/bash\n#GRID -m 2 --until=90ticks\n#GRID --ntasks=8 --gpus-per-node=4\n")
    assert read_script.scheduler is GRID
    assert read_script.request == Request(2, 8, 4, gpus_per_node=4, walltime_s=90)
    (found,) = read_script.launches
    assert (found.launcher, found.row, found.options, found.script) == ("gridrun", GRIDRUN, {"ntasks": "2"}, "train.py")
    assert [finding.rule for finding in check(read_script, AllHere())] == ["walltime"]
    assert [suggestion.launch for suggestion in suggest_all(read_script, AllHere())] == [
        "gridrun -n 8 python -m mpiddp train.py"]
    wrong = script("gridrun -n 8 python train.py --rank $GRIDRUN_RANK\n", "#!/bin/bash\n#GRID -m 2 --until=1:30\n")
    assert [(finding.rule, finding.write) for finding in check(wrong, AllHere())] == [
        ("walltime", ("#GRID --until=2400ticks",)), ("early-variable", ())]


@pytest.mark.process
def test_the_command(quick: Mpi, tmp_path: Path) -> None:
    """Both commands do the same; the status tells what was found."""
    (tmp_path / "train.py").touch()
    (tmp_path / "good.sh").write_text(HEAD + START)
    (tmp_path / "bad.sh").write_text(HEAD + START.replace(" --cpus-per-task=8", ""))
    for command in (("-m", "mpiddp.doctor"), ("-m", "mpiddp", "doctor")):
        good = support.check(alone(quick, *command, "good.sh", cwd=tmp_path))
        assert good.stdout == "good.sh: " + message("doctor/nothing_found", line=6) + "\n"
        bad = support.check(alone(quick, *command, "--json", "bad.sh", cwd=tmp_path), 1)
        assert [finding["rule"] for finding in json.loads(bad.stdout)["findings"]] == ["srun-cpus"]
        for arguments, text in ((("none.sh",), "mpiddp.doctor: none.sh " + message(
                "doctor/unreadable", reason="No such file or directory")), (("--x",), "mpiddp.doctor: ")):
            wrong = support.check(alone(quick, *command, *arguments, cwd=tmp_path), 2)
            assert wrong.stderr.startswith(text)
            assert wrong.stderr.count("\n") == 1
            assert wrong.stdout == ""


@pytest.mark.process
@pytest.mark.parametrize(("text", "line", "reason"), [
    (f"for i in 1 2; do\n{START}", 8, "syntax error: unexpected end of file"),
    (f"{START}if [ $? = 0 ]; then exit 0 fi\n", 8, "syntax error: unexpected end of file"),
    (START, 0, ""),
])
def test_bash_says_what_it_cannot_read(text: str, line: int, reason: str) -> None:
    errors = [*find_syntax_errors(script(text))]
    assert [(error.line, error.message) for error in errors] == (
        [(errors[0].line, message("doctor/shell_syntax", reason=reason))] if line else [])
    assert all(error.line is not None and error.line >= line for error in errors)
    assert not [*find_syntax_errors(script(text, HEAD.replace("/bin/bash", "/bin/zsh")))]


def test_an_address_of_the_users_shell_is_not_shown() -> None:
    environ = {"DATABASE_URL": "postgres://me:s3cr3t@host", "GH_PAT": "s3cr3t"}
    read_script = read_from_text("job.sh", HEAD + START.replace("train.py", "$GH_PAT").replace(
        "srun", "srun -o $DATABASE_URL/x"), environ)
    assert "s3cr3t" not in as_json(read_script, check(read_script, Host("/nowhere", environ)))


@pytest.mark.process
def test_a_centres_launch_line_is_shown_with_findings(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    profile = tmp_path / "site.toml"
    profile.write_text('name = "Testbed"\ncontact = "me"\nlaunch_line = "srun -ul python -m mpiddp train.py"\n'
                       'launch_options = ["--gpus=4", "--x"]\n')
    lines = [message("doctor/site_start", site="Testbed", line="srun -ul python -m mpiddp train.py"),
             message("doctor/site_options", site="Testbed", options="--gpus=4 --x")]
    for start, status, shown in ((START, 0, []), (START.replace(" --cpus-per-task=8", ""), 1, lines)):
        (tmp_path / "job.sh").write_text(HEAD + start)
        done = alone(quick, "-m", "mpiddp.doctor", "job.sh", cwd=tmp_path, env={"MPIDDP_SITE": str(profile)})
        assert [line for line in support.check(done, status).stdout.splitlines() if "Testbed" in line] == shown


def test_a_misspelt_directive_counts_as_it_is_meant() -> None:
    """No other rule asks for what it lacks; options of plugins are left alone."""
    for line in ("#SBATCH --ntask-per-node=4", "#SBATCh --ntasks-per-node=4", "#SBATCH \u2013ntasks-per-node=4",
                 "#SBATCH \u2013\u2013ntasks-per-node=4"):
        (finding,) = findings((head(line, without="ntasks"), START))
        assert (finding.rule, finding.write) == ("directive-text", ("#SBATCH --ntasks-per-node=4",))
    (finding,) = findings((head("#SBATCH \u2013c8 \u2014J \u2018a b\u2019", without="cpus"), START))
    assert (finding.rule, finding.write) == ("directive-text", ("#SBATCH -c8 -J 'a b'",))
    assert findings((head("--uenv=a", "--view=b", "--image=c", "--mem-per-gp=4G"), START)) == []


@pytest.mark.process
def test_neither_mpi_nor_torch_are_imported(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(HEAD + START)
    code = ("import sys; from mpiddp.doctor.__main__ import main; main(['job.sh'])\n"
            "print(sorted({'mpi4py', 'torch', 'numpy', 'psutil'} & set(sys.modules)))")
    assert support.check(alone(quick, "-c", code, cwd=tmp_path)).stdout.splitlines()[-1] == "[]"


@pytest.mark.mpi
def test_a_script_that_is_called_doctor_is_run(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "doctor").write_text("print('at your service')\n")
    assert "at your service" in support.check(alone(quick, "-m", "mpiddp", "doctor", cwd=tmp_path)).stdout


ODD_WORDS = (
    "srun ", "mpirun -n 4 ", "python -m mpiddp ", "a.py", "\n", "\n", " ", "$A", "${A:-b}", "${A[@]}", "A=1\n", "(",
    ")", "{ ", "}", "'", '"', "`", "$(", "<<EOF\n", "EOF\n", "if [ $A = 1 ]; then ", "fi\n", "for i in 1 2; do ",
    "done\n", "f() { ", "f\n", "eval ", "&", "|", ";", "#SBATCH -n 4\n", "#SBATCH -N\n", "\\", "torchrun ", "-", "--",
    "=", "$((", "))", "case $A in a) ", "esac\n", "bash -c ", "$1", "[[ -n $B ]] && ", "cd ", "\u20ac", "--n=",
    "module load ", "conda activate ", "source ", "trap ", "export ", "> ")
OUR_SCRIPTS = [file.read_text() for file in sorted((ROOT / "batch").glob("*.sh"))]


def test_files_that_may_block(tmp_path: Path) -> None:
    """Neither a FIFO nor the doctor's own input is read; the text that srun's shell gets from the script is."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("fifo", "link", "/proc/self/fd/0"):
        read_script = read_from_text(str(tmp_path / "job.sh"), f"{HEAD}srun bash {name}\n")
        assert read_script.launches[0].program is Program.OTHER
        assert message("doctor/started_script", file=name) in [note.text for note in read_script.not_followed]
        assert Host(str(tmp_path)).read(name) is None
    assert launch("srun bash /dev/stdin <<'X'\npython -m mpiddp train.py\nX").program is Program.MPIDDP


@pytest.mark.parametrize(("text", "note"), [
    ('a=x\n' + 'a="$a$a$a x"\n' * 30 + START, ""),
    ('a=(x)\n' + f'a=({"${a[@]} " * 10})\n' * 20 + START, ""),
    (f"""{START}a='eval "$a"; eval "$a"'\neval "$a"\n""", ""),
    (START + "echo $A\n" * 20_000, message("doctor/long_script")),
    (f"{START}A={'x' * 4000}\n" + f"echo {'$A' * 4000}\n" * 1000, ""),
    ("srun -n1 hostname\n" * 200 + START * 2000, message("doctor/many_launches", number="100")),
])
def test_a_script_that_would_take_for_ever(text: str, note: str) -> None:
    """What grows without end is unknown, and the rest of a script that is too long is not followed."""
    read_script = script(text)
    assert 0 < len(read_script.trainings) <= 100
    assert note in [each.text for each in read_script.not_followed] or not note
    assert len(check(read_script, Host())) <= 200


@pytest.mark.parametrize("nested", ["srun bash -c '{}'\n", "srun {}\n", "A={}\n", "{}\n", "cat <<E\n{}\nE\n"])
@pytest.mark.parametrize("pair", [("( ", ")"), ("$( ", ")"), ("${A:-", "}"), ("\"$(", ")\""), ("`", "`"), ("{ ", "; }"),
                                  ("if a; then ", "; fi")])
def test_deep_nesting_is_read_or_said(nested: str, pair: tuple[str, str]) -> None:
    """No depth is too deep."""
    text = nested.format(pair[0] * 5000 + "a" + pair[1] * 5000)
    check(script(text + START), Host())


ODD_NUMBERS = st.text("0123456789\u00b2:-.@", max_size=8) | st.sampled_from([
    "", "0", "-1", "4", "\u00b2", "1\u00b2", "\u0664", "1.5", "9" * 400, "9" * 5000])
NUMBERED_HEADS = (
    "#SBATCH --nodes={0} --ntasks={1}\n#SBATCH --gpus={2} --time={3}",
    "#SBATCH --ntasks-per-node={0} --gpus-per-node={1} --cpus-per-task={2}\n#SBATCH --mem={3} --signal=B:USR1@{3}",
    "#SBATCH -N2 --ntasks-per-gpu={0} --gres=gpu:{1} --mem-per-cpu={2}\n#SBATCH --time={3}:00 --ntasks-per-core={3}",
    "#PBS -l select={0}:mpiprocs={1}:ngpus={2} -l walltime={3}:00:00",
    "#PBS -l nodes={0}:ppn={1}:gpus={2} -l walltime={3}",
    '#BSUB -nnodes {0} -n {1}\n#BSUB -gpu "num={2}"\n#BSUB -W {3}',
    "#flux: -N{0} -n{1} -g{2}\n#flux: -t {3}h",
)
NUMBERED_STARTS = (
    "srun torchrun --nproc-per-node={0} --nnodes={1} a.py",
    "accelerate launch --num_processes={0} --num_machines={1} a.py",
    "mpirun -np {0} --map-by ppr:{1}:node python a.py", "srun -n {0} --gpus-per-task={1} python -m mpiddp a.py",
    "A=$(( {0} * {1} * {1} ))\nsrun python -m mpiddp --stop-before {0} ${{{1}}} $A a.py",
)


@given(st.sampled_from(NUMBERED_HEADS), st.sampled_from(NUMBERED_STARTS), st.lists(ODD_NUMBERS, min_size=7, max_size=7))
@settings(max_examples=300, deadline=None)
def test_odd_numbers(head: str, start: str, numbers: list[str]) -> None:
    """A number that is none, is zero or is too long is unknown to the rules."""
    text = f"#!/bin/bash\n{head.format(*numbers)}\nexport OMP_NUM_THREADS={numbers[6]}\n{start.format(*numbers[4:])}\n"
    try:
        read_script = read_from_text("job.sh", text)
    except NotABatchScript as error:
        assert "directives" in str(error)
        return
    assert all("\n" not in finding.message for finding in check(read_script, Host()))
    assert all("\n" not in suggestion.launch for suggestion in suggest_all(read_script, Host()))


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_script_is_too_odd(data: st.DataObject) -> None:
    """A script that was cut and stirred is read, or refused in one line."""
    text = data.draw(st.sampled_from(["", *OUR_SCRIPTS]))
    for word in data.draw(st.lists(st.sampled_from(ODD_WORDS), max_size=40)):
        begin = data.draw(st.integers(0, len(text)))
        text = text[:begin] + word + text[begin + data.draw(st.integers(0, 40)):]
    try:
        read_script = read_from_text("job.sh", HEAD + text)
    except NotABatchScript as error:
        assert "\n" not in str(error)
    else:
        format_findings(read_script, check(read_script, Here()), 80, has_colours=False,
                        suggestions=suggest_all(read_script, Here()))


def test_the_components_of_a_job_are_not_mixed() -> None:
    """The options are the first one's; the others are said not to be followed."""
    components = head("--time=5h", "--partition=a", "-J a", "--qos=b").replace("-J a", "hetjob")
    read_script = script(START, components)
    (finding,) = check(read_script, Here())
    assert (finding.rule, finding.write) == ("walltime", ("#SBATCH --time=5:00:00",))
    assert [note.text for note in read_script.not_followed] == ["the options of the job's other components"]


def test_values_of_the_users_shell_are_not_shown() -> None:
    """A key is the script's text in findings and launch lines, also where the shell would have its value."""
    environ = {"WANDB_API_KEY": "s3cr3tkey", "PLACE": "s3cr3t/place", "DATABASE_URL": "postgres://me:s3cr3t@host"}
    for words in ("--export=ALL,WANDB_API_KEY=$WANDB_API_KEY", '--export=ALL,A="$PLACE",B=1'):
        text = f"KEY=$WANDB_API_KEY\nsrun {words} torchrun --nproc-per-node=4 --nnodes=2 train.py --key $KEY\n"
        read_script = read_from_text("job.sh", HEAD + text, environ)
        host = Here("", environ)
        answer = as_json(read_script, check(read_script, host), suggest_all(read_script, host))
        assert "srun --mpi=pmix" in answer
        assert "s3cr3t" not in answer


def test_files_of_the_submission(tmp_path: Path) -> None:
    """A script of nearly the same name is suggested."""
    (tmp_path / "train.py").touch()
    (finding,) = check(script(START.replace("train.py", "trian.py")), Host(str(tmp_path)))
    assert finding.message == message("doctor/misspelt_file", path="trian.py", meant="train.py")
    (finding,) = check(script(START), Host(str(tmp_path / "none")))
    assert finding.message == message("doctor/missing_file", path="train.py")
