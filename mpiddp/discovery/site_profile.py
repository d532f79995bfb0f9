"""The site profile of this host's centre: where it is, and what of it this process has read.

batch/sites/README.md describes the file; its types and its schema are in site_schema.py, which only a profile needs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..base.config import SITE_PREFIX_FILE, SITE_VARIABLE

if TYPE_CHECKING:
    from .site_schema import SiteProfile

ETC_FILE = "/etc/mpiddp/site.toml"


class Site(NamedTuple):
    """The profile that counts for this process, None for none, and why a profile is not used, empty if it is."""

    profile: SiteProfile | None = None
    problem: str = ""


def load_site(environ: Mapping[str, str]) -> Site:
    """Return the profile of this host's centre."""
    file = find_profile(environ)
    return load_profile(file) if file else Site()


def find_profile(environ: Mapping[str, str]) -> str:
    """Return the path of the profile: the one that MPIDDP_SITE names, or else a usual one that exists; empty for none.

    If MPIDDP_SITE is set and empty, no profile is wanted.
    """
    if SITE_VARIABLE in environ:
        return os.path.abspath(environ[SITE_VARIABLE]) if environ[SITE_VARIABLE] else ""
    files = ETC_FILE, os.path.join(sys.prefix, SITE_PREFIX_FILE)
    return next(filter(os.path.lexists, files), "")


@functools.cache
def load_profile(file: str) -> Site:
    """Return a profile, or why it cannot be used."""
    from .site_schema import ProfileError, read_profile

    try:
        return Site(read_profile(file))
    except ProfileError as error:
        return Site(problem=str(error))


def expand(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return a text with its variables ($USER, ${USER}) replaced, and the name of the first that is not set.

    $$ stands for a dollar sign.
    """
    from string import Template

    try:
        return Template(text).substitute(environ), ""
    except KeyError as error:
        return "", str(error.args[0])
    except ValueError:  # a dollar sign that begins no name
        return text, ""


def find_state_folder(environ: Mapping[str, str]) -> str:
    """Return the centre's folder for what mpiddp keeps for this user, empty for the usual ones."""
    profile = load_site(environ).profile
    return expand_folder(profile.state_folder, environ)[0] if profile else ""


def find_staging_folder(environ: Mapping[str, str]) -> str:
    """Return the centre's folder for staged environments, empty for the usual ones."""
    profile = load_site(environ).profile
    return expand_folder(profile.staging_folder, environ)[0] if profile else ""


def expand_folder(folder: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return a folder of the profile, and why it cannot be used; the folder is empty then, or if there is none."""
    path, missing = expand(folder, drop_empty(environ))
    if missing:
        return "", f"${missing} is {'empty' if missing in environ else 'not set'}"
    return ("", f"{path} is not an absolute path") if path and not path.startswith("/") else (path, "")


def drop_empty(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not empty: the others name no folder."""
    return {name: value for name, value in environ.items() if value}
