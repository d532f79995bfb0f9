"""A rank's stack as frames, the outermost first: parsed, classified, and sent in messages. No I/O."""

from __future__ import annotations

import enum
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..base.text import CUT_STACK

FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)')
LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/")
PYTHON_FOLDER = os.path.dirname(os.__file__) + "/"
OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"
LAUNCH_FILES = ("entry.py", "cli.py", "launch.py", "__main__.py", "runner/script.py", "runner/lifecycle.py")
MAX_OUTERMOST, MAX_INNERMOST = 8, 32  # frames of a message
MAX_NAME_CHARS = 300  # of a file, and of a function
COLLECTIVE_FILES = (  # torch's functions there wait for other ranks
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
    """A call; line 0 is an unknown one."""

    kind: FrameKind
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The place as a table shows it."""
        return f"{os.path.basename(self.file)}:{self.line} {self.function}"


def classify_file(file: str) -> FrameKind:
    """Return whose code a file has."""
    if file.startswith(OUR_FOLDER):
        return FrameKind.OURS
    if any(part in file for part in LIBRARY_FOLDERS):
        return FrameKind.LIBRARY
    if is_pythons(file):
        return FrameKind.PYTHON
    return FrameKind.SCRIPT


def is_pythons(file: str) -> bool:
    """Return whether a file is one of the standard library, or its copy in a mirror of --stage; no installed package.

    conda has these in a folder of the standard library.
    """
    is_installed = any(part in file for part in LIBRARY_FOLDERS)
    return (PYTHON_FOLDER in file and not is_installed) or file.startswith("<frozen ")


def parse_dump(text: str) -> list[Frame]:
    """Return the frames of a main thread from faulthandler's dump, without those that lead to the script."""
    calls = [(match["file"], match["line"], match["function"])
             for line in text.split("\n") if (match := FRAME.fullmatch(line))]
    return select_script_frames(calls, is_whole=not text.endswith(f"{CUT_STACK}\n"))


def parse_py_spy(text: str, pid: int) -> list[Frame]:
    """Return the frames of a process's main thread from the output of `py-spy dump --json`, as parse_dump() does.

    Raises ValueError, TypeError or KeyError for other output, such as an error.
    """
    (main,) = (thread for thread in json.loads(text) if thread["os_thread_id"] == pid)
    return select_script_frames([(str(frame["filename"]), str(frame["line"]), str(frame["name"]).rpartition(".")[2])
                                 for frame in main["frames"]])


def select_script_frames(calls: Iterable[tuple[str, str, str]], is_whole: bool = True) -> list[Frame]:
    """Return the frames of calls (file, line, function; the innermost first), without those that lead to the script.

    There are none if it is another thread's stack. The package of a program that was started by its name is the script.
    """
    frames = [Frame(classify_file(file), file, int(line) if line.isdigit() else 0, function)
              for file, line, function in calls]
    if frames and frames[-1].function == "_bootstrap":
        return []
    frames = list(itertools.dropwhile(is_launcher_frame, reversed(frames)))
    if frames and frames[0].kind is FrameKind.LIBRARY and is_whole:
        package = find_package(frames[0].file)
        frames = [frame._replace(kind=FrameKind.SCRIPT) if frame.file.startswith(package) else frame
                  for frame in frames]
    return frames


def find_package(file: str) -> str:
    """Return the folder of the installed package around a file, or the file itself if it is a module without one."""
    before, part, after = next((file.partition(folder) for folder in LIBRARY_FOLDERS if folder in file), ("", "", file))
    top, slash, _ = after.partition("/")
    return f"{before}{part}{top}{slash}"


def is_launcher_frame(frame: Frame) -> bool:
    """Return whether a frame is one through which Python and mpiddp call a script."""
    if frame.kind is FrameKind.OURS:
        return frame.file[len(OUR_FOLDER):] in LAUNCH_FILES
    return frame.file == "<frozen runpy>" or (frame.kind is FrameKind.PYTHON
                                              and os.path.basename(frame.file) == "runpy.py")


def frames_to_lists(frames: Sequence[Frame]) -> list[tuple[str, str, int, str]]:
    """Return frames as a message's JSON carries them: of a deep stack only the outermost and the innermost ones."""
    shown = frames
    if len(frames) > MAX_OUTERMOST + MAX_INNERMOST:
        shown = [*frames[:MAX_OUTERMOST], *frames[-MAX_INNERMOST:]]
    return [(kind.value, file[-MAX_NAME_CHARS:], line, function[-MAX_NAME_CHARS:])
            for kind, file, line, function in shown]


def frames_from_lists(items: Iterable[Any]) -> tuple[Frame, ...]:
    """Return the frames of a message; raise ValueError or TypeError for anything else."""
    return tuple(Frame(FrameKind(kind), str(file), int(line), str(function)) for kind, file, line, function in items)


def frames_to_json(frames: Sequence[Frame]) -> str:
    """Return frames as JSON."""
    return json.dumps(frames_to_lists(frames), ensure_ascii=False)  # the message around it escapes the rest


def frames_from_json(text: str) -> tuple[Frame, ...]:
    """Return the frames of frames_to_json(), none of an empty text; raise ValueError or TypeError for other text."""
    return frames_from_lists(json.loads(text)) if text else ()


def make_stall_fingerprint(frames: Sequence[Frame]) -> tuple[tuple[str, int, str], ...]:
    """Return what stays the same while a rank hangs: the script's lines, and the library functions called.

    The lines in libraries vary, since libraries poll.
    """
    last = max((index for index, frame in enumerate(frames) if frame.kind is not FrameKind.PYTHON), default=-1)
    return tuple((frame.file, frame.line if frame.kind is FrameKind.SCRIPT else 0, frame.function)
                 for index, frame in enumerate(frames) if frame.kind is not FrameKind.PYTHON or index == last + 1)


def list_called_frames(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames of the calls below the script's innermost line."""
    last = max((index for index, frame in enumerate(frames) if frame.kind is FrameKind.SCRIPT), default=-1)
    return frames[last + 1:]


def find_collective(frames: Sequence[Frame]) -> str:
    """Return the collective in which a stack ends, BACKWARD_NAME if DDP or FSDP make it; empty for none."""
    called = [frame for frame in list_called_frames(frames) if frame.kind is not FrameKind.PYTHON]
    if not called:
        return ""
    if called[-1].function == BACKWARD_FUNCTION:
        return BACKWARD_NAME
    if called[-1].kind is FrameKind.OURS:
        return "should_stop" if called[0].function == "should_stop" else ""
    if not any(part in called[-1].file for part in COLLECTIVE_FILES):
        return ""
    public = [frame.function for frame in called
              if any(part in frame.file for part in COLLECTIVE_FILES) and not frame.function.startswith("_")]
    return public[-1] if public else called[-1].function


def is_in_torch(frames: Sequence[Frame]) -> bool:
    """Return whether a stack ends in torch's own code: there a rank may be waiting for its GPU."""
    libraries = [frame for frame in list_called_frames(frames) if frame.kind is not FrameKind.PYTHON]
    return bool(libraries) and "/torch/" in libraries[-1].file


def is_waiting_for_loader(frames: Sequence[Frame]) -> bool:
    """Return whether a stack waits for a DataLoader's workers."""
    return any(LOADER_FILE in frame.file and frame.function in ("_try_get_data", "_get_data")
               for frame in list_called_frames(frames))


def is_idle_worker(frames: Sequence[Frame]) -> bool:
    """Return whether a stack is that of a DataLoader's worker without work."""
    libraries = [frame for frame in frames if frame.kind is not FrameKind.PYTHON]
    return bool(libraries) and LOADER_WORKER_FILE in libraries[-1].file and libraries[-1].function == "_worker_loop"


def format_short(frames: Sequence[Frame]) -> str:
    """Return a stack in one line: at most three of the script's frames, and the call of the last one."""
    script = [frame for frame in frames if frame.kind is FrameKind.SCRIPT]
    shown = [frame.place for frame in (script if len(script) <= 3 else [script[0], *script[-2:]])]
    if len(script) > 3:
        shown.insert(1, "…")
    called = list_called_frames(frames)
    if name := find_collective(frames):
        shown.append(name)
    elif called:
        shown.append(called[0].function if called[0].kind is not FrameKind.OURS else "mpiddp")
    return " → ".join(shown)
