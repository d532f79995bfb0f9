"""All threads of a process, and the frames of C code, by a program made for that: py-spy, where a site lets it look.

For the frames of C code it has to stop the process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

ENDING_S = 1.0
NEEDED = "py-spy is not installed in the job's environment: pip install py-spy"


class Inspector:
    """A run of py-spy; `output` is its output, which comes to its end when the run does."""

    def __init__(self, pid: int, native: bool) -> None:
        """Begin to look at a process; raise OSError where that is not possible."""
        beside = os.path.dirname(sys.executable)
        program = shutil.which("py-spy", path=f"{beside}:{os.environ.get('PATH', os.defpath)}")
        if program is None:
            raise OSError(NEEDED)
        command = [program, "dump", "--pid", str(pid), "--native" if native else "--nonblocking"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, start_new_session=True)
        assert self._process.stdout
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)

    def end(self) -> None:
        """End the run, if it has not ended."""
        assert self._process.stdout
        self._process.stdout.close()
        self._process.terminate()
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
