"""`python -m mpiddp.doctor --site FILE`: checks a site profile, and shows what it sets."""

from __future__ import annotations

import os

from ..base.stderr import print_answer, write_line
from ..base.text import format_columns
from ..discovery.site_profile import ProfileError, read_profile
from ..options.site import find_option_problems
from ..planning.site import CACHE_REASON
from ..systems.statuses import EXIT_USAGE


def main(path: str) -> int:
    """Check the profile in a file; return 0 if it is right, 1 if not, 2 if there is no such file."""
    file = os.path.abspath(path)
    if not os.path.exists(file):
        write_line(f"mpiddp.doctor: --site {path}: there is no such file")
        return EXIT_USAGE
    try:
        profile = read_profile(file)
        problems = find_option_problems(profile.options)
    except ProfileError as error:
        problems = error.problems
    if problems:
        write_line("\n".join(f"{file}: {problem}" for problem in problems))
        return 1
    whom = ", ".join(filter(None, (profile.contact, profile.link)))
    rows = [(f"--{name}={value}", "an option of mpiddp") for name, value in profile.options.items()]
    rows += [(f"{name}={variable.value}", variable.reason) for name, variable in profile.variables.items()]
    rows += [(f"{name}={folder}", CACHE_REASON) for name, folder in profile.caches.items()]
    return print_answer("\n".join([f"{file} is right: the profile of {profile.name} ({whom})", *format_columns(rows)]))
