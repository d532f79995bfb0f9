"""What a site profile has: its types, its schema, and how its file is read."""

from __future__ import annotations

import errno
import importlib
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..base.config import SITE_PREFIX_FILE
from ..base.files import OTHERS_WRITE, PathStep, find_risk, format_os_error, open_checked, parse_stream_path, user_name

MAX_BYTES = 2**20  # of a profile
NVIDIA, AMD, INTEL, NO_GPU = "nvidia", "amd", "intel", "none"
MPI_NAMES = ("Open MPI", "MPICH", "Cray MPICH", "Intel MPI", "MVAPICH")  # as mpi4py and discovery/mpi.py call them
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Table = dict[str, Any]
# What a profile cannot set, by the beginning of its name, and why.
UNSETTABLE = {
    "LD_": "the dynamic loader has read it before; set it in the module",
    "PYTHON": "Python has read it before; set it in the module",
    "PATH": "the launcher has read it before; set it in the module",
    "MPIDDP_": "write the option under [options]",
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_", "ROLE_", "MASTER_",
                     "TORCHELASTIC_", "CUDA_VISIBLE_DEVICES"), "mpiddp sets it for each rank"),
}


class Conditions(NamedTuple):
    """When an entry of the profile counts; an empty text or 0 stands for any."""

    backend: str = ""
    gpu: str = ""
    mpi: str = ""
    minimum_nodes: int = 0
    maximum_nodes: int = 0


class SiteVariable(NamedTuple):
    """A variable that the centre sets, and why; its value may name other variables, as in $USER."""

    name: str
    value: str
    reason: str
    conditions: Conditions = Conditions()
    harmful_if_different: bool = False


class SiteCheck(NamedTuple):
    """A path that must exist, a variable that must not be set, or a module that must be loaded, and why."""

    reason: str
    path: str = ""
    unset: str = ""
    module: str = ""
    conditions: Conditions = Conditions()


class SiteProfile(NamedTuple):
    """What a profile says; `options` are defaults of mpiddp's options, `caches` folders by the variables for them."""

    file: str
    name: str
    contact: str
    text: str = ""
    link: str = ""
    launch_line: str = ""
    launch_options: tuple[str, ...] = ()
    variables: tuple[SiteVariable, ...] = ()
    caches: Mapping[str, str] = {}
    log_folder: str = ""
    state_folder: str = ""
    staging_folder: str = ""
    options: Mapping[str, str] = {}
    checks: tuple[SiteCheck, ...] = ()


class ProfileError(ValueError):
    """A profile cannot be used; `problems` has a line for each reason."""

    def __init__(self, file: str, problems: list[str]) -> None:
        super().__init__(file, problems)
        self.file, self.problems = file, problems

    def __str__(self) -> str:
        more = f"; `python -m mpiddp.doctor --site {self.file}` shows {len(self.problems) - 1} more"
        return f"{self.file} is not used: {self.problems[0]}{more if len(self.problems) > 1 else ''}"


def read_profile(file: str) -> SiteProfile:
    """Return the profile in a file; raise ProfileError if it cannot be read, is not protected, or is wrong."""
    try:
        content = parse_toml(read_protected_file(file))
    except ImportError:
        raise ProfileError(file, ["Python 3.10 needs the package tomli to read it (pip install tomli)"]) from None
    except OSError as error:
        raise ProfileError(file, [format_os_error(error, file)]) from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        raise ProfileError(file, [f"it is not TOML: {error}"]) from None
    return ProfileReader(file).read(content)


def parse_toml(text: str) -> Table:
    """Return the content of a TOML file; raise ImportError if nothing can parse it, or ValueError if it is wrong."""
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    content: Table = parser.loads(text)
    return content


def read_protected_file(file: str) -> str:
    """Return the text of a file that root or this user owns and that no other user can write to; raise OSError.

    The file of Python's environment may also belong to the environment's owner, whose software the user runs.
    """
    owners = {os.stat(sys.prefix).st_uid} if file == os.path.join(sys.prefix, SITE_PREFIX_FILE) else set()

    def check(step: PathStep) -> str:
        step = step._replace(trusted=step.trusted | owners)
        if not step.names_left and stat.S_ISREG(step.entry.st_mode):
            if step.is_foreign:
                return f"belongs to {user_name(step.entry.st_uid)}; it must belong to root or to you"
            if step.entry.st_mode & OTHERS_WRITE:
                return "can be written by other users (chmod go-w)"
        return find_risk(step)

    if parse_stream_path(file) >= 0:
        raise OSError(errno.EINVAL, "it is a stream, not a regular file")
    with open(open_checked(file, os.O_RDONLY, check), "rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_BYTES // 2**20} MiB")
    return content.decode()


