"""The TCP segments that a node has sent, and those that it had to send again: a network that loses packets shows so."""

from __future__ import annotations

from typing import NamedTuple

from ..facts.files import text

SNMP = "/proc/net/snmp"


class Segments(NamedTuple):
    """Segments that this network namespace has sent since it is there, and those that it has sent again.

    The kernel counts the segments that a network card makes of larger ones (RFC 4022, tcpOutSegs, tcpRetransSegs).
    """

    sent: int
    again: int


def segments() -> Segments:
    """Return the numbers by now, 0 where the kernel does not tell."""
    heads, values = ([line.split() for line in text(SNMP).splitlines() if line.startswith("Tcp:")] or [[], []])[:2]
    found = dict(zip(heads, values, strict=False))
    return Segments(int(found.get("OutSegs", 0)), int(found.get("RetransSegs", 0)))
