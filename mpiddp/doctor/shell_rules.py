"""Rules about the shell of the job script: its first line, variables that programs do not get, output and status."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from .batch_script import SETUP_FILES, Command, Launch, Program, Scheduler
from .context import Context, Problem, Step, rule
from .directives import SENTINELS
from .edits import advise, change_line, insert_before, insert_line, insert_words, replace_text
from .findings import Severity
from .shell import BLANK_BEHIND, Word

# Variables that only programs read, so that setting one without export has no effect.
PROGRAM_VARIABLES = re.compile(
    r"(NCCL|RCCL|GLOO|TORCH|PYTORCH|CUDA|HIP|HSA|ROCR|MIOPEN|TRITON|TORCHINDUCTOR|HF|TRANSFORMERS|TOKENIZERS|WANDB|"
    r"MPIDDP|UCX|FI|OMPI_MCA|MPICH|I_MPI|OMP|KMP|MKL)_\w+|PYTHON(UNBUFFERED|PATH|FAULTHANDLER)")
SCHEDULER_NAMES = {Scheduler.SLURM: "Slurm", Scheduler.PBS: "PBS", Scheduler.LSF: "LSF", Scheduler.FLUX: "Flux"}
# How the names of a batch system's variables begin, and the systems that set them.
SCHEDULER_VARIABLES = {"SLURM_": (Scheduler.SLURM,), "PBS_": (Scheduler.PBS,), "LSB_": (Scheduler.LSF,),
                       "FLUX_": (Scheduler.FLUX,)}
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
PATTERN_VARIABLES = {"%j": "$SLURM_JOB_ID", "%J": "$SLURM_JOB_ID", "%x": "$SLURM_JOB_NAME",
                     "%A": "$SLURM_ARRAY_JOB_ID", "%a": "$SLURM_ARRAY_TASK_ID", "%u": "$USER"}
PATTERN = re.compile(r"%[jJxAau](?![A-Za-z0-9])")


@rule("first-line", "a job script of Slurm without #! in its first line")
def check_first_line(context: Context) -> Iterator[Problem]:
    """Look at the beginning of the script."""
    script = context.script
    if script.scheduler is Scheduler.SLURM and not script.lines[0].startswith("#!"):
        yield Problem(Severity.ERROR, 1, "the first line does not begin with #!",
                      "sbatch refuses a script whose first line does not name a shell",
                      insert_line(1, "#!/bin/bash"))


@rule("line-continuation", "a command that does not go on in the next line")
def check_line_continuation(context: Context) -> Iterator[Problem]:
    """Look for a backslash with a blank behind it, and for a line that begins with an option."""
    script, lines = context.script, context.script.lines
    quoted = script.document_lines | script.string_lines
    broken = [number for number, line in enumerate(lines[:-1], 1) if BLANK_BEHIND.search(line) and lines[number].strip()
              and not {number, number + 1} & quoted and not line.lstrip().startswith("#")]
    for number in broken:
        yield Problem(Severity.ERROR, number, "a blank behind the backslash",
                      "the command ends here, and the next line is another one",
                      replace_text(context, number, BLANK_BEHIND.pattern, "\\"))
    for command in script.commands:
        above = lines[command.line - 2] if command.line > 1 else ""
        if not command.words[0].startswith("-") or command.line - 1 in broken or not lines[
                command.line - 1].lstrip().startswith("-"):
            continue
        is_comment = above.lstrip().startswith("#")
        yield Problem(Severity.ERROR, command.line, f"a line begins with an option: {command.words[0]}",
                      "the shell takes it for a command; the training does not get it",
                      advise("move the comment above out of the command") if is_comment or not above.strip() else
                      replace_text(context, command.line - 1, r"\s*$", " \\"))


@rule("other-scheduler", "directives or variables of another batch system")
def check_other_scheduler(context: Context) -> Iterator[Problem]:
    """Look for what another batch system would read or set."""
    script = context.script
    if script.scheduler is Scheduler.NONE:
        return
    quoted = script.document_lines | script.string_lines
    foreign = [number for number, line in enumerate(script.lines, 1) if number not in quoted
               and any(line.startswith(f"{sentinel} ") and other is not script.scheduler
                       for sentinel, other in SENTINELS.items())]
    if 0 < len(foreign) < len(script.directives) / 2:  # more are for a second batch system
        yield Problem(Severity.WARNING, foreign[0], "a directive of another batch system",
                      f"{SCHEDULER_NAMES[script.scheduler]} takes it for a comment")
    folders = (command for command in script.commands if command.words[0] == "cd")
    commands: list[Command | Launch] = [*folders, *script.launches]
    for command in commands:
        for name, others in SCHEDULER_VARIABLES.items():
            used = next((part for part in command.unknown if re.fullmatch(rf"\$\{{?{name}\w+\}}?", part)), "")
            if used and script.scheduler not in others:
                is_folder = command.text.startswith("cd ") and script.scheduler is Scheduler.SLURM
                yield Problem(Severity.ERROR, command.line, f"{used} is not set by {SCHEDULER_NAMES[script.scheduler]}",
                              "it is a variable of another batch system: the command then has an empty value",
                              advise("leave it out: Slurm starts the script in the folder of the submission"
                                     if is_folder else ""))
                return


@rule("not-exported", "a variable that no program gets, because it is not exported")
def check_not_exported(context: Context) -> Iterator[Problem]:
    """Look for variables of libraries that are set without export and that the script does not read."""
    script = context.script
    if not context.steps or context.has_text(r"^\s*set\s+(-\w*a|-o\s+allexport)"):
        return
    is_ours = any(step.launch.program is Program.MPIDDP for step in context.steps)
    for name, line in script.variable_lines.items():
        is_read = PROGRAM_VARIABLES.fullmatch(name) or (name in ADDRESS_VARIABLES and not is_ours)
        if (not is_read or name in script.exported or name in context.host.environ
                or line > context.steps[-1].launch.line or not script.lines[line - 1].strip().startswith(f"{name}=")
                or (script.scheduler is Scheduler.PBS and name == "OMP_NUM_THREADS")):
            continue  # PBS exports that one
        is_used = any(name in other and re.search(rf"\b{name}\b", other.split(" #")[0])
                      and not other.lstrip().startswith("#") and not re.match(rf"\s*{name}=", other)
                      for other in script.lines)
        is_for_file = any(command.words[0] in ("source", ".") and command.line > line and not SETUP_FILES.search(
            command.text) for command in script.commands)
        if not is_for_file and not is_used:
            yield Problem(Severity.WARNING, line, f"{name} is set without export",
                          "the training does not get it",
                          replace_text(context, line, rf"(?<!\S){name}=", f"export {name}="))


@rule("pipe-status", "the status of tee instead of that of the training")
def check_pipe_status(context: Context) -> Iterator[Problem]:
    """Look for a training whose output goes to tee, and whose status the script reads."""
    if context.has_text("pipefail|PIPESTATUS"):
        return
    for step in context.steps:
        rest = read_rest(context, step)
        match = re.match(r"[\s\\]*\|&?[\s\\]*tee\b[^\n|&;]*(\|\||&&)?", rest)
        if match is None:
            continue
        following = [line for line in rest[match.end():].split("\n")[1:]
                     if line.strip() and not line.lstrip().startswith("#")]
        if match[1] or re.search(r"\$\?", (following or [""])[0]):
            yield Problem(Severity.WARNING, step.launch.line, "the status is that of tee, not that of the training",
                          "of a pipe the shell keeps the last command's status: a training that failed looks well",
                          insert_before(context, step.launch, "set -o pipefail"))


def read_rest(context: Context, step: Step) -> str:
    """Return the script's text behind a launch, empty if the launch does not stand there as it is written."""
    text = "\n".join(context.script.lines[step.launch.line - 1:])
    place = text.find(step.launch.text)
    return text[place + len(step.launch.text):] if place >= 0 else ""


