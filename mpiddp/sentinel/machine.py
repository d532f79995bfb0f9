"""What the watcher and the coordinator are made of: events and actions, a state, a table of what leads where."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    def dataclass_transform(**_):
        """Mark nothing: this is for type checkers."""
        return lambda kind: kind

State = TypeVar("State", bound=enum.Enum)
Action = TypeVar("Action")


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


class Machine(Generic[State, Action]):
    """Logic without I/O and without a clock: it takes events and returns actions, which others carry out."""

    moves: ClassVar[Mapping[Any, Mapping[str, Any]]]  # from a state, by a word, to which

    def __init__(self, state: State, began_s: float) -> None:
        """Begin in a state, at `began_s` of any monotonic clock."""
        self.state = state
        self._now_s = began_s
        self._actions: list[Action] = []

    def taken(self) -> list[Action]:
        """Return the actions that are still to be carried out, once."""
        actions, self._actions = self._actions, []
        return actions

    def _do(self, *actions: Action) -> None:
        self._actions += actions

    def _move(self, by: str) -> bool:
        """Go on to the state to which something leads, and tell whether it leads to one."""
        to = self.moves[self.state].get(by)
        if to is not None:
            self.state = to
        return to is not None
