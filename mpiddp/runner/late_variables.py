"""Variables that a script sets for torch, CUDA or the process group, which have read them before it begins."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base.config import Script
from ..discovery.script import find_script_file, read_source

# Beginnings of names, by what reads them, and when. With torch's import: libgomp as it is loaded, torch._logging,
# torch.distributed. With the first use of CUDA, as which mpiddp chooses the rank's GPU: the driver, torch's allocator.
# With the group that mpiddp makes: NCCL and gloo, and torch's class for them.
IMPORT = ("OMP_", "GOMP_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS", "TORCH_TRACE")
CUDA = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
GROUP = {"nccl": ("NCCL_", "TORCH_NCCL_"), "gloo": ("GLOO_",)}


class Setting(NamedTuple):
    """A variable that a line of a script sets; `value` is None if it is computed.

    `is_default` tells that it is only set if it was not, `follows_torch` that the script has imported torch before.
    """

    line: int
    name: str
    value: str | None
    is_default: bool = False
    follows_torch: bool = False


def warning(script: Script, environ: Mapping[str, str], device: str, backend: str) -> list[str]:
    """Return the warning `late-variable` if a script sets variables in vain.

    `device` is the kind of the rank's device. `backend` is that of the process group, empty if the script makes it.
    """
    try:
        source = script.target.encode() if script.is_code else read_source(find_script_file(script))
        if b"environ" not in source and b"putenv" not in source:
            return []
        found = list(settings(ast.parse(source).body))
    except (OSError, SyntaxError, ValueError, RecursionError):  # code that Python can compile may be too deep for ast
        return []
    late = [one for one in found if is_late(one, environ, device, backend)]
    if not late:
        return []
    lines = ", ".join(f"{one.name} (line {one.line})" for one in late)
    by_group = backend and all(one.name.startswith(of_group(backend)) for one in late)
    before = "the process group is made" if by_group else "torch is imported and set up"
    cure = ", or let the script make the group (--no-init)" if by_group else ""
    words = f"the script sets {lines}, but {before} before it begins: this has no effect on that"
    return [f"late-variable: {words}; set it in the job script{cure}"]


def is_late(one: Setting, environ: Mapping[str, str], device: str, backend: str) -> bool:
    """Tell whether a variable has been read before the script sets it, and with another value."""
    if one.name in environ and (one.is_default or environ[one.name] == one.value):
        return False
    if one.name.startswith(IMPORT):
        return not one.follows_torch
    return (device == "cuda" and one.name.startswith(CUDA)) or one.name.startswith(of_group(backend))


def of_group(backend: str) -> tuple[str, ...]:
    """Return the beginnings of the names of variables that a group with such a backend reads (cpu:gloo,cuda:nccl)."""
    return tuple(name for kind, names in GROUP.items() if kind in backend for name in names)


def settings(body: Sequence[ast.stmt], follows_torch: bool = False) -> Iterator[Setting]:
    """Yield the variables that a script's top-level code sets, whatever its conditions are."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else [
                statement.module or ""]
            follows_torch |= any(name.partition(".")[0] == "torch" for name in names)
        elif isinstance(statement, ast.With | ast.Try) or (
                isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"):
            yield from settings(statement.body, follows_torch)
        elif isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr):
            for name, value, is_default in set_by(statement):
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
                    yield Setting(statement.lineno, name.value, text, is_default, follows_torch)


def set_by(statement: ast.Assign | ast.AugAssign | ast.Expr) -> Iterator[tuple[ast.expr | None, ast.expr, bool]]:
    """Yield name and value of each variable that a statement sets, and whether only if it was not set."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            yield from ((one.slice, value, False) for one in targets
                        if isinstance(one, ast.Subscript) and is_environ(one.value))
        case ast.AugAssign(target=target, op=ast.BitOr(), value=ast.Dict(keys, values)) if is_environ(target):
            yield from ((key, value, False) for key, value in zip(keys, values, strict=True))
        case ast.Expr(ast.Call(ast.Attribute(owner, "setdefault"), [key, value])) if is_environ(owner):
            yield key, value, True
        case ast.Expr(ast.Call(ast.Attribute(owner, "update"), arguments, keywords)) if is_environ(owner):
            for one in arguments:
                if isinstance(one, ast.Dict):
                    yield from ((key, value, False) for key, value in zip(one.keys, one.values, strict=True))
            yield from ((ast.Constant(one.arg), one.value, False) for one in keywords)
        case ast.Expr(ast.Call(ast.Attribute(_, "putenv") | ast.Name("putenv"), [key, value])):
            yield key, value, False


def is_environ(owner: ast.expr) -> bool:
    """Tell whether an expression is os.environ."""
    return getattr(owner, "attr", getattr(owner, "id", "")) == "environ"
