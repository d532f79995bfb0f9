"""The messages by which it is asked where the ranks of a job are."""

from __future__ import annotations

from typing import NamedTuple

# A rank to its sentinel


class Stacks(NamedTuple):
    """Stacks that STACK_SIGNAL asks for come from the pipe whose end comes with this; the rank's is `descriptor`."""

    descriptor: int


# One who asks, and the coordinator


class Ask(NamedTuple):
    """Tell where the ranks are."""


class Shown(NamedTuple):
    """Where the ranks are: a picture of where/merge.py, as where/table.py has it in JSON."""

    picture: str


# The coordinator, and a sentinel


class Where(NamedTuple):
    """Tell where the rank is."""

    number: int


class Whereabouts(NamedTuple):
    """The answer to the `Where` of this number, as where/merge.py has it.

    `stack` is one of where/stack.py, empty if the rank has not printed it. Of each process that the rank has forked
    `children` has its number, its state, the kernel's function that it sleeps in, and its stack, a line each with the
    stack's lines indented.
    """

    number: int
    stack: str
    state: str
    kernel: str
    cores: float
    busy_s: float
    moved_bytes: int
    ended: bool
    children: str
