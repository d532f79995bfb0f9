"""Rules about signals, the end of the walltime, and requeueing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .batch_script import Command, Program, Scheduler
from .context import Context, Problem, Step, find_option, is_mpirun, rule
from .files import list_places
from .findings import Severity

DEFAULT_SIGNAL_S = 60  # man sbatch, --signal
MIN_SIGNAL_S = 30  # a step and a checkpoint, at least
REQUEUE = r"scontrol\s+requeue(hold)?\b|--requeue-self\b"
RESUBMIT = r"(sbatch|qsub|bsub|flux\s+batch)\s+.*(\$0|\$\{0\}|BASH_SOURCE)"


def read_signal(context: Context) -> tuple[bool, str, int] | None:
    """Return whether --signal is for the batch shell, its name, and its seconds before the walltime, or None."""
    match = re.fullmatch(r"(?:(R?B?R?):)?(?:SIG)?(\w+)(?:@([0-9]{1,7}))?", context.script.options.get("signal", ""))
    if context.script.scheduler is not Scheduler.SLURM or match is None:
        return None
    return "B" in (match[1] or ""), match[2].upper(), int(match[3] or DEFAULT_SIGNAL_S)


def find_trap(context: Context, signal: str) -> Command | None:
    """Return the `trap` of the batch shell for a signal, None if there is none."""
    for command in context.script.commands:
        signals = [word.upper().removeprefix("SIG") for word in command.words[2:]]
        if command.words[0] == "trap" and signal in signals and command.words[1] not in ("-", ""):
            return command
    return None


@rule("signal-batch", "--signal with or without B: against who can receive it")
def check_signal_batch(context: Context) -> Iterator[Problem]:
    """Compare the receiver of the signal with what the script does with it."""
    signal = read_signal(context)
    if signal is None or not context.steps:
        return
    to_shell, name, seconds = signal
    trap, launch = find_trap(context, name), context.steps[-1].launch
    line = context.option_line("signal")
    with_batch, without = f"#SBATCH --signal=B:{name}@{seconds}", f"#SBATCH --signal={name}@{seconds}"
    is_exec = re.match(r"\s*(eval\s+[\"'])?exec\s", launch.text) is not None
    if not to_shell and trap is not None:
        yield Problem(Severity.ERROR, line, f"--signal without B:, but the script traps SIG{name}",
                      "Slurm sends the signal to the tasks of srun, and the batch shell never gets it", with_batch)
    elif not to_shell and is_mpirun(launch):
        yield Problem(Severity.ERROR, line, f"--signal without B:, but {launch.launcher} starts the ranks",
                      "Slurm sends the signal only to tasks of srun: the ranks never get it",
                      f"{with_batch}     # and a trap that sends it to {launch.launcher}")
    elif to_shell and trap is None and not is_exec:
        yield Problem(Severity.ERROR, line, f"--signal=B:{name}, but the script has no trap for SIG{name}",
                      "the signal kills the batch shell, and the job ends without a checkpoint",
                      without if launch.launcher == "srun" else f"trap 'kill -{name} $job' {name}")
    elif to_shell and trap is not None and not launch.is_background:
        yield Problem(Severity.ERROR, trap.line, f"the trap for SIG{name} waits for the end of the training",
                      "bash runs a trap only after the command in the foreground has ended",
                      f"{launch.text.splitlines()[-1].strip()} & job=$!; wait $job; wait $job")
    elif to_shell and trap is not None and is_one_wait(context, trap):
        wait = next(command.line for command in context.script.commands if command.words[0] == "wait")
        yield Problem(Severity.WARNING, wait, f"SIG{name} ends this wait",
                      "the script goes on, and the job ends before the training has written its checkpoint",
                      "wait $job; wait $job     # the first ends when the signal comes")


def is_one_wait(context: Context, trap: Command) -> bool:
    """Return whether the script waits only once, and its trap does nothing about that."""
    waits = [command for command in context.script.commands if command.words[0] == "wait"]
    passes_on = re.match(r"\s*kill\b", trap.words[1]) is not None
    return len(waits) == 1 and not waits[0].in_loop and passes_on and not re.search(r"wait|exit|requeue", trap.words[1])


@rule("signal-time", "the time of --signal and --stop-before against the walltime")
def check_signal_time(context: Context) -> Iterator[Problem]:
    """Compare the times."""
    walltime, signal = context.script.request.walltime_s, read_signal(context)
    if signal is not None:
        seconds, name = signal[2], signal[1]
        line, prefix = context.option_line("signal"), "B:" * signal[0]
        if walltime is not None and seconds >= walltime:
            yield Problem(Severity.ERROR, line,
                          f"--signal comes {seconds} s before the end of a walltime of {walltime} s",
                          "the job is stopped at once", f"#SBATCH --signal={prefix}{name}@{max(60, walltime // 10)}")
        elif seconds < MIN_SIGNAL_S and not any(stop_before(step) for step in context.steps):
            yield Problem(Severity.WARNING, line, f"--signal comes {seconds} s before the walltime",
                          "that is too short for a step and a checkpoint", f"#SBATCH --signal={prefix}{name}@120")
    for step in context.steps:
        stop = stop_before(step)
        if stop and walltime is not None and stop >= walltime:
            yield Problem(Severity.ERROR, step.launch.line, f"--stop-before {stop:g} with a walltime of {walltime} s",
                          "mpiddp refuses to start (stop-too-early)", f"--stop-before {max(60, walltime // 10)}")


def stop_before(step: Step) -> float:
    """Return the seconds of --stop-before, 0 if it is not given."""
    value = find_option((*step.launch.options, *(step.launch.supervised or ())), "stop-before")
    value = value or step.launch.assignments.get("MPIDDP_STOP_BEFORE") or ""
    return float(value) if re.fullmatch(r"[0-9]{1,7}(\.[0-9]+)?", value) else 0.0


@rule("should-stop", "--stop-before or --signal for a script that never asks whether it should stop")
def check_should_stop(context: Context) -> Iterator[Problem]:
    """Look for mpiddp.should_stop() in scripts that are here."""
    signal = read_signal(context)
    for step in context.steps:
        launch, option = step.launch, "--stop-before" if stop_before(step) else "--signal"
        has_signal = option == "--stop-before" or (signal is not None and not signal[0])  # B: is for the batch shell
        if launch.program is not Program.MPIDDP or not launch.script or not has_signal:
            continue
        words = "should_stop" if option == "--stop-before" else "should_stop|signal|lightning"
        texts = map(context.host.read, list_places(context, launch.folder, launch.script))
        if any(text is not None and not re.search(words, text) for text in texts):
            yield Problem(Severity.WARNING, launch.line, f"{option}, but {launch.script} never calls should_stop()",
                          "unless a module that it imports does, the job ends without a checkpoint",
                          f"if mpiddp.should_stop():     # in the loop of {launch.script}: save a checkpoint, and end")


@rule("requeue", "a job that is to be queued again, but is not")
def check_requeue(context: Context) -> Iterator[Problem]:
    """Compare --requeue with what the script does."""
    script = context.script
    if script.scheduler is not Scheduler.SLURM:
        return
    asks = context.has_text(REQUEUE)
    line = next((number for number, text in enumerate(script.lines, 1)
                 if re.search(REQUEUE, text) and not text.lstrip().startswith("#")), None)
    if asks and "no-requeue" in script.options:
        yield Problem(Severity.ERROR, context.option_line("no-requeue"),
                      "--no-requeue, but the script asks for a requeue", "scontrol requeue is refused",
                      "#SBATCH --requeue")
    elif asks and "requeue" not in script.options:
        yield Problem(Severity.WARNING, line, "scontrol requeue without #SBATCH --requeue",
                      "if the site does not requeue by default, scontrol refuses", "#SBATCH --requeue")
    elif "requeue" in script.options and not asks and not context.has_text(RESUBMIT):
        for step in context.steps[-1:]:
            stops = "signal" if "signal" in script.options else "stop-before" if stop_before(step) else ""
            if step.launch.program is Program.MPIDDP and stops:
                yield Problem(Severity.WARNING, step.launch.line,
                              f"--requeue and --{stops}, but nothing requeues the job",
                              "--requeue only allows it; a job that has stopped before the walltime stays ended",
                              "status=$?; [ $status = 75 ] && scontrol requeue $SLURM_JOB_ID; exit $status")


@rule("open-mode", "a requeued job that overwrites its output")
def check_open_mode(context: Context) -> Iterator[Problem]:
    """Look for a requeue without --open-mode=append."""
    options = context.script.options
    if context.script.scheduler is Scheduler.SLURM and options.get("open-mode", "truncate") == "truncate" and (
            "requeue" in options or context.has_text(REQUEUE)) and context.steps:
        yield Problem(Severity.WARNING, context.option_line("open-mode", "requeue", "output"),
                      "a requeued job without --open-mode=append",
                      "each start overwrites the output of the one before", "#SBATCH --open-mode=append")


@rule("errexit", "set -e, by which a line that looks at the status is not reached")
def check_errexit(context: Context) -> Iterator[Problem]:
    """Look for `status=$?` after a training in a script with set -e."""
    script = context.script
    first = script.lines[0] if script.lines[0].startswith("#!") else ""
    has_errexit = re.search(r"\s-\w*e", first) is not None or any(
        command.words[0] == "set" and any(re.fullmatch(r"-\w*e\w*|errexit", word) for word in command.words[1:])
        for command in script.commands)
    for step in context.steps[-1:]:
        launch = step.launch
        last = launch.line + launch.text.count("\n")
        following = "\n".join(line for line in script.lines[last:last + 3] if not line.lstrip().startswith("#"))
        guarded = re.search(r"\|\||^\s*if\s|&\s*$", "\n".join(script.lines[launch.line - 1:last])) is not None
        if has_errexit and not guarded and re.search(r"\$\?", following) and not context.has_text(r"set \+e"):
            yield Problem(Severity.WARNING, launch.line, "set -e ends the script if the training fails",
                          "the lines that look at its status, $?, are not reached",
                          "status=0; … || status=$?")
