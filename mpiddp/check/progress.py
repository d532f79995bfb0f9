"""How far a check is: a bar on a terminal; elsewhere a line when something else begins."""

from __future__ import annotations

import os

from ..say import STDERR, say, write_all

WIDTH = 30


class Progress:
    """Says what is being measured. Where stderr is no terminal, as under mpirun, it has no bar but a line for each."""

    def __init__(self) -> None:
        self._terminal, self._words = os.isatty(STDERR), ""

    def show(self, words: str, done: int, of: int) -> None:
        """Say that `done` of so many parts are through."""
        if self._terminal:
            filled = WIDTH * done // max(1, of)
            write_all(STDERR, f"\r\033[K{words} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{of}".encode())
        elif words != self._words:
            say(f"mpiddp.check: measuring {words}")
        self._words = words

    def end(self) -> None:
        """Take the bar away."""
        if self._terminal and self._words:
            write_all(STDERR, b"\r\033[K")
