"""Checks a job script before it is submitted: `python -m mpiddp.doctor job.sh`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..base.stderr import print_answer, write_line
from ..base.version import __version__
from ..options.parser import Parser, terminal_width
from ..systems import schedulers
from ..systems.statuses import EXIT_USAGE

DESCRIPTION = f"""\
Check a job script for {schedulers.describe_readable()} without running or changing it,
and print what is wrong, why, and what to write instead. An error will fail, a
warning is slow or risky, a note is harmless. Exit status: 0 nothing found, 1
something found, even a note, 2 wrong usage. If torchrun or the like starts the
training, the launch line of mpiddp is shown, too. Without a job script, check
the MPI library, torch, limits, caches and the site profile (a centre's
settings, if it has one) on this host; notes then give 0."""


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
    return check_script(options.script, options.json)


def check_script(path: str, is_json: bool) -> int:
    """Check a job script and print what was found; return the exit status."""
    from ..discovery.site_profile import load_site
    from .batch_script import NotABatchScript, read
    from .context import Host
    from .report import as_json, format_findings
    from .rules import check
    from .suggestion import suggest_all
    from .syntax import find_syntax_errors

    try:
        script = read(path, os.environ)
    except NotABatchScript as error:
        write_line(f"mpiddp.doctor: {path} {error}")
        return EXIT_USAGE
    centre = load_site(os.environ)
    if centre.problem:
        write_line(f"mpiddp.doctor: {centre.problem}")
    host = Host("", os.environ)
    findings = sorted([*find_syntax_errors(script), *check(script, host)], key=lambda finding: finding.line or 0)
    suggestions = suggest_all(script, host)
    if is_json:
        text = as_json(script, findings, suggestions)
    else:
        has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        text = format_findings(script, findings, terminal_width(), has_colours, centre.profile, suggestions)
    return print_answer(text) or int(bool(findings))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options; raise argparse.ArgumentTypeError with the line for the user."""
    parser = Parser(prog="mpiddp.doctor", usage="python -m mpiddp.doctor [options] [job.sh]",
                    description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("script", nargs="?", metavar="job.sh", help="the job script; files are looked for "
                        "from the current folder, from which you submit it. Without one, this host (usually the "
                        "login node) is checked")
    parser.add_argument("--site", metavar="FILE", help="check a site profile, and show what it sets")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    options = parser.parse_args(arguments)
    if options.json and options.site is not None:
        parser.error("--json is for findings: --site prints text")
    return options


if __name__ == "__main__":
    sys.exit(main())
