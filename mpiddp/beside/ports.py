"""Sockets that listen, of rank 0 and of its sentinel."""

from __future__ import annotations

import socket


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on a port of an address, 0 for a free port; raise OSError where that can't be.

    With an empty address it listens on all that this node has.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
    except (OSError, ValueError):  # a node without IPv6
        return socket.create_server(("", port), backlog=socket.SOMAXCONN)
