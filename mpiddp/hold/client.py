"""The connection of a client: what the hold's server sends it."""

from __future__ import annotations

from collections.abc import Callable

from ..base.stderr import write_all, write_line
from ..ipc.channel import Channel, Codec
from ..systems.statuses import EXIT_CANNOT_START, EXIT_OUTPUT_LOST
from . import protocol

CODEC: Codec[protocol.ToClient] = Codec(protocol.ToClient)
ToServer = Channel[protocol.FromClient, protocol.ToClient]


def receive(server: ToServer, timeout_s: float, show: Callable[[int, bytes], None] = write_all) -> None:
    """Take what the server has sent; `show` takes a stream, 1 or 2, and output.

    Raises SystemExit with the client's status if there is nothing more to do, and TimeoutError.
    """
    try:
        messages = server.receive(timeout_s)
    except TimeoutError:
        raise
    except (EOFError, OSError):
        write_line("mpiddp.run: the hold has ended")
        raise SystemExit(1) from None
    for message in messages:
        match message:
            case protocol.Output(stream, data):
                try:
                    show(stream, data)
                except OSError as error:
                    if not isinstance(error, BrokenPipeError):
                        write_line(f"mpiddp.run: cannot write its output: {error.strerror}")
                    raise SystemExit(EXIT_OUTPUT_LOST) from None
            case protocol.RunOver(status):
                raise SystemExit(status)
            case protocol.Refused(reason):
                write_line(f"mpiddp.run: {reason}")
                raise SystemExit(EXIT_CANNOT_START)
