"""The rule about the walltime."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .batch_script import Scheduler
from .context import Context, Fix, Problem, count, rule
from .edits import advise, set_option
from .findings import Severity

MIN_WALLTIME_S = 300  # mpiddp waits as long for the start: torch comes from a shared file system
HOURS = re.compile(r"(0?[1-9]|12|24|36|48|72|96):00")  # read as minutes, and mostly meant as hours
BARE_HOURS = re.compile(r"12|24|36|48|72|96|168")
LONG_TIME = re.compile(r"([0-9]{1,4})[ -]?(h|hrs?|hours?|d|days?)\b", re.IGNORECASE)


class TimeFormat(NamedTuple):
    """How a batch system reads a walltime: a pattern, its description, N hours, and ten minutes."""

    program: str
    pattern: str
    description: str
    hours: str
    short: str


FORMATS: Mapping[Scheduler, TimeFormat] = {
    Scheduler.SLURM: TimeFormat(
        "sbatch", r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE|-1",
        "minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]]", "{}:00:00", "00:10:00"),
    Scheduler.PBS: TimeFormat(
        "qsub", r"\d+(:\d+){0,3}(\.\d+)?", "hours:minutes:seconds", "{}:00:00", "00:10:00"),
    Scheduler.LSF: TimeFormat(
        "bsub", r"\d+(:\d+)?(/\S+)?", "hours:minutes, or minutes", "{}:00", "10"),
    Scheduler.FLUX: TimeFormat(
        "Flux", r"\d+(\.\d+)?(ms|[smhd])?|inf(inity)?", "minutes, or a number with s, m, h or d", "{}h", "10m"),
}
# The times of a script that means hours, and gets minutes.
READS_MINUTES = {Scheduler.SLURM: "Slurm reads a number alone as minutes, and two numbers as minutes and seconds",
                 Scheduler.PBS: "PBS reads two numbers as minutes and seconds",
                 Scheduler.LSF: "LSF reads a number alone as minutes",
                 Scheduler.FLUX: "Flux reads a number alone as minutes"}


@rule("walltime", "a walltime that is refused or shorter than a start, or minutes that are meant as hours")
def check_walltime(context: Context) -> Iterator[Problem]:
    """Look at the walltime."""
    script = context.script
    name = next((name for name in ("time", "walltime", "time-limit") if name in script.options), "")
    text, walltime = script.options.get(name, ""), script.request.walltime_s
    form, line = FORMATS.get(script.scheduler), context.option_line(name)
    if form is None or not text or re.search(r"[$%{<]", text):
        return
    if not re.fullmatch(form.pattern, text, re.IGNORECASE):
        hours = find_hours(text) or (text.partition(":")[0] if re.fullmatch(r"\d+:\d\d:\d\d", text) else "")
        yield Problem(Severity.ERROR, line, f"a walltime of {text}, which {form.program} refuses",
                      f"{form.program} reads {form.description}",
                      set_option(context, name, form.hours.format(hours or "24"))
                      + (Fix() if hours else advise("24 hours are an example")))
    elif hours := find_meant_hours(context, text, line):
        shown = f"--time={text}" if script.scheduler is Scheduler.SLURM else f"a walltime of {text}"
        yield Problem(Severity.WARNING, line, f"{shown} is {count((walltime or 0) // 60, 'minute')}",
                      READS_MINUTES[script.scheduler], set_option(context, name, form.hours.format(hours)) + (
                          Fix() if find_hours(read_comment(context, line)) == hours else
                          advise(f"only if {hours} hours are meant")))
    elif walltime is not None and 0 < walltime < MIN_WALLTIME_S:
        yield Problem(Severity.WARNING, line, f"a walltime of {count(walltime, 'second')}",
                      "importing torch from a shared file system alone can take minutes",
                      set_option(context, name, form.short) + advise("10 minutes are an example"))


def find_meant_hours(context: Context, text: str, line: int | None) -> str:
    """Return the hours that are meant by a time in minutes, empty if minutes may be meant."""
    scheduler = context.script.scheduler
    if scheduler in (Scheduler.SLURM, Scheduler.PBS) and HOURS.fullmatch(text):
        return text.partition(":")[0]
    if scheduler is Scheduler.PBS or not text.isdigit():
        return ""
    comment = read_comment(context, line)
    if re.search(r"\bmin", comment):
        return ""
    return text if BARE_HOURS.fullmatch(text) else find_hours(comment)


def read_comment(context: Context, line: int | None) -> str:
    """Return the comment behind a directive, empty for none."""
    return context.script.lines[line - 1].partition(" #")[2] if line else ""


def find_hours(text: str) -> str:
    """Return the number of hours that a text tells in words, empty for none."""
    match = LONG_TIME.search(text)
    return str(int(match[1]) * (24 if match[2][0] in "dD" else 1)) if match else ""
