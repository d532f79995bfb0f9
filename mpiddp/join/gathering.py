"""Let the relays find each other that fold the ranks' output: on each node, and between nodes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from ..beside.outflow import Folding
from ..beside.wire import listen
from ..config import LaunchConfig
from ..environment import Place
from ..plan.environment import Endpoint
from .hosting import listening_on
from .rollcall import RollCall

LOOPBACK = ("127.0.0.1", "::1")


class Offer(NamedTuple):
    """A rank's place, and where its relay takes the output of others; port 0 for nowhere."""

    place: Place
    address: str = ""
    port: int = 0


class Share(NamedTuple):
    """A rank's part in what is folded, and a descriptor that listens for the relays of others, -1 for none."""

    folding: Folding
    listener: int


def share(roll: RollCall, place: Place, endpoint: Endpoint, config: LaunchConfig) -> Share:
    """Let the relays of each node's ranks meet at local rank 0's, and these at rank 0's. Collective.

    Raises LaunchError `port-taken`.
    """
    listener = None
    if place.rank == 0:
        port = config.port and config.port + 2
        with listening_on(port, roll.name(0)):
            listener = listen(endpoint.address, port)
    elif place.local_rank == 0:
        listener = listen_on_loopback()
    offer = Offer(place)
    if listener is not None:
        offer = Offer(place, *listener.getsockname()[:2])
    folding = roll.agree("naming relays", offer, lambda offers: foldings(offers, endpoint.watch_token, config))
    if listener is not None and folding.gathers:
        return Share(folding, listener.detach())
    if listener is not None:
        listener.close()
    return Share(folding, -1)


def listen_on_loopback() -> socket.socket:
    """Return a socket that listens for processes of this node; raise OSError where it has no loopback."""
    try:
        return listen(LOOPBACK[0], 0)
    except OSError:
        return listen(LOOPBACK[1], 0)


def foldings(offers: Sequence[Offer], token: str, config: LaunchConfig) -> list[Folding]:
    """Return each rank's part: rank 0 gathers all, local rank 0 of each node the node's ranks."""
    leaders = {one.place.node_rank: one for one in offers if one.place.local_rank == 0}
    nodes: dict[int, int] = {}
    for one in offers:
        nodes[one.place.node_rank] = nodes.get(one.place.node_rank, 0) | 1 << one.place.rank
    everyone = (1 << len(offers)) - 1
    found = []
    for rank, node in ((one.place.rank, one.place.node_rank) for one in offers):
        leads = leaders[node].place.rank == rank
        above = offers[0] if leads else leaders[node]
        expected = everyone if rank == 0 else nodes[node] if leads else 1 << rank
        gathers = leads and (rank == 0 or expected != 1 << rank)
        found.append(Folding(rank, f"{expected:x}", above.address, 0 if rank == 0 else above.port, token,
                             config.fold_window_s, config.drops_lines, gathers))
    return found
