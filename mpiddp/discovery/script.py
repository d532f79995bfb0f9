"""The script as a rank finds it: whether it exists and compiles, and which words its code has, without running it."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import traceback
import types
import zlib
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourcelessFileLoader
from typing import NamedTuple

from ..base.config import Script

# A script with one of these words reads its rank, or uses a library that does.
# Regular expressions. A property of Lightning's Trainer, a matrix's rank and a fixed number tell a rank nothing.
RANK_WORDS = (rb"(?<!\.global_)(?<!low_)(?<!lora_)(?<!matrix_)rank(?!\s*=\s*\d)", b"procid", b"mpi4py", b"mpiddp",
              b"deepspeed", b"horovod", rb"torch\.distributed")
# These libraries use torch's group before the first step if they know of other ranks.
GROUP_WORDS = (b"accelerat", b"lightning", b"transformers")
# torch.distributed.launch's option for a script's local rank, in the code that parses it.
LOCAL_RANK_OPTION = re.compile(rb"""["'](--local[_-]rank)["']""")
INSTALLED = ("/site-packages/", "/dist-packages/")
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NOT_THE_USERS = tuple(f"{folder}/" for folder in (sys.base_prefix, sys.prefix, os.path.dirname(os.__file__), OURS))


class ScriptFacts(NamedTuple):
    """The script on this rank; `error` is why it cannot run, None if it can.

    `digest` is the CRC-32 of its source. `missing` is true if the script does not exist, and false if it does not
    compile. `local_rank_options` are the spellings of the script's own option for its local rank. `reads_local_rank`:
    it reads LOCAL_RANK.
    """

    target: str
    digest: str = ""
    missing: bool = False
    error: str | None = None
    local_rank_options: tuple[str, ...] = ()
    reads_local_rank: bool = False


sources: dict[str, bytes] = {}  # of scripts and modules, by path


def read_script_facts(script: Script) -> ScriptFacts:
    """Return the facts of the script on this rank."""
    if script.is_code:
        digest = f"{zlib.crc32(os.fsencode(script.target)):08x}"
        return ScriptFacts("-c", digest, error=find_compile_error("<string>", lambda: compile_command(script.target)))
    if script.is_module:
        return read_module_facts(script.target)
    spec = find_application(script)
    return read_spec_facts(script.target, spec) if spec is not None else read_file_facts(script.target)


def read_file_facts(path: str) -> ScriptFacts:
    """Return the facts of a script file."""
    if sys.path_importer_cache.get(make_absolute(path)) is not None:  # find_application() has found no __main__ there
        kind = "directory" if os.path.isdir(path) else "zip file"
        return ScriptFacts(path, missing=True, error=f"{make_absolute(path)} is a {kind} without a __main__.py")
    try:
        source = read_source(path)
    except OSError as error:
        return ScriptFacts(path, missing=True, error=f"{make_absolute(path)}: {error.strerror}")
    return read_source_facts(path, source)


def read_source_facts(path: str, source: bytes) -> ScriptFacts:
    """Return the facts of a script file with this source."""
    options = dict.fromkeys(option.decode() for option in LOCAL_RANK_OPTION.findall(source))
    return ScriptFacts(path, f"{zlib.crc32(source):08x}", error=find_compile_error(path, lambda: compile_file(path)),
                       local_rank_options=(*options,), reads_local_rank=b"LOCAL_RANK" in source)


def read_source(path: str) -> bytes:
    """Return the source of a script, which is read once."""
    if path not in sources:
        with open(path, "rb") as file:
            sources[path] = file.read()
    return sources[path]


def make_absolute(path: str) -> str:
    """Return a script's absolute path as Python makes it: "./" and ".." stay in it (_Py_abspath)."""
    if os.path.isabs(path):  # the working directory need not exist
        return path
    return os.path.join(os.getcwd(), path) if path not in ("", ".") else os.getcwd()


@functools.cache
def find_main(path: str) -> ModuleSpec | None:
    """Return the `__main__` of a folder or a zip file, None for another file (Python manual, "Interface options")."""
    spec = PathFinder.find_spec("__main__", [path])
    return spec if spec is not None and spec.loader is not None else None


def find_application(script: Script) -> ModuleSpec | None:
    """Return the `__main__` of a script that is a folder or a zip file with one, None for any other."""
    return find_main(make_absolute(script.target)) if script.is_file else None


@functools.cache
def compile_file(path: str) -> types.CodeType:
    """Return the code of a script; raise SyntaxError, ValueError for null bytes, or OSError.

    Raises ImportError, EOFError or ValueError for bytecode that this Python cannot load.
    """
    if is_bytecode(path):
        code = SourcelessFileLoader("__main__", path).get_code("__main__")
        assert code is not None
        return code
    return compile(read_source(path), make_absolute(path), "exec", dont_inherit=True)


def is_bytecode(path: str) -> bool:
    """Return whether a script is bytecode, by its name or its first two bytes as Python does (maybe_pyc_file())."""
    return path.endswith(".pyc") or read_source(path)[:2] == importlib.util.MAGIC_NUMBER[:2]


@functools.cache
def compile_command(source: str) -> types.CodeType:
    """Return the code of a script from the command line (-c); raise SyntaxError, or ValueError."""
    return compile(source, "<string>", "exec", dont_inherit=True)


def find_compile_error(path: str, compiled: Callable[[], types.CodeType]) -> str | None:
    """Return why a script does not compile, as Python would say it, or None."""
    try:
        compiled()
    except SyntaxError as error:
        lines = traceback.format_exception_only(error)[1:-1]  # the line, and a caret below it
        where = f"{path}, line {error.lineno}: {type(error).__name__}: {error.msg}"
        return "\n".join([where, *map(str.rstrip, lines)])
    except (ImportError, EOFError, ValueError) as error:
        return f"{path}: {error}"
    return None


def has_should_stop(script: Script) -> bool:
    """Tell by the names in a script's own code whether it calls mpiddp.should_stop(); import nothing."""
    try:
        code = compile_command(script.target) if script.is_code else compile_file(find_script_file(script))
        return {"mpiddp", "should_stop"} <= list_names(code)
    except (EOFError, ImportError, KeyError, OSError, SyntaxError, ValueError):
        return False


def has_rank_words(script: Script, has_trained: bool) -> bool:
    """Tell by the words in a script whether it may know that it is one of several ranks; True if it cannot be read.

    `has_trained`: it has made steps without the group. How many ranks there are does not tell a rank which one it is.
    """
    return has_match(script, b"|".join(RANK_WORDS if has_trained else RANK_WORDS + GROUP_WORDS))


def has_match(script: Script, pattern: bytes) -> bool:
    """Tell whether a script's text has a match of a pattern, in any case; True if it cannot be read.

    The modules that it has imported from outside of installed packages are its own too.
    """
    try:
        own = script.target.encode() if script.is_code else read_source(find_script_file(script))
        texts = [own, *map(read_source, list_user_modules())]
    except (ImportError, KeyError, OSError, ValueError):
        return True
    return any(re.search(pattern, text, re.IGNORECASE) for text in texts)


def list_user_modules() -> list[str]:
    """Return the files of the loaded modules that are not installed; some modules of torch name files in vain."""
    named = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = [file for file in named if isinstance(file, str)]
    return [file for file in files if file.endswith(".py") and not is_installed(file) and os.path.isfile(file)]


def is_installed(file: str) -> bool:
    """Return whether a module's file belongs to an installed package, to Python, or to us."""
    return any(folder in file for folder in INSTALLED) or file.startswith(NOT_THE_USERS)


def list_names(code: types.CodeType) -> set[str]:
    """Return the names of all globals, attributes and modules in code, each part of a dotted name."""
    nested = (list_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {part for name in code.co_names for part in name.split(".")}.union(*nested)


def find_script_file(script: Script) -> str:
    """Return the file of a script's own code, empty for a module that only an import can find."""
    if script.is_module:
        return find_module_file(script.target)
    spec = find_application(script)
    return spec.origin or "" if spec is not None else script.target


def find_module_file(name: str) -> str:
    """Return the file of a module that runs as a script, empty if only an import can find it."""
    spec = search_module(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return find_module_file(f"{name}.__main__")
    return spec.origin or "" if spec is not None else ""


def read_module_facts(name: str) -> ScriptFacts:
    """Return the facts of a module that runs as a script."""
    try:
        spec = find_module(name)
    except ImportError as error:
        return ScriptFacts(name, missing=True, error=str(error))
    if spec.submodule_search_locations is not None:
        return read_module_facts(f"{name}.__main__")
    return read_spec_facts(name, spec)


def read_spec_facts(target: str, spec: ModuleSpec) -> ScriptFacts:
    """Return the facts of a module that Python has found, in a folder or in a zip file."""
    get_data = getattr(spec.loader, "get_data", None)
    if spec.origin is None or not spec.origin.endswith(".py") or get_data is None:
        return ScriptFacts(target)
    try:
        source = sources[spec.origin] = get_data(spec.origin)
    except OSError as error:
        return ScriptFacts(target, error=f"{spec.origin}: {error.strerror}")
    return read_source_facts(spec.origin, source)._replace(target=target)


def find_module(name: str) -> ModuleSpec:
    """Return a module's spec; raise ImportError.

    The packages around the module are imported only if nothing else finds it: they may import torch before torch's
    variables are set.
    """
    try:
        spec = search_module(name)
    except KeyError:  # a namespace package inside a package knows its path only after the import
        spec = None
    if spec is None:
        spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"No module named {name}")
    return spec


@functools.cache
def search_module(name: str) -> ModuleSpec | None:
    """Return a module's spec, None if it is not found; import nothing."""
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = spec.submodule_search_locations if spec else None
        if spec and path is None:
            raise ImportError(f"{spec.name} is not a package")
        full = ".".join(parts[:depth])
        candidates = (finder.find_spec(full, path) for finder in sys.meta_path)
        spec = next((candidate for candidate in candidates if candidate is not None), None)
        if spec is None:
            return None
    return spec