class Key(NamedTuple):
    """A key of a section: the type of its value, what to write, and the only values that it may have, if not any."""

    type: type
    needed: str
    required: bool = False
    values: tuple[str, ...] = ()
    may_be_empty: bool = False


TEXT = "a text in quotes"
CONDITION_KEYS = {
    "backend": Key(str, 'the name of a backend, such as "nccl"'),
    "gpu": Key(str, TEXT, values=(NVIDIA, AMD, INTEL, NO_GPU)),
    "mpi": Key(str, TEXT, values=MPI_NAMES),
    "minimum_nodes": Key(int, "a number greater than 0"),
    "maximum_nodes": Key(int, "a number greater than 0"),
}
REASON = Key(str, "a sentence that tells users why", required=True)
SECTIONS = {
    "site": {
        "name": Key(str, "the name of the machine", required=True),
        "contact": Key(str, "an address to which users write", required=True),
        "text": Key(str, TEXT), "link": Key(str, TEXT),
    },
    "launch": {"line": Key(str, "the command that starts a script's ranks"),
               "options": Key(list, "a list of texts, the scheduler's options")},
    "folders": {"log": Key(str, "a folder"), "state": Key(str, "a folder"), "staging": Key(str, "a folder")},
    "caches": {},
    "options": {},
}
ENTRIES = {
    "variable": {"name": Key(str, "the name of a variable", required=True),
                 "value": Key(str, TEXT, required=True, may_be_empty=True), "reason": REASON,
                 "harmful_if_different": Key(bool, "true or false"), **CONDITION_KEYS},
    "check": {"path": Key(str, "a path that must exist"), "unset": Key(str, "a variable that must not be set"),
              "module": Key(str, "a module that must be loaded"), "reason": REASON, **CONDITION_KEYS},
}
TYPE_NAMES = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a table"}


