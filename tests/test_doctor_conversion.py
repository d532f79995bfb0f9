"""Recipes that start torchrun, accelerate or Python with mpirun, and the job scripts that take their place."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.doctor.batch_script import BatchScript, read, read_from_text
from mpiddp.doctor.context import Host
from mpiddp.doctor.conversion import check_syntax, convert, format_diff
from mpiddp.doctor.conversion_command import ConversionError
from mpiddp.doctor.rules import check
from mpiddp.doctor.shell import Token, Word, parse
from mpiddp.doctor.statements import find_unneeded, read_statements, references, remove_exports
from mpiddp.doctor.words import break_lines, format_word, format_words
from tests import processes, support
from tests.doctor.measure import FILES, SCRIPTS, find_folder, read_script
from tests.messages import message
from tests.support import ROOT, Mpi, alone

RECIPES = FILES.parent / "recipes"
CORES = "--cpus-per-task=$SLURM_CPUS_PER_TASK"
# Of each recipe: the job script, lines of the converted one, and what is not left in it.
CONVERTED = {
    "hipergator/job_launch.sh": (
        ["#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=2", "module load pytorch",
         f"srun --mpi=pmix {CORES} --unbuffered python3 -m mpiddp --pass-local-rank train.py --epochs 1"],
        ["gpus-per-task", "PRIMARY", "launch_node.sh"]),
    "supercloud/batch.sh": (
        ["#SBATCH --tasks-per-node=2", "#SBATCH -c 4", "module load mpi/openmpi",
         "mpirun --tag-output python -m mpiddp train.py"],
        ["MASTER", "OMP_NUM_THREADS", "MPI_FLAGS", "listens on this host"]),
    "enroot/run_script.sh": (
        ["#SBATCH --ntasks-per-node=2", "#SBATCH --cpus-per-task=2", "source env.sh",
         "enroot --root --rw --mount $HOME:/workspace/mnt $CONTAINER_NAME",
         "python -m mpiddp train.py -np $NPROC_PER_NODE -n $NNODES", '"$CONTAINER_NAME" "$CONTAINER_IMAGE" || exit 1'],
        ["MASTER_ADDR", "NODE_RANK", "get_master_address", "torchrun"]),
    "trixie/task.slurm": (
        ["#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=1", "source activate pytorch", "##SBATCH --ntasks=2",
         "# check: --cpus-per-task: the recipe has 6 cores for 4 ranks",
         (f"srun --mpi=pmix {CORES} python -m mpiddp --log-dir logs --pass-local-rank=--local_rank train.py"
          " --batch_size 128 --learning_rate 5e-5")],
        ["MASTER", "OMP_NUM_THREADS", "task.sh", "wait\n", "\nenv", "%t"]),
    "trixie-accelerate/job.sh": (
        ["#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=2", "#SBATCH --requeue", 'source setup_env.sh ""',
         "   trap _requeue USR1", f"srun --mpi=pmix {CORES} python -m mpiddp train.py"],
        ["head_node", "29507", "accelerate launch \\", "distributed framework"]),
    "launch/job.sh": (
        ["#SBATCH --ntasks-per-node=2", "#SBATCH --cpus-per-task=2", "#SBATCH --mem=4G",
         f"srun --mpi=pmix {CORES} python -m mpiddp --pass-local-rank train.py --backend=gloo"],
        ["master_", "hosts=", "helper"]),
}


def read_file(folder: Path, name: str) -> str | None:
    """Return a file's text beside a job script, None without one."""
    path = folder / name
    return path.read_text() if path.is_file() else None


def convert_recipe(name: str) -> tuple[BatchScript, str]:
    """Return a recipe and the script that takes its place."""
    path = RECIPES / name
    script = read(str(path))
    return script, convert(script, lambda file: read_file(path.parent, file))


def convert_text(text: str) -> str:
    """Return the conversion of a job script that is submitted where the corpus is."""
    return convert(read_from_text(str(FILES / "job.sh"), text), lambda file: read_file(FILES, file))


def join_lines(text: str) -> str:
    """Return a script with each command in one line."""
    return re.sub(r" \\\n\s*", " ", text)


@pytest.mark.parametrize("name", CONVERTED)
def test_the_recipes_of_the_beginning(name: str) -> None:
    lines, gone = CONVERTED[name]
    _, text = convert_recipe(name)
    assert [line for line in lines if line not in join_lines(text)] == [], text
    body = text.split("\n", 2)[2]  # without the line that tells the source
    assert [part for part in gone if part in body] == [], text
    assert text.count("-m mpiddp") == 1


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_recipe_has_no_finding_and_is_not_converted_again(name: str) -> None:
    script, text = convert_recipe(name)
    new = read_from_text(script.path, text)
    known = {"trixie/task.slurm": {"one-core"}, "trixie-accelerate/job.sh": {"open-mode", "signal-batch"}}  # their own
    assert {finding.rule for finding in check(new, Host(str((RECIPES / name).parent)))} == known.get(name, set())
    assert convert(new, lambda file: read_file((RECIPES / name).parent, file)) == text


