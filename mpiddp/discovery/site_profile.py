"""The site profile of this host's centre: where it is, what it has, and how its file is read.

batch/sites/README.md describes the file.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base.config import SITE_PREFIX_FILE, SITE_VARIABLE
from ..base.files import OTHERS_WRITE, format_os_error, user_name
from ..base.text import truncate_middle

ETC_FILE = "/etc/mpiddp/site.toml"
TYPE_NAMES = {str: "a text in quotes", bool: "true or false", list: "a list of texts", dict: "a table"}
VARIABLE_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
UNSETTABLE = {  # names of variables that a profile cannot set, and why
    r"PATH|(LD_|PYTHON).*": "it has been read before; set it in the module",
    r"MPIDDP_.*": "write the option under [options]",
}


class SiteVariable(NamedTuple):
    """A variable that the centre sets, and why; its value may name other variables, as in $USER."""

    value: str
    reason: str
    harmful_if_different: bool = False


class SiteProfile(NamedTuple):
    """What a profile says: its file has these keys, but for `file`.

    `options` are defaults of mpiddp's options. `caches` are folders, by the variables that name them.
    """

    file: str
    name: str
    contact: str
    link: str = ""
    text: str = ""
    launch_line: str = ""
    launch_options: Sequence[str] = ()
    log_folder: str = ""
    state_folder: str = ""
    staging_folder: str = ""
    caches: Mapping[str, str] = {}
    options: Mapping[str, str] = {}
    variables: Mapping[str, SiteVariable] = {}


class Site(NamedTuple):
    """The profile that counts for this process, None for none, and why a profile is not used, empty if it is."""

    profile: SiteProfile | None = None
    problem: str = ""


class ProfileError(ValueError):
    """A profile cannot be used; `problems` has a line for each reason."""

    def __init__(self, file: str, problems: list[str]) -> None:
        super().__init__(file, problems)
        self.file, self.problems = file, problems

    def __str__(self) -> str:
        more = f"; `python -m mpiddp.doctor --site {self.file}` shows {len(self.problems) - 1} more"
        return f"{self.file} is not used: {self.problems[0]}{more if len(self.problems) > 1 else ''}"


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
    try:
        return Site(read_profile(file))
    except ProfileError as error:
        return Site(problem=str(error))


def read_profile(file: str) -> SiteProfile:
    """Return the profile in a file; raise ProfileError if it cannot be read, is not protected, or is wrong."""
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        content = toml.loads(read_protected_file(file))
    except ImportError:
        raise ProfileError(file, ["Python 3.10 needs the package tomli to read it (pip install tomli)"]) from None
    except OSError as error:
        raise ProfileError(file, [format_os_error(error, file)]) from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        raise ProfileError(file, [f"it is not TOML: {error}"]) from None
    if isinstance(options := content.get("options"), dict):
        content["options"] = {name: str(int(value) if isinstance(value, bool) else value)
                              if isinstance(value, (int, float)) else value for name, value in options.items()}
    if problems := find_problems(content):
        raise ProfileError(file, problems)
    variables = {name: SiteVariable(**entry) for name, entry in content.get("variables", {}).items()}
    return SiteProfile(file, **{**content, "variables": variables})


def read_protected_file(file: str) -> str:
    """Return the text of a regular file that root or this user owns and no other user can write to; raise OSError.

    The file of Python's environment may also belong to the environment's owner, whose software the user runs. A
    container that a user has made shows root's files as those of the owner of "/".
    """
    owners = {0, os.geteuid(), os.stat("/").st_uid}
    if file == os.path.join(sys.prefix, SITE_PREFIX_FILE):
        owners.add(os.stat(sys.prefix).st_uid)
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:  # for a FIFO
        state = os.fstat(opened.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError("it is not a regular file")
        if state.st_uid not in owners:
            raise OSError(f"it belongs to {user_name(state.st_uid)}; it must belong to root or to you")
        if state.st_mode & OTHERS_WRITE:
            raise OSError("it can be written by other users (chmod go-w)")
        return opened.read().decode()


def find_problems(content: Mapping[str, Any]) -> list[str]:
    """Return what is wrong in a profile, a line for each key."""
    problems = check_keys("", content, SiteProfile._fields[1:], SiteProfile._field_defaults)
    caches, options, variables = (table if isinstance(table := content.get(name), dict) else {}
                                  for name in ("caches", "options", "variables"))
    problems += [*check_keys("[caches] ", caches, caches, {}), *check_keys("[options] ", options, options, {})]
    for name, entry in variables.items():
        if isinstance(entry, dict):
            problems += check_keys(f"[variables.{name}] ", entry, SiteVariable._fields, SiteVariable._field_defaults)
        else:
            problems.append(f"[variables] {name} is {show(entry)}; needed: a value and a reason, under "
                            f"[variables.{name}]")
    problems += [f"{name} cannot be set here: {why}" for name in (*variables, *caches) if (why := find_obstacle(name))]
    folders = {key: content.get(key) for key in SiteProfile._fields if key.endswith("_folder")} | caches
    problems += [f"{key} is {show(folder)}; needed: an absolute path" for key, folder in folders.items()
                 if isinstance(folder, str) and not folder.startswith(("/", "$"))]
    return problems


def check_keys(
    place: str, table: Mapping[str, Any], known: Sequence[str] | Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Return what is wrong with a table's keys; the others must be there, and be texts, if they have no default."""
    problems = [f"{place}{key} is missing; needed: {TYPE_NAMES[str]}"
                for key in known if key not in table and key not in defaults]
    for key, value in table.items():
        needed = list if isinstance(default := defaults.get(key, ""), tuple) else type(default)
        if key not in known:
            problems.append(f"{place}{key} is unknown; known: {', '.join(known)}")
        elif type(value) is not needed or (needed is list and not all(isinstance(text, str) for text in value)):
            problems.append(f"{place}{key} is {show(value)}; needed: {TYPE_NAMES[needed]}")
        elif needed is str and "\0" in value:
            problems.append(f"{place}{key} is {show(value)}; needed: a text without null characters")
    return problems


def find_obstacle(name: str) -> str:
    """Return why a profile cannot set a variable, empty if it can."""
    from ..systems.variables import VARIABLES

    own = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")  # torch reads more of them
    if name.startswith(own) or any(row.name == name and row.for_each_rank for row in VARIABLES):
        return "mpiddp sets it for each rank"
    if not re.fullmatch(VARIABLE_NAME, name):
        return "a variable's name has letters, digits and _"
    return next((why for pattern, why in UNSETTABLE.items() if re.fullmatch(pattern, name)), "")


def show(value: object) -> str:
    """Return a value as TOML has it, shortened."""
    return truncate_middle(json.dumps(value, default=str, ensure_ascii=False), 60)


def expand(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return a text with its variables ($USER, ${USER}) replaced, and the name of the first that is not set or empty.

    $$ stands for a dollar sign.
    """
    from string import Template

    try:
        return Template(text).substitute({name: value for name, value in environ.items() if value}), ""
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
    path, missing = expand(folder, environ)
    if missing:
        return "", f"${missing} is not set"
    return ("", f"{path} is not an absolute path") if path and not path.startswith("/") else (path, "")
