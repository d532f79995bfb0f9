"""Variables that a script sets for torch, CUDA or the process group, which have read them before it begins."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base.config import Script
from ..discovery.script import find_script_file, read_source

# Prefixes of names, by what reads them, and when. With torch's import: libgomp as it is loaded, torch._logging,
# torch.distributed. With the first use of CUDA, when mpiddp chooses the rank's GPU: the driver, torch's allocator.
# With the group that mpiddp makes: NCCL and gloo, and torch's class for them.
IMPORT_PREFIXES = ("OMP_", "GOMP_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS", "TORCH_TRACE")
CUDA_PREFIXES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
                 "CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
GROUP_PREFIXES = {"nccl": ("NCCL_", "TORCH_NCCL_"), "gloo": ("GLOO_",)}


class Setting(NamedTuple):
    """A variable that a line of a script sets; `value` is None if it is computed.

    If it `is_default`, it is only set if it was not. If it `follows_torch`, the script has imported torch before.
    """

    line: int
    name: str
    value: str | None
    is_default: bool = False
    follows_torch: bool = False


def find_late_variables(script: Script, environ: Mapping[str, str], device: str, backend: str) -> list[str]:
    """Return the warning `late-variable` if a script sets variables without effect.

    `device` is the type of the rank's device. `backend` is that of the process group, empty if the script creates it.
    """
    try:
        source = script.target.encode() if script.is_code else read_source(find_script_file(script))
        if b"environ" not in source and b"putenv" not in source:
            return []
        settings = list(find_settings(ast.parse(source).body))
    except (OSError, SyntaxError, ValueError, RecursionError):  # code that Python can compile may be too deep for ast
        return []
    late = [setting for setting in settings if is_late(setting, environ, device, backend)]
    if not late:
        return []
    lines = ", ".join(f"{setting.name} (line {setting.line})" for setting in late)
    by_group = backend and all(setting.name.startswith(find_group_prefixes(backend)) for setting in late)
    done = "the process group was created" if by_group else "torch was imported and initialised"
    cure = ", or create the group in the script (--no-init)" if by_group else ""
    reason = f"setting {lines} in the script has no effect, because {done} before the script started"
    return [f"late-variable: {reason}; set it in the job script{cure}"]


def is_late(setting: Setting, environ: Mapping[str, str], device: str, backend: str) -> bool:
    """Return whether a variable has been read before the script sets it, and with another value."""
    if setting.name in environ and (setting.is_default or environ[setting.name] == setting.value):
        return False
    if setting.name.startswith(IMPORT_PREFIXES):
        return not setting.follows_torch
    return (device == "cuda" and setting.name.startswith(CUDA_PREFIXES)) or setting.name.startswith(
        find_group_prefixes(backend))


def find_group_prefixes(backend: str) -> tuple[str, ...]:
    """Return the name prefixes of variables that a group with such a backend (cpu:gloo,cuda:nccl) reads."""
    return tuple(name for kind, names in GROUP_PREFIXES.items() if kind in backend for name in names)


def find_settings(body: Sequence[ast.stmt], follows_torch: bool = False) -> Iterator[Setting]:
    """Yield the variables that a script's top-level code sets, whatever its conditions are."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else [
                statement.module or ""]
            follows_torch |= any(name.partition(".")[0] == "torch" for name in names)
        elif isinstance(statement, ast.With | ast.Try) or (
                isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"):
            yield from find_settings(statement.body, follows_torch)
        elif isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr):
            for name, value, is_default in find_assignments(statement):
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
                    yield Setting(statement.lineno, name.value, text, is_default, follows_torch)


def find_assignments(
    statement: ast.Assign | ast.AugAssign | ast.Expr
) -> Iterator[tuple[ast.expr | None, ast.expr, bool]]:
    """Yield name and value of each variable that a statement sets, and whether only if it was not set."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            yield from ((target.slice, value, False) for target in targets
                        if isinstance(target, ast.Subscript) and is_environ(target.value))
        case ast.AugAssign(target=target, op=ast.BitOr(), value=ast.Dict(keys, values)) if is_environ(target):
            yield from ((key, value, False) for key, value in zip(keys, values, strict=True))
        case ast.Expr(ast.Call(ast.Attribute(owner, "setdefault"), [key, value])) if is_environ(owner):
            yield key, value, True
        case ast.Expr(ast.Call(ast.Attribute(owner, "update"), arguments, keywords)) if is_environ(owner):
            for argument in arguments:
                if isinstance(argument, ast.Dict):
                    yield from ((key, value, False) for key, value in zip(argument.keys, argument.values, strict=True))
            yield from ((ast.Constant(keyword.arg), keyword.value, False) for keyword in keywords)
        case ast.Expr(ast.Call(ast.Attribute(_, "putenv") | ast.Name("putenv"), [key, value])):
            yield key, value, False


def is_environ(owner: ast.expr) -> bool:
    """Return whether an expression is os.environ."""
    return getattr(owner, "attr", getattr(owner, "id", "")) == "environ"
