"""A rank's stack, as frames, outermost first.

No I/O: a sentinel reads what its rank prints, and knows which files are Python's own.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..where.protocol import CUT

FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)')
LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/")
PYTHON_FOLDER = os.path.dirname(os.__file__) + "/"
OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
LAUNCH_FILES = (
    "cli.py", "launch.py", "__main__.py", "runner/script.py", "runner/lifecycle.py", "runner/exit_hooks.py",
    "runner/embedding.py",
)
MAX_OUTERMOST, MAX_INNERMOST = 8, 32  # frames that are told
MAX_NAME_CHARS = 300  # characters of a file, and of a function
COLLECTIVE_FILES = (  # files of torch whose functions wait for other ranks
    "torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py",
    "torch/distributed/utils.py", "torch/nn/parallel/distributed.py",
)
BACKWARD_FUNCTION = "_engine_run_backward"
BACKWARD_NAME = "backward"
LOADER_FILE = "torch/utils/data/dataloader.py"
LOADER_WORKER_FILE = "torch/utils/data/_utils/worker.py"


class FrameKind(enum.Enum):
    """Whose code a frame is in."""

    SCRIPT = "s"
    LIBRARY = "l"
    PYTHON = "p"
    OURS = "m"


class Frame(NamedTuple):
    """A call: line 0 is one that is not known."""

    kind: FrameKind
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """Where it is, in words for a table."""
        return f"{os.path.basename(self.file)}:{self.line} {self.function}"


def classify_file(file: str) -> FrameKind:
    """Tell whose code a file has."""
    if file.startswith(OUR_FOLDER):
        return FrameKind.OURS
    if any(part in file for part in LIBRARY_FOLDERS):
        return FrameKind.LIBRARY
    if file.startswith((PYTHON_FOLDER, "<frozen ")):
        return FrameKind.PYTHON
    return FrameKind.SCRIPT


def parse_dump(text: str) -> list[Frame]:
    """Return the frames of a main thread from `Calls`, without those that lead to the script."""
    calls = [(found["file"], found["line"], found["function"])
             for line in text.split("\n") if (found := FRAME.fullmatch(line))]
    return select_script_frames(calls, is_whole=not text.endswith(f"{CUT}\n"))


def parse_py_spy(text: str, pid: int) -> list[Frame]:
    """Return the frames of a process's main thread from what `py-spy dump --json` prints, as read() does.

    Raises ValueError, TypeError or KeyError where that prints something else, such as what has gone wrong.
    """
    (main,) = (one for one in json.loads(text) if one["os_thread_id"] == pid)
    return select_script_frames([(str(one["filename"]), str(one["line"]), str(one["name"]).rpartition(".")[2])
                      for one in main["frames"]])


def select_script_frames(calls: Iterable[tuple[str, str, str]], is_whole: bool = True) -> list[Frame]:
    """Return the frames of files, lines and functions, the innermost first, without those that lead to the script.

    There are none if it is another thread's stack. The package of a program that was started by its name is the script.
    """
    frames = [Frame(classify_file(file), file, int(line) if line.isdigit() else 0, function)
              for file, line, function in calls]
    if frames and frames[-1].function == "_bootstrap":
        return []
    frames = drop_launch_frames(frames[::-1])
    if frames and frames[0].kind is FrameKind.LIBRARY and is_whole:
        inside = find_package(frames[0].file)
        frames = [one._replace(kind=FrameKind.SCRIPT) if one.file.startswith(inside) else one for one in frames]
    return frames


def find_package(file: str) -> str:
    """Return the folder of the package in a library that has a file, or the file of a module without one."""
    before, part, after = next((file.partition(one) for one in LIBRARY_FOLDERS if one in file), ("", "", file))
    top, slash, _ = after.partition("/")
    return f"{before}{part}{top}{slash}"


def drop_launch_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Return frames without the outermost ones, by which Python and mpiddp come to a script."""
    begin = 0
    while begin < len(frames) and is_launcher_frame(frames[begin]):
        begin += 1
    return list(frames[begin:])


def is_launcher_frame(frame: Frame) -> bool:
    """Tell whether a frame runs the script."""
    if frame.kind is FrameKind.OURS:
        return frame.file[len(OUR_FOLDER):] in LAUNCH_FILES
    return frame.file == "<frozen runpy>" or (frame.kind is FrameKind.PYTHON
                                              and os.path.basename(frame.file) == "runpy.py")


