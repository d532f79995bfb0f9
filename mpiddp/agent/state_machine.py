"""The base of the agents' state machines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar, Generic, TypeVar, cast

from .events import PrintLine

Phase = TypeVar("Phase")
Action = TypeVar("Action")


class StateMachine(Generic[Phase, Action]):
    """Logic without I/O and without a clock: takes events and returns actions for others to carry out.

    A phase holds what is known in it. `transitions` has for each type of phase the types that may follow, and those to
    which a transition has no effect: events that come late, or are overruled. Any other transition is a bug: it raises
    in tests, which set `raises`; a job prints a line about it and continues.
    """

    transitions: ClassVar[Mapping[type, tuple[Collection[type], Collection[type]]]]
    raises: ClassVar[bool] = False

    def __init__(self, phase: Phase, began_s: float) -> None:
        """Begin in a phase, at `began_s` of any monotonic clock."""
        self.phase = phase
        self._now_s = began_s
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return the actions that are still to be carried out, once."""
        actions, self._actions = self._actions, []
        return actions

    def _do(self, *actions: Action) -> None:
        self._actions += actions

    def _enter(self, phase: Phase) -> bool:
        """Enter a phase, and return whether it is a new one; what is known in the same one is replaced."""
        before, after = type(self.phase), type(phase)
        allowed, ignored = self.transitions[before]
        if after in allowed or after is before:
            self.phase = phase
        elif after not in ignored:
            text = f"{type(self).__name__}: illegal transition from {before.__name__} to {after.__name__}"
            if self.raises:
                raise AssertionError(text)
            self._do(cast("Action", PrintLine(f"mpiddp: {text}")))
        return after in allowed
