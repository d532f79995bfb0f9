"""Rules about signals, the end of the walltime, and requeueing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from signal import Signals

from .batch_script import SETUP_FILES, Command, Launch, Program, Scheduler
from .context import Context, Fix, Problem, Step, find_option, is_mpirun, rule
from .edits import (
    advise,
    append_line,
    append_words,
    change_line,
    insert_before,
    replace_option,
    replace_text,
    set_option,
)
from .files import list_places
from .findings import Severity

DEFAULT_SIGNAL_S = 60  # man sbatch, --signal
MIN_SIGNAL_S = 30  # a step and a checkpoint, at least
REQUEUE = r"scontrol\s+requeue(hold)?\b|--requeue-self\b"
PRINTED = r"\b(echo|printf)\b(\"[^\"]*\"|'[^']*'|[^;&|\"'])*"
FOREGROUND = ("bash runs a trap only after the command in the foreground has ended; of two waits the first ends with "
              "the signal, the second with the training")
RESUBMIT = r"(sbatch|qsub|bsub|flux\s+batch)\s+.*(\$0|\$\{0\}|BASH_SOURCE)"


def read_signal(context: Context) -> tuple[bool, str, int] | None:
    """Return whether --signal is for the batch shell, its name, and its seconds before the walltime, or None."""
    match = re.fullmatch(r"(?:(R?B?R?):)?(?:SIG)?(\w+)(?:@([0-9]{1,7}))?", context.script.options.get("signal", ""))
    if context.script.scheduler is not Scheduler.SLURM or match is None:
        return None
    return "B" in (match[1] or ""), name_signal(match[2]), int(match[3] or DEFAULT_SIGNAL_S)


def name_signal(text: str) -> str:
    """Return the name, without SIG, of a signal that is given by its name or number."""
    names = {str(signal.value): signal.name for signal in Signals}
    return names.get(text, text.upper()).removeprefix("SIG")


def find_trap(context: Context, signal: str) -> Command | None:
    """Return the `trap` of the batch shell for a signal, None if there is none."""
    for command in context.script.commands:
        signals = [*map(name_signal, command.words[2:])]
        if command.words[0] == "trap" and signal in signals and command.words[1] not in ("-", ""):
            return command
    return None


def may_trap(context: Context) -> bool:
    """Return whether a signal that is not known has a trap, or a file that is sourced may set one."""
    for command in context.script.commands:
        if command.words[0] == "trap" and any(word.unknown for word in command.words[2:]):
            return True
        name = command.words[1] if command.words[0] in ("source", ".") and len(command.words) > 1 else ""
        if name and not SETUP_FILES.search(name) and "trap" in (context.host.read(name) or "trap"):
            return True
    return False


@rule("signal-batch", "--signal with or without B: against who can receive it")
def check_signal_batch(context: Context) -> Iterator[Problem]:
    """Compare the receiver of the signal with what the script does with it."""
    signal = read_signal(context)
    if signal is None or not context.steps:
        return
    to_shell, name, seconds = signal
    trap, launch = find_trap(context, name), context.steps[-1].launch
    if trap is not None and re.fullmatch(r"\s*(echo|printf|date)\b[^;&|]*", trap.words[1]) and not to_shell:
        return  # it only tells the time
    line = context.option_line("signal")
    with_batch, without = (set_option(context, "signal", f"{prefix}{name}@{seconds}") for prefix in ("B:", ""))
    add_trap = insert_before(context, launch, f"trap 'kill -{name} $job' {name}")
    is_exec = re.match(r"\s*(eval\s+[\"'])?exec\s", launch.text) is not None
    if not to_shell and trap is not None and name != "TERM":  # which is also scancel's
        yield Problem(Severity.ERROR, line, f"--signal without B:, but the script traps SIG{name}",
                      "Slurm sends the signal to the tasks of srun, and the batch shell never gets it"
                      + ("" if launch.is_background else f"; {FOREGROUND}"),
                      with_batch if launch.is_background else with_batch + wait_for_trap(context, launch))
    elif not to_shell and is_mpirun(launch):
        yield Problem(Severity.ERROR, line, f"--signal without B:, but {launch.launcher} starts the ranks",
                      "Slurm sends the signal only to tasks of srun: the ranks never get it",
                      with_batch + add_trap + wait_for_trap(context, launch))
    elif to_shell and trap is None and not is_exec and not may_trap(context):
        yield Problem(Severity.ERROR, line, f"--signal=B:{name}, but the script has no trap for SIG{name}",
                      "the signal kills the batch shell, and the job ends without a checkpoint",
                      without if launch.launcher == "srun" else add_trap + wait_for_trap(context, launch))
    elif to_shell and trap is not None and not launch.is_background:
        yield Problem(Severity.ERROR, trap.line, f"the trap for SIG{name} waits for the end of the training",
                      FOREGROUND, wait_for_trap(context, launch))
    elif to_shell and trap is not None and is_one_wait(context, trap):
        wait = next(command for command in context.script.commands if command.words[0] == "wait")
        yield Problem(Severity.WARNING, wait.line, f"SIG{name} ends this wait",
                      "the script goes on, and the job ends before the training has written its checkpoint",
                      replace_text(context, wait.line, rf"\b{re.escape(wait.text)}", f"{wait.text} || {wait.text}"))


def wait_for_trap(context: Context, launch: Launch) -> Fix:
    """Return the change by which a training runs in the background, and the shell waits until it has ended."""
    if launch.is_background:
        return advise("then wait for it twice, wait || wait: the first wait ends when the signal comes")
    text = "& job=$!; wait $job || wait $job"
    return append_words(context, launch, text).otherwise(
        f"start the training in the background ({text}): the first wait ends when the signal comes")


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
        if walltime and seconds >= walltime:
            yield Problem(Severity.ERROR, line,
                          f"--signal comes {seconds} s before the end of a walltime of {walltime} s",
                          "the job is stopped at once",
                          set_option(context, "signal", f"{prefix}{name}@{choose_seconds(walltime)}"))
        elif seconds < MIN_SIGNAL_S and not any(stop_before(step) for step in context.steps):
            yield Problem(Severity.WARNING, line, f"--signal comes {seconds} s before the walltime",
                          "that is too short for a step and a checkpoint",
                          set_option(context, "signal", f"{prefix}{name}@{choose_seconds(walltime or 1200)}"))
    for step in context.steps:
        stop = stop_before(step)
        if stop and walltime and stop >= walltime:
            yield Problem(Severity.ERROR, step.launch.line, f"--stop-before {stop:g} with a walltime of {walltime} s",
                          "mpiddp refuses to start (stop-too-early)",
                          change_line(context, step.launch, r"(--stop[-_]before(=|\s+)|MPIDDP_STOP_BEFORE=)[\d.]+",
                                      spell_stop(step, choose_seconds(walltime))).otherwise(
                              f"write --stop-before {choose_seconds(walltime)}"))


def spell_stop(step: Step, seconds: int) -> str:
    """Return the time of --stop-before as the launch gives it."""
    is_variable = "MPIDDP_STOP_BEFORE" in step.launch.assignments
    return f"MPIDDP_STOP_BEFORE={seconds}" if is_variable else f"--stop-before={seconds}"


def choose_seconds(walltime: int) -> int:
    """Return how long before the end of a walltime a training should stop."""
    return min(max(MIN_SIGNAL_S * 2, walltime // 10), max(1, walltime // 2), 600)


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
                          advise(f"in the loop of {launch.script}: if mpiddp.should_stop(), save a checkpoint and end"))


@rule("requeue", "a job that is to be queued again, but is not")
def check_requeue(context: Context) -> Iterator[Problem]:
    """Compare --requeue with what the script does."""
    script = context.script
    if script.scheduler is not Scheduler.SLURM:
        return
    line = find_requeue(context)
    asks = line is not None
    if asks and "no-requeue" in script.options:
        yield Problem(Severity.ERROR, context.option_line("no-requeue"),
                      "--no-requeue, but the script asks for a requeue", "scontrol requeue is refused",
                      replace_option(context, None, "no-requeue", "--requeue"))
    elif asks and "requeue" not in script.options:
        yield Problem(Severity.WARNING, line, "scontrol requeue without #SBATCH --requeue",
                      "if the site does not requeue by default, scontrol refuses", set_option(context, "requeue"))
    elif "requeue" in script.options and not asks and not context.has_text(RESUBMIT):
        for step in context.steps[-1:]:
            stops = "signal" if "signal" in script.options else "stop-before" if stop_before(step) else ""
            if step.launch.program is Program.MPIDDP and stops:
                yield Problem(Severity.WARNING, step.launch.line,
                              f"--requeue and --{stops}, but nothing requeues the job",
                              "--requeue only allows it; a job that has stopped before the walltime stays ended",
                              requeue_at_end(context, step.launch))


def find_requeue(context: Context) -> int | None:
    """Return the line that queues the job again, None if there is none; a text that is printed does not."""
    return next((number for number, text in enumerate(context.script.lines, 1)
                 if re.search(REQUEUE, re.sub(PRINTED, "", text)) and not text.lstrip().startswith("#")), None)


def requeue_at_end(context: Context, launch: Launch) -> Fix:
    """Return the lines that queue a job again if mpiddp has stopped it, where nothing follows the launch."""
    last = launch.line + launch.text.count("\n")
    lines = ("status=$?", "if [ $status = 75 ]; then scontrol requeue $SLURM_JOB_ID; fi", "exit $status")
    if any(map(str.strip, context.script.lines[last:])) or launch.is_background:
        return advise(f"write behind the training: {'; '.join(lines)}")
    return Fix(tuple(change for text in lines for change in append_line(context, text).changes))


@rule("open-mode", "a requeued job that overwrites its output")
def check_open_mode(context: Context) -> Iterator[Problem]:
    """Look for a requeue without --open-mode=append."""
    options = context.script.options
    if context.script.scheduler is Scheduler.SLURM and options.get("open-mode", "truncate") == "truncate" and (
            "requeue" in options or find_requeue(context)) and context.steps:
        yield Problem(Severity.WARNING, context.option_line("open-mode", "requeue", "output"),
                      "a requeued job without --open-mode=append",
                      "each start overwrites the output of the one before",
                      set_option(context, "open-mode", "append"))


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
        own = "\n".join(script.lines[launch.line - 1:last])
        guarded = re.search(r"\|\|(?!\s*wait\b)|^\s*if\s|&\s*$", own) is not None
        if has_errexit and not guarded and re.search(r"\$\?", following) and not context.has_text(r"set \+e"):
            yield Problem(Severity.WARNING, launch.line, "set -e ends the script if the training fails",
                          "the lines that look at its status, $?, are not reached",
                          keep_status(context, launch))


def keep_status(context: Context, launch: Launch) -> Fix:
    """Return the change by which a script goes on with the status of a training that has failed."""
    following = launch.line + launch.text.count("\n") + 1
    text = context.script.lines[following - 1] if following <= len(context.script.lines) else ""
    match, end = re.match(r"\s*((\w+)=\$\?)(;\s*|\s*$)", text), Fix()
    if match is not None:
        end = append_words(context, launch, f"|| {match[1]}")
    if match is None or not end.changes:
        return advise("write status=0; … || status=$?")
    return insert_before(context, launch, f"{match[2]}=0") + end + replace_text(
        context, following, rf"{re.escape(match[1])}{';' * (';' in match[3])}\s*", "")
