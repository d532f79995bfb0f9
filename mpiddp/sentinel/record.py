"""The base of events and actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    def dataclass_transform(**_):
        """Mark nothing: this is for type checkers."""
        return lambda kind: kind


@dataclass_transform(eq_default=True)
class Record:
    """A value of named fields, as a dataclass is one; every sentinel makes these classes, so they must cost little."""

    _names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._names = cls.__match_args__ = tuple(cls.__annotations__)  # type: ignore[attr-defined,misc]

    def __init__(self, *values: Any, **named: Any) -> None:
        self.__dict__.update(zip(self._names, values, strict=False), **named)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names)
        return f"{type(self).__name__}({fields})"
