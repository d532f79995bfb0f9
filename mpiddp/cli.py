"""The command line: makes a `LaunchConfig` of arguments and ``MPIDDP_…`` variables, and starts the rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from .base.config import (
    DEFAULT_FOLD_WINDOW_S,
    DEFAULT_PREFIX,
    Binding,
    CheckMode,
    DryRunFacts,
    DryRunShape,
    LaunchConfig,
    LocalStart,
    OutputFilter,
    Script,
)
from .base.stderr import print_answer, warn, write_line
from .base.version import __version__
from .options.parser import FOREIGN_OPTION_HINTS, Parser, parse_path, parse_positive_int
from .options.site import read_site_defaults
from .options.table import (
    CONFIG_FIELDS,
    FLAGS,
    OPTIONS,
    find_unknown_variables,
    read_default,
    read_flag,
    split_command,
    variable_name,
)
from .systems.launchers import MPIRUN, SRUN_PMIX
from .systems.statuses import (
    EXIT_CANNOT_START,
    EXIT_OUTPUT_LOST,
    EXIT_REQUEUE,
    EXIT_STALLED,
    EXIT_USAGE,
    describe_statuses,
)

USAGE = f"""\
{MPIRUN.command} python -m mpiddp [options] script.py [arguments]
       {SRUN_PMIX} python -m mpiddp [options] -m package.module [arguments]
       … python -m mpiddp [options] -c code [arguments]"""

DESCRIPTION = """\
Join the processes that MPI started, one per GPU, to a torch.distributed group, and run a script in each
of them. Like python, run a module (-m), code (-c), bytecode, or a folder or zip file with a __main__.py."""

EPILOG = f"""\
Options precede the script; everything after the script is passed to it. Each option can also be set by
an environment variable, such as MPIDDP_STARTUP_TIMEOUT=60 for --startup-timeout 60; the command line
takes precedence. A centre may set other defaults in its site profile (MPIDDP_SITE= turns it off).

Exit status: that of the script, 128+N for a rank that signal N has ended, or
{describe_statuses(EXIT_USAGE, EXIT_CANNOT_START, EXIT_REQUEUE)};
{describe_statuses(EXIT_OUTPUT_LOST, EXIT_STALLED)}."""

AGENT_OPTIONS = ("log-dir", "prefix", "show", "error-file", "stall", "map", "trace", "explain")  # --no-agent excludes
MISSING_SCRIPT_ERRORS = {"": "no script given; name a script, or a module after -m", "-m": "no module after -m",
                         "-c": "no code after -c"}


def main() -> int:
    """Run one rank of a job from the command line and return the exit status."""
    os.environ.pop("_MPIDDP_STAGED_BY", None)  # of a job that started this one; its mirror ends with it
    try:
        job = read_config(sys.argv[1:], os.environ)
    except argparse.ArgumentTypeError as error:
        from .bootstrap.refusal import refuse_early

        refuse_early(str(error))
        return EXIT_USAGE
    if isinstance(job, DryRunFacts):
        return dry_run_from_facts(job)
    if isinstance(job, DryRunShape):
        from .discovery.schedulers import list_slurm_hosts
        from .planning.job import describe_dry_run

        return print_answer(describe_dry_run(job, list_slurm_hosts(os.environ)))
    if isinstance(job, LocalStart):
        from .bootstrap.local_start import start_ranks

        return start_ranks(job)
    from .launch import launch

    return launch(job)


def dry_run_from_facts(job: DryRunFacts) -> int:
    """Print the map of a job on the nodes of a facts file, or why it could not start; return the exit status."""
    from .base.errors import LaunchError
    from .discovery import serialization
    from .planning.job import plan_dry_run
    from .reporting.map import format_map

    try:
        placements, warnings = plan_dry_run(serialization.read_facts(job.facts_file), job.config)
    except (OSError, ValueError) as error:
        write_line(f"mpiddp: --facts: {error}")
        return EXIT_USAGE
    except LaunchError as error:
        write_line(str(error))
        return EXIT_CANNOT_START
    warn(warnings)
    status = print_answer("\n".join(format_map(placements)))
    if job.config.map_file:
        from .reporting.map import write_map

        write_map(placements, job.config.map_file)
    return status


def read_config(
    arguments: Sequence[str], environ: Mapping[str, str]
) -> LaunchConfig | LocalStart | DryRunShape | DryRunFacts:
    """Return the configuration of a job, or the request of -n or --dry-run.

    Raises argparse.ArgumentTypeError with one line for the user if an argument or a variable is wrong.
    """
    ours, command = split_command(arguments)
    parser, options = parse_options(ours, environ)
    for name in ("--explain", "-n"):
        if options.dry_run and any(argument.partition("=")[0] == name for argument in ours):
            parser.error(f"{name} cannot be combined with --dry-run, which starts no job")
    if options.dry_run and options.facts_file and options.nodes is None:
        return DryRunFacts(options.facts_file, make_config(options, Script(""), environ))
    if options.dry_run:
        if options.nodes is None or options.ranks_per_node is None:
            parser.error("--dry-run needs --nodes and --ranks-per-node, or --facts")
        return DryRunShape(options.nodes, options.ranks_per_node, options.port)
    form = command[0] if command[:1] in (["-m"], ["-c"]) else ""
    words = command[1:] if form or command[:1] == ["--"] else command
    if not words and (form or options.explain is None):
        parser.error(MISSING_SCRIPT_ERRORS[form])
    if words[:1] == ["-"] and not form:
        parser.error("cannot read the script from standard input (-); save it in a file")
    if conflict := find_conflict(options):
        parser.error(conflict)
    if options.ranks is not None:
        return LocalStart(options.ranks, (*without_count(ours), *command))
    script = Script(words[0], tuple(words[1:]), is_module=form == "-m", is_code=form == "-c") if words else None
    return make_config(options, script, environ)


def without_count(ours: Sequence[str]) -> list[str]:
    """Return our own options without each -n and its number."""
    return [word for word, before in zip(ours, ["", *ours], strict=False) if "-n" not in (word, before)]


def read_settings(environ: Mapping[str, str]) -> LaunchConfig:
    """Return the configuration of the ``MPIDDP_…`` variables, for a program with its own main().

    Raises argparse.ArgumentTypeError with one line for the user if a variable is wrong.
    """
    parser, options = parse_options([], environ)
    if conflict := find_conflict(options):
        parser.error(conflict)
    return make_config(options, None, environ)


def parse_options(ours: Sequence[str], environ: Mapping[str, str]) -> tuple[Parser, argparse.Namespace]:
    """Return the parser, and the options of the command line, or else of variables, or else of the site profile.

    Those of the profile that do not go together with the others are left out.
    """
    given = {variable_name(word.partition("=")[0][2:]) for word in ours if word.startswith("--")}
    defaults = {variable: text for variable, text in read_site_defaults(environ).items()
                if variable not in environ and variable not in given}
    site = {name: defaults[variable_name(name)] for name in (*OPTIONS, *FLAGS) if variable_name(name) in defaults}
    conflicts: list[str] = []
    while True:
        parser = build_parser({**{variable_name(name): text for name, text in site.items()}, **environ})
        options = parser.parse_args(ours)
        conflict = find_conflict(options) if site else ""
        unused = [name for name in site if f"--{name} " in conflict.replace(":", " ")]
        if not unused:
            break
        conflicts += [f"[options] {name} is not used: {conflict}" for name in unused]
        site = {name: text for name, text in site.items() if name not in unused}
    options.site_conflicts = tuple(conflicts)
    options.site_options = tuple(f"--{name}={text}" for name, text in site.items())
    return parser, options


def make_config(options: argparse.Namespace, script: Script | None, environ: Mapping[str, str]) -> LaunchConfig:
    """Return the configuration that options, a script and torchelastic's variable make."""
    fields = {name: value for name, value in vars(options).items() if name in LaunchConfig._fields}
    fields |= {
        "script": script,
        "init": not options.no_init,
        "agent": not options.no_agent,
        "binding": Binding(options.binding),
        "check": CheckMode(options.check),
        "error_file": options.error_file or parse_path(environ.get("TORCHELASTIC_ERROR_FILE", "")),
        "unknown_variables": tuple(find_unknown_variables(environ)),
    }
    return LaunchConfig(**fields)