@pytest.mark.process
def test_each_conversion_is_a_shell_script(tmp_path: Path) -> None:
    texts = [convert_recipe(name)[1] for name in CONVERTED]
    texts += [convert(read_script(name), partial(read_file, find_folder(name)))
              for name in (script.stem for script in SCRIPTS.iterdir())]
    for number, text in enumerate(texts):
        (path := tmp_path / f"{number}.sh").write_text(text)
    done = processes.run("bash", "-c", 'for file in "$@"; do bash -n "$file" || exit 1; done', "bash",
                         *map(str, tmp_path.iterdir()), timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert number == len(CONVERTED) + 73
    assert path.exists()


@pytest.mark.process
def test_the_diff_can_be_applied(tmp_path: Path) -> None:
    script, text = convert_recipe("trixie/task.slurm")
    (copy := tmp_path / "task.slurm").write_text(script.text)
    (tmp_path / "changes").write_text(format_diff(script, text))
    done = processes.run("git", "apply", "-p0", "changes", timeout=30, cwd=tmp_path)
    assert (done.returncode, copy.read_text()) == (0, text), done.stderr


@pytest.mark.process
def test_the_option(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#SBATCH -c 4\nmodule load openmpi\ntorchrun --nproc_per_node=2 train.py > $LOG\n")
    (tmp_path / "done.sh").write_text("#SBATCH -c 4\nsrun --mpi=pmix -c 4 python -m mpiddp train.py\n")
    done = support.check(alone(quick, "-m", "mpiddp.doctor", "--convert", "job.sh", cwd=tmp_path))
    assert done.stdout.splitlines()[:3] == ["--- job.sh", "+++ job.sh\twith mpiddp", "@@ -1,3 +1,4 @@"]
    assert f"\n+srun --mpi=pmix {CORES} python -m mpiddp train.py > $LOG\n" in done.stdout
    same = support.check(alone(quick, "-m", "mpiddp.doctor", "--convert", "done.sh", cwd=tmp_path), 1)
    assert (same.stdout, same.stderr) == ("", "mpiddp.doctor: done.sh " + message("doctor/nothing_to_convert") + "\n")
    (tmp_path / "odd.sh").write_text("#SBATCH -c 4\nout=$(torchrun train.py)\n")
    odd = support.check(alone(quick, "-m", "mpiddp.doctor", "--convert", "odd.sh", cwd=tmp_path), 1)
    assert (odd.stdout, odd.stderr) == (
        "", "mpiddp.doctor: odd.sh " + message("doctor/not_understood", starter="torchrun") + "\n")


def test_a_script_for_mpiddp_stays_as_it_is() -> None:
    for path in [*SCRIPTS.glob("*mpiddp*.sh"), *(ROOT / "batch").glob("*.sh")]:
        script = read(str(path))
        assert convert(script, lambda _: None) == script.text, path
        assert format_diff(script, script.text) == ""


@pytest.mark.parametrize(("launch", "expected"), [
    ("srun torchrun --nproc_per_node=2 -m package.train --lr 1", "python -m mpiddp -m package.train --lr 1"),
    ("torchrun --standalone --nproc-per-node gpu train.py", "python -m mpiddp train.py"),
    ("srun /opt/env/bin/torchrun --nproc_per_node=2 train.py", "/opt/env/bin/python -m mpiddp train.py"),
    ("srun python -u -m torch.distributed.run --nproc_per_node=2 train.py", "python -u -m mpiddp train.py"),
    ("srun torchrun --local-ranks-filter 0 --nproc_per_node=2 train.py", "python -m mpiddp --show local-0 train.py"),
    ("srun torchrun --virtual-local-rank --nproc_per_node=2 train.py",
     "python -m mpiddp --virtual-local-rank train.py"),
    ("srun torchrun --log-dir=out --tee 3 --nproc_per_node=2 train.py", "python -m mpiddp --log-dir out train.py"),
    ("srun accelerate launch --mixed_precision bf16 train.py --x", "python -m mpiddp train.py --x"),
    ("srun uv run torchrun --nproc_per_node=2 train.py", "uv run python -m mpiddp train.py"),
    ("srun --cpu-bind=none -l torchrun --nproc_per_node=2 train.py | tee log",
     f"srun --mpi=pmix {CORES} --label python -m mpiddp train.py | tee log"),
    ("NCCL_DEBUG=INFO srun torchrun --nproc_per_node=2 train.py", f"NCCL_DEBUG=INFO srun --mpi=pmix {CORES} python"),
    ('srun torchrun --nproc_per_node=2 train.py "$@" --name "a b" --lr=$LR',
     'python -m mpiddp train.py "$@" --name "a b" --lr=$LR'),
    ("srun apptainer exec --nv image.sif torchrun --nproc_per_node=2 train.py",
     "apptainer exec --nv image.sif python -m mpiddp train.py"),
    ('CMD="torchrun --nproc_per_node=2 train.py"\nsrun bash -c "$CMD"', "python -m mpiddp train.py"),
    ("A=(--nnodes 2 --nproc_per_node 2)\nsrun torchrun ${A[@]} train.py", "python -m mpiddp train.py"),
    ('run() {\n    srun torchrun --nproc_per_node=2 "$@"\n}\nrun train.py --x', "    srun --mpi=pmix"),
])
def test_what_a_launch_becomes(launch: str, expected: str) -> None:
    head = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --gres=gpu:2\n#SBATCH -c 8\nmodule load openmpi\n"
    text = convert_text(f"{head}{launch}\n")
    assert expected in join_lines(text)
    assert "#SBATCH --ntasks-per-node=2\n" in text
    assert "#SBATCH --cpus-per-task=4\n" in text
    assert "torchrun" not in text


@pytest.mark.parametrize(("directives", "expected"), [
    (["-N 2 -n 2 -c 24 --gres=gpu:4"], ["-N 2 --cpus-per-task=6 --gres=gpu:4", "--ntasks-per-node=4"]),
    (["--nodes=2", "--ntasks=2", "--gres=gpu:4"], ["--nodes=2", "--gres=gpu:4", "--ntasks-per-node=4"]),
    (["--ntasks-per-node=1  # one launcher", "--cpus-per-task=9 # cores"],
     ["--ntasks-per-node=4", "--cpus-per-task=2"]),
    (["--ntasks-per-node=1", "--gpus-per-task=4"], ["--ntasks-per-node=4", "--gpus-per-node=4"]),
    (["--ntasks-per-node=4", "--cpus-per-task=6"], ["--ntasks-per-node=4", "--cpus-per-task=6"]),
])
def test_what_directives_become(directives: list[str], expected: list[str]) -> None:
    head = "".join(f"#SBATCH {directive}\n" for directive in directives)
    text = convert_text(f"#!/bin/bash\n{head}\nmodule load openmpi\nsrun torchrun --nproc_per_node=4 train.py\n")
    assert re.findall("^#SBATCH (.*)$", text, re.MULTILINE) == expected
    assert ("# check: --cpus-per-task" in text) == ("cpus-per-task" not in "".join(expected))


@pytest.mark.parametrize(("module", "option"), [
    ("openmpi/5.0.3", "--mpi=pmix "), ("intel-oneapi-mpi/2021.10", "--mpi=pmi2 "), ("mpich", "--mpi=pmi2 "),
    ("cray-mpich/8.1.29", ""), ("pytorch", "--mpi=pmix ")])
def test_the_interface_is_that_of_the_module(module: str, option: str) -> None:
    text = convert_text(f"#!/bin/bash\n#SBATCH -c 4\nmodule load {module}\nsrun torchrun --nproc_per_node=2 train.py\n")
    assert f"srun {option}--cpus-per-task" in text
    assert ("# check: --mpi" in text) == (module == "pytorch")


@pytest.mark.parametrize(("launch", "count"), [
    ("torchrun --nproc_per_node=2 --max-restarts=3 train.py", 1), ("torchrun --nproc_per_node=2 --no-python ./a.sh", 1),
    ("python -m torch.distributed.launch --nproc_per_node=2 elsewhere.py", 1),
    ("python -m torch.distributed.launch --use_env --nproc_per_node=2 elsewhere.py", 0),
    ("accelerate launch --num_processes 2 --config_file configs/fsdp.yaml train.py", 0),
    ("accelerate launch --num_processes 2 --use_fsdp --config_file configs/fsdp.yaml train.py", 1),
    ("accelerate launch --num_processes 2 train.py", 1), ("torchrun --nproc_per_node=$N train.py", 1),
    ("torchrun --nproc_per_node=2 $SCRIPT --x", 1), ("srun bash -c 'torchrun --nproc_per_node=2 train.py && date'", 1),
    ("for i in 1 2; do srun torchrun --nproc_per_node=2 --no-python ./a.sh; done", 1),
])
def test_what_is_uncertain_is_marked(launch: str, count: int) -> None:
    text = convert_text(f"#!/bin/bash\n#SBATCH -c 4\nmodule load openmpi\n{launch}\n")
    assert text.count("# check: ") == count, text


def test_what_accelerate_sets_is_set_for_its_launch_alone() -> None:
    text = convert_text("#SBATCH -c 4\nmodule load openmpi\nfor s in 1 2; do srun accelerate launch --num_processes 2 "
                        "--mixed_precision=fp16 train.py --seed $s; done\n")
    assert join_lines(text).splitlines()[-1] == (
        f"for s in 1 2; do ACCELERATE_MIXED_PRECISION=fp16 srun --mpi=pmix {CORES} "
        "python -m mpiddp train.py --seed $s; done")


def test_trainings_beside_each_other_stay_so() -> None:
    text = convert_text("#SBATCH -c 4\nmodule load openmpi\nsrun python train.py &\nsrun python main.py &\nwait\n")
    assert re.findall(r"python.*|^wait", text, re.MULTILINE) == [
        "python -m mpiddp train.py &", "python -m mpiddp main.py &", "wait"]


def test_a_helper_beside_the_training_stays() -> None:
    text = convert_text("#SBATCH -c 4\nmodule load openmpi\nsrun python download.py\nsrun torchrun train.py\n")
    assert "\nsrun python download.py\n" in text
    assert "python -m mpiddp train.py" in text


@pytest.mark.parametrize(("directives", "before", "after"), [
    ("-N2 --ntasks-per-node=1", "srun tensorboard --logdir a &",
     "srun --ntasks=$SLURM_NNODES tensorboard --logdir a &"),
    ("-N2", "A=1 srun -N 1 -l hostname", "A=1 srun --ntasks=1 -N 1 -l hostname"),
    ("-N2", 'HOSTS="$(srun hostname -s)"', 'HOSTS="$(srun --ntasks=$SLURM_NNODES hostname -s)"'),
    ("-N2 --ntasks-per-node=2", "srun hostname", "srun --ntasks=$(($SLURM_NNODES * 2)) hostname"),
    ("--ntasks=3", "srun hostname", "srun --ntasks=3 hostname"),
    ("-N2", "srun -n 2 hostname", "srun -n 2 hostname"),
    ("-N2", "srun --ntasks-per-node=1 hostname", "srun --ntasks-per-node=1 hostname"),
    ("-N2 --ntasks-per-node=4", "srun hostname", "srun hostname"),
])
def test_other_steps_keep_their_number_of_tasks(directives: str, before: str, after: str) -> None:
    text = convert_text(f"#!/bin/bash\n#SBATCH {directives}\n#SBATCH -c 8\nmodule load openmpi\n{before}\n"
                        "curl $HOSTS\nsrun torchrun --nproc_per_node=4 train.py\n")
    assert after in text.splitlines()
    assert "--ntasks-per-node=4" in text
    assert f"srun --mpi=pmix {CORES} python -m mpiddp train.py" in text.splitlines()


@pytest.mark.parametrize("launch", ["torchrun", "accelerate launch", "torchrun --nproc_per_node=2", "python train.py",
                                    "srun torchrun train.py <<END\nEND", "out=$(torchrun train.py)",
                                    "srun --ntasks=1 python download.py",
                                    "srun python download.py\nsrun --mpi=pmix -c 4 python -m mpiddp train.py"])
def test_what_is_not_converted(launch: str) -> None:
    assert convert_text(text := f"#SBATCH -c 4\n{launch}\n") == text


def test_what_accelerate_would_set_is_set() -> None:
    text = convert_text("#!/bin/bash\n#SBATCH -c 4\naccelerate launch --cpu --mixed_precision=bf16 --num_processes 2 "
                        "--gradient_accumulation_steps 4 --config_file $HOME/a.yaml train.py\n")
    for line in ("CONFIG=$HOME/a.yaml", 'eval "$settings" || exit 1'):
        assert f"\n{line}\n" in text
    assert ("\nACCELERATE_MIXED_PRECISION=bf16 ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 ACCELERATE_USE_CPU=true "
            "srun --mpi=pmix ") in join_lines(text)


@pytest.mark.parametrize(("name", "source"), [
    ("accelerate_settings.sh", "accelerate.sh"), ("enroot_variables.sh", "enroot.sh")])
def test_lines_that_batch_scripts_have_too(name: str, source: str) -> None:
    assert (ROOT / "mpiddp/doctor" / name).read_text() in (ROOT / "batch" / source).read_text()


def test_a_statement_that_something_else_reads_stays() -> None:
    statements = read_statements("A=$(hostname)\nB=2\nexport ADDRESS=$A\necho $ADDRESS\ncurl $ADDRESS\necho $B\n")
    for number, unneeded in ((5, [3]), (4, [2, 3, 0])):
        part = statements[:number]
        assert find_unneeded(part, {"ADDRESS"}, "") == [statements[place] for place in unneeded]
    assert find_unneeded(statements[:4], {"ADDRESS"}, "srun curl $A") == [statements[2], statements[3]]


@pytest.mark.parametrize(("text", "left"), [
    ("export MASTER_ADDR=a NCCL_DEBUG=INFO", "export NCCL_DEBUG=INFO"), ("export MASTER_ADDR MASTER_PORT", ""),
    ("A=1 MASTER_PORT=2", "A=1"), ("MASTER_PORT=2", ""), ("export A=1", "export A=1"), ("echo a", "echo a")])
def test_exports_are_removed_one_by_one(text: str, left: str) -> None:
    assert remove_exports(text, frozenset(("MASTER_ADDR", "MASTER_PORT"))) == left


def test_an_exported_proxy_stays_although_the_launch_reads_it() -> None:
    text = convert_text("#!/bin/bash\n#SBATCH -c 4\nexport http_proxy=http://proxy:3128\nexport head=$(hostname)\n"
                        "torchrun --nproc_per_node=4 --rdzv_endpoint=$head:29500 train.py\n"
                        "torchrun --nproc_per_node=4 --rdzv_endpoint=$http_proxy train.py\n")
    assert "export http_proxy=" in text
    assert "head" not in text


def test_references() -> None:
    assert references('echo "$A" ${B:-c} \'$D\' $((E * 2)) $(cat $F) ${#G[@]}') == {"A", "B", "D", "E", "F", "G"}


@pytest.mark.parametrize(("word", "unknown", "text"), [
    ("plain", (), "plain"), ("two words", (), "'two words'"), ("$X", ("$X",), "$X"), ("$@", ("$@",), '"$@"'),
    ("--lr=$X", ("$X",), '"--lr=$X"'), ("a $X", ("$X",), '"a $X"'), ("it's", (), "'it'\"'\"'s'")])
def test_words(word: str, unknown: tuple[str, ...], text: str) -> None:
    assert format_word(Word(word, unknown)) == text


def test_words_stay_as_they_were_written_as_far_as_that_is_sure() -> None:
    command, name, _nothing, rate, own = tokens = (
        Token("$COMMAND", 2), Token('"b c"', 1), Token("${MORE:-}", 0), Token('"$LR"', 1), Token("$1", 1))
    words = [Word("a", (), command), Word("b c", (), name), Word("1e-3", (), rate), Word("--x=2", (), own)]
    assert format_words(words, tokens) == 'a "b c" ${MORE:-} "$LR" $1'
    assert format_words([Word("srun", (), command), *words], tokens, has_variables=False) == (
        'srun a "b c" 1e-3 --x=2')
    assert format_words(["a", Word("b c")], tokens) == "a 'b c'"


def test_a_long_line_is_broken() -> None:
    assert break_lines(["a", "b"]) == "a b"
    lines = break_lines(["srun " + "--option " * 20, "python " + "word " * 40]).split(" \\\n    ")
    assert all(len(line) <= 118 for line in lines)
    assert any(line.startswith("python word") for line in lines)


NODES = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
module load openmpi
nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))
"""
OF_A_NODE = "torchrun --nnodes=2 --nproc_per_node=4 --master_addr=${nodes[0]} --node_rank="


def test_a_loop_over_the_nodes_becomes_one_launch() -> None:
    text = convert_text(NODES + f"""\
