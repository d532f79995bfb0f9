"""The base of the sentinels' state machines."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

from .events import PrintLine

State = TypeVar("State", bound=enum.Enum)
Action = TypeVar("Action")


class StateMachine(Generic[State, Action]):
    """Logic without I/O and without a clock: takes events and returns actions for others to carry out.

    `transitions` has the states that may follow each state, `ignored` those to which a transition has no effect. Any
    other transition is a bug: it raises in tests, which set `raises`; a job prints a line about it and continues.
    """

    transitions: ClassVar[Mapping[Any, Collection[Any]]]
    ignored: ClassVar[Mapping[Any, Collection[Any]]]
    raises: ClassVar[bool] = False

    def __init__(self, state: State, began_s: float) -> None:
        """Begin in a state, at `began_s` of any monotonic clock."""
        self.state = state
        self._now_s = began_s
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return the actions that are still to be carried out, once."""
        actions, self._actions = self._actions, []
        return actions

    def _do(self, *actions: Action) -> None:
        self._actions += actions

    def _enter(self, state: State) -> bool:
        """Enter a state, and return whether it is a new one; an ignored transition changes nothing."""
        if state in self.transitions[self.state]:
            self.state = state
            return True
        if state is not self.state and state not in self.ignored.get(self.state, ()):
            text = f"{type(self).__name__}: illegal transition from {self.state.name} to {state.name}"
            if self.raises:
                raise AssertionError(text)
            self._do(cast("Action", PrintLine(f"mpiddp: {text}")))
        return False
