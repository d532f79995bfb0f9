"""A stand-in for torch that costs next to nothing, for starts with more ranks than a machine has memory for torch."""

from typing import NamedTuple

from . import distributed as distributed

__version__ = "2.13.0"


class device(NamedTuple):  # noqa: N801 (torch's name)
    """The CPU."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type


class accelerator:  # noqa: N801 (torch's name)
    """None."""

    @staticmethod
    def is_available() -> bool:
        """Return that there is none."""
        return False
