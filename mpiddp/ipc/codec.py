"""How a message travels: as one line of JSON, its name and its fields, {"Stage": {"name": "MPI_Init"}}."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

from ..failure.rank import LogPlan, RankIdentity
from ..failure.root_cause import Report, RootCause
from ..output.protocol import Folding
from ..sentinel.protocol import Message, Sent, Text, Unreadable

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Sent)}
FIELDS: dict[type[Any], dict[str, tuple[Any, ...]]] = {  # the kinds of value that each field may have
    kind: {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
    for kind in (*KINDS.values(), Folding, RankIdentity, LogPlan, Report, RootCause)
}


def encode(message: Sent) -> bytes:
    """Return a message as a line, without its end."""
    return json.dumps({type(message).__name__: plain(message)}).encode()


def decode(line: bytes) -> Message:
    """Return the message that a line holds; whatever the line is, nothing is raised."""
    if line.startswith(b"{"):
        try:
            (name, fields), = json.loads(line).items()
            kind = KINDS[name]
        except (ValueError, KeyError, RecursionError):
            pass
        else:
            try:
                message: Message = rebuilt(fields, (kind,))
                return message
            except (TypeError, KeyError) as error:
                return Unreadable(f"{name}: {error}")
    return Text(line.decode(errors="replace"))


def plain(value: Any) -> Any:
    """Return a field's value as JSON has it: named tuples as objects."""
    if hasattr(value, "_asdict"):
        return {name: plain(one) for name, one in value._asdict().items()}
    return value


def rebuilt(found: object, kinds: tuple[Any, ...]) -> Any:
    """Return a value of one of `kinds` from what plain() made of it; raise TypeError or KeyError for anything else."""
    for kind in kinds:
        if hasattr(kind, "_fields") and isinstance(found, dict):
            fields = FIELDS[kind]
            return kind(**{name: rebuilt(one, fields[name]) for name, one in found.items()})
        if isinstance(found, (int, float) if kind is float else kind):
            return found
    raise TypeError(f"{type(found).__name__} in the place of {' or '.join(kind.__name__ for kind in kinds)}")