def find_conflict(options: argparse.Namespace) -> str:
    """Return which options do not go together, empty if all do."""
    if options.stall_abort and options.stall_s is None:
        return "--stall-abort needs --stall SECONDS"
    if options.no_agent and (needs_agent := find_agent_options(options)):
        return f"--no-agent: needs an agent: {', '.join(needs_agent)}"
    if options.stage_keep and not options.stage:
        return "--stage-keep needs --stage"
    is_folded = options.output_filter.folded
    if not is_folded and (options.fold_window_s != DEFAULT_FOLD_WINDOW_S or options.drops_lines):
        return f"--{'overflow' if options.drops_lines else 'fold-window'} needs --show fold"
    if is_folded and options.port > 65533:
        return f"--port {options.port}: --show fold also needs the next two ports"
    if is_folded and options.prefix != DEFAULT_PREFIX and not can_prefix_folded(options.prefix):
        return (f"--prefix {options.prefix!r}: with --show fold the prefix may use only the fields rank (text, such as "
                "0-3) and time")
    return ""


def find_agent_options(options: argparse.Namespace) -> list[str]:
    """Return which options are set that need an agent, or a start that ends before the script."""
    return [f"--{name}" for name in AGENT_OPTIONS
            if (value := getattr(options, CONFIG_FIELDS.get(name, name.replace("-", "_")))) is not None
            and value not in ("", OutputFilter())]


def can_prefix_folded(prefix: str) -> bool:
    """Return whether a prefix can stand before lines of several ranks."""
    from datetime import datetime  # seldom needed

    try:
        prefix.format(rank="0-3", time=datetime.now().astimezone())
    except Exception:
        return False
    return True


def build_parser(environ: Mapping[str, str]) -> Parser:
    """Return the parser of our own options, with the ``MPIDDP_…`` variables as defaults."""
    parser = Parser(FOREIGN_OPTION_HINTS, prog="mpiddp", usage=USAGE, description=DESCRIPTION, epilog=EPILOG,
                    allow_abbrev=False)
    try:
        for name, details in OPTIONS.items():
            default = read_default(name, environ)
            parser.add_argument(f"--{name}", dest=CONFIG_FIELDS.get(name), **{**details, "default": default})
        for name, text in FLAGS.items():
            parser.add_argument(f"--{name}", dest=CONFIG_FIELDS.get(name), action="store_true",
                                default=read_flag(name, environ), help=text)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    parser.add_argument("-n", dest="ranks", type=parse_positive_int, metavar="N",
                        help="start N ranks on this machine, with the launcher of the MPI that mpi4py loads")
    parser.add_argument("--version", action="version", version=f"mpiddp {__version__}")
    return parser
