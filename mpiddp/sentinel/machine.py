"""What the watcher and the coordinator have in common: a state, a table of what leads where, actions to carry out."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

State = TypeVar("State", bound=enum.Enum)
Action = TypeVar("Action")


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