class ProfileReader:
    """Checks what a TOML file has against the sections above, and collects all that is wrong."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._problems: list[str] = []

    def read(self, content: Table) -> SiteProfile:
        """Return the profile; raise ProfileError."""
        for name in content:
            if name not in SECTIONS and name not in ENTRIES:
                known = [*(f"[{section}]" for section in SECTIONS), *(f"[[{entry}]]" for entry in ENTRIES)]
                self._problems.append(f"[{name}]: unknown section{suggest(f'[{name}]', known)}")
        site, launch, folders = (self._read_section(content, name) for name in ("site", "launch", "folders"))
        caches, options = (self._read_map(content, name) for name in ("caches", "options"))
        for name in caches:
            self._check_name(f"[caches] {name}", name)
        for place, name, folder in (*(("[caches]", *item) for item in caches.items()),
                                    *(("[folders]", *item) for item in folders.items())):
            if not folder.startswith(("/", "$")):
                self._problems.append(f"{place}: {name} is {folder!r}; needed: an absolute path")
        variables = [self._read_variable(place, entry) for place, entry in self._list_entries(content, "variable")]
        checks = [self._read_check(place, entry) for place, entry in self._list_entries(content, "check")]
        if self._problems:
            raise ProfileError(self._file, self._problems)
        return SiteProfile(
            self._file, site["name"], site["contact"], site.get("text", ""), site.get("link", ""),
            launch.get("line", ""), tuple(launch.get("options", ())), tuple(variables), caches, folders.get("log", ""),
            folders.get("state", ""), folders.get("staging", ""), options, tuple(checks))

    def _read_section(self, content: Table, name: str) -> Table:
        """Return a section with the keys that are right."""
        table = content.get(name, {})
        if not isinstance(table, dict):
            self._problems.append(f"[{name}] is {describe(table)}; needed: a section that begins with [{name}]")
            return {}
        return self._read_table(f"[{name}]", table, SECTIONS[name])

    def _list_entries(self, content: Table, name: str) -> Iterable[tuple[str, Table]]:
        """Return the entries of a kind, each with its place in words and the keys that are right."""
        entries = content.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self._problems.append(f"[{name}]: needed: [[{name}]], in two brackets, before each entry")
            return
        for number, entry in enumerate(entries, 1):
            title = next((entry[key] for key in ENTRIES[name] if isinstance(entry.get(key), str)), "")
            place = f"[[{name}]] {number}" + (f" ({title})" if title else "")
            yield place, self._read_table(place, entry, ENTRIES[name])

    def _read_table(self, place: str, table: Table, keys: Mapping[str, Key]) -> Table:
        """Return the keys of a table that are right."""
        right = {}
        for name, value in table.items():
            if name not in keys:
                hint = suggest(name, keys) or f"; known: {', '.join(keys)}"
                condition = " (a condition must be known before MPI_Init)" if "gpu" in keys else ""
                self._problems.append(f"{place}: unknown key {name}{hint}{condition}")
            elif problem := find_wrong_value(keys[name], value):
                self._problems.append(f"{place}: {name} {problem}")
            else:
                right[name] = value
        missing = [name for name, key in keys.items() if key.required and name not in table]
        self._problems += [f"{place}: {name} is missing; needed: {keys[name].needed}" for name in missing]
        return right

    def _read_map(self, content: Table, name: str) -> dict[str, str]:
        """Return a section whose keys are free, with texts as values."""
        table = content.get(name, {})
        if not isinstance(table, dict):
            self._problems.append(f"[{name}] is {describe(table)}; needed: a section that begins with [{name}]")
            return {}
        needed = "a folder" if name == "caches" else "a text, a number, true or false"
        texts = {}
        for key, value in table.items():
            if isinstance(value, bool) and name == "options":
                texts[key] = str(int(value))
            elif isinstance(value, (int, float)) and name == "options":
                texts[key] = str(value)
            elif problem := find_wrong_value(Key(str, needed, may_be_empty=name == "options"), value):
                self._problems.append(f"[{name}]: {key} {problem}")
            else:
                texts[key] = value
        return texts

    def _read_variable(self, place: str, entry: Table) -> SiteVariable:
        """Return an entry of [[variable]]."""
        if name := entry.get("name", ""):
            self._check_name(place, name)
        return SiteVariable(name, entry.get("value", ""), entry.get("reason", ""), self._read_conditions(place, entry),
                            entry.get("harmful_if_different", False))

    def _read_check(self, place: str, entry: Table) -> SiteCheck:
        """Return an entry of [[check]]."""
        kinds = [name for name in ("path", "unset", "module") if name in entry]
        if len(kinds) != 1:
            self._problems.append(f"{place}: has {' and '.join(kinds) or 'nothing to check'}; needed: one of path, "
                                  "unset and module")
        return SiteCheck(entry.get("reason", ""), entry.get("path", ""), entry.get("unset", ""),
                         entry.get("module", ""), self._read_conditions(place, entry))

    def _read_conditions(self, place: str, entry: Table) -> Conditions:
        """Return the conditions of an entry."""
        conditions = Conditions(**{name: entry[name] for name in Conditions._fields if name in entry})
        if 0 < conditions.maximum_nodes < conditions.minimum_nodes:
            self._problems.append(f"{place}: no job has at least {conditions.minimum_nodes} and at most "
                                  f"{conditions.maximum_nodes} nodes")
        return conditions

    def _check_name(self, place: str, name: str) -> None:
        """Note a problem if a variable cannot be set."""
        if not VARIABLE_NAME.fullmatch(name):
            self._problems.append(f"{place}: {name!r} is no name of a variable; needed: letters, digits and _")
        why = next((why for beginning, why in UNSETTABLE.items()
                    if name == beginning or (beginning.endswith(("_", "PYTHON")) and name.startswith(beginning))), "")
        if why:
            self._problems.append(f"{place}: {name} cannot be set here: {why}")


def find_wrong_value(key: Key, value: object) -> str:
    """Return what is wrong with a key's value, empty if nothing is."""
    items = value if isinstance(value, list) else []
    is_right = type(value) is key.type and all(isinstance(item, str) for item in items)
    if not is_right:
        return f"is {describe(value)}; needed: {key.needed}"
    if isinstance(value, str) and "\0" in value:
        return "has a null character"
    if value == "" and not key.may_be_empty:
        return f"is empty; needed: {key.needed}"
    if key.type is int and value < 1:  # type: ignore[operator]
        return f"is {value}; needed: {key.needed}"
    if key.values and value not in key.values:
        return f"is {value!r}{suggest(str(value), key.values)}; needed: one of {', '.join(key.values)}"
    return ""


def describe(value: object) -> str:
    """Return the kind of a value in words, with a short value itself."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    kind = TYPE_NAMES.get(type(value), "a date or time")
    return f"{kind} ({text})" if isinstance(value, (str, int, float)) and len(text) < 40 else kind


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a hint at the known word that may be meant, empty if none is near."""
    from difflib import get_close_matches

    matches = get_close_matches(word, list(known), 1, 0.6)
    return f" (did you mean {matches[0]}?)" if matches else ""
