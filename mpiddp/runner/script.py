"""Run the user's script in this process as `python script.py`, `python -m module` or `python -c code` would.

A script may also be bytecode, or a folder or a zip file with a `__main__`.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import sys
import types

from ..base.config import Script
from ..discovery.script import compile_command, compile_file, find_application, find_module, is_bytecode, make_absolute


def set_path(script: Script) -> None:
    """Replace our own entry of sys.path by the one that Python would add for the script.

    That is the script's folder with links resolved, the script itself if it has a `__main__`, the working directory
    for a module, nothing for code. With -P, -I or PYTHONSAFEPATH there is none, except for a script with a `__main__`
    (Python manual, sys.path, and pymain_run_python() in Modules/main.c).
    """
    is_safe = getattr(sys.flags, "safe_path", sys.flags.isolated)
    if find_application(script) is not None:
        sys.path[0:0 if is_safe else 1] = [make_absolute(script.target)]
    elif is_safe:
        return
    elif script.is_file:
        sys.path[0] = os.path.dirname(os.path.realpath(script.target))
    else:
        sys.path[0] = os.getcwd() if script.is_module else ""


def run_main(script: Script) -> None:
    """Run the script as the module `__main__`; it stays `__main__` after this returns.

    Errors of the script pass through. Threads, atexit functions and multiprocessing's spawned workers
    find the script as `__main__`, by its file or by its module's name.
    """
    spec = find_application(script)
    if script.is_code:
        (main, code), name = make_code_main(script.target), "-c"
    elif script.is_module:
        sys.argv = ["-m", *script.arguments]  # while its parents are imported
        main, code = make_module_main(script.target)
        name = str(main.__file__)
    else:
        main, code = make_spec_main(spec) if spec is not None else make_file_main(script.target)
        name = script.target
    sys.argv = [name, *script.arguments]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102 (running the user's code is the purpose)


def make_file_main(path: str) -> tuple[types.ModuleType, types.CodeType]:
    """Return an empty `__main__` for a script file, and its code."""
    main = types.ModuleType("__main__")
    main.__file__ = make_absolute(path)
    if is_bytecode(path):
        main.__loader__ = importlib.machinery.SourcelessFileLoader("__main__", main.__file__)
    else:
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    return main, compile_file(path)


def make_code_main(source: str) -> tuple[types.ModuleType, types.CodeType]:
    """Return an empty `__main__` for code of the command line, and that code."""
    main = types.ModuleType("__main__")
    main.__loader__ = importlib.machinery.BuiltinImporter
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    return main, compile_command(source)


def make_module_main(name: str) -> tuple[types.ModuleType, types.CodeType]:
    """Return an empty `__main__` for a module or a package's `__main__`, and its code.

    Its parents are imported, so that its relative imports work.
    """
    parent = name.rpartition(".")[0]
    if parent:
        importlib.import_module(parent)
    spec = find_module(name)
    return make_module_main(f"{name}.__main__") if spec.submodule_search_locations is not None else make_spec_main(spec)


def make_spec_main(spec: importlib.machinery.ModuleSpec) -> tuple[types.ModuleType, types.CodeType]:
    """Return an empty `__main__` for the spec of a module, and its code."""
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __builtins__=builtins, __annotations__={}, __spec__=spec, __file__=spec.origin, __cached__=spec.cached,
        __loader__=spec.loader, __package__=spec.parent,
    )
    code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    return main, code