def frames_to_lists(frames: Sequence[Frame]) -> list[tuple[str, str, int, str]]:
    """Return frames as a message's JSON carries them: of a deep stack the first ones and the last ones."""
    shown = frames if len(frames) <= MAX_OUTERMOST + MAX_INNERMOST else [*frames[:MAX_OUTERMOST],
                                                                         *frames[-MAX_INNERMOST:]]
    return [(kind.value, file[-MAX_NAME_CHARS:], line, function[-MAX_NAME_CHARS:])
            for kind, file, line, function in shown]


def frames_from_lists(found: Iterable[Any]) -> tuple[Frame, ...]:
    """Return the frames of a message; raise ValueError or TypeError for anything else."""
    return tuple(Frame(FrameKind(kind), str(file), int(line), str(function)) for kind, file, line, function in found)


def frames_to_json(frames: Sequence[Frame]) -> str:
    """Return frames as JSON."""
    return json.dumps(frames_to_lists(frames), ensure_ascii=False)  # of which the message around it makes ASCII


def frames_from_json(text: str) -> tuple[Frame, ...]:
    """Return the frames of as_text(), none of an empty text; raise ValueError or TypeError for anything else."""
    return frames_from_lists(json.loads(text)) if text else ()


def make_stall_fingerprint(frames: Sequence[Frame]) -> tuple[tuple[str, int, str], ...]:
    """Return what tells a place from others: the script's lines, and which functions of libraries they have called.

    Libraries poll, and are now at one line and now at another.
    """
    last = max((at for at, one in enumerate(frames) if one.kind is not FrameKind.PYTHON), default=-1)
    return tuple((one.file, one.line if one.kind is FrameKind.SCRIPT else 0, one.function)
                 for at, one in enumerate(frames) if one.kind is not FrameKind.PYTHON or at == last + 1)


def list_called_frames(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames of what the script's innermost line has called."""
    last = max((at for at, one in enumerate(frames) if one.kind is FrameKind.SCRIPT), default=-1)
    return frames[last + 1:]


def find_collective(frames: Sequence[Frame]) -> str:
    """Return the collective in which a stack ends, BACKWARD_NAME where DDP or FSDP make it; empty for none."""
    called = [one for one in list_called_frames(frames) if one.kind is not FrameKind.PYTHON]
    if not called:
        return ""
    if called[-1].function == BACKWARD_FUNCTION:
        return BACKWARD_NAME
    if called[-1].kind is FrameKind.OURS:
        return "should_stop" if called[0].function == "should_stop" else ""
    if not any(part in called[-1].file for part in COLLECTIVE_FILES):
        return ""
    public = [one.function for one in called
              if any(part in one.file for part in COLLECTIVE_FILES) and not one.function.startswith("_")]
    return public[-1] if public else called[-1].function


def is_in_torch(frames: Sequence[Frame]) -> bool:
    """Tell whether a stack ends in torch's own code: what a rank does there may be to wait for its GPU."""
    libraries = [one for one in list_called_frames(frames) if one.kind is not FrameKind.PYTHON]
    return bool(libraries) and "/torch/" in libraries[-1].file


def is_waiting_for_loader(frames: Sequence[Frame]) -> bool:
    """Tell whether a stack waits for a DataLoader's workers."""
    return any(LOADER_FILE in one.file and one.function in ("_try_get_data", "_get_data")
               for one in list_called_frames(frames))


def is_idle_worker(frames: Sequence[Frame]) -> bool:
    """Tell whether a stack is a DataLoader worker's that waits for work."""
    libraries = [one for one in frames if one.kind is not FrameKind.PYTHON]
    return bool(libraries) and LOADER_WORKER_FILE in libraries[-1].file and libraries[-1].function == "_worker_loop"


def format_short(frames: Sequence[Frame]) -> str:
    """Return a stack in one line: the script's frames, at most three, and what the last of them has called."""
    script = [one for one in frames if one.kind is FrameKind.SCRIPT]
    shown = [one.place for one in (script if len(script) <= 3 else [script[0], *script[-2:]])]
    if len(script) > 3:
        shown.insert(1, "…")
    called = list_called_frames(frames)
    if name := find_collective(frames):
        shown.append(name)
    elif called:
        shown.append(called[0].function if called[0].kind is not FrameKind.OURS else "mpiddp")
    return " → ".join(shown)
