"""The codec of a channel: a message is a line of JSON, its name and its fields, {"Stage": {"name": "MPI_Init"}}."""

from __future__ import annotations

import json
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

Message = TypeVar("Message")


class Text(NamedTuple):
    """A line that is no message of the channel."""

    line: str


class Unreadable(NamedTuple):
    """A message whose fields have wrong types."""

    error: str


class Codec(Generic[Message]):
    """Decodes the messages of a union of NamedTuples; their fields may be NamedTuples, too."""

    def __init__(self, union: Any) -> None:
        """Resolve all types now: a script may unload our modules later."""
        self._messages: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(union) or (union,)}
        self._fields: dict[type[Any], dict[str, tuple[Any, ...]]] = {}  # the types that each field may have
        for kind in self._messages.values():
            self._resolve(kind)

    def _resolve(self, kind: type[Any]) -> None:
        if kind in self._fields:
            return
        fields = self._fields[kind] = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
        for field_types in fields.values():
            for field_type in field_types:
                if hasattr(field_type, "_fields"):
                    self._resolve(field_type)

    def decode(self, line: bytes) -> Message | Text | Unreadable:
        """Return the message of a line; it never raises."""
        if line.startswith(b"{"):
            try:
                (name, fields), = json.loads(line).items()
                kind = self._messages[name]
            except (ValueError, KeyError, RecursionError):
                pass
            else:
                try:
                    message: Message = self._rebuild(fields, (kind,))
                    return message
                except (TypeError, KeyError) as error:
                    return Unreadable(f"{name}: {error}")
        return Text(line.decode(errors="replace"))

    def _rebuild(self, value: object, types: tuple[Any, ...]) -> Any:
        """Return what to_json() made `value` of, if that has one of `types`; else raise TypeError or KeyError."""
        for kind in types:
            if hasattr(kind, "_fields") and isinstance(value, dict):
                fields = self._fields[kind]
                return kind(**{name: self._rebuild(item, fields[name]) for name, item in value.items()})
            if isinstance(value, (int, float) if kind is float else kind):
                return value
        raise TypeError(f"expected {' or '.join(kind.__name__ for kind in types)}, got {type(value).__name__}")


def encode(message: Any) -> bytes:
    """Return a NamedTuple as a line, without its newline."""
    return json.dumps({type(message).__name__: to_json(message)}).encode()


def to_json(value: Any) -> Any:
    """Return a field's value as JSON has it: NamedTuples as objects."""
    if hasattr(value, "_asdict"):
        return {name: to_json(field) for name, field in value._asdict().items()}
    return value
