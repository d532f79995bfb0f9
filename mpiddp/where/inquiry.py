"""What becomes of the answers where a job's ranks are: for those who ask, for --stall, and for the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..plan.verdict import NOBODY, Report, Seen
from .deserted import Deserted, deserted
from .merge import calls_of, failed_at, free, picture, places_of
from .seen import WAITING
from .stall import Stall
from .survey import Survey
from .table import lines


class Standstill(NamedTuple):
    """What is said of a job whose ranks do not move, or move again; why it ends, empty if it moves.

    `rank` is the first one that is odd, NOBODY if none is.
    """

    text: str
    cause: str
    rank: int


class Inquiry:
    """Asks by `survey`, and makes sentences and tables of what it has found last."""

    def __init__(self, stall_s: float) -> None:
        self.survey, self._stall, self._deserted = Survey(), Stall(stall_s), Deserted()

    @property
    def pause_s(self) -> float:
        """The time from one look of --stall to the next."""
        return self._stall.pause_s

    def table(self) -> str:
        """Return where the ranks are, in lines."""
        return "\n".join(lines(picture(self.survey.ranks)))

    def seen(self, failed: Mapping[int, str]) -> Seen:
        """Return where ranks are for a verdict; those that have `failed` already are at the line where they did."""
        ranks = [failed_at(one, failed[one.rank]) if failed.get(one.rank) else one for one in self.survey.ranks]
        found = picture(ranks)
        stands = found.odd is not None or all(group.place.at in WAITING for group in found.groups)
        return Seen(places_of(ranks), free(ranks), calls_of(ranks), "\n".join(lines(found)) if stands else "",
                    has_groups=any(len(one.entered) > 1 for one in ranks), deserted=deserted(ranks))

    def deserted(self, now_s: float) -> Report | None:
        """Return the report on ranks that wait for one which has come to its end, as Deserted.see() does."""
        return self._deserted.see(self.survey.ranks, now_s)

    def standstill(self, now_s: float) -> Standstill | None:
        """Return what to say at `now_s`, on any monotonic clock, None for nothing."""
        line = self._stall.see(self.survey.ranks, now_s)
        if not line:
            return None
        if not self._stall.lasts_s:
            return Standstill(line, "", NOBODY)
        found = picture(self.survey.ranks)
        cause = "; ".join([line, *found.findings])
        return Standstill("\n".join([line, *lines(found)]), cause, found.odd.ranks[0] if found.odd else NOBODY)