for ((i = 0; i < SLURM_NNODES; i++)); do
    srun -N1 -n1 -w "${{nodes[$i]}}" {OF_A_NODE}$i train.py --lr 1 &
    sleep 1
done
wait
""")
    assert text.endswith(f"module load openmpi\nsrun --mpi=pmix {CORES} python -m mpiddp train.py --lr 1\n")
    assert "#SBATCH --ntasks-per-node=4\n" in text


def test_a_head_node_and_a_loop_over_the_others_become_one_launch() -> None:
    text = convert_text(NODES + f"""\
srun -N1 -n1 -w "${{nodes[0]}}" {OF_A_NODE}0 train.py --lr 1 &
for ((i = 1; i < SLURM_NNODES; i++)); do
    ssh ${{nodes[$i]}} nvidia-smi
    srun -N1 -n1 -w "${{nodes[$i]}}" {OF_A_NODE}$i train.py --lr 1 &
done
wait
""")
    assert text.count("-m mpiddp") == 1
    assert text.endswith(f"srun --mpi=pmix {CORES} python -m mpiddp train.py --lr 1\n"
                         "# check: the loop over the nodes also ran this: ssh ${nodes[$i]} nvidia-smi\n")


def test_a_training_of_its_own_on_each_node_stays_so() -> None:
    text = convert_text(NODES + """\
