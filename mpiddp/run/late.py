"""Variables that a script sets for torch, CUDA or the process group, which have read them before it begins."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..config import Script
from ..facts.script import path_of, read

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
    value: object
    is_default: bool
    follows_torch: bool


def warning(script: Script, environ: Mapping[str, str], device: str, backend: str) -> list[str]:
    """Return the warning `late-variable` if a script sets variables in vain.

    `device` is the kind of the rank's device. `backend` is that of the process group, empty if the script makes it.
    """
    try:
        source = script.target.encode() if script.is_code else read(path_of(script))
        found = list(settings(source)) if b"environ" in source else []
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


def settings(source: bytes) -> Iterator[Setting]:
    """Yield what a script sets by os.environ[…] = … and os.environ.setdefault(…) at its top level, not in blocks."""
    follows_torch = False
    for statement in ast.parse(source).body:
        match statement:
            case ast.Import(names):
                follows_torch |= any(one.name.partition(".")[0] == "torch" for one in names)
            case ast.ImportFrom(str(module)):
                follows_torch |= module.partition(".")[0] == "torch"
            case (ast.Assign([ast.Subscript(owner, ast.Constant(str(name)))], value)
                  | ast.Expr(ast.Call(ast.Attribute(owner, "setdefault"), [ast.Constant(str(name)), value]))
                  ) if getattr(owner, "attr", getattr(owner, "id", "")) == "environ":
                text = value.value if isinstance(value, ast.Constant) else None
                yield Setting(statement.lineno, name, text, isinstance(statement, ast.Expr), follows_torch)
