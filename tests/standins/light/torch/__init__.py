"""A stand-in for torch that costs next to nothing: for tests of jobs in which torch makes no difference."""

import math
import os
from types import SimpleNamespace
from typing import NamedTuple

__version__ = "2.13.0"
version = SimpleNamespace(cuda=None, hip=None, xpu=None)
compiler = SimpleNamespace(is_compiling=lambda: False)
accelerator = SimpleNamespace(is_available=lambda: False)


class device(NamedTuple):  # noqa: N801 (torch's name)
    """The CPU."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type


class Tensor:
    """A row of numbers."""

    def __init__(self, values):
        self.values = values if isinstance(values, list) else [values]

    def fill_(self, value):
        """Make all numbers this one."""
        self.values = [value] * len(self.values)
        return self

    def item(self):
        """Return the only number."""
        (value,) = self.values
        return value

    def __bool__(self):
        return bool(self.item())

    def __int__(self):
        return int(self.item())

    __float__ = item


tensor = Tensor


def ones(*sizes, device=None):
    """Return so many ones."""
    return Tensor([1.0] * math.prod(sizes))


def zeros(*sizes, device=None):
    """Return so many zeros."""
    return Tensor([0.0] * math.prod(sizes))


def manual_seed(_):
    """Do nothing: nothing is random."""


def set_num_threads(_):
    """Do nothing: nothing is computed."""


def get_num_threads():
    """Return how many threads torch would have."""
    return int(os.environ["OMP_NUM_THREADS"])


from . import distributed as distributed  # noqa: E402
