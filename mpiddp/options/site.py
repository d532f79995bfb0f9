"""Defaults of options in the site profile."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ..discovery.site_profile import expand_folder, load_site
from .table import FLAGS, OPTIONS, read_default, read_flag, variable_name

# A site profile cannot set them: they start no job, or jobs would write the same file.
ONE_JOB_OPTIONS = ("dry-run", "error-file", "explain", "facts", "map", "nodes", "ranks-per-node", "trace")


def read_site_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the site profile's defaults of options as ``MPIDDP_…`` variables, without those that are wrong."""
    profile = load_site(environ).profile
    if profile is None:
        return {}
    log_dir = expand_folder(profile.log_folder, environ)[0]
    defaults = {"log-dir": log_dir} if log_dir else {}
    defaults |= {name: text for name, text in profile.options.items() if not find_option_problem(name, text)}
    return {variable_name(name): text for name, text in defaults.items()}


def find_option_problems(options: Mapping[str, str]) -> list[str]:
    """Return what is wrong with options of a site profile, a line for each that is wrong."""
    problems = {name: find_option_problem(name, text) for name, text in options.items()}
    return [f"[options] {name} is not used: {problem}" for name, problem in problems.items() if problem]


def find_option_problem(name: str, text: str) -> str:
    """Return what is wrong with an option of a site profile, empty if nothing is."""
    from difflib import get_close_matches

    variable = variable_name(name)
    if name not in OPTIONS and name not in FLAGS:
        matches = get_close_matches(name, [*OPTIONS, *FLAGS], 1, 0.6)
        return f"there is no such option{f' (did you mean {matches[0]}?)' if matches else ''}"
    if name in ONE_JOB_OPTIONS:
        return "it is for a single job"
    try:
        read_flag(name, {variable: text}) if name in FLAGS else read_default(name, {variable: text})
    except argparse.ArgumentTypeError as error:
        return str(error).removeprefix(f"{variable} ")
    return ""
