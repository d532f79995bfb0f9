"""Rules about the signal that a scheduler sends before the end of the walltime."""

from __future__ import annotations

import re
from collections.abc import Iterator
from signal import Signals

from .batch_script import SETUP_FILES
from .context import Context, error, rule, warning
from .directives import read_number
from .findings import Finding
from .launches import find_option
from .shell import SimpleCommand

DEFAULT_SIGNAL_S = 60  # man sbatch, --signal
MIN_SIGNAL_S = 30  # a step and a checkpoint, at least
FOREGROUND = ("bash runs a trap only after the command in the foreground has ended; of two waits the first ends with "
              "the signal, the second with the training")
BACKGROUND = "& job=$!; wait $job || wait $job"


def read_signal(context: Context) -> tuple[bool, str, int] | None:
    """Return whether --signal is for the batch shell, its name, and its seconds before the walltime, or None."""
    match = re.fullmatch(r"(?:(R?B?R?):)?(?:SIG)?(\w+)(?:@([0-9]{1,7}))?", context.script.options.get("signal", ""))
    if match is None:
        return None
    return "B" in (match[1] or ""), parse_signal_name(match[2]), int(match[3] or DEFAULT_SIGNAL_S)


def parse_signal_name(text: str) -> str:
    """Return the name, without SIG, of a signal that is given by its name or number."""
    names = {str(signal.value): signal.name for signal in Signals}
    return names.get(text, text.upper()).removeprefix("SIG")


def find_trap(context: Context, signal: str) -> SimpleCommand | None:
    """Return the `trap` of the batch shell for a signal, None if there is none."""
    for command in context.script.commands:
        signals = [*map(parse_signal_name, command.words[2:])]
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


@rule("signal-batch")
def check_signal_batch(context: Context) -> Iterator[Finding]:
    """Compare the receiver of the signal with what the script does with it."""
    signal = read_signal(context)
    if signal is None or not context.steps:
        return
    to_shell, name, seconds = signal
    trap, launch, line = find_trap(context, name), context.steps[-1].launch, context.option_line("signal")
    if trap is not None and re.fullmatch(r"\s*(echo|printf|date)\b[^;&|]*", trap.words[1]) and not to_shell:
        return  # it only tells the time
    with_batch, without = (context.directive("signal", f"{prefix}{name}@{seconds}") for prefix in ("B:", ""))
    is_background, is_exec = launch.command.is_background, launch.words[0] == "exec"
    wait = "" if is_background else f"{launch.words[launch.begin].spelling} … {BACKGROUND}"
    scheduler, passes_on = context.script.scheduler.name, f"trap 'kill -{name} $job' {name}"
    if not to_shell and trap is not None and name != "TERM":  # which is also scancel's
        yield error(line, f"--signal without B:, but the script traps SIG{name}",
                    f"{scheduler} sends the signal to the tasks of its launcher, and the batch shell never gets it"
                    + ("" if is_background else f"; {FOREGROUND}"), with_batch, wait)
    elif not to_shell and launch.is_mpirun:
        yield error(line, f"--signal without B:, but {launch.launcher} starts the ranks",
                    f"{scheduler} sends the signal only to tasks of its own launcher: the ranks never get it",
                    with_batch, passes_on, wait)
    elif to_shell and trap is None and not is_exec and not may_trap(context):
        yield error(line, f"--signal=B:{name}, but the script has no trap for SIG{name}",
                    "the signal kills the batch shell, and the job ends without a checkpoint",
                    *((without,) if launch.row.system is not None else (passes_on, wait)))
    elif to_shell and trap is not None and not is_background:
        yield error(trap.line, f"the trap for SIG{name} waits for the end of the training", FOREGROUND, wait)
    elif to_shell and trap is not None and is_one_wait(context, trap):
        only = next(command for command in context.script.commands if command.words[0] == "wait")
        yield warning(only.line, f"SIG{name} ends this wait",
                      "the script goes on, and the job ends before the training has written its checkpoint",
                      f"{only.text} || {only.text}")


def is_one_wait(context: Context, trap: SimpleCommand) -> bool:
    """Return whether the script waits only once, and its trap does nothing about that."""
    waits = [command for command in context.script.commands if command.words[0] == "wait"]
    passes_on = re.match(r"\s*kill\b", trap.words[1]) is not None
    return len(waits) == 1 and not waits[0].in_loop and passes_on and not re.search(r"wait|exit|requeue", trap.words[1])


@rule("signal-time")
def check_signal_time(context: Context) -> Iterator[Finding]:
    """Compare the time of the signal with the walltime."""
    walltime_s, signal = context.script.request.walltime_s, read_signal(context)
    for step in context.steps:
        stop_s = read_number((find_option(step.launch.program_options, "stop-before") or "").partition(".")[0])
        if stop_s and walltime_s and stop_s >= walltime_s:
            yield error(step.launch.line, f"--stop-before {stop_s} with a walltime of {walltime_s} s",
                        "mpiddp refuses to start (stop-too-early)", f"--stop-before {max(1, walltime_s // 10)}")
    if signal is None:
        return
    to_shell, name, seconds = signal
    line = context.option_line("signal")
    better = min(max(MIN_SIGNAL_S * 2, (walltime_s or 1200) // 10), max(1, (walltime_s or 1200) // 2), 600)
    write = context.directive("signal", f"{'B:' * to_shell}{name}@{better}")
    stops = any(find_option(step.launch.program_options, "stop-before") for step in context.steps)
    if walltime_s and seconds >= walltime_s:
        yield error(line, f"--signal comes {seconds} s before the end of a walltime of {walltime_s} s",
                    "the job is stopped at once", write)
    elif seconds < MIN_SIGNAL_S and not stops:
        yield warning(line, f"--signal comes {seconds} s before the walltime",
                      "that is too short for a step and a checkpoint", write)