for i in 0 1; do
    srun -N1 -n1 -w "${nodes[$i]}" torchrun --standalone --nproc_per_node=4 train.py --seed $i &
done
wait
""")
    assert (f"    srun --mpi=pmix {CORES} --nodelist=\"${{nodes[$i]}}\" --nodes=1 --ntasks=4 python -m mpiddp train.py"
            " --seed $i &\ndone\nwait\n") in join_lines(text)


def test_a_launch_of_some_ranks_keeps_their_number() -> None:
    text = convert_text(NODES + "srun --nodes=1 --ntasks=4 python train.py\n")
    assert f"srun --mpi=pmix {CORES} --nodes=1 --ntasks=4 python -m mpiddp train.py\n" in text


RUN_ONCE = "# check: this line started the training on one node; now it starts it on all: run it once"
OURS = f"srun --mpi=pmix {CORES} python -m mpiddp train.py"
ON_NODE = f'srun -N1 -n1 -w "${{nodes[$i]}}" {OF_A_NODE}$i train.py'


@pytest.mark.parametrize(("before", "after"), [
    pytest.param("for s in 1 2; do\n  srun torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 train.py $s\ndone\n",
                 f"for s in 1 2; do\n  {OURS} $s\ndone\n", id="seeds"),
    pytest.param("until srun bash -c 'torchrun --nnodes=2 --node_rank=$SLURM_NODEID --nproc_per_node=4 train.py'; do\n"
                 "  sleep 30\ndone\n", f"until {OURS}; do\n  sleep 30\ndone\n", id="again until it ends well"),
    pytest.param('run() {\n  srun torchrun --nnodes=2 --nproc_per_node=4 train.py "$@"\n}\nrun --lr 1\nrun --lr 2\n',
                 f'run() {{\n  {OURS} "$@"\n}}\nrun --lr 1\nrun --lr 2\n', id="a function's parameters"),
    pytest.param("srun torchrun --nnodes=2 --nproc_per_node=4 train.py & pid=$!\nwait $pid\n",
                 f"{OURS} & pid=$!\nwait $pid\n", id="the process is waited for by its number"),
    pytest.param(f"for i in 0 1; do\n  if ((i)); then\n    {ON_NODE} &\n  fi\ndone\nwait\n",
                 f"  if ((i)); then\n    {RUN_ONCE}\n    {OURS} &\n  fi\ndone\nwait\n", id="a branch in the loop"),
    pytest.param(f"start() {{\n  {ON_NODE.replace('$i', '$1')} &\n}}\nstart 0\nstart 1\nwait\n",
                 f"start() {{\n  {RUN_ONCE}\n  {OURS} &\n}}\nstart 0\nstart 1\nwait\n", id="a function for each node"),
    pytest.param(f"{ON_NODE.replace('$i', '0')} &\n{ON_NODE.replace('$i', '1')} | tee 1.log\nwait\n",
                 f"{RUN_ONCE}\n{OURS} &\n{RUN_ONCE}\n{OURS} | tee 1.log\nwait\n", id="a part in a pipeline"),
    pytest.param(f"{ON_NODE.replace('$i', '0')} & {ON_NODE.replace('$i', '1')} & wait\n", f"{OURS}\n", id="one line"),
    pytest.param(f"{ON_NODE.replace('$i', '0')} 1 &\n{ON_NODE.replace('$i', '1')} 1 &\nwait\n"
                 f"{ON_NODE.replace('$i', '0')} 2 &\n{ON_NODE.replace('$i', '1')} 2 | tee 2.log\nwait\n",
                 f"{OURS} 1 &\nwait\n{RUN_ONCE}\n{OURS} 2 &\n{RUN_ONCE}\n{OURS} 2 | tee 2.log\nwait\n",
                 id="the parts of one of two trainings"),
    pytest.param("srun torchrun --nnodes=2 --nproc_per_node=4 train.py | tee log &\nwait\n",
                 f"{OURS} | tee log\n", id="a pipeline in the background"),
    pytest.param(f"for i in 0 1; do\n  {ON_NODE} &\ndone &\necho started\nwait\n",
                 f"{OURS} &\necho started\nwait\n", id="a loop in the background"),
    pytest.param(f"for i in 0 1; do\n  {ON_NODE} &\n  p+=($!)\ndone\nfor i in ${{p[@]}}; do wait $i || exit 1; done\n",
                 f"{OURS} & p+=($!)\nfor i in ${{p[@]}}; do wait $i || exit 1; done\n", id="numbers of processes"),
    pytest.param(f"for i in 0 1; do\n  export A=1\n  {ON_NODE} > $i.log &\n  pids+=($!)\ndone\n",
                 "# check: the loop over the nodes also ran this: export A=1\n"
                 "# check: the loop over the nodes also ran this: pids+=($!)\n"
                 f"# check: $i was set by the loop over the nodes\n{OURS} > $i.log\n", id="what else the loop does"),
    pytest.param('for i in 0 1; do\n  srun -N1 -n1 -w "${nodes[$i]}" bash -c "' + OF_A_NODE + '$i train.py" &\n'
                 "done\nwait\n", f"{OURS}\n", id="a shell on each node"),
    pytest.param(2 * f"{ON_NODE.replace('$i', '0')} &\n{ON_NODE.replace('$i', '1')} &\nwait\n",
                 2 * (2 * f"{RUN_ONCE}\n{OURS} &\n" + "wait\n"), id="two trainings one after another"),
    pytest.param('for i in 0 1; do\n  srun -N1 -n1 -w "${nodes[$i]}" accelerate launch --cpu --config_file a.yaml '
                 "--num_machines 1 --machine_rank 0 --num_processes 4 train.py $i &\ndone\nwait\n",
                 f"  ACCELERATE_USE_CPU=true srun --mpi=pmix {CORES} --nodelist=\"${{nodes[$i]}}\" --nodes=1 "
                 "--ntasks=4 python -m mpiddp train.py $i &\ndone\nwait\n", id="a training on each node"),
    pytest.param("srun -o logs/a.out torchrun --nnodes=2 --nproc_per_node=4 train.py\ngrep loss logs/a.out\n",
                 f"srun --mpi=pmix {CORES} --output=logs/a.out python -m mpiddp train.py\ngrep loss logs/a.out\n",
                 id="a file of output"),
    pytest.param('ssh ${nodes[1]} "torchrun --node_rank=1 train.py" &\ntorchrun --nnodes=2 --node_rank=0 '
                 "--nproc_per_node=4 train.py\n", "# check: ssh also starts a part of the training: leave that out\n"
                 f"{OURS}\n", id="ssh"),
    pytest.param("srun torchrun --nnodes=2 --nproc_per_node=4 train.py\n"
                 "srun -N1 -n1 torchrun --standalone --nproc_per_node=1 eval.py\n",
                 f"{OURS}\nsrun -N1 -n1 torchrun --standalone --nproc_per_node=1 eval.py\n", id="one process"),
])
def test_what_stands_around_a_launch_stays_or_is_told(before: str, after: str) -> None:
    text = join_lines(convert_text(NODES + before))
    assert text.endswith(after), text
    assert not parse(text).has_error


OF_TWO = "torchrun --nnodes=2 --nproc_per_node=4"
IN_TEXT = f"{OF_TWO} --node_rank=$SLURM_NODEID train.py"


@pytest.mark.parametrize(("before", "after"), [
    pytest.param(f"export MASTER_ADDR=$(hostname); export MASTER_PORT=29500\nsrun {OF_TWO} train.py\n", f"{OURS}\n",
                 id="two statements of a line go"),
    pytest.param(f"export A=1; export MASTER_ADDR=$(hostname); cd src\nsrun {OF_TWO} train.py\n",
                 f"export A=1; cd src\n{OURS}\n", id="one of three goes"),
    pytest.param(f"srun {OF_TWO} train.py & wait; cp a b\n", f"{OURS}; cp a b\n", id="wait in the same line"),
    pytest.param(f"srun {OF_TWO} train.py &\nsleep 3h\ntouch STOP\nwait\n",
                 f"{OURS} &\nsleep 3h\ntouch STOP\nwait\n", id="what the script does meanwhile"),
    pytest.param(f"trap stop USR1\nsrun {OF_TWO} train.py &\nwait\n",
                 f"trap stop USR1\n{OURS} &\nwait\n", id="a trap"),
    pytest.param(f"setup() {{\n  export MASTER_PORT=29500\n  export HF_HOME=/hf\n}}\nsetup\nsrun {OF_TWO} train.py\n",
                 f"export HF_HOME=/hf\n}}\nsetup\n{OURS}\n", id="a function that also exports something else"),
    pytest.param(f"export OMP_NUM_THREADS=8 TOKENIZERS_PARALLELISM=false\nsrun {OF_TWO} train.py\n",
                 f"export TOKENIZERS_PARALLELISM=false\n{OURS}\n", id="an export of two"),
    pytest.param(f"export WANDB_RUN_ID=a\nsrun {OF_TWO} --rdzv_id=$WANDB_RUN_ID train.py\n",
                 f"export WANDB_RUN_ID=a\n{OURS}\n", id="a variable that Python may read"),
    pytest.param(f'export MASTER_ADDR=$(hostname)\necho "$MASTER_ADDR" >> hosts\nsrun {OF_TWO} train.py\n',
                 f'export MASTER_ADDR=$(hostname)\necho "$MASTER_ADDR" >> hosts\n{OURS}\n', id="a file is written"),
    pytest.param(f"SCRIPT=${{1:-train.py}}\nsrun {OF_TWO} $SCRIPT --lr ${{2:-0.1}} ${{DEBUG:+--debug}}\n",
                 f"SCRIPT=${{1:-train.py}}\n{OURS[:-8]}$SCRIPT --lr ${{2:-0.1}} ${{DEBUG:+--debug}}\n",
                 id="values that are given at the submission"),
    pytest.param(f"ARGS=(--name 'my run')\nsrun {OF_TWO} train.py \"${{ARGS[@]}}\" shard-{{0..9}}\n",
                 f"ARGS=(--name 'my run')\n{OURS} \"${{ARGS[@]}}\" shard-{{0..9}}\n", id="an array"),
    pytest.param(f"srun bash -c '{IN_TEXT}; cp -r /tmp/a $HOME/'\n",
                 f"# check: each task also ran this, behind the training: cp -r /tmp/a $HOME/\n{OURS}\n",
                 id="what tasks did afterwards"),
    pytest.param(f"srun bash -c '[ $SLURM_NODEID = 0 ] && python load.py; {IN_TEXT}'\n",
                 "# check: each task also ran this, before the training: [ $SLURM_NODEID = 0 ] && python load.py\n"
                 f"{OURS}\n", id="what one task did"),
    pytest.param(f"srun bash -c 'source env.sh && {IN_TEXT}'\n", f"source env.sh\n{OURS}\n", id="what tasks did first"),
    pytest.param(f"srun bash -c '{IN_TEXT} --a; {IN_TEXT} --b'\n",
                 f"# check: each task also ran this, before the training: {IN_TEXT} --a\n{OURS} --b\n", id="two"),
    pytest.param(f'A=${{A:-1}}\nsrun bash -c "{IN_TEXT.replace("$", chr(92) + "$")} --a $A"\n',
                 f"# check: the arguments are written with the values of A\n{OURS} --a 1\n", id="values"),
    pytest.param("srun accelerate launch --num_processes 4 --mixed_precision bf16 train.py\n"
                 "srun accelerate launch --num_processes 4 train.py\n",
                 f"ACCELERATE_MIXED_PRECISION=bf16 {OURS}\n{OURS}\n", id="settings of one launch"),
    pytest.param(f"while read lr; do\n  srun {OF_TWO} train.py $lr\ndone < rates\n",
                 f"while read lr; do\n  {OURS} $lr < /dev/null\ndone < rates\n", id="a loop over lines"),
    pytest.param(f"timeout 3h srun {OF_TWO} train.py\nexec srun {OF_TWO} train.py\n",
                 f"timeout 3h {OURS}\nexec {OURS}\n", id="what stands before srun"),
    pytest.param(f"srun {OF_TWO} train.py\ncat > prompt <<END\na\n\n\n\nb\nEND\n",
                 f"{OURS}\ncat > prompt <<END\na\n\n\n\nb\nEND\n", id="empty lines of a document"),
    pytest.param(f"dry=${{DRY:-}}\n$dry srun {OF_TWO} train.py\n",
                 f"dry=${{DRY:-}}\n$dry {OURS}\n", id="a word or none"),
    pytest.param(f"while read lr; do\n  srun {OF_TWO} train.py $lr < a\ndone < rates\n",
                 f"while read lr; do\n  {OURS} $lr < a\ndone < rates\n", id="an input of its own"),
    pytest.param("srun --ntasks-per-node=4 bash -c 'python train.py --out=$SLURM_PROCID'\n",
                 "# check: the arguments name a node or a task: each rank has its own now\n"
                 f"{OURS[:-25]}--ntasks-per-node=4 bash -c 'python -m mpiddp train.py \"--out=$SLURM_PROCID\"'\n",
                 id="a value of each rank"),
    pytest.param(f"srun bash -c '{IN_TEXT} $SLURM_PROCID'\n",
                 "# check: the arguments name a node or a task: each rank has its own now\n"
                 f"{OURS[:-25]}bash -c 'python -m mpiddp train.py $SLURM_PROCID'\n", id="a text for each rank"),
    pytest.param("mpirun -np 8 -x A bash -c 'python train.py'\n", "mpirun -np 8 -x A python -m mpiddp train.py\n",
                 id="mpirun and a shell"),
    pytest.param(f'srun --output="logs/$A/%t.log" {OF_TWO} train.py\n',
                 "# check: each rank's output goes to a file in the folder of --log-dir\n"
                 f"{OURS.replace('train', '--log-dir logs/$A train')}\n", id="a file for each rank"),
    pytest.param(f'echo "torchrun train.py"; srun {OF_TWO} train.py\n', f'echo "torchrun train.py"; {OURS}\n',
                 id="a text with the same words"),
])
def test_nothing_is_lost(before: str, after: str) -> None:
    """Without a word: what the new script does not do stands in a comment."""
    text = join_lines(convert_text(NODES.removesuffix(NODES.splitlines()[-1] + "\n") + before))
    kept = re.sub(r"# check: accelerate launch also reads.*\n", "", text)
    assert kept.endswith(after if "setup" in before else f"\nmodule load openmpi\n{after}"), text
    assert not parse(text).has_error


@pytest.mark.parametrize(("before", "check"), [
    (f"srun {OF_TWO} train.py --batch $((SLURM_NTASKS * 16))", "SLURM_NTASKS is of the new tasks, one for each rank"),
    (f"srun {OF_TWO} train.py\ntime srun python merge.py", "this has more tasks now: time srun python merge.py"),
    (f"srun {OF_TWO} train.py\ntorchrun --nproc_per_node=1 eval.py",
     "torchrun still starts something, which is not converted"),
    (f"srun bash -c 'cd /app; {IN_TEXT}'", "this holds for the rest of the script, too: cd /app"),
    (f"srun apptainer exec a.sif bash -c 'cd /app; {IN_TEXT}'",
     "this ran in the container, before the training: cd /app"),
    (f"srun {OF_TWO} train.py\nssh node2 bash worker.sh", "ssh may also start a part of the training: leave that out"),
])
def test_what_has_another_meaning_now_is_told(before: str, check: str) -> None:
    text = convert_text(f"{NODES}{before}\n")
    assert f"\n# check: {check}\n" in text
    assert ("rest of the script" in text) == ("\ncd /app\n" in text)


SET_UP = ("export MASTER_ADDR=$(hostname)", "export MASTER_PORT=29500", "nodes=($(scontrol show hostnames))",
          "echo $MASTER_ADDR", "export WORLD_SIZE=$SLURM_NTASKS")
KEPT = ("export A=1", "cd src", "[ -d out ] || mkdir out", "cp a b", "rm -f hosts && touch hosts", "echo done >> log")
STARTS = (f"srun {OF_TWO} train.py --n $N", f'srun {OF_TWO} "$SCRIPT" "${{ARGS[@]}}"', f"srun bash -c '{IN_TEXT}'",
          "accelerate launch --num_processes 4 --mixed_precision bf16 train.py",
          f"time srun {OF_TWO} train.py > out 2>&1")
FRAMES = ("{}", "{}", "for i in 1 2; do\n  {}\ndone", "for i in 1 2; do {}; done", "true && {} || exit 1",
          "if [ $A ]; then {}; else true; fi", "if true; then\n  {}\nfi", "run() {{\n  {}\n}}\nrun",
          "( {} )", "{{ {}; }}", "case $1 in\n  a) {} ;;\nesac", "while read x; do {}; done < f", "{} | tee log",
          "{} &\nwait", "{} & wait", "{} &")
PARTS = st.one_of(st.sampled_from((*SET_UP, *KEPT)), st.tuples(st.sampled_from(FRAMES), st.sampled_from(STARTS)))


@given(st.lists(PARTS, min_size=1, max_size=8), st.lists(st.sampled_from("\n;"), min_size=8, max_size=8))
@settings(max_examples=300, deadline=None)
def test_whatever_stands_around_launches_stays(parts: list[str | tuple[str, str]], ends: list[str]) -> None:
    """In any order, on lines of their own or not: each launch is converted, and no other command is lost."""
    text = NODES
    for part, end in zip(parts, ends, strict=False):
        command = part if isinstance(part, str) else part[0].format(part[1])
        text += command + ("\n" if end == "\n" or "&" in command[-6:] else "; ")
    new = convert_text(text.rstrip("; ") + "\n")
    assert not parse(new).has_error, new
    assert new.count("-m mpiddp") == sum(not isinstance(part, str) for part in parts), new
    for kept in KEPT:
        assert new.count(kept) == parts.count(kept), new


def test_a_function_whose_arguments_are_the_launch_is_refused() -> None:
    calls = "".join(f"run {OF_TWO} train.py --phase {phase}\n" for phase in (1, 2))
    with pytest.raises(ConversionError, match="what line 7 starts is in the arguments of its function"):
        convert_text(f'{NODES}run() {{ srun "$@"; }}\n{calls}')


def test_names_of_the_users_own_are_not_taken() -> None:
    text = convert_text(f"{NODES}CONFIG=a\nsrun accelerate launch --config_file b.yaml train.py --config $CONFIG\n")
    assert "\nCONFIG=a\n" in text and "\naccelerate_CONFIG=b.yaml\naccelerate_settings=$(" in text
    assert text.endswith("train.py --config $CONFIG\n")


def test_no_script_becomes_one_that_the_shell_cannot_read() -> None:
    script = read_from_text("job.sh", "#SBATCH -N 2\nsrun torchrun train.py\n")
    check_syntax(script, script.text)
    with pytest.raises(ConversionError) as caught:
        check_syntax(script, "#SBATCH -N 2\nif\n")
    assert f"cannot be converted: {caught.value}; " in message("doctor/not_converted", line=2)


def test_two_trainings_share_the_nodes() -> None:
    parts = "".join(f"for i in 0 1; do\n  {ON_NODE} --seed {seed} &\ndone\n" for seed in (1, 2))
    text = join_lines(convert_text(NODES.replace("nodes=2", "nodes=4") + parts + "wait\n"))
    assert text.endswith("".join(
        f"srun --mpi=pmix {CORES} --nodes=2 --ntasks=8 python -m mpiddp train.py --seed {seed} &\n" for seed in (1, 2))
        + "wait\n")


def test_two_trainings_share_a_node() -> None:
    launch = "srun -N1 -n1 --gpus=2 --exact torchrun --standalone --nproc_per_node=2 train.py &\n"
    text = join_lines(convert_text(NODES.replace("nodes=2", "nodes=1") + 2 * launch + "wait\n"))
    assert text.count(f"srun --mpi=pmix {CORES} --gpus=2 --exact python -m mpiddp train.py &\n") == 2
