"""A rank of a prompt (prompt.py): runs each source that stdin brings, a line of JSON, in one namespace."""

from __future__ import annotations

import code
import contextlib
import json
import os
import signal
import sys
import types

READY = "\x1eready"  # the line on stdout and stderr that ends what a source has printed
FILE = "<prompt>"


class Console(code.InteractiveInterpreter):
    """The namespace of a rank; a SIGINT interrupts what runs in it, and nothing else."""

    def __init__(self) -> None:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        super().__init__(main.__dict__)
        self._is_running = False
        sys.excepthook = sys.__excepthook__  # torch's puts the rank before each line, as the output's prefix does
        signal.signal(signal.SIGINT, self._interrupt)

    def run(self, source: str) -> None:
        """Run a source; what it raises is printed, except SystemExit."""
        try:
            self._is_running = True
            self.runsource(source, FILE)
            self._is_running = False
        except KeyboardInterrupt:  # as the source had ended
            self._is_running = False

    def _interrupt(self, *_: object) -> None:
        if self._is_running:
            raise KeyboardInterrupt


def main() -> None:
    """Run what comes until stdin ends."""
    sources = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    console = Console()
    while True:
        for file, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):  # which the user may have replaced
            with contextlib.suppress(Exception):
                file.flush()
            os.write(descriptor, f"{READY}\n".encode())
        if not (line := sources.readline()):
            return
        console.run(json.loads(line))


if __name__ == "__main__":
    main()