@rule("conda-run", "conda run, which keeps the output back until the end")
def check_conda_run(context: Context) -> Iterator[Problem]:
    """Look for conda run without --no-capture-output."""
    for step in context.steps:
        words = step.launch.wrapper_words
        is_conda = any(pair == ("conda", "run") for pair in pairwise(words))
        if is_conda and {"--no-capture-output", "--live-stream", "-s"}.isdisjoint(words) and not any(
                getattr(word, "is_unknown", False) for word in words):
            yield Problem(Severity.WARNING, step.launch.line, "conda run without --no-capture-output",
                          "conda keeps the output back until the training ends, and a job that is killed leaves none",
                          insert_words(context, step.launch, r"\bconda\s+run\b", "--no-capture-output").otherwise(
                              "write conda run --no-capture-output"))


@rule("output-pattern", "patterns of #SBATCH --output where the shell reads them")
def check_output_pattern(context: Context) -> Iterator[Problem]:
    """Look for %j and its like in files that the shell or tee writes."""
    if context.script.scheduler is not Scheduler.SLURM:
        return
    files: list[tuple[Launch | Command, Word]] = [
        (step.launch, file) for step in context.steps for file in step.launch.outputs]
    files += [(command, word) for command in context.script.commands if command.words[0] == "tee"
              for word in command.words[1:]]
    for command, file in files:
        known = str(file)
        for part in file.unknown:
            known = known.replace(part, "")
        if PATTERN.search(known):
            correct = PATTERN.sub(lambda match: PATTERN_VARIABLES[match[0]], file)
            yield Problem(Severity.WARNING, command.line,
                          f"{file}: the shell does not replace {PATTERN.findall(known)[0]}",
                          "only #SBATCH lines and options of srun do: all jobs write the same file",
                          change_line(context, command, rf"(?<!['\w]){re.escape(file)}(?![\w'])", correct).otherwise(
                              f"write {correct}"))
