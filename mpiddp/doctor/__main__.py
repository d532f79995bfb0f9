"""Checks a job script before it is submitted: `python -m mpiddp.doctor job.sh`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.stderr import print_answer, write_line
from ..base.version import __version__
from ..options.parser import Parser, terminal_width
from ..systems.statuses import EXIT_USAGE

if TYPE_CHECKING:
    from .batch_script import BatchScript

DESCRIPTION = """\
Check a job script for Slurm, PBS, LSF or Flux without running or changing it,
and print what is wrong, why, and which lines to replace, insert or remove. An
error will fail, a warning is slow or risky, a note is harmless. Exit status: 0
nothing found, 1 something found, even a note, 2 wrong usage. Without a job
script, check the MPI library, torch, limits, caches and the site profile (a
centre's settings, if it has one) on this host; notes then give 0."""
NEEDS_PARSER = ("mpiddp.doctor: the parser of shell scripts is not installed: pip install 'mpiddp[doctor]' "
                "(tree-sitter and tree-sitter-bash)")
LEFT = "mpiddp.doctor: what is left when these changes are made:"
NOTHING_CERTAIN = "mpiddp.doctor: no change is certain:"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a job script and print what was found; return the exit status."""
    try:
        options = parse_arguments(arguments)
    except argparse.ArgumentTypeError as error:
        write_line(str(error))
        return EXIT_USAGE
    if options.site is not None:
        from . import site

        return site.main(options.site)
    if options.script is None:
        from . import environment

        return environment.main(options.json)
    try:
        from .batch_script import NotABatchScript, read
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tree_sitter"):
            raise
        write_line(NEEDS_PARSER)
        return EXIT_USAGE
    from ..discovery.site_profile import load_site
    from .context import Host
    from .report import as_json, format_findings
    from .rules import check, fix
    from .syntax import find_syntax_errors

    try:
        # without this shell's variables a converted script keeps their names
        script = read(options.script, {} if options.convert else os.environ)
    except NotABatchScript as error:
        write_line(f"mpiddp.doctor: {options.script} {error}")
        return EXIT_USAGE
    if options.convert:
        return print_conversion(script)
    centre = load_site(os.environ)
    if centre.problem:
        write_line(f"mpiddp.doctor: {centre.problem}")
    host = Host("", os.environ)
    fixed = fix(script, host, os.environ) if options.fix else script
    findings = sorted([*find_syntax_errors(fixed), *check(fixed, host)], key=lambda finding: finding.line or 0)
    has_colours = (sys.stderr if options.fix else sys.stdout).isatty() and "NO_COLOR" not in os.environ
    text = as_json(fixed, findings) if options.json else format_findings(
        fixed, findings, terminal_width(), has_colours, profile=centre.profile)
    if options.fix:
        return print_fixes(script, fixed, text if findings else "")
    return print_answer(text) or int(bool(findings))


def print_fixes(script: BatchScript, fixed: BatchScript, left: str) -> int:
    """Print what changes in a job script, and on stderr what is `left`; return the exit status, 1 for no change."""
    from .conversion import format_diff

    changes = format_diff(script, fixed.text, "fixed")
    if left:
        write_line(f"{LEFT if changes else NOTHING_CERTAIN}\n{left}")
    elif not changes:
        write_line(f"mpiddp.doctor: {script.path} has nothing to fix")
    return print_answer(changes.rstrip("\n"), is_patch=True) if changes else 1


def print_conversion(script: BatchScript) -> int:
    """Print what changes in a job script so that it starts mpiddp; return the exit status, 1 if nothing does."""
    from .batch_script import open_script
    from .conversion import convert, find_starter, format_diff
    from .conversion_command import ConversionError

    try:
        changes = format_diff(script, convert(script, lambda name: open_script(script.path, name)))
    except ConversionError as error:
        return refuse_conversion(script, str(error))
    if not changes and (starter := find_starter(script.text, has_values=True)):
        return refuse_conversion(script, f"how it starts {starter} is not understood")
    if not changes:
        write_line(f"mpiddp.doctor: {script.path} has nothing to convert: it starts neither torchrun, nor accelerate "
                   "launch, nor Python by srun or mpirun")
        return 1
    return print_answer(changes.rstrip("\n"), is_patch=True)


def refuse_conversion(script: BatchScript, reason: str) -> int:
    """Say why a job script cannot be converted; return the exit status."""
    write_line(f"mpiddp.doctor: {script.path} cannot be converted: {reason}; write its launch by hand, as in "
               "mpiddp's batch/")
    return 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options; raise argparse.ArgumentTypeError with the line for the user."""
    parser = Parser(prog="mpiddp.doctor", usage="python -m mpiddp.doctor [options] [job.sh]",
                    description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("script", nargs="?", metavar="job.sh", help="the job script; files are looked for "
                        "from the current folder, from which you submit it. Without one, this host (usually the "
                        "login node) is checked")
    parser.add_argument("--convert", action="store_true", help="print the changes that make the job script start "
                        "mpiddp instead of torchrun or accelerate launch, as a diff; `# check:` marks what is not "
                        "certain")
    parser.add_argument("--fix", action="store_true", help="print all changes that are certain as a diff, which "
                        "`patch job.sh` applies; what is left goes to stderr. Exit status 1: no change is certain")
    parser.add_argument("--site", metavar="FILE", help="check a site profile, and show what it sets")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    options = parser.parse_args(arguments)
    for name in ("convert", "fix"):
        if getattr(options, name) and options.script is None:
            parser.error(f"--{name} needs a job script")
    if options.convert and options.fix:
        parser.error("--convert and --fix exclude each other: fix the converted script")
    if options.json and (options.site is not None or options.convert or options.fix):
        parser.error("--json is for findings: --site, --convert and --fix print text")
    return options


if __name__ == "__main__":
    sys.exit(main())
