"""The lines of a stream, and what stands before them."""

from __future__ import annotations

WRITE_BYTES = 4096  # PIPE_BUF: what a pipe takes in one piece (man 7 pipe)


def prefixed(begun: dict[int, bytes], source: int, data: bytes, prefix: bytes) -> list[bytes]:
    """Return the lines that new data completes, each with the prefix, in pieces that a pipe takes whole.

    `begun` holds the beginning of each source's last line; empty `data` completes it. A carriage return,
    with which progress bars begin anew, ends a line.
    """
    text = begun[source] + data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    *lines, begun[source] = text.split(b"\n")
    if not data and begun[source]:
        lines.append(begun[source])
        begun[source] = b""
    pieces = [b""]
    for line in lines:
        if len(pieces[-1]) + len(prefix) + len(line) >= WRITE_BYTES:
            pieces.append(b"")
        pieces[-1] += prefix + line + b"\n"
    return pieces
